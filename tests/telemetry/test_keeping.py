"""Tail sampling: what is kept and why, and what waits for what.

Steps wait for the ends of their members, calls for their generations; memory is bounded.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.telemetry.reported import HEAD_ONLY, Listener, attributes, heard
from tests.telemetry.story import SERVICE, UNIX_OFFSET_NS, tell

from headrace_facts import facts
from headrace_telemetry import keeping
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.export.trace_ring import RingPart, TraceRing

KEEP_ALL: dict[str, Any] = {"trace_keep_failed": True, "trace_keep_ttft_ms": 0.001}
KEEP_FAILED: dict[str, Any] = {"trace_keep_failed": True}


def _reason(changes: dict[str, Any], **settings: Any) -> str | None:
    generation = tell(1, 1, sampled=0.0).generations[0]
    calm = {"preemptions": 0, "error_type": "", "finish_reasons": ["stop"]}
    config = TelemetryConfig(**{**HEAD_ONLY, **settings})
    return keeping.reason(msgspec.structs.replace(generation, **{**calm, **changes}), config)


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        ({}, {}, None),
        ({"error_type": "INTERNAL"}, {}, None),
        ({"error_type": "INTERNAL"}, {"trace_keep_failed": True}, "failed"),
        ({"finish_reasons": ["stop", "deadline"]}, {"trace_keep_failed": True}, "failed"),
        ({"finish_reasons": ["cancelled"]}, {"trace_keep_failed": True}, None),
        ({"first_chunk_ns": 10_000_001, "ttft_ns": 1}, {"trace_keep_ttft_ms": 10}, "ttft"),
        ({"first_chunk_ns": 10_000_000, "ttft_ns": 1}, {"trace_keep_ttft_ms": 10}, None),
        ({"first_chunk_ns": 0, "ttft_ns": 10_000_001}, {"trace_keep_ttft_ms": 10}, "ttft"),
        ({"first_chunk_ns": 0, "ttft_ns": 10_000_000}, {"trace_keep_ttft_ms": 10}, None),
        ({"first_chunk_ns": 0, "ttft_ns": 0, "end_ns": 10**15}, {"trace_keep_ttft_ms": 10}, "ttft"),
        ({"preemptions": 1}, {"trace_keep_preempted": True}, "preempted"),
        ({"preemptions": 1}, {"trace_keep_failed": True}, None),
        ({"span": None, "error_type": "INTERNAL"}, {"trace_keep_failed": True}, None),
        ({"span": facts.SpanContext("a" * 32, "b" * 16, sampled=True)}, {}, "head"),
    ],
)
def test_reasons(changes: dict[str, Any], settings: dict[str, Any], expected: str | None) -> None:
    assert _reason(changes, **settings) == expected


@pytest.mark.parametrize(("gap_ms", "expected"), [(49, None), (51, "itl")])
def test_a_long_gap_in_an_output_keeps_it(gap_ms: int, expected: str | None) -> None:
    made = np.array([0, 10, 10 + gap_ms], "<u8") * 1_000_000
    emission = facts.Emission(np.ones(3, "<u4").tobytes(), made.tobytes(), made.tobytes())
    assert _reason({"emissions": [emission]}, trace_keep_itl_ms=50) == expected


@hypothesis.given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 5))
@hypothesis.settings(max_examples=30)
def test_kept_traces_are_whole_and_their_links_resolve(seed: int, num_requests: int) -> None:
    story = tell(seed, num_requests, sampled=0.3)
    listener = Listener(**KEEP_FAILED)
    failed = {each.number for each in story.requests if each.number % 2}
    reported = [(who, _failed(fact, failed)) for who, fact in story.reported]
    listener.hear(reported).wait(1)
    kept = {each.span.trace_id for each in story.requests if each.span and (each.sampled or each.number in failed)}
    inferences = {span.trace_id.hex() for span in listener.named("text_completion demo")}
    calls = {span.trace_id.hex() for span in listener.named("headrace.v1.InferenceService/Generate")}
    assert inferences == calls == kept
    ids = {span.span_id for span in listener.spans}
    assert all(link.span_id in ids for span in listener.spans for link in span.links)
    for step in listener.named("engine.step"):
        assert {link.trace_id.hex() for link in step.links} == _members_kept(story, step, kept)


def _failed(fact: facts.Fact, numbers: set[int]) -> facts.Fact:
    if isinstance(fact, facts.Generation) and fact.trace is not None and fact.trace.number in numbers:
        return msgspec.structs.replace(fact, error_type="INTERNAL")
    return fact


def _members_kept(story: Any, step: trace_pb2.Span, kept: set[str]) -> set[str]:
    members = story.members[attributes(step)["headrace.step.id"] - 1]
    spans = [story.requests[number].span for number in members]
    return {span.trace_id for span in spans if span} & kept


def test_nothing_of_a_trace_that_is_not_kept_comes_out() -> None:
    assert heard(tell(2, 3, sampled=0.0), **KEEP_FAILED).spans == []
    assert heard(tell(2, 3, sampled=0.0, recorded=False)).spans == []


def test_steps_wait_for_the_ends_of_all_their_members_but_not_for_ever() -> None:
    story = tell(3, 2, sampled=0.0, calls=False)
    *before, (_, last) = story.reported
    listener = Listener(**KEEP_ALL).hear(before)
    together = [index for index, members in enumerate(story.members, 1) if len(set(members)) == 2]
    ids = [attributes(span)["headrace.step.id"] for span in listener.wait(1).named("engine.step")]
    assert not set(ids) & set(together)
    listener.wait(31)
    steps = {attributes(span)["headrace.step.id"]: len(span.links) for span in listener.named("engine.step")}
    assert together and all(steps[step_id] == 1 for step_id in together)
    # The other is kept after all: steps of its own come out, the shared ones not again.
    listener.hear([(SERVICE, last)])
    later = [attributes(span)["headrace.step.id"] for span in listener.named("engine.step")]
    assert sorted(later) == story.records["step_id"].tolist()


def test_a_call_that_ends_before_its_generation_waits_for_it() -> None:
    story = tell(4, 1, sampled=0.0)
    *before, (_, generation), call = story.reported
    listener = Listener(**KEEP_ALL).hear([*before, call])
    assert not listener.spans
    listener.hear([(SERVICE, generation)])
    assert len(listener.named("headrace.v1.InferenceService/Generate")) == 1


def test_links_of_a_call_lead_to_exported_spans_only() -> None:
    story = tell(5, 2, sampled=0.0, calls=False)
    listener = Listener(**KEEP_FAILED)
    listener.hear((who, _failed(fact, {0})) for who, fact in story.reported)
    spans = [each.span for each in story.requests if each.span]
    session = facts.SpanContext("d" * 32, "e" * 16, "", "", True)
    call = facts.CallEnded("headrace.v1.InferenceService/Session", "OK", UNIX_OFFSET_NS, 1, 2, "", session, spans)
    listener.hear([(SERVICE, call)])
    (found,) = listener.named("headrace.v1.InferenceService/Session")
    assert [link.trace_id.hex() for link in found.links] == [spans[0].trace_id]


def test_a_trace_is_found_by_request_and_by_trace_with_all_its_steps() -> None:
    story = tell(6, 3)
    listener = heard(story)
    for each in story.requests:
        assert each.span is not None
        data = listener.sink.find(each.request_id)
        assert data == listener.sink.find(each.span.trace_id)
        spans = [
            span
            for part in trace_pb2.TracesData.FromString(data).resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]
        own = [span for span in spans if span.name != "engine.step"]
        expected = [span for span in listener.spans if span.trace_id.hex() == each.span.trace_id]
        assert sorted(span.span_id for span in own) == sorted(span.span_id for span in expected)
        steps = {attributes(span)["headrace.step.id"] for span in spans if span.name == "engine.step"}
        links = {link.span_id for span in own for link in span.links}
        assert {span.span_id for span in spans if span.name == "engine.step"} == links
        assert steps == {step for column in each.token_steps for step in column} | {chunk[0] for chunk in each.chunks}


def test_an_unknown_trace_is_empty() -> None:
    assert Listener().sink.find("nothing") == b""
    assert heard(tell(7, 1), trace_ring=0).sink.find("req_0000") == b""


@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000), st.booleans()), max_size=80))
def test_the_ring_stays_within_its_bytes_and_forgets_the_oldest(entries: list[tuple[int, int, bool]]) -> None:
    counts = ExportCounts()
    ring = TraceRing(10_000, counts)
    for index, (trace, size, is_step) in enumerate(entries):
        if is_step:
            ring.add_step(("engine", index), b"r", bytes(size))
        else:
            ring.add(str(trace), RingPart(b"r", bytes(size), f"request-{trace}"))
        assert 0 <= counts.ring_bytes <= 10_000
        # The newest is there, and nobody is found without spans.
        assert is_step or ring.find(str(trace)) == ring.find(f"request-{trace}") is not None
        for other in range(6):
            found = ring.find(f"request-{other}")
            assert found is None or found.spans


def test_an_endless_stream_of_facts_takes_no_more_memory() -> None:
    listener = Listener(trace_ring=1 << 20, **KEEP_FAILED)
    for seed in range(60):
        story = tell(seed, 2, sampled=0.0)
        listener.hear(entry for entry in story.reported if not isinstance(entry[1], facts.Steps))
        context = facts.SpanContext(f"{seed + 10**6:032x}", "a" * 16)
        listener.hear([(SERVICE, facts.CallEnded("m", "OK", 0, 1, 2, "", context))] * 200)
    sink = listener.sink
    assert len(sink._calls._entries) <= 4096
    assert listener.counts.ring_bytes <= 1 << 20


def test_the_span_of_a_call_whose_caller_left_encloses_its_generation() -> None:
    story = tell(8, 1)
    *before, (_, generation), (_, call) = story.reported
    assert isinstance(call, facts.CallEnded) and isinstance(generation, facts.Generation)
    left = msgspec.structs.replace(call, status="CANCELLED", end_ns=call.start_ns + 1)
    listener = Listener().hear([*before, (SERVICE, left)])
    assert not listener.named("headrace.v1.InferenceService/Generate")
    listener.hear([(SERVICE, generation)])
    (span,) = listener.named("headrace.v1.InferenceService/Generate")
    assert span.end_time_unix_nano == generation.end_ns + UNIX_OFFSET_NS
    # One whose generation is never reported does not wait for ever.
    alone = Listener().hear([*before, (SERVICE, left)]).wait(3)
    assert len(alone.named("headrace.v1.InferenceService/Generate")) == 1


def test_a_generation_that_makes_no_sense_is_refused_at_once_and_alone() -> None:
    story = tell(9, 2, calls=False)
    first, second = story.reported[-2:]
    assert isinstance(first[1], facts.Generation)
    listener = Listener().hear(story.reported[:-2])
    for broken in (
        {"emissions": [facts.Emission(b"\1\0\0\0", b"", b"")]},
        {"emissions": [facts.Emission(b"\xff\xff\xff\xff", bytes(8), bytes(8))]},
        {"arrival_ns": -UNIX_OFFSET_NS - 1},
        {"end_ns": 1 << 63},
    ):
        with pytest.raises(ValueError):
            listener.hear([(SERVICE, msgspec.structs.replace(first[1], **broken))])
    listener.hear([second])
    assert [span.trace_id.hex() for span in listener.named("text_completion demo")] == [f"{2:032x}"]
