"""A conversation's messages as templates of harmony read them.

Owns what those ask for beyond transformers' convention: reasoning as `thinking`, and no message
with several calls. All else, such as which reasoning is shown again, is the template's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_service import errors


def for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as a template of harmony reads them.

    Such a template takes reasoning or text beside a call, not both, and shows either as analysis:
    they are given to it as one.

    Raises:
        ServiceError: INVALID_ARGUMENT; a message has several calls, of which the template would
            show the first alone.
    """
    for index, message in enumerate(messages):
        if len(message.get("tool_calls", ())) > 1:
            rule = "must have at most 1 entry: in the model's format, harmony, a message has one call"
            raise errors.invalid_field(f"messages[{index}].tool_calls", rule)
    return [_with_thinking(message) for message in messages]


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning, content = message.get("reasoning_content", ""), message["content"]
    if not reasoning:
        return message
    if "tool_calls" not in message or not content:
        return {**message, "thinking": reasoning}
    return {**message, "thinking": f"{reasoning}\n\n{content}", "content": ""}
