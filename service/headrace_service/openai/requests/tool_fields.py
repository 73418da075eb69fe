"""Tools, the choice among them and calls in OpenAI's JSON, as messages of headrace.v1.

Owns the translation; what tools must be beyond their types is `generations.tools`'.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from headrace.v1 import inference_pb2
from headrace_request import limits
from headrace_request.structured_rules import path_beyond
from headrace_service import errors
from headrace_service.generations.tools import ToolFields

FIELDS: Final = ToolFields(function="function.", schema="parameters", arguments="arguments", choice="tool_choice")
_MODES: Final = {
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolObject(msgspec.Struct, frozen=True):
    """One entry of `tools`."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    """The name in a choice."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """A choice of one function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class CalledFunction(msgspec.Struct, frozen=True):
    """What a call of an earlier message called."""

    name: str
    arguments: str


class CallObject(msgspec.Struct, frozen=True):
    """One entry of a message's `tool_calls`."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


Choice = Literal["none", "auto", "required"] | NamedChoice


def tools_of(given: list[ToolObject]) -> list[inference_pb2.Tool]:
    """Returns the tools of a request.

    Raises:
        ServiceError: INVALID_ARGUMENT; a schema nests too deeply to be read.
    """
    return [_tool(one.function, f"tools[{index}].function") for index, one in enumerate(given)]


def choice_of(given: Choice | None) -> inference_pb2.ToolChoice:
    """Returns the choice of a request."""
    if isinstance(given, NamedChoice):
        return inference_pb2.ToolChoice(name=given.function.name)
    return inference_pb2.ToolChoice(mode=_MODES[given]) if given is not None else inference_pb2.ToolChoice()


def calls_of(given: Any, field: str) -> list[inference_pb2.ToolCall]:
    """Returns the calls of an earlier message.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming what is no call.
    """
    try:
        calls = msgspec.convert(given, list[CallObject])
    except msgspec.ValidationError as error:
        raise errors.invalid_field(field, f"must be a list of calls: {error}") from None
    return [
        inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        for call in calls
    ]


def _tool(function: Function, field: str) -> inference_pb2.Tool:
    tool = inference_pb2.Tool(name=function.name, description=function.description or "")
    if function.strict is not None:
        tool.strict = function.strict
    if function.parameters is not None:
        path = path_beyond(function.parameters, limits.MAX_STRUCTURED_DEPTH)
        if path is not None:
            rule = f"nests deeper than {limits.MAX_STRUCTURED_DEPTH} levels at {path}"
            raise errors.invalid_field(f"{field}.parameters", rule)
        tool.parameters_json_schema = msgspec.json.encode(function.parameters).decode()
    return tool
