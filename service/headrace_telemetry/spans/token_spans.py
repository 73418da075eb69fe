"""Token spans and arrays of numbers, many at once: one numpy row of bytes per token.

Owns the fast path. All rows of a call have one layout, so that a column is written to all of them
by one operation; that is why a varint has as many bytes as the largest of its column needs, padded
with continuation groups, which every protobuf parser reads (its conformance suite asks for it).
Costs 0.3 us per token, beside 2.5 us of a generated class.
"""

from __future__ import annotations

import functools
import os
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_telemetry.otlp.otlp_bytes import INTERNAL, field, varint

U64 = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

# Attributes of a token span, in order.
ATTRIBUTES: Final = (
    "headrace.token.index",
    "headrace.output.index",
    "headrace.step.id",
    "headrace.token.sampled_ns",
    "headrace.token.device_end_ns",
    "headrace.token.emitted_ns",
)
_INCOMPLETE: Final = field(b"\x4a", field(b"\x0a", b"headrace.trace.incomplete") + b"\x12\x02\x10\x01")


class Tokens(NamedTuple):
    """Columns of tokens that have the same attributes.

    Attributes:
        start_ns: UNIX times, [n].
        end_ns: UNIX times, not before the starts, [n].
        attributes: one column for each of `names`, [n] each.
        names: indices into ATTRIBUTES, rising.
        parent_ids: trace id and span id of each token's parent, [n, 24].
        link_ids: trace id and span id of each token's step, [n, 24]; None: their steps are not
            known.
    """

    start_ns: U64
    end_ns: U64
    attributes: tuple[U64, ...]
    names: tuple[int, ...]
    parent_ids: Bytes
    link_ids: Bytes | None


class _Layout(NamedTuple):
    """The bytes that all rows share, and where those that differ go."""

    template: Bytes
    trace_at: int
    span_at: int
    parent_at: int
    start_at: int
    end_at: int
    link_at: int
    # For each byte of a varint: its place in the row, its column, its shift, and its continuation
    # bit.
    places: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    shifts: U64
    more: Bytes


def encode(tokens: Tokens, incomplete: bool = False) -> Bytes:
    """Spans named "token" as fields of ScopeSpans, a row each, [n, bytes].

    Args:
        tokens: what they say; some thousands at most, because all are in memory at once.
        incomplete: whether to mark them as lacking something.
    """
    widths = tuple(_width(column) for column in tokens.attributes)
    layout = _layout(tokens.names, widths, tokens.link_ids is not None, incomplete)
    count = len(tokens.start_ns)
    out = np.empty((count, len(layout.template)), np.uint8)
    out[:] = layout.template
    out[:, layout.trace_at : layout.trace_at + 16] = tokens.parent_ids[:, :16]
    out[:, layout.parent_at : layout.parent_at + 8] = tokens.parent_ids[:, 16:]
    out[:, layout.span_at : layout.span_at + 8] = np.frombuffer(os.urandom(8 * count), np.uint8).reshape(count, 8)
    out[:, layout.start_at : layout.start_at + 8] = _as_bytes(tokens.start_ns)
    out[:, layout.end_at : layout.end_at + 8] = _as_bytes(tokens.end_ns)
    if tokens.link_ids is not None:
        out[:, layout.link_at : layout.link_at + 16] = tokens.link_ids[:, :16]
        out[:, layout.link_at + 18 : layout.link_at + 26] = tokens.link_ids[:, 16:]
    values = np.stack(tokens.attributes, axis=1)
    out[:, layout.places] = _varint_bytes(values, layout.columns, layout.shifts, layout.more)
    return out


def int_elements(values: U64) -> Bytes:
    """Elements of an array attribute, one for each value, [n] (int64 in two's complement).

    A row each, [n, bytes].
    """
    width = _width(values)
    out = np.empty((len(values), 3 + width), np.uint8)
    out[:, 0], out[:, 1], out[:, 2] = 0x0A, 1 + width, 0x18
    shifts, more = _groups(width)
    out[:, 3:] = _varint_bytes(values[:, None], np.zeros(width, np.intp), shifts, more)
    return out


def _varint_bytes(values: U64, columns: npt.NDArray[np.intp], shifts: U64, more: Bytes) -> Bytes:
    """Bytes of padded varints, [n, bytes]: each from its column, shift and continuation bit."""
    groups = (values[:, columns] >> shifts).astype(np.uint8)
    groups &= 0x7F
    groups |= more
    return groups


def _width(values: U64) -> int:
    """Bytes that the largest value takes as a varint."""
    largest = int(values.max()) if len(values) else 0
    return max(1, (largest.bit_length() + 6) // 7)


@functools.lru_cache(maxsize=16)
def _groups(width: int) -> tuple[U64, Bytes]:
    """Shift and continuation bit of each byte of a varint of this width."""
    shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
    return shifts, np.array([0x80] * (width - 1) + [0], np.uint8)


def _as_bytes(times: U64) -> Bytes:
    return np.ascontiguousarray(times, "<u8").view(np.uint8).reshape(-1, 8)


@functools.lru_cache(maxsize=256)
def _layout(names: tuple[int, ...], widths: tuple[int, ...], linked: bool, incomplete: bool) -> _Layout:
    head = b"\x0a\x10" + bytes(16) + b"\x12\x08" + bytes(8) + b"\x22\x08" + bytes(8)
    head += field(b"\x2a", b"token") + b"\x30" + varint(INTERNAL) + b"\x39" + bytes(8) + b"\x41" + bytes(8)
    body = bytearray(head)
    places: list[int] = []
    for name, width in zip(names, widths, strict=True):
        value = b"\x18" + bytes(width)
        body += field(b"\x4a", field(b"\x0a", ATTRIBUTES[name].encode()) + field(b"\x12", value))
        places += range(len(body) - width, len(body))
    if incomplete:
        body += _INCOMPLETE
    link_at = len(body) + 4
    if linked:
        body += field(b"\x6a", b"\x0a\x10" + bytes(16) + b"\x12\x08" + bytes(8))
    prefix = b"\x12" + varint(len(body))
    base = len(prefix)
    groups = [_groups(width) for width in widths]
    return _Layout(
        template=np.frombuffer(prefix + bytes(body), np.uint8),
        trace_at=base + 2,
        span_at=base + 20,
        parent_at=base + 30,
        start_at=base + len(head) - 17,
        end_at=base + len(head) - 8,
        link_at=base + link_at,
        places=np.array(places, np.intp) + base,
        columns=np.repeat(np.arange(len(widths)), widths),
        shifts=np.concatenate([shifts for shifts, _ in groups]),
        more=np.concatenate([more for _, more in groups]),
    )
