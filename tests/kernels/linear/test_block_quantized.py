"""Products with weights in blocks against fp64 of what the bits stand for.

They run in the interpreter at awkward sizes, on a GPU at the sizes of models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.any_two import any_two_meet
from tests.support.gguf_numbers import BLOCK_KINDS, decode, quantize
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, kernels_on, poisoned_memory

from headrace_kernels.linear import block_quantized as block_linear
from headrace_kernels.linear.block_quantized import Path, path_rule
from headrace_kernels.linear.block_quantized_kernels import MAX_SMALL_BATCH_ROWS, SmallTile, small_rule
from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight, allocate
from headrace_kernels.weight_formats.gguf_blocks import store_file_rows

# Of layers of Llama 8B, Qwen3-4B; an odd number of outputs.
MODEL_SIZES = ((4096, 14336), (9728, 2560), (1001, 4096))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on(str(request.param)), poisoned_memory(str(request.param)):
        yield str(request.param)


@functools.lru_cache(maxsize=1)
def written(name: str, size: tuple[int, int]) -> tuple[Any, Any]:
    """Random numbers as a file holds them, and as fp64; of a model's layer it takes seconds."""
    numbers = np.random.default_rng(size[0]).normal(0.01, 0.05, size).astype(np.float32)
    file_rows = quantize(name, numbers)
    return file_rows, decode(name, file_rows).astype(np.float64)


class Product:
    """Fresh random operands, and what comes of them in fp64."""

    def __init__(self, name: str, rows: int, size: tuple[int, int], dtype: torch.dtype, device: str) -> None:
        generator = np.random.default_rng(rows + size[0])
        file_rows, exact = written(name, size)
        self.weight: BlockWeight = allocate(BlockKind(name), *size, dtype, torch.device(device))
        store_file_rows(torch.from_numpy(file_rows).to(device), self.weight, 0)
        self.x = torch.from_numpy(generator.normal(0, 1, (rows, size[1]))).to(device, dtype)
        self.bias = torch.from_numpy(generator.normal(0, 1, size[0])).to(device, dtype)
        self.exact = torch.from_numpy(exact).to(device)

    def check(self, found: torch.Tensor, bias: bool = False) -> None:
        expected = self.x.double() @ self.exact.t() + (self.bias.double() if bias else 0)
        # Dequantized numbers are rounded to the activations' type once, and the result once.
        error = float((found.double() - expected).norm() / expected.norm())
        assert error < 2 * ROUNDING[self.x.dtype] + 1e-6, error


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BLOCK_KINDS)
@pytest.mark.parametrize("rows", [1, 11, 33])
def test_products_are_those_of_the_numbers(name: str, rows: int, device: str) -> None:
    size = (37, 256) if rows == 11 else (5, 512)
    product = Product(name, rows, size, torch.bfloat16, device)
    product.check(block_linear.linear(product.x, product.weight, product.bias), bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q3_K", "Q5_K"])
def test_all_types_of_activations(name: str, dtype: torch.dtype, device: str) -> None:
    product = Product(name, 3, (9, 256), dtype, device)
    product.check(block_linear.linear(product.x, product.weight))


@pytest.mark.parametrize("num_blocks", [1, 3, 5])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_inputs_that_fill_no_tile(name: str, num_blocks: int, device: str) -> None:
    """32, 96 and 160 inputs: the last tile is not full, and what fills it counts nothing."""
    product = Product(name, 2, (6, 32 * num_blocks), torch.bfloat16, device)
    weight = product.weight
    # Parts 2 and 3 of the last tile of 64 lie beyond the end.
    for plane, lanes, bits in ((weight.nibbles, 16, -256), (weight.singles, 8, 0xCC), (weight.octets, 32, -1)):
        if plane is not None:
            plane[:, -lanes:] |= bits
    product.check(block_linear.linear(product.x, weight))


def test_results_may_be_parts_of_longer_rows_and_of_another_type(device: str) -> None:
    product = Product("Q6_K", 4, (7, 256), torch.bfloat16, device)
    whole = torch.full((4, 20), 7.0, device=device)
    # fp32 beside bf16 activations, as of the output layer.
    block_linear.linear(product.x, product.weight, out=whole[:, 5:12])
    product.check(whole[:, 5:12])
    assert (whole[:, :5] == 7).all() and (whole[:, 12:] == 7).all()


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_rows_are_looked_up(name: str, device: str) -> None:
    product = Product(name, 1, (12, 256), torch.bfloat16, device)
    tokens = torch.tensor([11, 0, 5, 5, 7], device=device)
    found = block_linear.embedding(tokens, product.weight)
    expected = product.exact[tokens]
    assert ((found.double() - expected).abs() <= 1.01 * ROUNDING[torch.bfloat16] * expected.abs() + 1e-9).all()
    assert block_linear.embedding(tokens[:0], product.weight).shape == (0, 256)


def test_few_rows_are_multiplied_without_restoring(device: str) -> None:
    product = Product("Q4_K", 1, (4, 256), torch.bfloat16, device)
    assert path_rule(1, product.weight) is path_rule(MAX_SMALL_BATCH_ROWS, product.weight) is Path.SMALL_BATCH
    assert path_rule(MAX_SMALL_BATCH_ROWS + 1, product.weight) is Path.DEQUANTIZED


def test_wide_products_have_few_slices_and_numbers_of_several_planes_few_outputs() -> None:
    def rule(num_rows: int, kind: BlockKind, *size: int) -> SmallTile:
        return small_rule(num_rows, allocate(kind, *size, torch.bfloat16, torch.device("meta")))

    assert rule(3, BlockKind.Q4_K, 28_672, 4096) == SmallTile(8, block_n=64, slices=2)
    assert rule(3, BlockKind.Q6_K, 28_672, 4096) == SmallTile(8, block_n=16, slices=2)
    assert rule(3, BlockKind.Q4_K, 4096, 14_336) == SmallTile(8, block_n=16, slices=8)
    assert rule(32, BlockKind.Q4_K, 4096, 14_336) == SmallTile(32, block_n=16, slices=4)
    # A tile of inputs is one slice's.
    assert rule(3, BlockKind.Q4_K, 4096, 256).slices == 2


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_without_triton_blocks_of_rows_are_restored(name: str) -> None:
    product = Product(name, 3, (41, 512), torch.float32, "cpu")
    assert path_rule(3, product.weight) is Path.BLOCKS
    product.check(block_linear.linear(product.x, product.weight, product.bias), bias=True)
    product.check(block_linear.linear_reference(product.x, product.weight, product.bias), bias=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("name", "size", "rows"), any_two_meet(("Q4_0", "Q8_0", "Q4_K", "Q6_K"), MODEL_SIZES, (1, 8, 16, 32, 200))
)
def test_sizes_of_models_on_a_card(name: str, size: tuple[int, int], rows: int) -> None:
    product = Product(name, rows, size, torch.bfloat16, "cuda")
    product.check(block_linear.linear(product.x, product.weight, product.bias), bias=True)
