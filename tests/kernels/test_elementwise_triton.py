"""The operations around attention: SwiGLU, embedding, the step's rotations, copies of blocks."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.kernel_case import DEVICES, DTYPES, Numbers, assert_rounded, kernels_on, poisoned_memory

from headrace_kernels.attention.kv_cache import copy_blocks
from headrace_kernels.attention.rope import rope_rows, rope_rows_reference
from headrace_kernels.embedding import embedding
from headrace_kernels.swiglu import Activation, swiglu


def check_swiglu(rows: int, size: int, dtype: torch.dtype, device: str, activation: Activation = "silu") -> None:
    gate_up = Numbers(device, dtype, seed=rows * size).randn(rows, 2 * size) * 4
    with kernels_on(device), poisoned_memory(device):
        found = swiglu(gate_up, activation)
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        gate = gate / (1 + torch.exp(-gate))
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    # What the gate gives is rounded, and so is the product.
    assert_rounded(found, gate * up, roundings=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (2, 1024), (1, 1100), (66, 24), (0, 8)])
def test_swiglu_of_any_size(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    check_swiglu(rows, size, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rows, size, dtype", [(3, 7, torch.float16), (2, 1100, torch.bfloat16), (66, 24, torch.float32)]
)
def test_geglu_is_gelu_of_the_gate(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    check_swiglu(rows, size, dtype, device, "gelu_tanh")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_swiglu_of_large_gates_is_the_value_or_nothing(activation: Activation, device: str) -> None:
    with kernels_on(device):
        found = swiglu(torch.tensor([[1e4, -1e4, 1e14, 3.0, 3.0, 3.0]], device=device), activation)
    assert found.tolist() == [[3e4, 0.0, pytest.approx(3e14)]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64, 65, 4096])
def test_swiglu_at_the_sizes_of_a_model(rows: int, dtype: torch.dtype) -> None:
    check_swiglu(rows, 14336, dtype, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 40, 3000])
def test_embedding_takes_rows(size: int, dtype: torch.dtype, device: str) -> None:
    numbers = Numbers(device, dtype)
    weight, tokens = numbers.randn(11, size), numbers.integers(0, 11, 6)
    with kernels_on(device), poisoned_memory(device):
        assert torch.equal(embedding(tokens, weight), weight[tokens])
        assert embedding(tokens[:0], weight).shape == (0, size)


@pytest.mark.parametrize("device", DEVICES)
def test_embedding_of_split_vocabularies_adds_up(device: str) -> None:
    numbers = Numbers(device, torch.bfloat16)
    weight, tokens = numbers.randn(12, 40), torch.tensor([0, 11, 5, 6, 4], device=device)
    with kernels_on(device), poisoned_memory(device):
        parts = [embedding(tokens, weight[first : first + 6], first, whole=False) for first in (0, 6)]
    assert torch.equal(parts[0] + parts[1], weight[tokens])
    assert torch.equal(parts[1][0], torch.zeros_like(parts[1][0]))


@pytest.mark.gpu
def test_embedding_of_a_table_of_more_than_2_to_the_31_numbers() -> None:
    weight = torch.zeros(2**31 // 8192 + 8, 8192, dtype=torch.bfloat16, device="cuda")
    weight[-1] = torch.arange(8192, device="cuda")
    tokens = torch.tensor([weight.shape[0] - 1, 0], device="cuda")
    assert torch.equal(embedding(tokens, weight), weight[tokens])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, half", [(1, 8), (9, 40), (17, 64), (0, 8)])
def test_rotations_are_the_rows_of_the_table(tokens: int, half: int, device: str) -> None:
    numbers = Numbers(device, torch.float32)
    table, positions = numbers.randn(50, 2, half), numbers.integers(0, 50, tokens)
    with kernels_on(device), poisoned_memory(device):
        assert torch.equal(rope_rows(table, positions), rope_rows_reference(table, positions))


def check_copies(copies: list[tuple[int, int]], num_blocks: int, device: str, head_dim: int = 4) -> None:
    numbers = Numbers(device, torch.float16)
    caches = [numbers.randn(num_blocks, 2, 3, 4, head_dim) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    sources, targets = torch.tensor(copies, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    with kernels_on(device), poisoned_memory(device):
        copy_blocks(caches, sources.contiguous(), targets.contiguous())
    for cache, expected in zip(caches, before, strict=True):
        expected[targets] = expected[sources]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_read_before_any_is_written(device: str) -> None:
    check_copies([(0, 1), (1, 0)], 3, device)
    # A chain through more copies than a program takes at a time, against its order.
    check_copies([(i, i + 1) for i in range(20)], 21, device)
    check_copies([], 2, device)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_several_parts_are_copied_whole(device: str) -> None:
    check_copies([(0, 2), (2, 0), (3, 1)], 4, device, head_dim=80)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    targets=strategies.lists(strategies.integers(0, 11), max_size=12, unique=True), data=strategies.data()
)
def test_any_set_of_copies(targets: list[int], data: strategies.DataObject) -> None:
    check_copies([(data.draw(strategies.integers(0, 11)), target) for target in targets], 12, "cpu")
