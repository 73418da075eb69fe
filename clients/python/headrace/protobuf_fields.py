"""Sets fields of protobuf messages from a caller's Python values.

Owns the words for what a field cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from headrace.errors import invalid


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
        raise invalid(path, f"{error} (given: {value!r:.80})") from error
