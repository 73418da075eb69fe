"""Which captured shapes are kept.

Those that no larger one makes useless, by times of their own device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.driver import BLOCK_SIZE, Entry, admission, step

from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.pp_rules import WHOLE
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.draws import widened
from headrace_backend.worker.start_up.synthetic_steps import BlockPool, Chunk, SamplingKind, drafted_step, make_step
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.graphs import DeviceClock, StepGraphs, least_times_ms
from headrace_backend.worker.step.kv_caches import allocate_kv_caches
from headrace_backend.worker.step.shape import (
    AttentionSizes,
    StepShape,
    captured_shapes,
    has_few_rows,
    smallest_holding,
    undominated,
    widest,
)
from headrace_kernels.attention.plan import QUERY_LEN_CLASSES
from headrace_kernels.triton_runtime import INTERPRETED, forced

SIZES = AttentionSizes(num_heads=8, num_kv_heads=2, tile_tokens=32)
BATCHES, MIXED = (1, 64, 128, 224, 256, 448, 512), (64, 128, 256, 384, 448, 512, 768)
# An 8B model on an H200: steps of 448 tokens take longer than those of 512.
TIMES_MS = {224: 5.80, 256: 5.75, 384: 9.0, 448: 13.1, 512: 9.7, 768: 14.0}


def replay_ms(num_tokens: int) -> float:
    return TIMES_MS.get(num_tokens, 4.0)


@given(st.data())
def test_what_is_dropped_is_held_by_something_kept_that_takes_no_longer(data: st.DataObject) -> None:
    shapes = captured_shapes(BATCHES, MIXED, 512, SIZES)
    timed = data.draw(st.sets(st.sampled_from(widest(shapes))))
    times = {shape: data.draw(st.sampled_from([1.0, 2.0, 3.0, 4.0])) for shape in shapes if shape in timed}
    kept = undominated(shapes, times)
    assert kept == [shape for shape in shapes if shape in kept]
    # Those for few rows are there or not as those of as many tokens for all rows are.
    wide = {shape.num_tokens: shape for shape in widest(shapes) if shape.num_tiles}
    few = set(shapes) - set(widest(shapes))
    assert all((shape in kept) == (wide[shape.num_tokens] in kept) for shape in few)
    assert set(kept) >= set(shapes) - timed - few
    for shape in set(widest(shapes)) - set(kept):
        assert any(
            o.holds(shape) and o.num_tokens > shape.num_tokens and times[o] <= times[shape] for o in timed & set(kept)
        )
    for is_mixed in (False, True):
        kind = [times[shape] for shape in kept if shape in times and bool(shape.num_tiles) == is_mixed]
        assert all(a < b for a, b in zip(kind, kind[1:], strict=False))


@given(st.integers(1, 8192), st.integers(1, 256))
def test_a_full_step_holds_what_nearly_fills_it_and_nothing_shorter(num_tokens: int, num_rows: int) -> None:
    needed = StepShape.mixed(num_tokens, min(num_rows, num_tokens), SIZES)
    shapes = captured_shapes(BATCHES, MIXED, 512, SIZES, full_sizes=[8192])
    held = smallest_holding(shapes, needed)
    assert captured_shapes(BATCHES, MIXED, 512, SIZES) == shapes[:-2] and shapes[-1].num_tokens == 8192
    if num_tokens >= 8192 - 256:
        assert held in shapes[-2:]
    else:
        assert held == smallest_holding(shapes[:-2], needed)


def test_a_full_step_makes_no_other_shape_useless_and_is_never_so() -> None:
    shapes = captured_shapes(BATCHES, MIXED, 512, SIZES, full_sizes=[8192])
    assert undominated(shapes, {shape: 1.0 if shape.fewest_tokens else 2.0 for shape in shapes})[-1] == shapes[-1]
    mixed = {shape: float(shape.num_tokens) for shape in shapes[:-1] if shape.num_tiles}
    assert set(mixed) <= set(undominated(shapes, {**mixed, shapes[-1]: 0.5}))


@given(st.integers(1, 768), st.integers(1, 512), st.integers(64, 512))
def test_steps_of_few_rows_draw_no_more_than_few(num_tokens: int, num_rows: int, max_rows: int) -> None:
    num_rows = min(num_rows, num_tokens, max_rows)
    needed = StepShape.mixed(num_tokens, num_rows, SIZES)
    shapes = captured_shapes((), MIXED, max_rows, SIZES)
    held = smallest_holding(shapes, needed)
    assert held is not None and held.holds(needed)
    # Padded to as many tokens as with shapes for all rows alone.
    assert held.num_tokens == smallest_holding(widest(shapes), needed).num_tokens  # type: ignore[union-attr]
    if num_rows <= 128:
        assert held.num_samples < 256 and held.num_entries == held.num_samples
    few = [size for size in MIXED if has_few_rows(size, max_rows)]
    assert few == ([256, 384, 448, 512, 768] if max_rows >= 256 else [])
    assert len(shapes) == len(MIXED) + len(few)


def test_of_long_steps_full_ones_alone_have_shapes_for_few_rows() -> None:
    shapes = captured_shapes((), (768, 896, 7936), 512, SIZES, full_sizes=[8192])
    few = [(shape.num_tokens, shape.num_samples) for shape in shapes if shape.num_entries < 512]
    assert few == [(768, 128), (8192, 128)]
    full = [shape for shape in shapes if shape.num_tokens == 8192]
    assert [shape.fewest_tokens for shape in full] == [7936, 7936]
    assert smallest_holding(shapes, StepShape.mixed(8000, 100, SIZES)) == full[0]
    assert smallest_holding(shapes, StepShape.mixed(8000, 200, SIZES)) == full[1]


def test_a_decode_is_not_given_up_for_a_mixed_shape() -> None:
    decode, mixed = StepShape.decode(448, SIZES), StepShape.mixed(512, 512, SIZES)
    assert mixed.holds(decode)
    assert undominated([decode, mixed], {decode: 2.0, mixed: 1.0}) == [decode, mixed]


class FakeClock:
    """A device whose time passes by what is launched."""

    def __init__(self) -> None:
        self.now_ms = 100.0
        self.marks_ms: list[float] = []
        self.num_waits = 0

    def mark(self) -> None:
        self.marks_ms.append(self.now_ms)

    def intervals_ms(self) -> list[float]:
        self.num_waits += 1
        return [b - a for a, b in zip(self.marks_ms, self.marks_ms[1:], strict=False)]


def test_a_first_launch_may_take_longer_and_nothing_is_waited_for_in_between() -> None:
    clock, launched = FakeClock(), []

    def launch(name: str, time_ms: float) -> Callable[[], None]:
        def run() -> None:
            assert clock.num_waits == 0
            clock.now_ms += time_ms + 5 * (name not in launched)
            launched.append(name)

        return run

    times = least_times_ms({"a": launch("a", 2), "b": launch("b", 3)}, clock)
    assert times == pytest.approx({"a": 2, "b": 3})
    assert launched == ["a", "b", "a", "b"] and clock.num_waits == 1
    assert least_times_ms({}, FakeClock()) == {}


class FakeGraphs:
    """Graphs that take a given time and compute nothing."""

    def __init__(self) -> None:
        self.keys: list[tuple[Any, StepShape]] = []
        self.replayed: list[StepShape] = []
        self.num_prepared = self.num_captured = 0
        self.clock = FakeClock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self.keys

    def prepare(self, run: Callable[[], Any]) -> None:
        self.num_prepared += 1

    def capture(self, key: tuple[Any, StepShape], run: Callable[[], Any]) -> None:
        assert self.num_prepared > self.num_captured, "a piece that was not prepared"
        self.keys.append(key)
        self.num_captured += 1

    def replay(self, key: tuple[Any, StepShape]) -> None:
        assert key in self.keys
        self.replayed.append(key[1])
        self.clock.now_ms += replay_ms(key[1].num_tokens) / 2

    def times_ms(self, launches: Mapping[Any, Callable[[], None]]) -> dict[Any, float]:
        return least_times_ms(launches, self.clock)

    def drop(self, key: tuple[Any, StepShape]) -> None:
        self.keys.remove(key)


class OneProduct:
    """A model of one layer's widest product, of which nothing but its time is of interest."""

    vocab_size = part_size = 128
    hidden_size, dtype, stage, row_dealer = 4096, torch.bfloat16, WHOLE, None

    def __init__(self, device: torch.device) -> None:
        wide = 28_672 if device.type == "cuda" else 1
        self.weight = torch.zeros(wide, self.hidden_size, dtype=torch.bfloat16, device=device)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: StepMetadata,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = torch.zeros(token_ids.shape[0], self.hidden_size, dtype=torch.bfloat16, device=token_ids.device)
        for _ in range(16):
            torch.nn.functional.linear(hidden, self.weight)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def representative_layers(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.linear(hidden, self.weight[: self.vocab_size]))


def runner_of(device: torch.device) -> GpuRunner:
    caches = allocate_kv_caches(1, (64, 2, 2, BLOCK_SIZE, 16), torch.bfloat16, device)
    sizes = AttentionSizes.of(8, caches[0])
    sampler = Sampler(512, OneProduct.vocab_size, device)
    shapes = captured_shapes(BATCHES, MIXED, 512, sizes)
    return GpuRunner(OneProduct(device), sampler, caches, StepLimits(512, 768, 1024), sizes, shapes)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_a_runner_replays_the_next_larger_shape_that_pays() -> None:
    graphs = FakeGraphs()
    with forced():
        runner = runner_of(torch.device("cpu"))
        runner._graphs = graphs  # type: ignore[assignment]
        runner.capture(lambda *_: None)
        assert runner.captured_mixed_sizes == (64, 128, 256, 384, 512, 768)
        kept = [shape for _, shape in graphs.keys]
        assert sorted({shape.num_tokens for shape in kept if not shape.num_tiles}) == [1, 64, 128, 256, 512]
        few = [shape for shape in kept if shape.num_tiles and shape.num_entries < min(shape.num_tokens, 512)]
        assert sorted({shape.num_tokens for shape in few}) == [256, 384, 512, 768]
        num_mixed = len(MIXED) + sum(has_few_rows(size, 512) for size in MIXED)
        assert runner.num_captured == 2 * (len(BATCHES) + num_mixed), "late work is what is captured after these"
        # Short ones are not timed.
        timed = graphs.replayed[::2]
        assert sorted(shape.num_tokens for shape in timed if shape.num_tiles) == sorted(2 * [256, 384, 448, 512, 768])
        assert sorted(shape.num_tokens for shape in timed if not shape.num_tiles) == sorted(2 * [224, 256, 448, 512])
        tables = {0: list(range(30))}
        runner.forward(step([Entry(0, 0, [5] * 430, (0,))], [admission(0)], tables))
    assert (graphs.replayed[-1].num_tokens, graphs.replayed[-1].num_samples) == (512, 128)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_shapes_are_timed_full_of_tokens_that_differ_and_share_no_block() -> None:
    """Experts take as long as tokens choose differently, so that padding says nothing of them."""
    graphs, seen = FakeGraphs(), {}
    with forced():
        runner = runner_of(torch.device("cpu"))
        runner._graphs = graphs  # type: ignore[assignment]
        replay = graphs.replay

        def looked_at(key: tuple[Any, StepShape]) -> None:
            columns, tables = runner._buffers.columns(key[1]), runner._rows.block_tables
            entries = columns.rows[columns.token_entries.long()]
            seq_lens = columns.attention[0].seq_lens
            seen[key[1]] = (columns.token_ids.clone(), tables[0, entries.long(), 0], seq_lens.clone())
            replay(key)

        graphs.replay = looked_at  # type: ignore[method-assign]
        runner.capture(lambda *_: None)
    assert {shape.num_tokens for shape in seen} == {224, 256, 384, 448, 512, 768}
    for shape, (ids, blocks, seq_lens) in seen.items():
        assert len(ids.unique()) == min(shape.num_tokens, OneProduct.vocab_size)
        # As far as there are blocks: the cache has 64.
        assert len(blocks.unique()) == 64
        assert int(seq_lens.sum()) == shape.num_tokens and int(seq_lens.min()) >= 1
    assert not runner._rows.block_tables.any()


def drafting_sizes() -> AttentionSizes:
    """Rows with up to eight drafts, four query heads to a key/value head."""
    return AttentionSizes.of(8, torch.empty(64, 2, 2, BLOCK_SIZE, 16, dtype=torch.bfloat16), tokens_per_row=9)


@pytest.mark.parametrize(
    ("num_rows", "num_drafts", "query_len"),
    # Up to 64 tokens, rows are dealt out in parts of four.
    [(3, 1, 8), (3, 4, 8), (3, 7, 8), (3, 8, 16), (16, 3, 8), (33, 1, 4), (17, 3, 4), (17, 4, 8), (17, 8, 16)],
)
def test_few_drafts_take_the_kernel_of_few_query_tokens(num_rows: int, num_drafts: int, query_len: int) -> None:
    sizes, pool = drafting_sizes(), BlockPool(64, BLOCK_SIZE)
    prompt = make_step([Chunk(0, 1)] * num_rows, pool, SamplingKind.GREEDY)
    needed = StepShape.of(widened(drafted_step(prompt, num_drafts))[0], sizes)
    num_tokens = num_rows * (1 + num_drafts)
    assert (needed.query_len, needed.num_tokens, needed.is_drafted) == (query_len, num_tokens, True)
    held = smallest_holding(captured_shapes(BATCHES, MIXED, 512, sizes), needed)
    assert held is not None and held.query_len == query_len and held.is_drafted
    # Without drafts the kernel stays that of one token.
    assert StepShape.of(prompt, sizes).query_len == 1


@given(
    st.sampled_from([(32, 8), (64, 8), (8, 8), (28, 4), (48, 8)]),
    st.sampled_from([3, 5, 9]),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=56),
)
def test_every_step_with_drafts_has_a_graph_of_the_smallest_kernel_that_takes_it(
    heads: tuple[int, int], tokens_per_row: int, is_quantized: bool, tokens: list[int]
) -> None:
    sizes = AttentionSizes(*heads, tile_tokens=32, tokens_per_row=tokens_per_row, is_quantized=is_quantized)
    counts = [min(count, tokens_per_row) for count in tokens]
    if max(counts) == 1 or sum(counts) < 2:
        return
    query_len = sizes.query_len_of(max(counts), sum(counts))
    assert query_len in QUERY_LEN_CLASSES and query_len >= max(counts)
    needed = dataclasses.replace(
        StepShape.drafted(sum(counts), 512, sizes, query_len), num_entries=len(counts), num_samples=sum(counts)
    )
    held = smallest_holding(captured_shapes(BATCHES, MIXED, 512, sizes), needed)
    assert held is not None and held.query_len == query_len and held.is_drafted


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_graphs_of_drafts_are_timed_for_the_engine() -> None:
    graphs = FakeGraphs()
    with forced():
        runner = runner_of(torch.device("cpu"))
        runner._shapes = tuple(captured_shapes((1, 4), (64,), 512, drafting_sizes()))
        runner._graphs = graphs  # type: ignore[assignment]
        runner.capture(lambda *_: None)
    reported = dict(runner.drafted_graphs)
    assert list(reported) == [4, 9, 16, 32, 36]
    assert all(time_us > 0 for time_us in reported.values())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_times_of_what_is_kept_ascend_on_a_card() -> None:
    device = torch.device("cuda", 0)
    runner = runner_of(device)
    runner.capture(lambda *_: None)
    assert isinstance(runner._graphs, StepGraphs)
    shapes = [shape for shape in runner._shapes if shape.num_tiles and shape.num_tokens > 128]
    assert shapes[-1].num_tokens == MIXED[-1]
    launches = {shape.num_tokens: lambda shape=shape: runner._replay_full(shape) for shape in shapes}
    with torch.inference_mode():
        times = list(least_times_ms(launches, DeviceClock(device)).values())
    # Sizes that take the same time may change places by what a measurement varies.
    assert all(a < 1.03 * b for a, b in zip(times, times[1:], strict=False)), times
