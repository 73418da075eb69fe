"""W3C contexts: what is read of headers, what is drawn, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_service.tracing import context
from headrace_service.tracing.context import CallerContext, RootSampler

GOOD = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "zz",
        "00-" + "0" * 400,
        "ff-" + "a" * 32 + "-" + "b" * 16 + "-00",
        "00-" + "0" * 32 + "-" + "b" * 16 + "-00",
        "00-" + "a" * 32 + "-" + "0" * 16 + "-00",
        "00-" + "A" * 32 + "-" + "b" * 16 + "-00",
        GOOD + "-more",
        GOOD + "\n",
        " " + GOOD,
    ],
)
def test_a_malformed_context_is_as_none(traceparent: str) -> None:
    assert context.parse(traceparent) is None


def test_versions_to_come_may_say_more() -> None:
    assert context.parse("cc" + GOOD[2:] + "-what-the-future-holds") == CallerContext("a" * 32, "b" * 16, True)


def test_two_parents_are_none() -> None:
    assert context.of_metadata((("traceparent", GOOD), ("traceparent", GOOD))) is None


@pytest.mark.parametrize(
    ("tracestate", "kept"),
    [
        ("a=1", "a=1"),
        ("a=1, b@c=2 ,,", "a=1,b@c=2"),
        ("A=1", ""),
        ("a", ""),
        ("a=" + "x" * 600, ""),
        (",".join(f"k{index}=1" for index in range(33)), ""),
        ("a=grün", ""),
    ],
)
def test_a_malformed_state_is_dropped_and_the_context_kept(tracestate: str, kept: str) -> None:
    parsed = context.parse(GOOD, tracestate)
    assert parsed is not None and parsed.tracestate == kept


@given(st.text(max_size=80))
def test_any_text_is_a_context_or_none(text: str) -> None:
    parsed = context.parse(text)
    assert parsed is None or text.startswith(
        ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "a", "b", "c", "d", "e", "f")
    )


def test_what_is_written_is_read_again() -> None:
    parent = CallerContext("a" * 32, "b" * 16, False, "k=v")
    span = context.child_of(parent)
    again = context.parse(context.traceparent_of(span), span.tracestate)
    assert again == CallerContext("a" * 32, span.span_id, False, "k=v")
    assert span.parent_span_id == "b" * 16 and span.span_id != "b" * 16


def test_of_traces_that_begin_here_the_ratio_is_sampled() -> None:
    spans = [RootSampler(0.25).root(record_all=True) for _ in range(4000)]
    assert all(span is not None and len(span.trace_id) == 32 and len(span.span_id) == 16 for span in spans)
    assert len({span.trace_id for span in spans if span}) == len({span.span_id for span in spans if span}) == 4000
    # 4,000 draws at 1/4: five standard deviations are 137.
    assert 863 < sum(span.sampled for span in spans if span) < 1137
    # As OpenTelemetry's TraceIdRatioBased decides, so that other services with that ratio decide
    # the same.
    assert all(span.sampled == (int(span.trace_id[16:], 16) < 1 << 62) for span in spans if span)


def test_nothing_is_drawn_that_nobody_wants_and_all_is_at_ratio_one() -> None:
    assert all(RootSampler(0.0).root(record_all=False) is None for _ in range(100))
    ones = [RootSampler(1.0).root(record_all=False) for _ in range(100)]
    assert all(span is not None and span.sampled for span in ones)
