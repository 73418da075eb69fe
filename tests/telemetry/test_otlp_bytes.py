"""Hand-packed protobuf against the generated classes.

A slow builder of the same spans, and whole values back.
"""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.telemetry.reported import value_of

from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_bytes import Key, SpanHead
from headrace_telemetry.spans import token_spans

u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
ids = st.binary(min_size=8, max_size=8)


def _parsed(attribute: bytes) -> common_pb2.KeyValue:
    (found,) = trace_pb2.Span.FromString(attribute).attributes
    return found


@hypothesis.given(i64, st.floats(allow_nan=False), st.text(), st.lists(st.text()), st.lists(i64))
def test_attributes_come_back(number: int, fraction: float, text: str, texts: list[str], numbers: list[int]) -> None:
    key = Key("a.key")
    for encoded, value in (
        (key.integer(number), number),
        (key.integer(number), number),
        (key.number(fraction), fraction),
        (key.text(text), text),
        (key.text(text), text),
        (key.texts(texts), texts),
        (key.integers(numbers), numbers),
        (key.flag(True), True),
    ):
        attribute = _parsed(encoded)
        assert attribute.key == "a.key"
        assert value_of(attribute.value) == value


@hypothesis.given(st.text(), st.integers(0, 30))
def test_text_is_cut_to_whole_characters(text: str, limit: int) -> None:
    cut = otlp_bytes.cut(text, limit)
    assert len(cut) <= limit
    assert text.startswith(cut.decode())
    assert len(cut) > limit - 4 or cut.decode() == text


@hypothesis.given(st.lists(i64, min_size=1, max_size=50))
def test_many_numbers_come_back(values: list[int]) -> None:
    column = np.array(values, np.int64).view(np.uint64)
    assert value_of(_parsed(Key("k").array(token_spans.int_elements(column).tobytes())).value) == values


@hypothesis.given(
    ids, ids, st.text(min_size=1, max_size=20), st.integers(1, 2**63), st.integers(0, 2**32), st.booleans()
)
def test_a_span_is_what_the_generated_class_makes(
    span_id: bytes, parent: bytes, name: str, start: int, length: int, failed: bool
) -> None:
    head = SpanHead(span_id * 2, span_id, parent, name, start, start + length, otlp_bytes.SERVER, "a=b", 0x301)
    packed = otlp_bytes.span(head, Key("k").integer(7), otlp_bytes.link(parent * 2, parent, "c=d"), failed)
    expected = trace_pb2.Span(
        trace_id=span_id * 2,
        span_id=span_id,
        trace_state="a=b",
        parent_span_id=parent,
        flags=0x301,
        name=name,
        kind=trace_pb2.Span.SPAN_KIND_SERVER,
        start_time_unix_nano=start,
        end_time_unix_nano=start + length,
        attributes=[common_pb2.KeyValue(key="k", value=common_pb2.AnyValue(int_value=7))],
        links=[trace_pb2.Span.Link(trace_id=parent * 2, span_id=parent, trace_state="c=d")],
        status=trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR) if failed else None,
    )
    assert packed == trace_pb2.ScopeSpans(spans=[expected]).SerializeToString()


columns = st.integers(1, 40).flatmap(
    lambda count: st.tuples(*[st.lists(st.integers(0, 2**62), min_size=count, max_size=count) for _ in range(8)])
)


@hypothesis.given(
    columns,
    st.sets(st.integers(0, 5), min_size=1),
    st.booleans(),
    st.booleans(),
    st.binary(min_size=16, max_size=16),
    ids,
)
def test_token_spans_are_what_the_generated_class_makes(
    values: tuple[list[int], ...], names: set[int], linked: bool, incomplete: bool, trace_id: bytes, parent: bytes
) -> None:
    arrays = [np.array(column, np.uint64) for column in values]
    count = len(arrays[0])
    links = np.arange(24 * count, dtype=np.uint8).reshape(count, 24) if linked else None
    order = tuple(sorted(names))
    parents = np.tile(np.frombuffer(trace_id + parent, np.uint8), (count, 1))
    tokens = token_spans.Tokens(arrays[6], arrays[7], tuple(arrays[name] for name in order), order, parents, links)
    spans = trace_pb2.ScopeSpans.FromString(token_spans.encode(tokens, incomplete).tobytes()).spans
    assert len(spans) == count
    assert len({span.span_id for span in spans}) == count
    for row, span in enumerate(spans):
        expected = trace_pb2.Span(
            trace_id=trace_id,
            span_id=span.span_id,
            parent_span_id=parent,
            name="token",
            kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=values[6][row],
            end_time_unix_nano=values[7][row],
        )
        for name in order:
            expected.attributes.add(
                key=token_spans.ATTRIBUTES[name], value=common_pb2.AnyValue(int_value=values[name][row])
            )
        if incomplete:
            expected.attributes.add(key="headrace.trace.incomplete", value=common_pb2.AnyValue(bool_value=True))
        if links is not None:
            expected.links.add(trace_id=links[row, :16].tobytes(), span_id=links[row, 16:].tobytes())
        assert span == expected


def test_resources_and_scopes_frame_spans() -> None:
    resource = otlp_bytes.resource({"service.name": "headrace", "process.pid": 7, "yes": True, "half": 0.5})
    span = otlp_bytes.span(SpanHead(b"t" * 16, b"s" * 8, b"", "n", 1, 2))
    framed = otlp_bytes.resource_spans(resource, otlp_bytes.scope("1.2"), [span, span])
    (found,) = trace_pb2.TracesData.FromString(framed).resource_spans
    assert {each.key: value_of(each.value) for each in found.resource.attributes} == {
        "service.name": "headrace",
        "process.pid": 7,
        "yes": True,
        "half": 0.5,
    }
    assert found.resource == resource_pb2.Resource.FromString(resource)
    assert (found.scope_spans[0].scope.name, found.scope_spans[0].scope.version) == ("headrace", "1.2")
    assert len(found.scope_spans[0].spans) == 2
