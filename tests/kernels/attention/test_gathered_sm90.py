"""Attention over gathered contexts by warps of three trades, for sm_90.

Its kernel runs on stand-ins of barriers, copies and products, each partition a thread of its own.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.attention_case import Case, Shape
from tests.support.gluon_partitions import emulating_partitions

from headrace_kernels import card
from headrace_kernels.attention import gathered_sm90
from headrace_kernels.attention.gathered import gather_contexts
from headrace_kernels.attention.quantized_kv import memory_of
from headrace_kernels.triton_runtime import INTERPRETED


def attend(case: Case, eager: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the kernel makes of the step; what it does not write is NaN."""
    assert case.step.prefill is not None and case.step.prefill.gathered is not None
    gathered, shape = case.step.prefill.gathered, case.shape
    gather_contexts(case.kv_cache, memory_of(case.kv_cache), case.step, gathered, shape.window)
    output = torch.full(case.query.shape, float("nan"), dtype=shape.dtype)
    step = (case.step, case.step.prefill.tiles, gathered, shape.scale, shape.window, output, case.sinks)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 3)
    with emulating_partitions(gathered_sm90, "_gathered_kernel_sm90", eager) as launches:
        gathered_sm90.attend_gathered_sm90(case.query.contiguous(), *step)
    assert launches == [3]
    return output


@pytest.mark.skipif(not INTERPRETED, reason="stands in for a card")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (Shape(4, 2, 64, 16, None, torch.bfloat16), [(0, 300), (100, 140), (7, 1), (127, 1)]),
        (Shape(7, 1, 128, 16, None, torch.float16), [(250, 20)]),
        (Shape(2, 2, 64, 16, 50, torch.bfloat16), [(70, 260), (3, 1)]),
        (Shape(8, 1, 64, 16, 200, torch.bfloat16, has_sinks=True), [(500, 40), (0, 9)]),
        (Shape(8, 1, 64, 16, 1, torch.bfloat16), [(250, 9), (0, 128)]),
    ],
    ids=str,
)
def test_warps_of_three_trades_equal_fp64(
    shape: Shape, rows: list[tuple[int, int]], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_ROWS", 1)
    monkeypatch.setattr("headrace_kernels.attention.plan._MIN_GATHER_KEYS", 1)
    case = Case(shape, rows, "cpu", max_query_len=1, padding=1, gather_bytes=1 << 21)
    found, expected = attend(case, eager, monkeypatch)[: sum(count for _, count in rows)], case.oracle()
    is_chunk = torch.cat([torch.full((count,), count > 1) for _, count in rows])
    torch.testing.assert_close(found[is_chunk].double(), expected[is_chunk], atol=2e-2, rtol=0)
    assert found[~is_chunk].isnan().all()
