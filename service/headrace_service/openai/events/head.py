"""What all JSON of one request begins with, and why outputs end.

Owns ids, names of objects and finish reasons; chunks of chats, chunks of completions and whole
answers share them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Literal

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors

_REASONS = {engine_pb2.OUTPUT_END_REASON_STOP: "stop", engine_pb2.OUTPUT_END_REASON_LENGTH: "length"}
_FINGERPRINT_CHARS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The fields that say which answer this is.

    Attributes:
        kind: of request.
        model: the model's name.
        fingerprint: stands for the model's revision.
        created: UNIX time, seconds.
    """

    kind: Literal["chat", "completion"]
    model: str
    fingerprint: str
    created: int

    @staticmethod
    def of(kind: Literal["chat", "completion"], model: str, revision: str) -> Head:
        """Returns the head of an answer that begins now."""
        return Head(kind, model, f"fp_{revision.rpartition('@')[2][:_FINGERPRINT_CHARS]}", int(time.time()))

    def fields(self, request_id: str, *, chunk: bool) -> dict[str, Any]:
        """Returns the fields, for a part of a stream or the whole."""
        prefix, name = ("chatcmpl-", "chat.completion") if self.kind == "chat" else ("cmpl-", "text_completion")
        return {
            "id": prefix + request_id,
            "object": f"{name}.chunk" if chunk and self.kind == "chat" else name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def finish_reason(end: engine_pb2.OutputEnd, calls_tools: bool) -> str:
    """Returns why an output ended, one that called functions or not.

    Raises:
        ServiceError: it ended before its time.
    """
    reason = _REASONS.get(end.reason)
    if reason is not None:
        return "tool_calls" if calls_tools and reason == "stop" else reason
    if end.reason == engine_pb2.OUTPUT_END_REASON_DEADLINE:
        raise errors.deadline_exceeded("the request's time limit passed before the generation ended")
    if end.HasField("error"):
        raise errors.from_status(end.error)
    raise errors.cancelled()


def matched_stop(end: engine_pb2.OutputEnd, stop_strings: Sequence[str]) -> str | int | None:
    """Returns the stop string, or the id of the stop token, that ended an output."""
    if end.HasField("stop_token_id"):
        return end.stop_token_id
    if end.HasField("stop_string_index") and end.stop_string_index < len(stop_strings):
        return stop_strings[end.stop_string_index]
    return None
