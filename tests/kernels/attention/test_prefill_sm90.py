"""Attention of chunks by warps of three trades, for sm_90, over blocks and gathered contexts.

Its kernel runs on stand-ins of barriers, copies and products, each partition a thread of its own.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.attention_case import Case, Shape, empty_cache
from tests.support.gluon_partitions import emulating_partitions

from headrace_kernels import card
from headrace_kernels.attention.gathered import gather_contexts
from headrace_kernels.attention.prefill_sm90 import items, kernel
from headrace_kernels.attention.prefill_sm90.launch import attend_blocks_sm90, attend_gathered_sm90, takes_blocks_sm90
from headrace_kernels.attention.quantized_kv import memory_of
from headrace_kernels.triton_runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="stands in for a card")

SHAPES_AND_ROWS = [
    (Shape(4, 2, 64, 16, None, torch.bfloat16), [(0, 300), (100, 140), (7, 1), (127, 1)]),
    (Shape(7, 1, 128, 16, None, torch.float16), [(250, 20)]),
    (Shape(2, 2, 64, 16, 50, torch.bfloat16), [(70, 260), (3, 1)]),
    (Shape(8, 1, 64, 16, 200, torch.bfloat16, has_sinks=True), [(500, 40), (0, 9)]),
    (Shape(8, 1, 64, 16, 1, torch.bfloat16), [(250, 9), (0, 128)]),
]


def attend_gathered(case: Case, eager: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the kernel makes of the gathered step; what it does not write is NaN."""
    assert case.step.prefill is not None and case.step.prefill.gathered is not None
    gathered, shape = case.step.prefill.gathered, case.shape
    gather_contexts(case.kv_cache, memory_of(case.kv_cache), case.step, gathered, shape.window)
    output = torch.full(case.query.shape, float("nan"), dtype=shape.dtype)
    step = (case.step, case.step.prefill.tiles, gathered, shape.scale, shape.window, output, case.sinks)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 3)
    with emulating_partitions(kernel, "prefill_kernel_sm90", eager) as launches:
        attend_gathered_sm90(case.query.contiguous(), *step)
    assert launches == [3]
    return output


def attend_blocks(case: Case, eager: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the kernel makes of the step from its blocks; what it does not write is NaN."""
    work, shape = case.step.prefill, case.shape
    assert work is not None
    output = torch.full(case.query.shape, float("nan"), dtype=shape.dtype)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 3)
    with emulating_partitions(kernel, "prefill_kernel_sm90", eager) as launches:
        query = case.query.contiguous()
        attend_blocks_sm90(query, case.kv_cache, case.step, work, shape.scale, shape.window, output, case.sinks)
    assert launches == [min(3, work.tiles.shape[0] * shape.num_kv_heads)]
    return output


def check(case: Case, found: torch.Tensor) -> None:
    """Rows of chunks are right, and nothing else is written."""
    num_tokens, expected = sum(count for _, count in case.rows), case.oracle()
    is_chunk = torch.cat([torch.full((count,), count > 1) for _, count in case.rows])
    torch.testing.assert_close(found[:num_tokens][is_chunk].double(), expected[is_chunk], atol=2e-2, rtol=0)
    assert found[:num_tokens][~is_chunk].isnan().all() and found[num_tokens:].isnan().all()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("shape", "rows"), SHAPES_AND_ROWS, ids=str)
def test_gathered_contexts_equal_fp64(
    shape: Shape, rows: list[tuple[int, int]], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    monkeypatch.setattr(card, "has_copy_engine", lambda device: True)
    case = Case(shape, rows, "cpu", max_query_len=1, padding=1, gather_bytes=1 << 21)
    check(case, attend_gathered(case, eager, monkeypatch))


@pytest.mark.parametrize("long_keys", [1, 2048])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        *SHAPES_AND_ROWS,
        (Shape(2, 1, 64, 32, None, torch.bfloat16), [(0, 128), (31, 97), (64, 65)]),
        (Shape(4, 1, 128, 64, 130, torch.bfloat16, has_sinks=True), [(200, 70), (0, 33)]),
    ],
    ids=str,
)
def test_contexts_in_blocks_equal_fp64_in_tiles_of_either_size(
    shape: Shape, rows: list[tuple[int, int]], eager: bool, long_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "_LONG_KEYS", long_keys)
    case = Case(shape, rows, "cpu", max_query_len=1, padding=1)
    check(case, attend_blocks(case, eager, monkeypatch))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows", "plan_window"),
    [
        (Shape(8, 1, 64, 16, None, torch.bfloat16), [(1500, 20), (0, 5)], None),
        (Shape(8, 2, 64, 16, None, torch.bfloat16, has_sinks=True), [(1100, 30)], None),
        # A windowed layer of a model whose others see all: most shares of the plan see nothing.
        (Shape(8, 1, 64, 16, 140, torch.bfloat16, has_sinks=True), [(1500, 20), (600, 5)], 10_000),
        (Shape(8, 1, 128, 16, 700, torch.float16), [(1500, 20)], 10_000),
    ],
    ids=str,
)
def test_shares_of_a_context_equal_fp64_twice(
    shape: Shape,
    rows: list[tuple[int, int]],
    plan_window: int | None,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_kernels.attention.shares._LEAST_KEYS", 150)
    case = Case(shape, rows, "cpu", max_query_len=1, padding=9, plan_window=plan_window, shares=True)
    assert case.step.prefill is not None and case.step.prefill.shares is not None
    assert int(case.step.prefill.shares[:, 1].max()) > 2
    for _ in range(2):
        check(case, attend_blocks(case, eager, monkeypatch))
    scratch = case.step.prefill.scratch
    assert scratch is not None and not scratch.done.any()


def test_which_caches_are_read_from_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)

    def takes(shape: Shape, tile_tokens: int | None = None, dtype: torch.dtype | None = None) -> bool:
        return takes_blocks_sm90(shape.num_heads, dtype or shape.dtype, empty_cache(2, shape, "cpu"), tile_tokens)

    llama = Shape(32, 8, 128, 16, None, torch.bfloat16)
    assert takes(llama) and takes(llama, tile_tokens=32) and takes(Shape(28, 4, 64, 64, None, torch.float16))
    assert not takes(llama, tile_tokens=16), "a layer with other tiles than the plan's cuts each into several"
    assert not takes(llama, dtype=torch.float16) and not takes(Shape(32, 8, 128, 16))
    assert not takes(Shape(8, 2, 80, 16, None, torch.bfloat16)) and not takes(
        Shape(8, 2, 256, 16, None, torch.bfloat16)
    )
    assert not takes(Shape(8, 2, 128, 16, None, torch.bfloat16, kv="fp8"))
    assert not takes(Shape(8, 2, 128, 128, None, torch.bfloat16)), "a block is longer than a short tile"
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: False)
    assert not takes(llama)


def test_tiles_of_a_cache_may_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with other heads than these may have their tiles in the same blocks."""
    shape = Shape(4, 2, 64, 16, None, torch.bfloat16)
    case = Case(shape, [(70, 40), (0, 20)], "cpu", max_query_len=1, padding=1)
    near = case.kv_cache
    apart = torch.full((*near.shape[:3], 40, 64), float("nan"), dtype=near.dtype)[:, :, :, :16]
    apart.copy_(near)
    case.kv_cache = apart
    check(case, attend_blocks(case, False, monkeypatch))
