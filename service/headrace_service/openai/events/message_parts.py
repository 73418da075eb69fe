"""The parts of a chat's output as fields of OpenAI's messages: content, reasoning, calls.

Owns the names, which a whole message and the pieces of a stream share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_service.output_forms.parts import CallArguments, CallFinished, CallStarted, Part, Reasoning, Text


class Message:
    """What has come of one output's message."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self._texts)

    def add_text(self, text: str) -> None:
        """Takes text of the answer."""
        if text:
            self._texts.append(text)

    def add(self, parts: Sequence[Part]) -> None:
        """Takes the next parts."""
        for part in parts:
            match part:
                case Text(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStarted(_, id, name):
                    self._calls.append(_call(id, name))
                case CallFinished(_, arguments, _):
                    self._calls[-1]["function"]["arguments"] = arguments

    def fields(self) -> dict[str, Any]:
        """Returns the message; one of calls alone has no content."""
        content = self.text if self._texts or not self._calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def piece(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns parts as the `delta` of a chunk."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
    calls: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case CallStarted(index, id, name):
                calls.append({"index": index, **_call(id, name)})
            case CallArguments(index, delta) if calls and calls[-1]["index"] == index:
                calls[-1]["function"]["arguments"] += delta
            case CallArguments(index, delta):
                calls.append({"index": index, "function": {"arguments": delta}})
    fields = {"content": "".join(texts), "reasoning_content": "".join(reasoning), "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def _call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
