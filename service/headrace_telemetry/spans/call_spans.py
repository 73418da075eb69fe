"""An RPC as a server span, as the RPC conventions have it.

Owns its attributes. Which statuses make it a failed one says `outcome`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace_facts import facts
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_bytes import FLAG_REMOTE_PARENT, FLAG_SAMPLED, SERVER, Key, SpanHead
from headrace_telemetry.outcome import FAILURES

_SYSTEM: Final = Key("rpc.system.name")
_METHOD: Final = Key("rpc.method")
_STATUS: Final = Key("rpc.response.status_code")
_ERROR: Final = Key("error.type")
_REQUEST_ID: Final = Key("headrace.request.id")


def encode(call: facts.CallEnded, start_ns: int, end_ns: int, links: Iterable[facts.SpanContext]) -> bytes:
    """The server span of a call that has a span context, as a field of ScopeSpans.

    Args:
        call: the fact.
        start_ns: when it began, UNIX time.
        end_ns: when it ended.
        links: exported inference spans that it read.
    """
    span = call.span
    assert span is not None
    head = SpanHead(
        bytes.fromhex(span.trace_id),
        bytes.fromhex(span.span_id),
        bytes.fromhex(span.parent_span_id),
        otlp_bytes.cut(call.method, 256).decode(),
        start_ns,
        max(start_ns, end_ns),
        SERVER,
        span.tracestate,
        FLAG_REMOTE_PARENT | FLAG_SAMPLED if span.parent_span_id else 0,
    )
    attributes = [_SYSTEM.text(call.system), _METHOD.text(call.method, 256), _STATUS.text(call.status, 64)]
    if call.status != "OK":
        attributes.append(_ERROR.text(call.status, 64))
    if call.request_id:
        attributes.append(_REQUEST_ID.text(call.request_id, 256))
    return otlp_bytes.span(head, b"".join(attributes), _links(links), failed=call.status in FAILURES)


def _links(contexts: Iterable[facts.SpanContext]) -> bytes:
    return b"".join(
        [
            otlp_bytes.link(bytes.fromhex(each.trace_id), bytes.fromhex(each.span_id), each.tracestate)
            for each in contexts
        ]
    )
