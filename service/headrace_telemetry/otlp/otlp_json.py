"""Spans as OTLP JSON: what a trace file holds, one ExportTraceServiceRequest per line.

Owns the mapping that OTLP prescribes, which is protobuf's but for ids in hex: 64-bit numbers are
text, enums are numbers. The file is `trace_file`'s.
"""

from __future__ import annotations

from typing import Any

import msgspec
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from headrace_telemetry.otlp import otlp_bytes

Json = dict[str, Any]
_encoder = msgspec.json.Encoder()


def line(resource: bytes, scope: bytes, spans: bytes) -> bytes:
    """A line of the file, its end included.

    Args:
        resource: a serialized Resource.
        scope: a serialized InstrumentationScope.
        spans: spans as fields of ScopeSpans.
    """
    parsed = trace_pb2.ScopeSpans.FromString(otlp_bytes.field(b"\x0a", scope) + spans)
    scope_spans = {
        "scope": {"name": parsed.scope.name, "version": parsed.scope.version},
        "spans": [_span(span) for span in parsed.spans],
        "schemaUrl": otlp_bytes.SCHEMA_URL,
    }
    attributes = _attributes(resource_pb2.Resource.FromString(resource).attributes)
    reported = {
        "resource": {"attributes": attributes},
        "scopeSpans": [scope_spans],
        "schemaUrl": otlp_bytes.SCHEMA_URL,
    }
    request = {"resourceSpans": [reported]}
    return _encoder.encode(request) + b"\n"


def _span(span: trace_pb2.Span) -> Json:
    shown: Json = {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "parentSpanId": span.parent_span_id.hex(),
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_time_unix_nano),
        "endTimeUnixNano": str(span.end_time_unix_nano),
        "attributes": _attributes(span.attributes),
    }
    if span.trace_state:
        shown["traceState"] = span.trace_state
    if span.links:
        shown["links"] = [_link(link) for link in span.links]
    if span.status.code:
        shown["status"] = {"code": span.status.code}
    if span.flags:
        shown["flags"] = span.flags
    return shown


def _link(link: trace_pb2.Span.Link) -> Json:
    shown = {"traceId": link.trace_id.hex(), "spanId": link.span_id.hex()}
    return {**shown, "traceState": link.trace_state} if link.trace_state else shown


def _attributes(attributes: Any) -> list[Json]:
    return [{"key": attribute.key, "value": _value(attribute.value)} for attribute in attributes]


def _value(value: common_pb2.AnyValue) -> Json:
    kind = value.WhichOneof("value")
    if kind == "int_value":
        return {"intValue": str(value.int_value)}
    if kind == "string_value":
        return {"stringValue": value.string_value}
    if kind == "double_value":
        return {"doubleValue": value.double_value}
    if kind == "bool_value":
        return {"boolValue": value.bool_value}
    assert kind == "array_value", kind
    return {"arrayValue": {"values": [_value(each) for each in value.array_value.values]}}
