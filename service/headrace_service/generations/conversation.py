"""What a chat may say: its messages, checked, as templates read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.v1 import generation_pb2, inference_pb2
from headrace_service.generations import tools
from headrace_service.generations.tools import HEADRACE_FIELDS, Asked, Offered, ToolFields
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.violations import Violations

MAX_MESSAGES = 1024
# In the words of templates.
_EFFORTS = {
    generation_pb2.REASONING_EFFORT_LOW: "low",
    generation_pb2.REASONING_EFFORT_MEDIUM: "medium",
    generation_pb2.REASONING_EFFORT_HIGH: "high",
}
_ROLES = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
    inference_pb2.ROLE_TOOL: "tool",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation.

    Attributes:
        messages: each with role and content, as templates read them, and what else it has of
            reasoning, calls and their results.
        continues_last: whether the answer goes on with the last one.
        offered: the tools; None: the model is shown none.
        max_reasoning_tokens: most tokens of an output's reasoning; None: any number.
        reasoning_effort: how much the model is to reason, in its template's words; "": the
            template's default.
    """

    messages: list[dict[str, Any]]
    continues_last: bool
    offered: Offered | None = None
    max_reasoning_tokens: int | None = None
    reasoning_effort: str = ""


class ConversationRequest(Protocol):
    """A message of headrace.v1 that has a conversation: of Chat, Submit, or Session."""

    @property
    def spec(self) -> generation_pb2.GenerationSpec:
        """What to generate."""

    @property
    def messages(self) -> Sequence[inference_pb2.ChatMessage]:
        """The conversation, oldest first."""

    @property
    def continue_last_message(self) -> bool:
        """Whether the answer goes on with the last message."""

    @property
    def tools(self) -> Sequence[inference_pb2.Tool]:
        """Functions that the model may call."""

    @property
    def tool_choice(self) -> inference_pb2.ToolChoice:
        """Whether it calls them."""

    @property
    def parallel_tool_calls(self) -> bool:
        """Whether it may call several."""

    def HasField(self, field_name: Any) -> bool:  # noqa: N802  # as protobuf has it
        """Whether an optional field is set."""


def asked_tools(request: ConversationRequest) -> Asked:
    """Returns what a request says of tools."""
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    return Asked(request.tools, request.tool_choice, parallel, request.spec.HasField("structured_output"))


def conversation_of(request: ConversationRequest, form: ModelForm) -> Conversation:
    """Returns a request's conversation, after checking it.

    Args:
        request: of Chat, Submit or Session.
        form: how the model writes calls of functions.

    Raises:
        ServiceError: INVALID_ARGUMENT with all violations; FAILED_PRECONDITION, the model takes no
            tools.
    """
    offered = tools.offered(asked_tools(request), form)
    conversation = check_conversation(request.messages, request.continue_last_message)
    spec = request.spec
    return dataclasses.replace(
        conversation,
        offered=offered,
        max_reasoning_tokens=spec.max_reasoning_tokens if spec.HasField("max_reasoning_tokens") else None,
        reasoning_effort=_EFFORTS.get(spec.reasoning_effort, ""),
    )


def check_conversation(messages: Sequence[inference_pb2.ChatMessage], continue_last_message: bool) -> Conversation:
    """Returns a chat's messages as templates read them, after checking them.

    Raises:
        ServiceError: INVALID_ARGUMENT with all violations.
    """
    found = Violations()
    found.require(
        1 <= len(messages) <= MAX_MESSAGES, "messages", f"must have at least 1 and at most {MAX_MESSAGES} messages"
    )
    calls = KnownCalls(HEADRACE_FIELDS)
    contents = [
        _message(message, f"messages[{index}]", calls, found) for index, message in enumerate(messages[:MAX_MESSAGES])
    ]
    if continue_last_message and messages:
        field, last = f"messages[{len(messages) - 1}]", messages[-1]
        is_assistant = last.role == inference_pb2.ROLE_ASSISTANT
        found.require(is_assistant, f"{field}.role", "must be ROLE_ASSISTANT when continue_last_message is set")
        found.require(not last.tool_calls, f"{field}.tool_calls", "must be empty when continue_last_message is set")
    found.raise_if_any()
    return Conversation(contents, continue_last_message)


class KnownCalls:
    """The calls of a conversation's messages so far, to which results belong.

    An id that a later message uses again names its call from then on: models that number their
    calls, and conversations of several servers, repeat them. Within a message no two calls have the
    same, and no call has two results, as in OpenAI's API: a result would belong to either.

    Args:
        fields: what the caller's API calls the fields of calls.
    """

    def __init__(self, fields: ToolFields) -> None:
        self._fields = fields
        # Names of functions by the id of their call; of those that have no result yet, the ids.
        self._names: dict[str, str] = {}
        self._open: set[str] = set()

    def add_to(
        self, message: dict[str, Any], calls: Sequence[inference_pb2.ToolCall], field: str, found: Violations
    ) -> None:
        """Gives a template's message the calls of an assistant's message; notes what is wrong."""
        is_assistant = message["role"] == "assistant"
        found.require(not calls or is_assistant, field, "must be empty but in the assistant's messages")
        if calls:
            message["tool_calls"] = [
                tools.call_for_template(call, f"{field}[{index}]", self._fields, found)
                for index, call in enumerate(calls)
            ]
            ids: set[str] = set()
            for index, call in enumerate(calls):
                found.require(call.id not in ids, f"{field}[{index}].id", "must not be that of another call beside it")
                ids.add(call.id)
            self._names.update({call.id: call.name for call in calls})
            self._open |= ids

    def answer(self, message: dict[str, Any], call_id: str, field: str, found: Violations) -> None:
        """Gives a template's message the call whose result it is; notes what is wrong."""
        if message["role"] != "tool":
            found.require(not call_id, field, "must not be set but in messages of tools")
            return
        found.require(call_id in self._names, field, "must be the id of a call of an earlier message")
        has_result = call_id in self._names and call_id not in self._open
        found.require(not has_result, field, "must be the id of a call that has no result yet")
        self._open.discard(call_id)
        message["tool_call_id"], message["name"] = call_id, self._names.get(call_id, "")


def _message(
    chat_message: inference_pb2.ChatMessage, field: str, calls: KnownCalls, found: Violations
) -> dict[str, Any]:
    """Returns one message for a template; what is wrong with it is noted."""
    rule = "must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL"
    found.require(chat_message.role in _ROLES, f"{field}.role", rule)
    has_some = len(chat_message.parts) > 0 or len(chat_message.tool_calls) > 0
    found.require(has_some, f"{field}.parts", "must have at least 1 part")
    message: dict[str, Any] = {"role": _ROLES.get(chat_message.role, "")}
    for index, part in enumerate(chat_message.parts):
        kind, at = part.WhichOneof("kind"), f"{field}.parts[{index}]"
        found.require(kind is not None, at, "must have text")
        is_kept = kind != "reasoning" or message["role"] == "assistant"
        found.require(is_kept, f"{at}.reasoning", "must not be set but in the assistant's messages")
    message["content"] = "".join(part.text for part in chat_message.parts)
    reasoning = "".join(part.reasoning for part in chat_message.parts)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls.add_to(message, chat_message.tool_calls, f"{field}.tool_calls", found)
    calls.answer(message, chat_message.tool_call_id, f"{field}.tool_call_id", found)
    return message
