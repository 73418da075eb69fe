"""Fields of a request's inner objects: messages, parts, calls, tools, formats.

Owns which of them this server reads, or knows to change nothing. All others are ignored and named,
as in the request itself (`unsupported`), whatever their depth: clients add fields of their own to
messages, and those of an answer come back in the conversation that it became a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

# What is known in an object, or in the objects of a list; None: nothing is looked at within.
Known: TypeAlias = Mapping[str, "Known | None"]


def _leaves(names: str) -> Known:
    return dict.fromkeys(names.split())


# What must be empty in a message is refused with it (`chat_request`).
_MESSAGE: Final[Known] = {
    **_leaves("role name tool_call_id reasoning_content function_call audio refusal annotations"),
    "content": _leaves("type text"),
    "tool_calls": {**_leaves("id type"), "function": _leaves("name arguments")},
}
_TAGS: Final[Known] = {**_leaves("type triggers"), "structures": _leaves("begin schema end")}
_KNOWN: Final[Known] = {
    "messages": _MESSAGE,
    "tools": {"type": None, "function": _leaves("name description parameters strict")},
    "tool_choice": {"type": None, "function": _leaves("name")},
    "response_format": {**_TAGS, "json_schema": _leaves("name description schema strict")},
    "structural_tag": _TAGS,
}


def unknown(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the paths of fields within a request's own that nobody knows, as "messages[0].id"."""
    for name, known in _KNOWN.items():
        if known is not None and name in values:
            yield from _within(values[name], known, name)


def _within(value: Any, known: Known, path: str) -> Iterator[str]:
    """Looks at an object, or at those of a list: no deeper than fields are known."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _of_object(one, known, f"{path}[{index}]")
    else:
        yield from _of_object(value, known, path)


def _of_object(value: Any, known: Known, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        if name not in known:
            if inner is not None:
                yield f"{path}.{name}"
        elif (deeper := known[name]) is not None:
            yield from _within(inner, deeper, f"{path}.{name}")
