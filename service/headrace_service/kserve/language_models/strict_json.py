"""JSON that callers send, read without surprises.

Owns what `json` would let pass: keys given twice, NaN and infinities, numbers of thousands of
digits, values nested without end, strings that are no text.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 64 << 10
MAX_DEPTH = 8
_MAX_DIGITS = 40


def read_object(text: str) -> dict[str, Any]:
    """Returns the members of a JSON object.

    Raises:
        ValueError: what is wrong with the text, as one rule.
    """
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    _check_depth(text)
    try:
        content = json.loads(text, object_pairs_hook=_members, parse_constant=_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(content, dict):
        raise ValueError("must be a JSON object")
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain half of a surrogate pair") from None
    return content


def _check_depth(text: str) -> None:
    depth, in_string, escaped = 0, False, False
    for char in text:
        if in_string:
            escaped, in_string = (char == "\\" and not escaped), (char != '"' or escaped)
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"must be nested at most {MAX_DEPTH} deep")
        elif char in "]}":
            depth -= 1


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"gives {twice[:64]!r} more than once")
    return members


def _constant(name: str) -> Any:
    raise ValueError(f"must not contain {name}")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"has a number of {len(digits)} digits; must have at most {_MAX_DIGITS}")
    return int(digits)
