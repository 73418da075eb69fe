"""From spans to the model: details, outputs, what is missing, several requests."""

from __future__ import annotations

import dataclasses

import pytest
from tests.trace_viewer.synthetic_traces import Plan, Request, World, as_lines, put, step_trace_id

from headrace_trace.reading import SeveralRequests, inference_spans, read_trace, step_traces
from headrace_trace.spans import Span, TraceError, parse
from headrace_trace.trace_model import Trace

PLAN = Plan(
    (Request("r-1", 0, 5000, 12, cached=16), Request("r-2", 3, 60, 20, n=3), Request("r-3", 5, 60, 4)),
    unread=frozenset({"r-3"}),
)


def read(plan: Plan, request_id: str, detail: str = "array") -> Trace:
    return read_trace(parse(World(plan).traces(detail).SerializeToString()), request_id=request_id)


@pytest.mark.parametrize("detail", ["array", "span"])
def test_a_trace_is_what_the_engine_did(detail: str) -> None:
    world = World(PLAN)
    trace, life = read(PLAN, "r-1", detail), world.life("r-1")
    assert (trace.model, trace.prompt_tokens, trace.cached_tokens) == ("llama-3.1-8b", 5000, 16)
    assert [(p.name, p.start_ns, p.end_ns) for p in trace.phases] == life.phases
    assert [(c.step_id, c.first_token, c.tokens) for c in trace.chunks] == life.chunks
    rows = [(t.step_id, t.scheduled_ns, t.sampled_ns, t.emitted_ns, t.written_ns) for t in trace.tokens]
    assert rows == world.times(life)
    assert sum(trace.ledger.values()) == trace.end_ns - trace.start_ns
    step = trace.steps[1]
    assert (step.start_ns, step.end_ns, step.prefill_tokens) == (world.ran(1).started, world.ran(1).finished, 2048)
    assert step.prefills[0].request_id == "r-1"


def test_arrays_and_spans_of_tokens_say_the_same() -> None:
    for request_id in ("r-1", "r-2", "r-3"):
        assert read(PLAN, request_id, "array").tokens == read(PLAN, request_id, "span").tokens


def test_outputs_are_kept_apart() -> None:
    trace = read(PLAN, "r-2", "span")
    assert list(trace.outputs) == [0, 1, 2]
    assert all([token.index for token in tokens] == list(range(20)) for tokens in trace.outputs.values())


@pytest.mark.parametrize("detail", ["array", "span"])
def test_tokens_that_nobody_read_arrive_when_they_were_sampled(detail: str) -> None:
    for token in read(PLAN, "r-3", detail).tokens:
        assert token.emitted_ns is None and token.written_ns is None
        assert token.arrived_ns == token.sampled_ns


def test_without_steps_and_without_tokens_there_is_still_a_trace() -> None:
    spans = [s for s in parse(World(PLAN).traces("off").SerializeToString()) if s.name != "engine.step"]
    trace = read_trace(spans, request_id="r-1")
    assert (trace.tokens, trace.steps) == ((), {})
    assert trace.phases and trace.ledger


def test_columns_of_another_length_are_as_if_unknown() -> None:
    traces = World(PLAN).traces("array", only=["r-1"])
    spans = [dataclasses.replace(span, attributes=dict(span.attributes)) for span in parse(traces.SerializeToString())]
    inference_spans(spans)[0].attributes["headrace.token.sampled_ns"] = [1, 2]
    trace = read_trace(spans)
    assert len(trace.tokens) == 12
    assert all(token.sampled_ns is None for token in trace.tokens)


def test_arrays_that_jaeger_hands_out_as_text_are_read() -> None:
    spans = parse(World(PLAN).traces("array", only=["r-1"]).SerializeToString())
    as_text = [
        dataclasses.replace(
            s, attributes={k: str(v).replace("'", '"') if isinstance(v, list) else v for k, v in s.attributes.items()}
        )
        for s in spans
    ]
    assert read_trace(as_text) == read_trace(spans)


def test_several_requests_must_be_told_apart_by_id() -> None:
    shared = "ab" * 16
    plan = Plan((Request("r-1", 0, 40, 3, trace_id=shared), Request("r-2", 0, 40, 3, trace_id=shared)))
    spans = parse(as_lines(World(plan).traces()).encode())
    with pytest.raises(SeveralRequests, match=r"holds 2 requests \(r-1, r-2\): choose one with --request"):
        read_trace(spans, trace_id=shared)
    assert read_trace(spans, request_id="r-2", trace_id=shared).request_id == "r-2"
    with pytest.raises(TraceError, match="holds no request r-9"):
        read_trace(spans, request_id="r-9")


def test_steps_of_another_engine_are_not_taken_for_its_own() -> None:
    traces = World(PLAN).traces("array", only=["r-1"])
    foreign = (
        traces.resource_spans[0]
        .scope_spans[0]
        .spans.add(name="engine.step", trace_id=bytes(15) + b"1", span_id=b"12345678")
    )
    put(foreign, "headrace.step.id", 1)
    put(foreign, "headrace.step.engine", "another")
    assert read_trace(parse(traces.SerializeToString())).steps[1].prefill_tokens == 2048


def test_the_traces_of_steps_follow_from_their_ids() -> None:
    plan = Plan((Request("r-1", 0, 40, 300),))
    spans = parse(World(plan).traces("array").SerializeToString())
    steps = {span.trace_id for span in spans if span.name == "engine.step"}
    assert steps == {step_trace_id(1).hex(), step_trace_id(257).hex()}
    assert step_traces(inference_spans(spans)[0]) == steps


def test_members_of_steps_have_names_where_their_spans_came_along() -> None:
    trace = read(PLAN, "r-1")
    assert {
        trace.requests_by_span[(m.trace_id, m.span_id)]
        for m in trace.steps[2].members
        if (m.trace_id, m.span_id) in trace.requests_by_span
    } == {"r-2", "r-3"} & set(trace.steps[2].request_ids)


def test_a_file_of_others_spans_holds_no_request() -> None:
    with pytest.raises(TraceError, match="holds 1 spans, but none of a Headrace request"):
        read_trace([Span("0" * 32, "0" * 16, "", "GET /", 1, 2, {})])


def test_tokens_of_an_attempt_before_have_no_step() -> None:
    """Numbers as the telemetry process reports them.

    0 for the step, -1 for times, in spans neither.
    """
    spans = [
        dataclasses.replace(span, attributes=dict(span.attributes))
        for span in parse(World(PLAN).traces("array", only=["r-1"]).SerializeToString())
    ]
    attributes = inference_spans(spans)[0].attributes
    for name in ("step_id", "scheduled_ns", "sampled_ns"):
        column = list(attributes[f"headrace.token.{name}"])
        attributes[f"headrace.token.{name}"] = [0 if name == "step_id" else -1, *column[1:]]
    attributes["headrace.trace.truncated_tokens"] = 7
    trace = read_trace(spans)
    assert (trace.tokens[0].step_id, trace.tokens[0].scheduled_ns, trace.tokens[0].sampled_ns) == (None, None, None)
    assert trace.left_out_tokens == 7
    token_spans = [
        dataclasses.replace(span, attributes=dict(span.attributes))
        for span in parse(World(PLAN).traces("span", only=["r-1"]).SerializeToString())
    ]
    for span in token_spans:
        if span.name == "token" and span.attributes["headrace.token.index"] == 0:
            span.attributes["headrace.step.id"] = 0
            del span.attributes["headrace.token.sampled_ns"]
    assert read_trace(token_spans).tokens == trace.tokens
