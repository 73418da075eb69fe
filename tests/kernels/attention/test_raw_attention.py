"""Decodes that norm, rotate and write the new tokens' heads themselves.

They, and merging by the last program of a row, are held against fp64 and the separate kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import random

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.attention_case import Case, Shape, memory_of
from tests.support.kernels_ahead import KernelsAhead
from tests.support.raw_case import RawCase

from headrace_kernels.attention import decode, decode_kernels
from headrace_kernels.attention import paged as attention
from headrace_kernels.attention.decode import decode_attention
from headrace_kernels.attention.merge import merged_at_once
from headrace_kernels.attention.paged import paged_attention, rotate_write_attend
from headrace_kernels.attention.quantized_kv import dequantized_blocks, is_quantized
from headrace_kernels.triton_runtime import INTERPRETED, compilation_count

DEVICE = "cpu" if INTERPRETED else "cuda"
# As in test_attention_triton. Queries and keys are rotated in fp32 here and in fp64 there, so that
# some are rounded to the neighbouring number of their type.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}

SHAPES = [
    Shape(8, 2, 16),
    Shape(7, 1, 8, 16),
    Shape(6, 2, 80, 32),
    Shape(2, 2, 64, 64, dtype=torch.float16),
    Shape(8, 2, 64, 16, dtype=torch.bfloat16),
    Shape(3, 1, 96, 16, dtype=torch.bfloat16),
    Shape(8, 2, 16, window=1),
    Shape(4, 2, 16, 32, window=40),
    Shape(20, 1, 16, 16),
    Shape(8, 2, 16, kv="int8"),
    Shape(7, 1, 8, 16, kv="fp8"),
    Shape(6, 2, 80, 32, dtype=torch.float16, kv="fp8"),
    Shape(8, 2, 64, 16, 40, dtype=torch.bfloat16, kv="int8"),
    # Few query rows as columns: one head of a group, all 8, blocks larger than a tile, wide heads.
    Shape(2, 2, 32, 64, dtype=torch.bfloat16, kv="fp8"),
    Shape(8, 1, 64, 16, dtype=torch.float16, kv="int8"),
    Shape(4, 1, 256, 32, window=70, dtype=torch.float16, kv="fp8"),
]


def check(case: RawCase) -> None:
    """Compares results with fp64, and the cache with the separate kernels' to the bit.

    Padding must be untouched, and counters back at 0.
    """
    expected, (_, cache) = case.oracle(), case.separately()
    found = rotate_write_attend(
        case.raw, case.kv_cache, case.step, case.shape.scale, case.shape.window, case.case.sinks
    )
    torch.testing.assert_close(found[: expected.shape[0]].double(), expected, atol=TOLERANCE[case.shape.dtype], rtol=0)
    if case.shape.dtype == torch.float32 and case.raw.key_norm is not None and not INTERPRETED:
        check_but_for_rounding(case.kv_cache, cache)
    else:
        torch.testing.assert_close(memory_of(case.kv_cache), memory_of(cache), atol=0, rtol=0, equal_nan=True)
    for block, offset in case.places:
        assert dequantized_blocks(case.kv_cache, torch.tensor([block]))[:, :, :, offset].isfinite().all()
    assert case.step.decode is not None and not case.step.decode.scratch.done.any()


def check_but_for_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares as `check` does, but for last bits of norms.

    A GPU sums the norms of fp32 heads in different orders: their last bits differ, and so does one
    number in a million that lies between two of 8 bits, which may be one of a small cache.
    """
    if not is_quantized(found):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
        return
    are_others = memory_of(found) != memory_of(expected)
    assert are_others.sum() <= 1 + 1e-5 * are_others.numel()
    blocks = torch.arange(len(found), device=found.device)
    ours, theirs = dequantized_blocks(found, blocks), dequantized_blocks(expected, blocks)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=1 / 7, equal_nan=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        (Shape(8, 2, 16), 12),
        (Shape(3, 1, 96, 16, dtype=torch.bfloat16), 24),
        (Shape(7, 1, 8, 16, kv="fp8"), 2),
        (Shape(3, 1, 128, 16, dtype=torch.bfloat16, kv="int8"), 96),
    ],
    ids=str,
)
def test_dimensions_that_do_not_turn_stay_as_they_are(shape: Shape, rotary_dim: int, normed: bool) -> None:
    check(RawCase(shape, [1, 40, 17], DEVICE, normed=normed, rotary_dim=rotary_dim))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        (Shape(8, 2, 16), 16),
        (Shape(16, 1, 128, 16, dtype=torch.bfloat16), 64),
        (Shape(7, 1, 8, 16, kv="fp8"), 2),
    ],
    ids=str,
)
def test_neighbours_turn_together_where_they_form_planes(shape: Shape, rotary_dim: int, normed: bool) -> None:
    check(RawCase(shape, [1, 40, 17], DEVICE, normed=normed, rotary_dim=rotary_dim, interleaved=True))


def test_weights_of_norms_may_be_wider_than_heads() -> None:
    check(RawCase(Shape(3, 1, 32, 16, dtype=torch.bfloat16), [1, 40, 17], DEVICE, normed=True, wide_norms=True))


# With norms of heads and without: the first shape both ways, the others in turn.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "normed"), [(SHAPES[0], True), *((shape, bool(at % 2)) for at, shape in enumerate(SHAPES))], ids=str
)
def test_decodes_of_raw_heads_equal_fp64_and_write_what_the_separate_kernels_write(shape: Shape, normed: bool) -> None:
    chance = random.Random(shape.head_dim)
    computed = [0, *(chance.choice([1, 15, 16, 62, 63, 64, 65, 130]) for _ in range(2))]
    check(RawCase(shape, computed, DEVICE, normed=normed, padding=2))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("computed", [[63], [64], [65], [127, 128], [0], [1499, 2]])
def test_the_new_token_at_the_edges_of_splits(computed: list[int]) -> None:
    check(RawCase(Shape(4, 1, 16), computed, DEVICE))


@pytest.mark.parametrize("plan_window", [10_000, 300])
def test_the_new_token_where_a_narrow_window_leaves_the_last_splits_empty(plan_window: int) -> None:
    check(RawCase(Shape(4, 2, 16, 16, 70), [600, 30], DEVICE, plan_window=plan_window))


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(
    computed=strategies.lists(strategies.integers(0, 200), min_size=1, max_size=3),
    window=strategies.none() | strategies.integers(1, 200),
    seed=strategies.integers(0, 100),
)
def test_any_decodes_of_raw_heads(computed: list[int], window: int | None, seed: int) -> None:
    check(RawCase(Shape(3, 1, 8, window=window), computed, DEVICE, seed=seed, normed=seed % 2 == 1))


# Two groups of heads to a tile, quantized and not, whose rows one, some or many programs share.
@pytest.mark.parametrize(
    ("window", "kv"),
    [(None, ""), (70, "fp8"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, "fp8"), (70, "")))],
)
def test_sinks_count_once_however_a_context_is_split(window: int | None, kv: str) -> None:
    shape = Shape(6, 2, 16, window=window, kv=kv, has_sinks=True)
    check(RawCase(shape, [0, 5, 300, 64 * 12], DEVICE, plan_window=10_000, padding=1))


def test_tokens_without_a_slot_are_seen_and_not_stored() -> None:
    case = RawCase(Shape(4, 2, 16), [100, 3], DEVICE)
    case.step.slot_mapping[0] = -1
    before, expected = case.kv_cache.clone(), case.oracle()
    found = rotate_write_attend(case.raw, case.kv_cache, case.step, case.shape.scale)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    block, offset = case.places[1]
    before[block, :, :, offset] = case.kv_cache[block, :, :, offset]
    torch.testing.assert_close(case.kv_cache, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="what an earlier kernel writes is poison in the interpreter alone")
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_read_behind_the_wait_and_before_the_next_kernel_may_start(
    normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class Ahead(KernelsAhead):
        def _wait(self) -> None:
            calls.append("wait")
            super()._wait()

        def _release(self) -> None:
            calls.append("release")

    case = RawCase(Shape(4, 2, 16), [100, 3], DEVICE, normed=normed, padding=2)
    expected, work = case.oracle(), case.step.decode
    assert work is not None
    Ahead(monkeypatch, decode_kernels, (case.raw.qkv,))
    found = rotate_write_attend(case.raw, case.kv_cache, case.step, case.shape.scale)
    torch.testing.assert_close(found[: expected.shape[0]].double(), expected, atol=2e-5, rtol=0)
    programs = (work.splits[:, 0] >= 0).tolist() * case.shape.num_kv_heads
    # Programs without work wait too, and let the next kernel start by their end.
    assert calls == [call for works in programs for call in ("wait", "release")[: 1 + works]]


def test_few_programs_that_compute_long_have_twice_the_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    warps = []

    def note(*_: object, num_warps: int, **__: object) -> None:
        warps.append(num_warps)

    for name in ("decode_kernel", "raw_decode_kernel"):
        monkeypatch.setattr(decode, name, collections.defaultdict(lambda: note))
    shape = Shape(32, 4, 128, dtype=torch.bfloat16)
    for rows, normed in ((8, True), (9, True), (8, False)):
        case = RawCase(shape, [3] * rows, DEVICE, normed=normed)
        rotate_write_attend(case.raw, case.kv_cache, case.step, shape.scale)
    # A row with four drafts, whose query tokens are dealt out to programs of 16 query rows.
    drafted = Case(shape, [(20, 5)], DEVICE)
    paged_attention(drafted.query, drafted.kv_cache, drafted.step, shape.scale)
    assert warps == [4, 2, 2, 4]


def test_padding_writes_nothing() -> None:
    case = RawCase(Shape(4, 2, 16), [100, 3], DEVICE, padding=3)
    assert case.step.decode is not None
    case.step.decode.splits.fill_(-1)
    before = case.kv_cache.clone()
    rotate_write_attend(case.raw, case.kv_cache, case.step, case.shape.scale)
    torch.testing.assert_close(case.kv_cache, before, atol=0, rtol=0, equal_nan=True)


def test_a_projection_that_is_not_contiguous_is_read() -> None:
    case = RawCase(Shape(4, 2, 16), [100, 3], DEVICE)
    wide = torch.zeros(2, 9, 16, device=DEVICE)
    wide[:, :8] = case.raw.qkv
    case.raw = dataclasses.replace(case.raw, qkv=wide[:, :8])
    check(case)


def test_a_cache_whose_tiles_are_not_whole_is_refused() -> None:
    case = RawCase(Shape(2, 2, 16), [4], DEVICE)
    with pytest.raises(ValueError, match="kv_cache must have its tiles at equal distances"):
        rotate_write_attend(case.raw, case.kv_cache.transpose(2, 3), case.step, 1.0)


def test_steps_with_longer_entries_or_classes_take_the_separate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rope_and_write_kv(qkv: torch.Tensor, *_: object) -> torch.Tensor:
        calls.append("separate")
        return qkv[:, :4].contiguous()

    monkeypatch.setattr(attention, "rope_and_write_kv", rope_and_write_kv)
    alone = RawCase(Shape(4, 2, 16), [100, 3], DEVICE)
    rotate_write_attend(alone.raw, alone.kv_cache, alone.step, 1.0)
    assert not calls
    for rows, max_query_len in ([(40, 1), (0, 20)], 1), ([(40, 1)], 2):
        case = Case(alone.shape, rows, DEVICE, max_query_len=max_query_len)
        num_tokens = case.query.shape[0]
        qkv = torch.zeros(num_tokens, 8, 16, device=DEVICE)
        raw = dataclasses.replace(alone.raw, qkv=qkv, rotations=torch.zeros(num_tokens, 3, 8, device=DEVICE))
        rotate_write_attend(raw, case.kv_cache, case.step, 1.0)
    assert calls == ["separate", "separate"]


AT_ONCE = [1, 4, 16]


def merged(case: Case, at_once: int) -> torch.Tensor:
    """What decodes give when `at_once` partial results are merged at a time.

    What they do not write is not written here.
    """
    assert case.step.decode is not None
    output = torch.full(case.query.shape, float("nan"), dtype=case.shape.dtype, device=DEVICE)
    query, shape = case.query, case.shape
    decode_attention(
        query, case.kv_cache, case.step, case.step.decode, shape.scale, shape.window, output, at_once=at_once
    )
    return output


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize(
    ("shape", "rows", "max_query_len"),
    [
        (Shape(2, 1, 16), [(64 * 70, 1)], 1),
        (Shape(6, 2, 80), [(700, 1), (3, 1), (200, 1)], 1),
        (Shape(6, 2, 16, window=70), [(700, 1), (300, 4), (200, 3), (0, 4)], 4),
    ],
)
def test_partial_results_are_merged_however_many_at_a_time(
    shape: Shape, rows: list[tuple[int, int]], max_query_len: int, at_once: int
) -> None:
    case = Case(shape, rows, DEVICE, max_query_len=max_query_len, plan_window=10_000)
    assert case.step.decode is not None and (case.step.decode.splits[:, 3] >= 0).any()
    found = merged(case, at_once)
    torch.testing.assert_close(found.double(), case.oracle(), atol=2e-5, rtol=0)
    assert not case.step.decode.scratch.done.any()


def test_a_replay_finds_its_counters_as_the_launch_before_did() -> None:
    """Scratch is shared by layers and steps.

    These have other contexts, other splits and other classes of lengths.
    """
    one = Case(Shape(4, 2, 16), [(900, 1), (100, 1), (5, 1)], DEVICE, max_query_len=4)
    two = Case(Shape(4, 2, 16), [(3, 1), (1100, 3)], DEVICE, seed=1, max_query_len=4)
    assert one.step.decode is not None and two.step.decode is not None
    two.step.decode.scratch = one.step.decode.scratch
    for case in (one, two, one, two):
        found = merged(case, 4)
        torch.testing.assert_close(found.double(), case.oracle(), atol=2e-5, rtol=0)
        assert not one.step.decode.scratch.done.any()


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("warps", [2, 4, 8])
def test_what_is_merged_at_a_time_is_a_power_of_two_that_registers_hold(dim: int, warps: int) -> None:
    for query_rows in (1, 3, 4, 7, 16, 20, 32, 64):
        at_once = merged_at_once(query_rows, dim, warps)
        assert at_once >= 1 and at_once & (at_once - 1) == 0
        assert at_once == 1 or at_once * query_rows * dim <= 128 * 32 * warps


LARGE = [
    Shape(32, 8, 128, 16, None, torch.bfloat16),
    Shape(32, 8, 128, 32, 1000, torch.bfloat16),
    Shape(28, 4, 128, 16, None, torch.float16),
    Shape(16, 2, 64, 16, None, torch.bfloat16),
    Shape(8, 2, 80, 16, None, torch.bfloat16),
    Shape(8, 8, 96, 16, None, torch.float16),
    Shape(8, 4, 256, 16, None, torch.bfloat16),
    Shape(8, 2, 128, 16, None, torch.float32),
    Shape(32, 8, 128, 16, None, torch.bfloat16, "int8"),
    Shape(32, 8, 128, 16, None, torch.bfloat16, "fp8"),
    Shape(28, 4, 128, 32, 1000, torch.float16, "fp8"),
    Shape(8, 2, 80, 16, None, torch.bfloat16, "int8"),
    Shape(8, 4, 256, 16, None, torch.bfloat16, "fp8"),
    Shape(8, 2, 64, 16, None, torch.float32, "fp8"),
    # gpt-oss' two kinds of layers.
    Shape(64, 8, 64, 16, None, torch.bfloat16, has_sinks=True),
    Shape(64, 8, 64, 16, 128, torch.bfloat16, has_sinks=True),
    Shape(64, 8, 64, 16, 128, torch.bfloat16, "fp8", has_sinks=True),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.parametrize(("shape", "normed"), [(shape, i % 2 == 1) for i, shape in enumerate(LARGE)], ids=str)
def test_raw_heads_of_real_sizes(shape: Shape, normed: bool) -> None:
    chance = random.Random(1)
    check(RawCase(shape, [0, 639, *(chance.randrange(5000) for _ in range(40))], DEVICE, normed=normed, padding=3))
    check(RawCase(shape, [20_000], DEVICE, normed=normed))
    check(RawCase(shape, [640], DEVICE, normed=normed))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("rows", [[(640, 1)], [(8000, 1)] * 32, [(131_071, 1)], [(900, 1)] * 300], ids=len)
def test_merging_of_real_sizes_again_and_again(rows: list[tuple[int, int]], at_once: int) -> None:
    """Programs of a row race on a GPU.

    The numbers are the same every time, whoever is last, and counters are at 0.
    """
    case = Case(LARGE[0], rows, DEVICE, max_query_len=1)
    assert case.step.decode is not None
    first = merged(case, at_once)
    torch.testing.assert_close(first.double(), case.oracle(), atol=2e-2, rtol=0)
    again = [merged(case, at_once) for _ in range(50)]
    assert all(torch.equal(first, other) for other in again)
    assert not case.step.decode.scratch.done.any()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_a_captured_step_of_raw_heads_is_replayed() -> None:
    shape = LARGE[0]
    case = RawCase(shape, [640, 5000, 3, 0], DEVICE, padding=4)
    rotate_write_attend(case.raw, case.kv_cache, case.step, shape.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rotate_write_attend(case.raw, case.kv_cache, case.step, shape.scale)
    expected = case.oracle()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(found[:4].double(), expected, atol=4e-2, rtol=0)
        assert found[4:].isnan().all()
    assert case.step.decode is not None and not case.step.decode.scratch.done.any()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_no_batch_and_no_length_of_decodes_compiles_anew() -> None:
    shape = LARGE[0]

    def run(computed: list[int], padding: int = 0) -> None:
        case = RawCase(shape, computed, DEVICE, padding=padding)
        rotate_write_attend(case.raw, case.kv_cache, case.step, shape.scale)

    run([640])
    before = compilation_count()
    for computed in ([0], [15] * 16, [5000, 4], [100] * 64, [31, 17, 4, 900, 1]):
        for padding in (0, 1, 3):
            run(computed, padding)
    assert compilation_count() == before
