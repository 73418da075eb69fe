"""What a delta holds besides text: reasoning, and calls of functions.

Owns the Python shape of contents, how two deliveries of the same contents are told apart, and the
whole calls that they make together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text that the model wrote for itself, before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model began to call a function; `index` counts the output's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """A call is over, with all of its arguments.

    `valid`: it names one of the request's tools, and its arguments are one JSON object.
    """

    index: int
    arguments: str
    valid: bool


Content = AnswerText | ReasoningText | ToolCallStarted | ToolCallArguments | ToolCallFinished


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model called.

    Attributes:
        id: Names the call in the message that brings its result.
        name: The function.
        arguments: JSON text of its arguments.
        valid: Whether it names one of the request's tools, and its arguments are one JSON object.
    """

    id: str
    name: str
    arguments: str
    valid: bool = True

    def parsed(self) -> dict[str, Any]:
        """The arguments.

        Raises:
            ValueError: They are no JSON object.
        """
        value = json.loads(self.arguments)
        if not isinstance(value, dict):
            raise ValueError(f"the arguments of {self.name} are no JSON object: {self.arguments!r:.80}")
        return value


@dataclass(slots=True)
class CollectedContent:
    """The reasoning and the calls of one output, put together.

    A call whose beginning was not read has neither id nor name.
    """

    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)

    def add(self, contents: Iterable[Content]) -> None:
        """Takes the next contents."""
        for content in contents:
            match content:
                case ReasoningText(text):
                    self.reasoning.append(text)
                case ToolCallStarted(index, id, name):
                    self.calls[index] = ToolCall(id, name, "", valid=False)
                case ToolCallFinished(index, arguments, valid):
                    call = self.calls.get(index, ToolCall("", "", ""))
                    self.calls[index] = replace(call, arguments=arguments, valid=valid)

    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in order."""
        return tuple(self.calls[index] for index in sorted(self.calls))


def contents_from_proto(contents: Iterable[pb.Content]) -> tuple[Content, ...]:
    """The contents of a delta that is more than text; empty for one that is text alone."""
    converted = [_content(content) for content in contents]
    if all(isinstance(content, AnswerText) for content in converted):
        return ()
    return tuple(content for content in converted if content is not None)


def num_units(contents: Iterable[Content]) -> int:
    """How long contents are: a character counts one, as do the beginning and the end of a call."""
    return sum(_length(content) for content in contents)


def without_units(contents: Iterable[Content], known: int) -> tuple[Content, ...]:
    """Contents without the first of them, by their length."""
    rest: list[Content] = []
    for content in contents:
        length = _length(content)
        skipped = min(known, length)
        known -= skipped
        if skipped == 0:
            rest.append(content)
        elif skipped < length:
            rest.append(_cut(content, skipped))
    return tuple(rest)


def _content(content: pb.Content) -> Content | None:
    """The content of a message; None for a kind that is newer than this client."""
    match content.WhichOneof("kind"):
        case "text":
            return AnswerText(content.text)
        case "reasoning":
            return ReasoningText(content.reasoning)
        case "tool_call_started":
            started = content.tool_call_started
            return ToolCallStarted(started.index, started.id, started.name)
        case "tool_call_arguments":
            return ToolCallArguments(content.tool_call_arguments.index, content.tool_call_arguments.delta)
        case "tool_call_finished":
            finished = content.tool_call_finished
            return ToolCallFinished(finished.index, finished.arguments, finished.valid)
    return None


def _length(content: Content) -> int:
    match content:
        case AnswerText(text) | ReasoningText(text):
            return len(text)
        case ToolCallArguments(_, delta):
            return len(delta)
    return 1


def _cut(content: Content, length: int) -> Content:
    match content:
        case AnswerText(text):
            return AnswerText(text[length:])
        case ReasoningText(text):
            return ReasoningText(text[length:])
        case ToolCallArguments(index, delta):
            return ToolCallArguments(index, delta[length:])
    return content
