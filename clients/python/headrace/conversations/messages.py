"""Conversations and their tools as a caller writes them, and as messages of the API.

Owns Message and Tool, and how they are sent. What they must be the server knows, which refuses with
field, rule and limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from headrace.conversations.content import ToolCall
from headrace.errors import invalid
from headrace.protobuf_fields import assign
from headrace.v1 import inference_pb2

RoleName = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, inference_pb2.Role] = {
    "system": inference_pb2.ROLE_SYSTEM,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "tool": inference_pb2.ROLE_TOOL,
}
_MODES: dict[str, inference_pb2.ToolChoiceMode] = {
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: Who said it; "tool": a function that the model had called.
        text: What was said, or what the function returned.
        tool_calls: The functions that the assistant called.
        tool_call_id: The call whose result this is.
        reasoning: What the assistant had written for itself.
    """

    role: RoleName
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name: 1 to 64 letters, digits, "_", "-" and ".".
        description: What it does, for the model.
        parameters: JSON Schema of its arguments, that of an object: JSON text, or the object. None:
            it has none.
        strict: Whether arguments can only be such as the schema allows.
    """

    name: str
    description: str = ""
    parameters: str | Mapping[str, Any] | None = None
    strict: bool = True


class ToolOptions(TypedDict, total=False):
    """What a conversation says of tools.

    Attributes:
        tools: Functions that the model may call. At most 128.
        tool_choice: Whether it calls them: "auto", "none", "required", or the name of one that it
            must call. Default: "auto".
        parallel_tool_calls: Whether one output may call several. Default: True.
    """

    tools: Sequence[Tool] | None
    tool_choice: str | None
    parallel_tool_calls: bool | None


# What chat() takes: one user message, or the whole conversation, oldest first.
Messages = str | Sequence["Message | tuple[RoleName, str]"]
# The requests that have conversations.
ConversationRequest = inference_pb2.ChatRequest | inference_pb2.SubmitRequest | inference_pb2.SessionSubmit


def chat_messages(messages: Messages) -> list[inference_pb2.ChatMessage]:
    """The conversation as messages of the API.

    Raises:
        InvalidRequest: A role is none, or a text is no UTF-8.
    """
    conversation = [Message("user", messages)] if isinstance(messages, str) else messages
    return [_chat_message(index, message) for index, message in enumerate(conversation)]


def assign_tools(request: ConversationRequest, options: ToolOptions) -> None:
    """Gives a request what its caller says of tools.

    Raises:
        InvalidRequest: A value that the wire format cannot carry.
    """
    for index, tool in enumerate(options.get("tools") or ()):
        if not isinstance(tool, Tool):
            raise invalid(f"tools[{index}]", f"must be a headrace.Tool (given: {tool!r:.80})")
        _assign_tool(request.tools.add(), tool, f"tools[{index}]")
    choice = options.get("tool_choice")
    if choice in _MODES:
        request.tool_choice.mode = _MODES[choice]
    elif choice is not None:
        assign(request.tool_choice, "name", choice, "tool_choice.name")
    parallel = options.get("parallel_tool_calls")
    if parallel is not None:
        assign(request, "parallel_tool_calls", parallel, "parallel_tool_calls")


def json_text(value: str | Mapping[str, Any] | bool, path: str) -> str:
    """JSON text as it is, and another value as JSON text.

    Raises:
        InvalidRequest: The value is none that JSON can hold; names `path`.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(path, f"must be JSON text or what JSON can hold: {error}") from error


def _assign_tool(message: inference_pb2.Tool, tool: Tool, path: str) -> None:
    assign(message, "name", tool.name, f"{path}.name")
    assign(message, "description", tool.description, f"{path}.description")
    assign(message, "strict", tool.strict, f"{path}.strict")
    if tool.parameters is not None:
        field = f"{path}.parameters_json_schema"
        assign(message, "parameters_json_schema", json_text(tool.parameters, field), field)


def _chat_message(index: int, given: Message | tuple[RoleName, str]) -> inference_pb2.ChatMessage:
    path = f"messages[{index}]"
    if not isinstance(given, Message) and not (isinstance(given, list | tuple) and len(given) == 2):
        raise invalid(path, f"must be a headrace.Message or a pair of role and text (given: {given!r:.80})")
    message = given if isinstance(given, Message) else Message(*given)
    if message.role not in _ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)} (given: {message.role!r:.80})")
    sent = inference_pb2.ChatMessage(role=_ROLES[message.role])
    if message.reasoning:
        assign(sent.parts.add(), "reasoning", message.reasoning, f"{path}.parts[0].reasoning")
    if message.text or not message.tool_calls:
        assign(sent.parts.add(), "text", message.text, f"{path}.parts[{len(sent.parts) - 1}].text")
    for number, call in enumerate(message.tool_calls):
        field = f"{path}.tool_calls[{number}]"
        added = sent.tool_calls.add()
        assign(added, "id", call.id, f"{field}.id")
        assign(added, "name", call.name, f"{field}.name")
        assign(added, "arguments_json", call.arguments, f"{field}.arguments_json")
    assign(sent, "tool_call_id", message.tool_call_id, f"{path}.tool_call_id")
    return sent
