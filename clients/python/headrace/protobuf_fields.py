"""Sets fields of protobuf messages from a caller's Python values.

Owns the words for what a field cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtobufMessage

from headrace.errors import invalid

_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_INT32: f"a whole number of {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number of 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"a whole number of {-(2**63)} to {2**63 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number of 0 to {2**64 - 1}",
}


def assign(message: ProtobufMessage, field: str, value: Any, path: str) -> None:
    """Sets a scalar, repeated or map field.

    What protobuf refuses becomes an InvalidRequest that names `path`.
    """
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except UnicodeEncodeError as error:
        raise invalid(path, f"must be Unicode text: character {error.start} is none (given: {value!r:.80})") from error
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise invalid(path, f"must be {_rule(message, field)} (given: {value!r:.80})") from error


def _rule(message: ProtobufMessage, field: str) -> str:
    """What a field holds, in words."""
    described: Any = message.DESCRIPTOR.fields_by_name[field]
    present = getattr(message, field)
    if hasattr(present, "update"):
        key, value = described.message_type.fields
        return f"a mapping from {_kind(key)} to {_kind(value)}"
    return f"several values, each {_kind(described)}" if hasattr(present, "extend") else _kind(described)


def _kind(field: FieldDescriptor) -> str:
    return _KINDS.get(field.cpp_type, "a value of another type")
