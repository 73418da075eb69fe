"""The picture, and what is said where it cannot be drawn."""

from __future__ import annotations

import importlib.util

import pytest
from tests.trace_viewer.synthetic_traces import Plan, Request, World, beside_a_long_prefill

from headrace_trace import picture
from headrace_trace.causes import explain
from headrace_trace.reading import read_trace
from headrace_trace.spans import TraceError, parse

LARGEST = 200_000


def drawn(plan: Plan, request_id: str, detail: str = "array") -> bytes:
    trace = read_trace(parse(World(plan).traces(detail).SerializeToString()), request_id=request_id)
    return picture.draw(trace, explain(trace))


def test_a_picture_is_a_small_png() -> None:
    pytest.importorskip("matplotlib")
    data = drawn(beside_a_long_prefill(), "01JDECODE0005-7qm2")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert 20_000 < len(data) < LARGEST


# What an earlier test left open may be collected while this one runs.
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("detail", ["off", "array", "span"])
def test_whatever_a_trace_lacks_or_is_called_it_is_drawn(detail: str) -> None:
    pytest.importorskip("matplotlib")
    hostile = "$\\frac{1}{$ \u4f60\u597d \x1b[31m"
    plan = Plan((Request(hostile, 0, 90, 9, n=2),), unread=frozenset({hostile}), lost_steps=frozenset(range(1, 99)))
    assert drawn(plan, hostile, detail).startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TraceError, match=r"needs matplotlib: pip install 'headrace-server\[bench\]'"):
        picture.check()
