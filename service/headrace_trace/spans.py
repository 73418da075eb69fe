"""Spans as OpenTelemetry exports them, read from OTLP: JSON, JSON lines or protobuf.

Owns the byte forms and nothing of what the spans mean (trace_model.py). Bytes come in; spans, each
once, go out. Metrics and logs that share a file with spans are passed over.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Value = Any
_STATUS_ERROR = 2
# A TracesData begins with its first field, the resource spans. The byte is a line feed, too: what
# follows decides.
_PROTOBUF_START = b"\n"
_HEX = frozenset("0123456789abcdef")


class TraceError(Exception):
    """A trace cannot be had or read. The message is one line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that a span points to; ids in lower-case hex."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are UNIX nanoseconds, ids lower-case hex ("" without a parent)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    links: tuple[Link, ...] = ()
    failed: bool = False


def parse(data: bytes) -> list[Span]:
    """Reads spans of OTLP bytes.

    One JSON document, several (a line each, or not), or a serialized TracesData.

    A last line that is cut off, as a file has while it is written, is left out.

    Raises:
        TraceError: The bytes are none of these.
    """
    text = data.lstrip()
    if not text:
        raise TraceError("is empty")
    if text[:1] in b"{[":
        try:
            return unique(span for document in _documents(text) for span in spans_of_json(document))
        except TraceError:
            if not data.startswith(_PROTOBUF_START):
                raise
    if not data.startswith(_PROTOBUF_START):
        raise TraceError("is neither OTLP JSON nor a serialized TracesData")
    return parse_protobuf(data)


def parse_protobuf(data: bytes) -> list[Span]:
    """Reads a serialized opentelemetry.proto.trace.v1.TracesData.

    Raises:
        TraceError: It is none.
    """
    try:
        traces = trace_pb2.TracesData.FromString(data)
    except DecodeError:
        raise TraceError("is neither OTLP JSON nor a serialized TracesData") from None
    return unique(
        _from_protobuf(span) for group in traces.resource_spans for scope in group.scope_spans for span in scope.spans
    )


def spans_of_json(document: Any) -> Iterator[Span]:
    """Returns the spans of a decoded OTLP JSON document.

    A TracesData, an export request, or a list or `result` of such (as Jaeger answers).

    Raises:
        TraceError: A span in it is not as OTLP has it.
    """
    if isinstance(document, list):
        for part in document:
            yield from spans_of_json(part)
        return
    if not isinstance(document, dict):
        raise TraceError("is JSON, but not of OpenTelemetry")
    if isinstance(document.get("result"), dict):
        yield from spans_of_json(document["result"])
    try:
        for group in document.get("resourceSpans") or ():
            for scope in group.get("scopeSpans") or ():
                yield from map(_from_json, scope.get("spans") or ())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"holds a span that is not as OTLP has it ({type(error).__name__}: {error})") from None


def unique(spans: Iterable[Span]) -> list[Span]:
    """Each span once, in the order of its first."""
    return list({(span.trace_id, span.span_id): span for span in spans}.values())


def _documents(data: bytes) -> Iterator[Any]:
    """The JSON documents of a text, one after the other, with nothing but white space between.

    Raises:
        TraceError: It is no JSON; the message names the line.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise TraceError("is no text") from None
    decoder = json.JSONDecoder()
    at, length = 0, len(text)
    while at < length:
        try:
            document, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise TraceError("nests its JSON too deeply") from None
        except ValueError as error:
            if at and "\n" not in text[at:]:
                return
            line = text.count("\n", 0, getattr(error, "pos", at)) + 1
            raise TraceError(f"is no JSON in line {line}") from None
        yield document
        while at < length and text[at].isspace():
            at += 1


def _from_json(span: dict[str, Any]) -> Span:
    return Span(
        trace_id=hex_id(span["traceId"], 32),
        span_id=hex_id(span["spanId"], 16),
        parent_id=hex_id(span.get("parentSpanId") or "", 16),
        name=str(span.get("name", "")),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes={str(entry["key"]): _json_value(entry.get("value") or {}) for entry in span.get("attributes") or ()},
        links=tuple(Link(hex_id(link["traceId"], 32), hex_id(link["spanId"], 16)) for link in span.get("links") or ()),
        failed=(span.get("status") or {}).get("code") in (_STATUS_ERROR, "STATUS_CODE_ERROR"),
    )


def hex_id(value: str, digits: int) -> str:
    """An id in lower-case hex; base64, which protobuf's own JSON uses for bytes, is understood too.

    Raises:
        ValueError: It is neither.
    """
    lower = value.lower()
    if not value or (len(value) == digits and _HEX.issuperset(lower)):
        return lower
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error:
        raw = b""
    if 2 * len(raw) != digits:
        raise ValueError(f"{value!r:.60} is no id of {digits} hex digits")
    return raw.hex()


def _json_value(value: dict[str, Any]) -> Value:
    """An OTLP AnyValue of JSON, in which 64-bit integers are strings."""
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_json_value(item) for item in (value["arrayValue"] or {}).get("values") or ()]
    for kind in ("stringValue", "doubleValue", "boolValue"):
        if kind in value:
            return value[kind]
    return None


def _from_protobuf(span: trace_pb2.Span) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={entry.key: _protobuf_value(entry.value) for entry in span.attributes},
        links=tuple(Link(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        failed=span.status.code == _STATUS_ERROR,
    )


def _protobuf_value(value: common_pb2.AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_protobuf_value(item) for item in value.array_value.values]
    if kind is None or kind in ("kvlist_value", "bytes_value"):
        return None
    return getattr(value, kind)
