"""What the text of a structured output must be, as far as it shows without compiling it.

Owns sizes, JSON that can be read, and how deep it nests. Whether a form can be compiled, and
whether any text has it, the backend finds out (`headrace_backend.structured_output`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_request.rule_kinds import Bounds, Found, Violation
from headrace_request.structured_output import StructuredOutput, Tag


class StructuredText:
    """A text of at most a length, of which what is JSON nests at most so deep."""

    def __init__(self, most_bytes: int, most_levels: int) -> None:
        """Takes the limits: UTF-8 bytes of the text, and levels of objects and arrays in JSON."""
        self._most_bytes = most_bytes
        self._most_levels = most_levels

    def broken(self, field: str, value: StructuredOutput | None, bounds: Bounds) -> Found:
        """Returns how the text breaks the rule; nothing if it keeps it."""
        if value is None:
            return ()
        at = f"{field}.{value.form}"
        size = len(value.text.encode(errors="surrogatepass"))
        if size > self._most_bytes:
            return (Violation(at, f"has {size} bytes; must have at most {self._most_bytes}"),)
        size = len(value.around.encode(errors="surrogatepass"))
        if size > self._most_bytes:
            return (Violation(f"{field}.around", f"has {size} bytes; must have at most {self._most_bytes}"),)
        match value.form:
            case "json_object":
                return ()
            case "json_schema":
                return self._schema(at, value.text)
            case "choice":
                return _choice(at, value.text)
            case "structural_tags":
                return self._tags(at, value.text)
        return () if value.text else (Violation(at, "must not be empty"),)

    def _schema(self, field: str, text: str) -> Found:
        try:
            schema = msgspec.json.decode(text)
        except RecursionError:
            return (Violation(field, f"nests deeper than {self._most_levels} levels"),)
        except (msgspec.DecodeError, UnicodeError) as error:
            return (Violation(field, f"is no JSON: {error}"),)
        if not isinstance(schema, dict | bool):
            return (Violation(field, "must be a JSON object, or true or false, as a JSON Schema is"),)
        path = path_beyond(schema, self._most_levels)
        if path is None:
            return ()
        return (Violation(field, f"nests deeper than {self._most_levels} levels at {path}"),)

    def _tags(self, field: str, text: str) -> Found:
        try:
            tags = msgspec.json.decode(text, type=list[Tag])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return (Violation(field, f"is no array of tags: {error}"),)
        if not tags:
            return (Violation(f"{field}.tags", "must have at least 1 entry"),)
        for index, tag in enumerate(tags):
            at = f"{field}.tags[{index}]"
            if not tag.trigger:
                return (Violation(f"{at}.trigger", "must not be empty"),)
            if not tag.begin.startswith(tag.trigger):
                return (Violation(f"{at}.begin", "must begin with the trigger"),)
            found = self._schema(f"{at}.json_schema", tag.json_schema)
            if found:
                return found
        return ()


def _choice(field: str, text: str) -> Found:
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return (Violation(field, f"is no array of texts: {error}"),)
    if not texts:
        return (Violation(f"{field}.texts", "must have at least 1 entry"),)
    empty = next((index for index, each in enumerate(texts) if not each), None)
    return () if empty is None else (Violation(f"{field}.texts[{empty}]", "must not be empty"),)


def path_beyond(root: Any, most_levels: int) -> str | None:
    """Returns the JSON pointer of an object or array below `most_levels` others; None: none is."""
    stack: list[tuple[Any, str, int]] = [(root, "", 1)]
    while stack:
        value, path, level = stack.pop()
        if not isinstance(value, dict | list):
            continue
        if level > most_levels:
            return path
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        stack += [(child, f"{path}/{pointer_part(key)}", level + 1) for key, child in entries]
    return None


def pointer_part(key: str | int) -> str:
    """One step of a JSON pointer: an object's key, escaped, or an array's index."""
    return str(key).replace("~", "~0").replace("/", "~1")
