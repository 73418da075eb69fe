"""The small operations against their formulas in fp64.

They are norms, rotation, SwiGLU, embedding, linear, cache writes and copies.
"""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples

from headrace_kernels.attention.kv_cache import copy_blocks, write_kv
from headrace_kernels.attention.rope import rope, rope_rows
from headrace_kernels.attention.rope_frequencies import default_frequencies, rope_table, yarn_frequencies
from headrace_kernels.embedding import embedding
from headrace_kernels.linear.dense import empty_weight, linear
from headrace_kernels.rms_norm import add_rms_norm, rms_norm
from headrace_kernels.swiglu import swiglu

CPU = torch.device("cpu")


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=1e-5)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_divides_by_the_root_of_the_mean_square(scale: float) -> None:
    x, weight = randn(5, 7, 48) * scale, randn(48, seed=1)
    wide = x.double()
    close(rms_norm(x, weight, 1e-5), wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    assert torch.equal(rms_norm(torch.zeros(1, 48), weight, 1e-5), torch.zeros(1, 48))


def test_add_rms_norm_changes_the_residual_stream_in_place() -> None:
    x, residual, weight = randn(5, 48), randn(5, 48, seed=1), randn(48, seed=2)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_swiglu_gates_the_second_half_by_the_first() -> None:
    gate_up = randn(4, 30)
    gate, up = gate_up[:, :15].double(), gate_up[:, 15:].double()
    close(swiglu(gate_up), gate / (1 + torch.exp(-gate)) * up)


def test_rope_turns_each_plane_by_position_times_frequency() -> None:
    head_dim, positions = 12, torch.tensor([0, 1, 77])
    table = rope_table(default_frequencies(head_dim, 10_000.0), 128)
    x = randn(3, 2, 2 * head_dim)[:, :, :head_dim]
    rotated = rope(x, rope_rows(table, positions))
    half = head_dim // 2
    plane = torch.complex(x[..., :half].double(), x[..., half:].double())
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
    expected = plane * torch.exp(1j * angle)[:, None]
    close(rotated, torch.cat((expected.real, expected.imag), dim=-1), atol=1e-4)
    assert torch.equal(rotated[0], x[0])


def test_rope_of_a_part_of_a_head_leaves_the_rest_as_it_is() -> None:
    x, positions = randn(3, 2, 12), torch.tensor([0, 1, 77])
    rows = rope_rows(rope_table(default_frequencies(8, 10_000.0), 128), positions)
    rotated = rope(x, rows)
    assert torch.equal(rotated, torch.cat((rope(x[..., :8].contiguous(), rows), x[..., 8:]), dim=-1))
    assert not torch.equal(rotated[2, :, :8], x[2, :, :8])


def test_scores_after_rope_depend_on_the_distance_only() -> None:
    table = rope_table(yarn_frequencies(16, 10_000.0, 4.0, 64), 256)
    query, key = randn(1, 1, 16), randn(1, 1, 16, seed=1)

    def score(a: int, b: int) -> float:
        return float(
            (rope(query, rope_rows(table, torch.tensor([a]))) * rope(key, rope_rows(table, torch.tensor([b])))).sum()
        )

    assert math.isclose(score(10, 3), score(207, 200), abs_tol=1e-4)


def test_embedding_of_split_vocabularies_adds_up() -> None:
    weight, tokens = randn(10, 4), torch.tensor([0, 9, 5, 4])
    assert torch.equal(embedding(tokens, weight), weight[tokens])
    parts = [embedding(tokens, weight[first : first + 5], first, whole=False) for first in (0, 5)]
    assert torch.equal(parts[0] + parts[1], weight[tokens])


@pytest.mark.parametrize("order", ["outputs", "inputs"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_takes_weights_in_either_order_and_rounds_a_row_alike_in_every_batch(order: str, bias: bool) -> None:
    values, x, b = randn(96, 64), randn(33, 64, seed=1), randn(96, seed=2) if bias else None
    weight = empty_weight(96, 64, torch.float32, CPU).copy_(values) if order == "inputs" else values
    expected = x.double() @ values.double().t() + (0 if b is None else b.double())
    close(linear(x, weight, b), expected, atol=1e-4)
    close(linear(x[::3], weight, b), expected[::3], atol=1e-4)
    # Not equality to the bit: kernels differ between processors. But no further apart than fp32
    # sums of 64 terms are.
    close(linear(x[:1], weight, b), linear(x, weight, b)[:1], atol=2e-5)


@hypothesis.settings(max_examples=examples(50), deadline=None)
@hypothesis.given(
    slots=strategies.lists(
        strategies.integers(-1, 4 * 16 - 1), min_size=1, max_size=30, unique_by=lambda s: s if s >= 0 else object()
    )
)
def test_write_kv_fills_exactly_the_mapped_slots(slots: list[int]) -> None:
    kv_cache = torch.zeros(4, 2, 3, 16, 8)
    key, value = randn(len(slots), 3, 8), randn(len(slots), 3, 8, seed=1)
    expected = kv_cache.clone()
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 16, 0, :, slot % 16] = key[i]
            expected[slot // 16, 1, :, slot % 16] = value[i]
    write_kv(key, value, kv_cache, torch.tensor(slots))
    assert torch.equal(kv_cache, expected)


def test_copy_blocks_reads_all_sources_before_it_writes() -> None:
    caches = [randn(5, 2, 1, 16, 4, seed=layer) for layer in range(2)]
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, torch.tensor([0, 1]), torch.tensor([1, 4]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[1, 4]], old[[0, 1]]) and torch.equal(cache[[0, 2, 3]], old[[0, 2, 3]])
