"""POST /v1/chat/completions: its fields, and the conversation in them.

Owns what a message may be. Roles and parts that this server has no way of showing a model are
refused by name.
"""

from __future__ import annotations

from typing import Any

from headrace.v1 import generation_pb2
from headrace_service import errors
from headrace_service.generations import tools
from headrace_service.generations.conversation import MAX_MESSAGES, Conversation, KnownCalls
from headrace_service.generations.tools import Asked, Offered
from headrace_service.openai.requests import generation_spec, tool_fields, unsupported
from headrace_service.openai.requests.shared_fields import U32, SharedFields, given
from headrace_service.openai.requests.tool_fields import ToolObject
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.violations import Violations

# What OpenAI's newer models call the system's role; templates do not know the word.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_EFFORTS = {
    "low": generation_pb2.REASONING_EFFORT_LOW,
    "medium": generation_pb2.REASONING_EFFORT_MEDIUM,
    "high": generation_pb2.REASONING_EFFORT_HIGH,
}
# Fields of messages whose contents this server has no way of showing a model.
_EMPTY_FIELDS = ("function_call", "audio", "refusal")


class ChatRequest(SharedFields, frozen=True, kw_only=True):
    """The fields of one request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[ToolObject] | None = None
    tool_choice: tool_fields.Choice | None = None
    parallel_tool_calls: bool | None = None
    # As in headrace.v1.
    max_reasoning_tokens: U32 | None = None
    reasoning_effort: str | None = None

    @property
    def max_tokens_field(self) -> str:
        """What the caller calls the most tokens of an output."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def spec(self) -> generation_pb2.GenerationSpec:
        """Returns what is asked for, without the messages.

        Raises:
            ServiceError: INVALID_ARGUMENT or UNIMPLEMENTED; fields that contradict each other, or
                that this server does not have.
        """
        newer = self.max_completion_tokens
        if newer is not None and self.max_tokens not in (None, newer):
            raise errors.invalid_field("max_tokens", "must not differ from max_completion_tokens, its newer name")
        spec = generation_spec.spec_of(self, self.max_tokens if newer is None else newer, self.max_tokens_field)
        if self.add_special_tokens:
            # The template writes them itself.
            raise unsupported.unsupported("add_special_tokens", (False,))
        if self.top_logprobs and not self.logprobs:
            raise errors.invalid_field("top_logprobs", "needs logprobs to be true")
        if self.logprobs:
            spec.logprobs = self.top_logprobs or 0
        if self.max_reasoning_tokens is not None:
            spec.max_reasoning_tokens = self.max_reasoning_tokens
        if self._effort:
            spec.reasoning_effort = _effort_of(self._effort)
        return spec

    @property
    def names(self) -> dict[str, str]:
        """What fields of GenerationSpec are called in this request."""
        return {
            **generation_spec.NAMES,
            **generation_spec.names_of_form(self),
            "spec.logprobs": "top_logprobs",
            "spec.max_reasoning_tokens": "max_reasoning_tokens",
            "spec.reasoning_effort": "reasoning_effort",
            "spec.stop.max_tokens": self.max_tokens_field,
        }

    def conversation(self, form: ModelForm) -> Conversation:
        """Returns the messages as templates read them, and the tools.

        Args:
            form: how the model writes calls.

        Raises:
            ServiceError: INVALID_ARGUMENT with all violations; UNIMPLEMENTED, media;
                FAILED_PRECONDITION, tools for a model that takes none.
        """
        found = Violations()
        rule = f"must have at least 1 and at most {MAX_MESSAGES} messages"
        found.require(1 <= len(self.messages) <= MAX_MESSAGES, "messages", rule)
        calls = KnownCalls(tool_fields.FIELDS)
        messages = [
            _message(given(one), f"messages[{index}]", calls, found)
            for index, one in enumerate(self.messages[:MAX_MESSAGES])
        ]
        continues = bool(self.continue_final_message)
        self._check_continuing(continues, messages, found)
        found.raise_if_any()
        return Conversation(
            messages,
            continues,
            self._offered(form),
            max_reasoning_tokens=self.max_reasoning_tokens,
            reasoning_effort=self._effort,
        )

    @property
    def _effort(self) -> str:
        """How much the model is to reason; "": as its template says."""
        return "" if self.reasoning_effort in (None, "none") else str(self.reasoning_effort)

    def _offered(self, form: ModelForm) -> Offered | None:
        """Returns the tools; without any, what is said of choosing them asks for nothing."""
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise errors.invalid_field("tool_choice", "must not be set without tools")
            return None
        has_form = generation_spec.has_form(self)
        choice = tool_fields.choice_of(self.tool_choice)
        asked = Asked(tool_fields.tools_of(self.tools), choice, self.parallel_tool_calls, has_form)
        try:
            return tools.offered(asked, form, tool_fields.FIELDS)
        except errors.ServiceError as error:
            raise errors.renamed(error, self.names) from None

    def _check_continuing(self, continues: bool, messages: list[dict[str, Any]], found: Violations) -> None:
        if continues and self.add_generation_prompt:
            found.add("add_generation_prompt", "must not be true when continue_final_message is")
        if not continues and self.add_generation_prompt is False:
            found.add("add_generation_prompt", "must be true unless continue_final_message is")
        if continues and messages:
            role = f"messages[{len(messages) - 1}].role"
            found.require(messages[-1]["role"] == "assistant", role, "must be assistant for continue_final_message")
            calls = f"messages[{len(messages) - 1}].tool_calls"
            found.require("tool_calls" not in messages[-1], calls, "must be empty for continue_final_message")


def _effort_of(name: str) -> generation_pb2.ReasoningEffort:
    if name not in _EFFORTS:
        raise errors.invalid_field("reasoning_effort", f"must be one of {', '.join(_EFFORTS)}, or none")
    return _EFFORTS[name]


def _message(one: dict[str, Any], field: str, calls: KnownCalls, found: Violations) -> dict[str, Any]:
    """Returns one message for a template; what is wrong with it is noted."""
    role = one.get("role")
    if role == "function":
        raise errors.unimplemented(f"{field}.role: function is not supported by this server; its newer name is tool")
    found.require(isinstance(role, str) and role in _ROLES, f"{field}.role", f"must be one of {', '.join(_ROLES)}")
    for name in _EMPTY_FIELDS:
        if one.get(name):
            raise unsupported.unsupported(f"{field}.{name}")
    called = tool_fields.calls_of(one.get("tool_calls", []), f"{field}.tool_calls")
    message: dict[str, Any] = {"role": _ROLES.get(str(role), "")}
    # A message that is calls alone has no content.
    content = one.get("content", "" if called else None)
    message["content"] = _content(content, f"{field}.content", found)
    _add_reasoning(message, one.get("reasoning_content"), f"{field}.reasoning_content", found)
    calls.add_to(message, called, f"{field}.tool_calls", found)
    calls.answer(message, str(one.get("tool_call_id", "")), f"{field}.tool_call_id", found)
    if "name" in one:
        found.require(isinstance(one["name"], str), f"{field}.name", "must be a string")
        message["name"] = str(one["name"])
    return message


def _add_reasoning(message: dict[str, Any], reasoning: Any, field: str, found: Violations) -> None:
    if not reasoning:
        return
    found.require(isinstance(reasoning, str), field, "must be a string")
    found.require(message["role"] == "assistant", field, "must not be set but in the assistant's messages")
    message["reasoning_content"] = str(reasoning)


def _content(content: Any, field: str, found: Violations) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        found.add(field, "must be a string or a list of parts")
        return ""
    return "".join([_part(part, f"{field}[{index}]", found) for index, part in enumerate(content)])


def _part(part: Any, field: str, found: Violations) -> str:
    if not isinstance(part, dict):
        found.add(field, "must be an object with type and text")
        return ""
    kind = part.get("type")
    if kind != "text" and isinstance(kind, str):
        raise errors.unimplemented(f"{field}.type: {errors.echo(kind)} is not supported; this server takes text")
    text = part.get("text")
    found.require(kind == "text", f"{field}.type", "must be text")
    found.require(isinstance(text, str), f"{field}.text", "must be a string")
    return text if isinstance(text, str) else ""
