"""Values of arguments that a model wrote in another form than JSON, as JSON."""

from __future__ import annotations

import json

import msgspec


def json_text(text: str) -> str:
    """Returns a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def as_json(text: str) -> str:
    """Returns a value as JSON: as it is if it is that, else as a string."""
    try:
        msgspec.json.decode(text)
        return text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return json_text(text)
