"""NF4: rounded to the nearest number under the stored scale, with scales in 8 bits.

Products and rows are those of any weight in blocks; the layout is bitsandbytes'.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, ROUNDING, kernels_on, poisoned_memory

from headrace_kernels.linear import block_quantized as block_linear
from headrace_kernels.weight_formats import nf4
from headrace_kernels.weight_formats.block_weight import (
    NF4_NUMBERS,
    BlockKind,
    BlockWeight,
    allocate,
    dequantize_rows,
    scale_codes,
    store_numbers,
)

CPU = torch.device("cpu")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on(str(request.param)), poisoned_memory(str(request.param)):
        yield str(request.param)


def rounded(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> BlockWeight:
    weight = allocate(BlockKind.NF4, *values.shape, dtype, values.device)
    nf4.quantize_rows(values, weight, 0)
    return weight


def dequantized(weight: BlockWeight) -> torch.Tensor:
    out = torch.full((weight.num_outputs, weight.num_inputs), torch.nan, device=weight.device)
    dequantize_rows(weight, slice(0, weight.num_outputs), out)
    return out


def reference(row: np.ndarray) -> np.ndarray:
    """One row, number by number: scales rounded first, then each number to the nearest of 16."""
    groups = row.astype(np.float64).reshape(-1, 64)
    scales = np.abs(groups).max(1)
    codes = scale_codes(CPU).numpy().astype(np.float64)
    mean = scales.mean()
    nested = max(np.abs(scales - mean).max(), np.finfo(np.float32).tiny)
    scales = codes[np.abs((scales - mean)[:, None] / nested - codes).argmin(1)] * nested + mean
    table = np.array(NF4_NUMBERS)
    with np.errstate(all="ignore"):
        places = np.abs(np.nan_to_num(groups / scales[:, None])[:, :, None] - table).argmin(2)
    return (table[places] * scales[:, None]).reshape(-1)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 1.0, 1e4]))
def test_numbers_are_rounded_to_the_nearest(rows: int, groups: int, seed: int, size: float) -> None:
    values = np.random.default_rng(seed).normal(0, size, (rows, 64 * groups)).astype(np.float32)
    found = dequantized(rounded(torch.from_numpy(values))).numpy()
    expected = np.stack([reference(row) for row in values])
    # A number in the middle of two may go either way: in fp32 it is not seen to be.
    close = np.isclose(found, expected, rtol=1e-5, atol=1e-6 * size)
    assert close.mean() > 0.995
    assert np.linalg.norm(found - values) <= 1.01 * np.linalg.norm(expected - values) + 1e-6 * size


def test_the_table_of_scales_is_the_published_one() -> None:
    """Seven decades of both signs, the middles of equal parts; 0 and 1."""
    codes = scale_codes(CPU)
    assert len(codes) == 256 and bool((codes.diff() > 0).all())
    assert codes[-1] == 1 and 0.0 in codes.tolist()
    torch.testing.assert_close(codes[-2], torch.tensor(1 - 0.9 / 128))
    torch.testing.assert_close(codes[0], -codes[-2])


def test_bits_per_weight_are_those_of_double_quantization() -> None:
    for inputs in (1024, 4096, 14336):
        weight = allocate(BlockKind.NF4, 32, inputs, torch.bfloat16, torch.device("meta"))
        assert 8 * weight.num_bytes / (32 * inputs) == 4 + 8 / 64 + 64 / inputs


def test_pieces_of_rows_give_the_same_bits() -> None:
    values = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
    whole, parts = rounded(values), allocate(BlockKind.NF4, 9, 192, torch.float32, CPU)
    for first, end in ((5, 9), (0, 1), (1, 5)):
        nf4.quantize_rows(values[first:end], parts, first)
    for found, expected in zip(parts.parts, whole.parts, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("values", [torch.zeros(2, 128), torch.full((2, 128), -3.0), torch.eye(2, 128) * 1e-30])
def test_rows_without_spread_come_back(values: torch.Tensor) -> None:
    found = dequantized(rounded(values))
    assert found.isfinite().all()
    if values[0, 0] != 1e-30:
        torch.testing.assert_close(found, values)


@pytest.mark.parametrize("kind", [BlockKind.NF4, BlockKind.NF4_SINGLE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 20, 40])
def test_products_are_those_of_the_numbers(kind: BlockKind, rows: int, dtype: torch.dtype, device: str) -> None:
    """64, 192 and 512 inputs; nested scales of two groups, which cross rows."""
    generator = torch.Generator().manual_seed(rows)
    size = (13, {1: 64, 20: 192, 40: 512}[rows])
    weight = allocate(kind, *size, dtype, torch.device(device), nested=2 if kind is BlockKind.NF4 else 0)
    numbers = torch.randint(0, 16, size, dtype=torch.uint8, generator=generator)
    store_numbers(numbers.to(device), weight, slice(0, len(numbers)))
    for part in (weight.scales, weight.mins):
        if part is not None:
            part.copy_(torch.rand(part.shape, generator=generator) + 1.1)
    if weight.group_scales is not None:
        weight.group_scales.copy_(
            torch.randint(0, 256, weight.group_scales.shape, dtype=torch.uint8, generator=generator)
        )
    x = torch.randn(rows, size[1], generator=generator).to(device, dtype)
    expected = x.double() @ dequantized(weight).double().t()
    found = block_linear.linear(x, weight)
    # The table's numbers are rounded to the type, and the result.
    assert float((found.double() - expected).norm() / expected.norm()) < 2 * ROUNDING[dtype]
    tokens = torch.tensor([12, 0, 12], device=device)
    looked_up = block_linear.embedding(tokens, weight)
    torch.testing.assert_close(looked_up.float(), dequantized(weight)[tokens], rtol=1.01 * ROUNDING[dtype], atol=0)


def test_nested_scales_are_counted_along_the_rows() -> None:
    weight = allocate(BlockKind.NF4, 3, 192, torch.float32, CPU, nested=2)
    assert weight.scales.shape == (5,) and weight.group_scales is not None and weight.mins is not None
    weight.group_scales.fill_(255)
    weight.mins.fill_(0)
    weight.scales.copy_(torch.arange(5.0))
    store_numbers(torch.full((3, 192), 15, dtype=torch.uint8), weight, slice(0, 3))
    assert dequantized(weight)[:, ::64].tolist() == [[0, 0, 1], [1, 2, 2], [3, 3, 4]]


def test_the_upper_half_of_a_byte_comes_first() -> None:
    assert nf4.pieces_of_bytes(torch.tensor([[0x1F, 0x20]], dtype=torch.uint8)).tolist() == [[1, 15, 2, 0]]
