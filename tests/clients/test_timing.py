"""Figures of one stream, from events at known times."""

from __future__ import annotations

import pytest

from headrace import Accepted, Delta
from headrace.timing import StreamTimer


def _delta(first: int, count: int, output_index: int = 0) -> Delta:
    return Delta(output_index, first, tuple(range(count)), "x" * count)


def test_gaps_are_per_output_and_shared_by_tokens_that_arrive_together() -> None:
    times = iter([10.0, 10.5, 10.6, 10.7, 10.9, 11.5])
    timer = StreamTimer(lambda: next(times))
    events = [Accepted("r", "m", 1), _delta(0, 1), _delta(0, 1, 1), _delta(1, 1), _delta(2, 2), _delta(1, 1, 1)]
    assert list(timer.observe(events)) == events
    assert timer.ttft == pytest.approx(0.5)
    # Gaps: output 0 has 0.2 and 0.2 shared by two tokens (0.1 each), output 1 has 0.9.
    assert [timer.itl(q) for q in (0.25, 0.5, 0.75, 1.0)] == pytest.approx([0.1, 0.1, 0.2, 0.9])
    assert timer.tokens == 6
    assert timer.tokens_per_second == pytest.approx(6 / 1.5)


def test_a_stream_without_tokens_has_no_figures() -> None:
    timer = StreamTimer()
    timer.note(Accepted("r", "m", 1))
    assert (timer.ttft, timer.itl(0.5), timer.tokens_per_second) == (None, None, None)
    timer.note(_delta(0, 1))
    assert timer.ttft is not None and timer.itl(0.99) is None
