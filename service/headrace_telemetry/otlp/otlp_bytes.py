"""OTLP spans as protobuf bytes, packed by hand.

A generated class costs 2.5 us per span, which 300,000 token spans a second can't pay.

Owns the wire form of spans, attributes, links and resources (opentelemetry.proto.trace.v1,
common.v1). What they say is the business of `generation_spans`, `step_spans` and `token_spans`,
which packs many spans of one form at once. Tests parse everything with the generated classes.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

SCOPE_NAME: Final = "headrace"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"
INTERNAL: Final = 1
SERVER: Final = 2
STATUS_ERROR: Final = 2
# As it stands before a span's times.
_KINDS: Final = {INTERNAL: b"\x30\x01\x39", SERVER: b"\x30\x02\x39"}
# Bits of Span.flags: sampled; whether the parent is in another process is known, and so it is.
FLAG_SAMPLED: Final = 0x001
FLAG_REMOTE_PARENT: Final = 0x300

_MOST_REMEMBERED: Final = 256
_FREQUENT: Final = 1 << 32
# Bytes of a value that stand before most of them.
_SHORT_VALUE: Final = 48
# Cut to any limit it stays whole.
_SHORT: Final = 16

AttributeValue = str | bool | int | float

# Trace id and span id; parent; kind and times.
_pack_ids = struct.Struct("<2s16s2s8s").pack
_pack_parent = struct.Struct("<2s8s").pack
_pack_kind_and_times = struct.Struct("<3sQBQ").pack
_pack_double = struct.Struct("<d").pack
_pack_flags = struct.Struct("<I").pack


def varint(value: int) -> bytes:
    """A varint; a negative value takes ten bytes, as int64 demands."""
    if 0 <= value < len(_SMALL):
        return _SMALL[value]
    value &= (1 << 64) - 1
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


_SMALL: tuple[bytes, ...] = ()
_SMALL = tuple(varint(value) for value in range(1024))


def field(tag: bytes, content: bytes) -> bytes:
    """A field of bytes, text or a message: its tag, its length, its content."""
    return tag + varint(len(content)) + content


class Key:
    """A name of attributes, encoded once; so are its most frequent values."""

    __slots__ = ("_heads", "_integers", "_key", "_texts")

    def __init__(self, name: str) -> None:
        self._key = field(b"\x0a", name.encode())
        # All that stands before a value of so many bytes.
        self._heads = [self._head(size) for size in range(_SHORT_VALUE)]
        # The first values that came, which are those that come often: sizes, models, reasons. What
        # never repeats costs no more than a look.
        self._integers: dict[int, bytes] = {}
        self._texts: dict[str, bytes] = {}

    def serialized(self, value: bytes) -> bytes:
        """An attribute of a span (field 9) whose AnyValue is serialized already."""
        size = len(value)
        return (self._heads[size] if size < _SHORT_VALUE else self._head(size)) + value

    def _head(self, size: int) -> bytes:
        rest = self._key + b"\x12" + varint(size)
        return b"\x4a" + varint(len(rest) + size) + rest

    def integer(self, value: int) -> bytes:
        """An attribute that is a number without a fraction."""
        known = self._integers.get(value)
        if known is None:
            known = self.serialized(b"\x18" + varint(value))
            if len(self._integers) < _MOST_REMEMBERED and value < _FREQUENT:
                self._integers[value] = known
        return known

    def number(self, value: float) -> bytes:
        """An attribute that is a number with one."""
        return self.serialized(b"\x21" + _pack_double(value))

    def flag(self, value: bool) -> bytes:
        """An attribute that is true or false."""
        return self.serialized(b"\x10\x01" if value else b"\x10\x00")

    def text(self, value: str, limit: int = 1 << 16) -> bytes:
        """An attribute that is text, cut to `limit` bytes."""
        known = self._texts.get(value)
        if known is None:
            known = self.serialized(field(b"\x0a", cut(value, limit)))
            if len(self._texts) < _MOST_REMEMBERED and len(value) < _SHORT:
                self._texts[value] = known
        return known

    def array(self, values: bytes) -> bytes:
        """Packs an attribute that is an array of serialized elements.

        `text_element` and `int_elements` make the elements.
        """
        return self.serialized(field(b"\x2a", values))

    def texts(self, values: Iterable[str], limit: int = 1 << 16) -> bytes:
        """An attribute that is an array of texts."""
        return self.array(b"".join([text_element(value, limit) for value in values]))

    def integers(self, values: Iterable[int]) -> bytes:
        """An attribute that is an array of a few numbers. Many at once: `int_columns`."""
        return self.array(b"".join([field(b"\x0a", b"\x18" + varint(value)) for value in values]))


def cut(text: str, limit: int) -> bytes:
    """UTF-8 of a text, cut to whole characters within `limit` bytes."""
    data = text.encode("utf-8", errors="replace")
    return data if len(data) <= limit else data[:limit].decode("utf-8", errors="ignore").encode()


def text_element(value: str, limit: int = 1 << 16) -> bytes:
    """Returns the bytes of an element of an array of texts."""
    return field(b"\x0a", field(b"\x0a", cut(value, limit)))


def link(trace_id: bytes, span_id: bytes, tracestate: str = "") -> bytes:
    """Returns the bytes of a span's link (field 13)."""
    state = field(b"\x1a", tracestate.encode()) if tracestate else b""
    return field(b"\x6a", b"\x0a\x10" + trace_id + b"\x12\x08" + span_id + state)


class SpanHead(NamedTuple):
    """A span's place in its trace, its name and its times.

    Attributes:
        trace_id: 16 bytes.
        span_id: 8 bytes.
        parent_span_id: 8 bytes; empty: it is a root.
        name: for people.
        start_ns: UNIX time; not after `end_ns`.
        end_ns: UNIX time.
        kind: INTERNAL or SERVER.
        tracestate: as it came from the caller.
        flags: as Span.flags.
    """

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    name: str
    start_ns: int
    end_ns: int
    kind: int = INTERNAL
    tracestate: str = ""
    flags: int = 0


def span(head: SpanHead, attributes: bytes = b"", links: bytes = b"", failed: bool = False) -> bytes:
    """A span as a field of ScopeSpans: what a batch is made of by joining."""
    content = b"".join(
        [
            _pack_ids(b"\x0a\x10", head.trace_id, b"\x12\x08", head.span_id),
            field(b"\x1a", head.tracestate.encode()) if head.tracestate else b"",
            _pack_parent(b"\x22\x08", head.parent_span_id) if head.parent_span_id else b"",
            _name(head.name),
            _pack_kind_and_times(_KINDS[head.kind], head.start_ns, 0x41, head.end_ns),
            attributes,
            links,
            b"\x7a\x02\x18\x02" if failed else b"",
            b"\x85\x01" + _pack_flags(head.flags) if head.flags else b"",
        ]
    )
    return b"\x12" + varint(len(content)) + content


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def _name(name: str) -> bytes:
    return field(b"\x2a", name.encode())


def new_span_id() -> bytes:
    """Eight random bytes, of many that the system was asked for at once.

    A call of its own takes as long as a small span.
    """
    if not _drawn:
        drawn = os.urandom(8 * _MOST_REMEMBERED)
        _drawn.extend(drawn[begin : begin + 8] for begin in range(0, len(drawn), 8))
    return _drawn.pop()


_drawn: list[bytes] = []


def resource(attributes: Mapping[str, AttributeValue]) -> bytes:
    """Returns a serialized Resource."""
    return b"".join([field(b"\x0a", _key_value(name, value)) for name, value in attributes.items()])


def _key_value(name: str, value: AttributeValue) -> bytes:
    if isinstance(value, bool):
        content = b"\x10\x01" if value else b"\x10\x00"
    elif isinstance(value, int):
        content = b"\x18" + varint(value)
    elif isinstance(value, float):
        content = b"\x21" + _pack_double(value)
    else:
        content = field(b"\x0a", value.encode("utf-8", errors="replace"))
    return field(b"\x0a", name.encode()) + field(b"\x12", content)


def resource_spans(resource_bytes: bytes, scope: bytes, spans: Iterable[bytes]) -> bytes:
    """Packs the spans of one resource as a field of ExportTraceServiceRequest.

    TracesData has the same form.
    """
    # The resource's schema does not hold for what is under it.
    schema = field(b"\x1a", SCHEMA_URL.encode())
    joined = b"".join([field(b"\x0a", scope), *spans, schema])
    return field(b"\x0a", field(b"\x0a", resource_bytes) + field(b"\x12", joined) + schema)


def scope(version: str) -> bytes:
    """Returns the serialized InstrumentationScope of all our spans."""
    return field(b"\x0a", SCOPE_NAME.encode()) + (field(b"\x12", version.encode()) if version else b"")
