"""Hypothesis strategies for any message of a protobuf type.

They draw valid values, values at limits, and nonsense, field by field from the descriptor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from google.protobuf import message
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

_MAX_DEPTH = 6
_STRINGS = [
    "",
    "a",
    "hello world",
    "\0",
    "../etc",
    "/etc/passwd",
    "é" * 300,
    "🙂",
    "%s%n",
    "tiny",
    "demo",
    " ",
    "{{7*7}}",
    "-1",
    "99",
]
_BYTES = [b"", b"a", b"\xff\xfe", b"\x05\x00\x00\x00hello", b"\xff\xff\xff\xff", b"\x00" * 64]
_FLOATS = [0.0, -0.0, 1.0, 0.5, -1.0, math.nan, math.inf, -math.inf, 1e-40, 1e38, 100.0, 2.0]


def _integers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    edges = [value for value in (low, high, 0, 1, 2, 5, 20, 21, 100, 4096, -1, -2) if low <= value <= high]
    return st.sampled_from(edges) | st.integers(low, high)


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integers(32, signed=True),
    FieldDescriptor.CPPTYPE_INT64: _integers(64, signed=True),
    FieldDescriptor.CPPTYPE_UINT32: _integers(32, signed=False),
    FieldDescriptor.CPPTYPE_UINT64: _integers(64, signed=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(_FLOATS) | st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from(_FLOATS[:10]) | st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 6) | st.integers(-(1 << 31), (1 << 31) - 1),
}
# What protobuf takes as a string is what encodes as UTF-8.
_TEXT = st.sampled_from(_STRINGS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    # Hypothesis also tries constants of our code; what looks like a path of the server must not
    # come from the caller.
    lambda text: not re.search(r"/(tmp|work|root|home)|\.py|0x|headrace|object at|Traceback", text)
)


def any_message(make: Callable[[], message.Message], depth: int = 0) -> st.SearchStrategy[message.Message]:
    """Messages of the type that `make` makes."""
    return st.composite(_draw_message)(make, depth)


def _draw_message(draw: Any, make: Callable[[], message.Message], depth: int) -> message.Message:
    built = make()
    fields = list(built.DESCRIPTOR.fields)
    for field in (
        draw(st.lists(st.sampled_from(fields), unique_by=lambda field: field.name, max_size=6)) if fields else []
    ):
        _set(draw, built, field, depth)
    return built


def _set(draw: Any, built: message.Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and depth >= _MAX_DEPTH:
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(draw, getattr(built, field.name), field.message_type, depth)
    elif field.message_type is not None and _is_repeated(field):
        for _ in range(draw(st.integers(1, 3))):
            getattr(built, field.name).add().MergeFrom(_draw_like(draw, getattr(built, field.name).add, depth))
    elif field.message_type is not None:
        inner = getattr(built, field.name)
        inner.SetInParent()
        inner.MergeFrom(draw(any_message(type(inner), depth + 1)))
    elif _is_repeated(field):
        getattr(built, field.name).extend(draw(st.lists(_scalar(field), min_size=1, max_size=4)))
    else:
        setattr(built, field.name, draw(_scalar(field)))


def _draw_like(draw: Any, add: Callable[[], message.Message], depth: int) -> message.Message:
    return draw(any_message(type(add()), depth + 1))  # type: ignore[no-any-return]


def _set_map(draw: Any, entries: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for name in draw(st.lists(_scalar(key), min_size=1, max_size=3)):
        if value.message_type is None:
            entries[name] = draw(_scalar(value))
        else:
            entries[name].MergeFrom(draw(any_message(type(entries[name]), depth + 1)))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_text = field.type == FieldDescriptor.TYPE_STRING
        return _TEXT if is_text else st.sampled_from(_BYTES) | st.binary(max_size=64)
    return _SCALARS[field.cpp_type]


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)
