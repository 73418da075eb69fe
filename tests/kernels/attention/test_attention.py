"""Paged attention, specification and fast path, against a dense oracle in fp64.

Rows, heads, windows and block sizes are mixed at will.
"""

import dataclasses
import math
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from tests.support.attention_case import probabilities
from tests.support.examples import examples
from torch import Tensor

from headrace_kernels.attention.cpu import plan_gathers
from headrace_kernels.attention.kv_cache import write_kv
from headrace_kernels.attention.paged import AttentionMetadata, paged_attention, paged_attention_reference

# fp32 against fp64, contexts up to 200 of values of order 1.
TOLERANCE = 2e-5


@dataclasses.dataclass
class Case:
    """A step: each row's true keys and values, and the paged form of both.

    A row is given as (computed tokens, tokens of this step).
    """

    rows: list[tuple[int, int]]
    query: Tensor
    contexts: list[Tensor]
    kv_cache: Tensor
    metadata: AttentionMetadata
    window: int | None
    # [num_heads]; None: there are none.
    sinks: Tensor | None = None

    def oracle(self) -> Tensor:
        """[num_tokens, num_heads, head_dim] fp64, from the rows' own keys and values."""
        outputs, start = [], 0
        for (computed, count), context in zip(self.rows, self.contexts, strict=True):
            key, value = context.double()
            query = self.query[start : start + count].double().unflatten(1, (key.shape[0], -1))
            position, other = torch.arange(computed, computed + count)[:, None], torch.arange(computed + count)
            hidden = (other > position) | (position - other >= (self.window or 10**9))
            scores = torch.einsum("thgd,hsd->hgts", query, key) * 0.3
            weights = probabilities(scores.masked_fill(hidden, -math.inf), self.sinks)
            outputs.append(torch.einsum("hgts,hsd->thgd", weights, value).flatten(1, 2))
            start += count
        return torch.cat(outputs)


def build(
    rows: list[tuple[int, int]], num_kv_heads: int, group: int, block_size: int, window: int | None, head_dim: int = 8
) -> Case:
    """Blocks in random order; everything that no row wrote is NaN."""
    generator = torch.Generator().manual_seed(len(rows) * 1000 + sum(map(sum, rows)))
    ends = [computed + count for computed, count in rows]
    num_blocks = [-(-end // block_size) for end in ends]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    kv_cache = torch.full((len(order), 2, num_kv_heads, block_size, head_dim), float("nan"))
    tables = [[order.pop() for _ in range(n)] for n in num_blocks]
    contexts, slots = [], []
    for table, (computed, _), end in zip(tables, rows, ends, strict=True):
        context = torch.randn(2, num_kv_heads, end, head_dim, generator=generator)
        row_slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(end)])
        write_kv(context[0].transpose(0, 1), context[1].transpose(0, 1), kv_cache, row_slots)
        contexts.append(context)
        slots += row_slots[computed:].tolist()
    counts = [count for _, count in rows]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=torch.tensor([t + [10**6] * (max(num_blocks) - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
        max_query_len=max(counts),
        max_seq_len=max(ends),
        query_lens_cpu=np.array(counts, np.int32),
        seq_lens_cpu=np.array(ends, np.int32),
    )
    query = torch.randn(sum(counts), num_kv_heads * group, head_dim, generator=generator)
    return Case(rows, query, contexts, kv_cache, metadata, window)


Attention = Callable[[Tensor, Tensor, AttentionMetadata, float, int | None, Tensor | None], Tensor]
_ROWS = strategies.lists(
    strategies.tuples(strategies.integers(0, 90), strategies.one_of(strategies.just(1), strategies.integers(1, 40))),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_reference])
@hypothesis.settings(max_examples=examples(200), deadline=None)
@hypothesis.given(
    rows=_ROWS,
    num_kv_heads=strategies.sampled_from([1, 2, 3]),
    group=strategies.sampled_from([1, 2, 8]),
    block_size=strategies.sampled_from([16, 32]),
    window=strategies.none() | strategies.integers(1, 70),
    sink=strategies.none() | strategies.floats(0, 9),
)
def test_any_step_equals_the_dense_oracle(
    attention: Attention,
    rows: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    block_size: int,
    window: int | None,
    sink: float | None,
) -> None:
    case = build(rows, num_kv_heads, group, block_size, window)
    if sink is not None:
        case.sinks = sink * torch.linspace(-1.0, 1.0, num_kv_heads * group)
    found = attention(case.query, case.kv_cache, case.metadata, 0.3, window, case.sinks)
    torch.testing.assert_close(found.double(), case.oracle(), atol=TOLERANCE, rtol=0)


def test_a_strided_query_is_read_correctly() -> None:
    case = build([(30, 1), (5, 1), (0, 9)], 2, 2, 16, None)
    padded = torch.cat((case.query, torch.randn_like(case.query)), dim=1)[:, : case.query.shape[1]]
    assert not padded.is_contiguous()
    found = paged_attention(padded, case.kv_cache, case.metadata, 0.3)
    torch.testing.assert_close(found.double(), case.oracle(), atol=TOLERANCE, rtol=0)


def test_a_long_chunk_is_cut_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_kernels.attention.cpu._MAX_MASK_ENTRIES", 500)
    case = build([(100, 77), (3, 1)], 2, 2, 16, None)
    assert len(case.metadata.gather_plan(2, 8, None).chunks[0].tiles) > 10
    found = paged_attention(case.query, case.kv_cache, case.metadata, 0.3)
    torch.testing.assert_close(found.double(), case.oracle(), atol=TOLERANCE, rtol=0)


def test_bfloat16_differs_by_its_rounding_only() -> None:
    case = build([(100, 1), (60, 1), (0, 20)], 2, 4, 16, None)
    found = paged_attention(case.query.bfloat16(), case.kv_cache.bfloat16(), case.metadata, 0.3)
    # Inputs, probabilities and outputs are each rounded to 8 bits.
    torch.testing.assert_close(found.double(), case.oracle(), atol=0.05, rtol=0)


def test_a_windowed_layer_gathers_the_window_only() -> None:
    tables = torch.arange(256, dtype=torch.int32)[None]
    plan = plan_gathers(tables, np.array([1], np.int32), np.array([4000], np.int32), 16, 1, 8, 40)
    # 40 tokens touch at most 4 blocks of 16; keys and values each.
    assert plan.buckets[0].entries.numel() <= 2 * 4


def test_padding_of_decode_buckets_is_bounded() -> None:
    lens = np.random.default_rng(0).integers(1, 4000, 64).astype(np.int32)
    tables = torch.zeros(64, 250, dtype=torch.int32)
    plan = plan_gathers(tables, np.ones(64, np.int32), lens, 16, 1, 8, None)
    gathered = sum(bucket.entries.numel() for bucket in plan.buckets)
    assert gathered < 1.5 * 2 * int((-(-lens // 16)).sum())
    assert len(plan.buckets) < 12


def test_buckets_stay_within_the_processors_cache() -> None:
    lens = np.full(64, 1000, np.int32)
    plan = plan_gathers(torch.zeros(64, 63, dtype=torch.int32), np.ones(64, np.int32), lens, 16, 4, 32, None)
    sizes = [bucket.entries.numel() * 16 * 32 for bucket in plan.buckets]
    assert max(sizes) <= 1 << 20 and sum(bucket.num_rows for bucket in plan.buckets) == 64
    # A row that is larger by itself stands alone.
    lone = plan_gathers(
        torch.zeros(2, 2000, dtype=torch.int32), np.ones(2, np.int32), np.full(2, 32_000, np.int32), 16, 8, 128, None
    )
    assert [bucket.num_rows for bucket in lone.buckets] == [1, 1]
