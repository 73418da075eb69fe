"""The one error of this room.

A caller prints its message as it is: one line, the file first, then the field or tensor, the rule,
the value.
"""

from __future__ import annotations

_SHOWN_CHARACTERS = 80


class InvalidModelFolder(ValueError):
    """A model folder that can't be served. The message is one line without control characters."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


def shown(value: object) -> str:
    """The repr of a value from a file, cut to a length that a hostile file can't stretch."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_CHARACTERS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)} entries"
    text = repr(value[: 2 * _SHOWN_CHARACTERS] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
