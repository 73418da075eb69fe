"""W3C trace contexts: read, drawn, decided on, written.

Owns `traceparent` and `tracestate`. What is malformed counts as not sent, as the recommendation
asks. Ids come from a generator of this process that is seeded by the system and costs 0.3 us an id
(the system's own: 0.6 us); they are not secrets.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterable

from headrace_facts.facts import SpanContext

# Version ff and ids of zeros only are invalid; versions to come may add parts, which are not ours
# to read.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?"
)
_MAX_TRACEPARENT_CHARS = 256
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MAX_TRACESTATE_CHARS = 512
_MAX_MEMBERS = 32
_SAMPLED = 1
_LOW_BITS = 64

_bits = random.Random().getrandbits


@dataclasses.dataclass(frozen=True, slots=True)
class CallerContext:
    """The span of a caller's that asks.

    Attributes:
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        sampled: whether the caller records its trace.
        tracestate: to be passed on; "" if there is none that is well-formed.
    """

    trace_id: str
    span_id: str
    sampled: bool
    tracestate: str = ""


def parse(traceparent: str, tracestate: str = "") -> CallerContext | None:
    """Returns the context of the two headers; None if `traceparent` is malformed."""
    if len(traceparent) > _MAX_TRACEPARENT_CHARS:
        return None
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    return CallerContext(found[2], found[3], bool(int(found[4], 16) & _SAMPLED), _well_formed(tracestate))


def of_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> CallerContext | None:
    """Returns the context that a call brought.

    None if it brought none, more than one, or a malformed one.
    """
    parents: list[str] = []
    states: list[str] = []
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str):
            parents.append(value)
        elif key == "tracestate" and isinstance(value, str):
            states.append(value)
    return parse(parents[0], ",".join(states)) if len(parents) == 1 else None


def child_of(parent: CallerContext) -> SpanContext:
    """Returns a new span under a caller's."""
    return SpanContext(parent.trace_id, new_span_id(), parent.span_id, parent.tracestate, parent.sampled)


def child_of_span(parent: SpanContext) -> SpanContext:
    """Returns a new span under one of ours."""
    return SpanContext(parent.trace_id, new_span_id(), parent.span_id, parent.tracestate, parent.sampled)


def traceparent_of(span: SpanContext) -> str:
    """Returns a span's own context as the header."""
    return f"00-{span.trace_id}-{span.span_id}-{'01' if span.sampled else '00'}"


def new_span_id() -> str:
    """Returns 16 hex digits, not all 0."""
    return f"{_bits(64) or 1:016x}"


class RootSampler:
    """Decides on traces that begin here, by the low half of their id.

    OpenTelemetry's TraceIdRatioBased does the same. Ids are made only where somebody wants them.

    Args:
        ratio: share that is sampled, 0 to 1.
    """

    __slots__ = ("_bound",)

    def __init__(self, ratio: float) -> None:
        self._bound = round(min(1.0, max(0.0, ratio)) * (1 << _LOW_BITS))

    def root(self, record_all: bool) -> SpanContext | None:
        """Returns the root span of a new trace, sampled or to be decided on at its end.

        None if nobody wants it.
        """
        low = _bits(_LOW_BITS)
        sampled = low < self._bound
        if not (sampled or record_all):
            return None
        return SpanContext(f"{_bits(64):016x}{low or 1:016x}", new_span_id(), sampled=sampled)


def _well_formed(tracestate: str) -> str:
    if not tracestate or len(tracestate) > _MAX_TRACESTATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in tracestate.split(",")]
    members = [member for member in members if member]
    if len(members) > _MAX_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    return ",".join(members)
