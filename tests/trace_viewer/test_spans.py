"""OTLP in all its forms, and what is none."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trace_viewer.synthetic_traces import Plan, Request, World, as_document, as_lines

from headrace_trace.spans import TraceError, parse, spans_of_json

WORLD = World(Plan((Request("r-1", 0, 40, 5), Request("r-2", 1, 40, 5, n=2))))
TRACES = WORLD.traces("span")
SPANS = parse(TRACES.SerializeToString())


def test_json_lines_one_json_and_protobuf_give_the_same_spans() -> None:
    assert len(SPANS) > 20
    document = as_document(TRACES)
    forms = [
        as_lines(TRACES, 3),
        json.dumps(document),
        json.dumps(document, indent=2),
        json.dumps({"result": document}),
    ]
    for form in forms:
        assert {s.span_id: s for s in parse(form.encode())} == {s.span_id: s for s in SPANS}


def test_a_span_that_comes_twice_is_one() -> None:
    assert len(parse((as_lines(TRACES) + as_lines(TRACES)).encode())) == len(SPANS)


def test_a_last_line_that_is_still_being_written_is_left_out() -> None:
    text = as_lines(TRACES, 5)
    cut = text[: len(text.rstrip()) - 40]
    assert 0 < len(parse(cut.encode())) < len(SPANS)


def test_metrics_and_logs_of_the_same_file_are_passed_over() -> None:
    lines = '{"resourceMetrics":[{"scopeMetrics":[]}]}\n' + as_lines(TRACES) + '{"resourceLogs":[]}\n'
    assert len(parse(lines.encode())) == len(SPANS)


def test_ids_in_base64_are_understood() -> None:
    span = {"traceId": base64.b64encode(bytes(range(16))).decode(), "spanId": base64.b64encode(bytes(8)).decode()}
    span |= {"name": "x", "startTimeUnixNano": "1", "endTimeUnixNano": 2}
    read = next(spans_of_json({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    assert (read.trace_id, read.span_id) == (bytes(range(16)).hex(), bytes(8).hex())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"a,b\n1,2\n", "is neither OTLP JSON nor a serialized TracesData"),
        (b"\n\xff\xff\xff", "is neither OTLP JSON nor a serialized TracesData"),
        (b'{"a": }', "is no JSON in line 1"),
        (b'{"a": 1}\n{"b"\n: ]}\n', "is no JSON in line 3"),
        (b'{"a": "\xff"}', "is no text"),
        (b'["x"]', "is JSON, but not of OpenTelemetry"),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"x"}]}]}]}', "holds a span that is not as OTLP has it"),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"zz"}]}]}]}', "is no id of 32 hex digits"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as raised:
        parse(data)
    assert "\n" not in str(raised.value)


@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=100).map(str.encode),
        st.recursive(
            st.none() | st.text() | st.integers(),
            lambda inner: (
                st.lists(inner)
                | st.dictionaries(
                    st.sampled_from(
                        ["resourceSpans", "scopeSpans", "spans", "attributes", "value", "links", "status", "result"]
                    ),
                    inner,
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        parse(data)
    except TraceError:
        pass
