"""What a chat may say: its messages, checked, as templates read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.v1 import inference_pb2
from headrace_service.violations import Violations

MAX_MESSAGES = 1024
_ROLES = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation.

    It has the role and content of each message, as templates read them, and whether the answer goes
    on with the last one.
    """

    messages: list[dict[str, str]]
    continues_last: bool


def check_conversation(messages: Sequence[inference_pb2.ChatMessage], continue_last_message: bool) -> Conversation:
    """Returns a chat's messages as templates read them, after checking them.

    Raises:
        ServiceError: INVALID_ARGUMENT with all violations.
    """
    found = Violations()
    found.require(
        1 <= len(messages) <= MAX_MESSAGES, "messages", f"must have at least 1 and at most {MAX_MESSAGES} messages"
    )
    for index, chat_message in enumerate(messages[:MAX_MESSAGES]):
        _check_message(chat_message, f"messages[{index}]", found)
    if continue_last_message and messages:
        last = len(messages) - 1
        found.require(
            messages[last].role == inference_pb2.ROLE_ASSISTANT,
            f"messages[{last}].role",
            "must be ROLE_ASSISTANT when continue_last_message is set",
        )
    found.raise_if_any()
    contents = [
        {"role": _ROLES[entry.role], "content": "".join(part.text for part in entry.parts)} for entry in messages
    ]
    return Conversation(contents, continue_last_message)


def _check_message(chat_message: inference_pb2.ChatMessage, field: str, found: Violations) -> None:
    found.require(chat_message.role in _ROLES, f"{field}.role", "must be ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT")
    found.require(len(chat_message.parts) > 0, f"{field}.parts", "must have at least 1 part")
    for index, part in enumerate(chat_message.parts):
        found.require(part.HasField("text"), f"{field}.parts[{index}]", "must have text")
