"""How a request ended is said: the status of its call, the reason, and where it was then."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.trace_viewer.synthetic_traces import Plan, Request, World, put

from headrace_trace.causes import explain
from headrace_trace.command import trace as command
from headrace_trace.explanation import Ending
from headrace_trace.page import render
from headrace_trace.reading import read_trace
from headrace_trace.spans import TraceError, parse
from headrace_trace.trace_model import Trace
from headrace_trace.words import ending_words, first_token_words, lines_of, milliseconds

NAME = "01JONE-7qm2"
WORLD = World(Plan((Request(NAME, 0, 40, 30),)))


def traces(**changed: Any) -> trace_pb2.TracesData:
    """Returns the trace of one request, with other attributes and a failed span on request."""
    reported = WORLD.traces()
    for span in reported.resource_spans[0].scope_spans[0].spans:
        if span.name.startswith("text_completion") and changed.get("failed"):
            span.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        if span.name.startswith("text_completion") and "error_type" in changed:
            put(span, "error.type", changed["error_type"])
        for attribute in span.attributes:
            if attribute.key == "rpc.response.status_code" and "status" in changed:
                attribute.value.string_value = changed["status"]
            if attribute.key == "rpc.method" and "method" in changed:
                attribute.value.string_value = changed["method"]
            if attribute.key == "gen_ai.response.finish_reasons" and "reason" in changed:
                attribute.value.array_value.values[0].string_value = changed["reason"]
    return reported


def read(**changed: Any) -> Trace:
    return read_trace(parse(traces(**changed).SerializeToString()))


@pytest.mark.parametrize(
    ("changed", "ending", "words"),
    [
        ({}, Ending("OK", False, ("length",), "", "delivery"), "OK (length)"),
        (
            {"status": "DEADLINE_EXCEEDED", "error_type": "DEADLINE_EXCEEDED", "reason": "deadline", "failed": True},
            Ending("DEADLINE_EXCEEDED", True, ("deadline",), "DEADLINE_EXCEEDED", "decode"),
            "DEADLINE_EXCEEDED (deadline) while it decoded, after 30 tokens, ",
        ),
        (
            {"status": "CANCELLED", "reason": "cancelled"},
            Ending("CANCELLED", False, ("cancelled",), "", "decode"),
            "CANCELLED (cancelled) while it decoded, after 30 tokens, ",
        ),
        (
            {"error_type": "engine_error", "reason": "error", "failed": True},
            Ending("OK", True, ("error",), "engine_error", "decode"),
            "OK (error, engine_error) while it decoded, after 30 tokens, ",
        ),
        (
            {"status": "RESOURCE_EXHAUSTED", "error_type": "RESOURCE_EXHAUSTED", "reason": "stop", "failed": False},
            Ending("RESOURCE_EXHAUSTED", False, ("stop",), "RESOURCE_EXHAUSTED", "delivery"),
            "RESOURCE_EXHAUSTED (stop) on the way to its reader, after 30 tokens, ",
        ),
        # A session's call has a status of its own.
        (
            {
                "method": "headrace.v1.InferenceService/Session",
                "error_type": "UNAVAILABLE",
                "reason": "error",
                "failed": True,
            },
            Ending("UNAVAILABLE", True, ("error",), "UNAVAILABLE", "decode"),
            "UNAVAILABLE (error) while it decoded, after 30 tokens, ",
        ),
        (
            {"method": "inference.GRPCInferenceService/ModelStreamInfer", "reason": "cancelled"},
            Ending("", False, ("cancelled",), "", "decode"),
            "unknown (cancelled) while it decoded, after 30 tokens, ",
        ),
    ],
)
def test_an_end_is_reported_with_status_reason_and_place(changed: dict[str, Any], ending: Ending, words: str) -> None:
    explanation = explain(read(**changed))
    assert explanation.ending == ending
    assert ending_words(explanation).startswith(words)
    assert f"ended   {ending_words(explanation)}" in lines_of(explanation)
    page = render(read(**changed), explanation)
    assert f"ended: {ending_words(explanation)}" in page


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("queue", "while it waited in the queue, before its first token"),
        ("prefill", "while its prompt was computed, before its first token"),
        ("preempted", "while it was preempted, before its first token"),
        ("engine_restart", "while the engine was restarted, before its first token"),
    ],
)
def test_a_request_that_ended_before_its_first_token_is_said_to_have(phase: str, words: str) -> None:
    trace = read(status="DEADLINE_EXCEEDED", error_type="DEADLINE_EXCEEDED", reason="deadline", failed=True)
    ended = dataclasses.replace(trace, tokens=(), phases=(dataclasses.replace(trace.phases[0], name=phase),))
    assert f"DEADLINE_EXCEEDED (deadline) {words}, " in ending_words(explain(ended))
    nowhere = explain(dataclasses.replace(ended, phases=()))
    assert nowhere.ending.where == "" and "(deadline) before its first token, " in ending_words(nowhere)


def test_the_command_line_says_it_in_words_and_as_json(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "failed.pb"
    changes = {"status": "UNAVAILABLE", "error_type": "UNAVAILABLE", "reason": "error", "failed": True}
    file.write_bytes(traces(**changes).SerializeToString())
    words = CliRunner().invoke(command, [str(file), "--explain"]).output
    assert "ended   UNAVAILABLE (error) while it decoded, after 30 tokens, " in words
    reported = json.loads(CliRunner().invoke(command, [str(file), "--json"]).output)
    assert reported["ending"] == {
        "status": "UNAVAILABLE",
        "failed": True,
        "reasons": ["error"],
        "error_type": "UNAVAILABLE",
        "where": "decode",
    }
    assert 0 < reported["computed_ms"] < reported["ttft_ms"]


def test_a_call_that_was_refused_is_said_to_have_been() -> None:
    reported = traces(status="RESOURCE_EXHAUSTED")
    spans = reported.resource_spans[0].scope_spans[0].spans
    kept = [span for span in spans if not span.name.startswith("text_completion")]
    del spans[:]
    spans.extend(kept)
    reason = r"none of a Headrace request: headrace\.v1\.InferenceService/Generate ended RESOURCE_EXHAUSTED"
    with pytest.raises(TraceError, match=reason):
        read_trace(parse(reported.SerializeToString()))


def test_one_figure_for_the_first_token_and_the_rest_by_other_names() -> None:
    """The page has the time at which the first message had left, by the service, everywhere."""
    reported = traces()
    for span in reported.resource_spans[0].scope_spans[0].spans:
        for attribute in span.attributes:
            if attribute.key == "gen_ai.response.time_to_first_chunk":
                attribute.value.double_value = 0.0531
            elif attribute.key == "headrace.engine.time_to_first_token":
                attribute.value.double_value = 0.0222
    trace = read_trace(parse(reported.SerializeToString()))
    explanation = explain(trace)
    assert explanation.ttft_ms == explanation.gaps[0].ms == explanation.gaps[0].at_ms == 53.1
    assert sum(ms for _, ms in explanation.gaps[0].parts_ms) == pytest.approx(53.1)
    first = trace.tokens[0]
    assert first.sampled_ns is not None
    computed = milliseconds((first.sampled_ns - trace.start_ns) / 1e6)
    assert first_token_words(explanation) == f"TTFT 53.10 ms (computed after {computed})"
    page = render(trace, explanation)
    assert f"<dt>time to first token</dt><dd>53.10 ms <small>computed after {computed}</small></dd>" in page
    assert "first token: 53.10 ms after the call" in page and "22.20 ms" not in page


def test_an_answer_in_one_message_has_the_engines_first_token_alone() -> None:
    trace = dataclasses.replace(read(), tokens=(), ttft_ns=None, engine_ttft_ns=22_200_000)
    explanation = explain(trace)
    assert explanation.ttft_ms is None
    assert first_token_words(explanation) == "first token computed after 22.20 ms"
    assert "<dt>first token computed after</dt><dd>22.20 ms</dd>" in render(trace, explanation)


def test_a_trace_that_tells_no_first_token_shows_its_own() -> None:
    trace = dataclasses.replace(read(), ttft_ns=None, engine_ttft_ns=None)
    explanation = explain(trace)
    assert explanation.ttft_ms == explanation.gaps[0].ms
