"""A generation's events as server-sent events: one chunk of JSON for each delta.

An `EventWire` for each generation. Owns the encoding. What stands around a chunk's text is encoded
once for each output, since every token passes here.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.openai.events import head as heads
from headrace_service.openai.events import message_parts
from headrace_service.openai.events.openai_wire import AnswerParts, OpenAIWire
from headrace_service.openai.events.token_report import CompletionReport
from headrace_service.output_forms.parts import Part
from headrace_service.streams.wires import TokenLogprobs

END = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
# Stands where a chunk's text goes.
_TEXT = "\x00text\x00"


def event(content: bytes) -> bytes:
    """Returns JSON as one server-sent event."""
    return b"data: " + content + b"\n\n"


class Chunks(OpenAIWire, abc.ABC):
    """The chunks of one generation.

    Args:
        parts: what the answer is made of.
        first_index: index of its first output among all of the request.
        says_usage: whether chunks have the field `usage`.
    """

    def __init__(self, parts: AnswerParts, first_index: int = 0, *, says_usage: bool) -> None:
        super().__init__(parts)
        self._num_outputs = parts.num_outputs
        self._first_index = first_index
        self._says_usage = says_usage
        # Known once the request is accepted.
        self._fields: dict[str, Any] = {}
        # Per output, what stands before and after a text.
        self._around: list[tuple[bytes, bytes]] = []

    @abc.abstractmethod
    def _choice(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        """Returns a choice without its index."""

    @abc.abstractmethod
    def _begin(self, output_index: int) -> bytes:
        """Returns the chunks that an output begins with."""

    @abc.abstractmethod
    def _logprobs(
        self, output_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Returns the log probabilities of new tokens."""

    # -- EventWire

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> bytes | None:
        """Returns what each output begins with."""
        self._fields = self._head.fields(self.request_id, chunk=True)
        marked = [self._chunk(index, self._choice(_TEXT, None, None)) for index in range(self._num_outputs)]
        mark = _encode(_TEXT)
        self._around = [(before, after) for before, _, after in (chunk.partition(mark) for chunk in marked)]
        return b"".join([self._begin(index) for index in range(self._num_outputs)]) or None

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> bytes | None:
        """Chats do not report them."""
        return None

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        parts: Sequence[Part] | None = None,
    ) -> bytes | None:
        """Returns the chunk of new tokens."""
        if parts is not None:
            reported = self._logprobs(output_index, token_ids, logprobs) if logprobs is not None else None
            choice = self._choice("", reported, None)
            return self._chunk(output_index, {**choice, "delta": message_parts.piece(parts)})
        if logprobs is None:
            before, after = self._around[output_index]
            return before + _encode(text) + after
        return self._chunk(output_index, self._choice(text, self._logprobs(output_index, token_ids, logprobs), None))

    def output_finished(
        self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str], calls_tools: bool = False
    ) -> bytes | None:
        """Returns the chunk that says why an output ended."""
        reason = self._finish_reason(end, calls_tools)
        if reason is None:
            return None
        choice = self._choice("", None, reason)
        choice["stop_reason"] = heads.matched_stop(end, stop_strings)
        return self._chunk(end.output_index, choice)

    # -- the end

    def usage_chunk(self) -> bytes:
        """Returns the chunk that reports the whole request's tokens."""
        return event(_encode({**self._fields, "choices": [], "usage": self._usage.report()}))

    def _chunk(self, output_index: int, choice: dict[str, Any]) -> bytes:
        whole = {**self._fields, "choices": [{"index": self._first_index + output_index, **choice}]}
        if self._says_usage:
            whole["usage"] = None
        return event(_encode(whole))


class ChatChunks(Chunks):
    """The chunks of one chat."""

    def _begin(self, output_index: int) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk(output_index, role)

    def _choice(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if finish_reason is None else {}
        return {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(
        self, output_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        return self._report.chat(token_ids, logprobs)


class CompletionChunks(Chunks):
    """The chunks of one completion."""

    def __init__(self, parts: AnswerParts, first_index: int = 0, *, says_usage: bool) -> None:
        super().__init__(parts, first_index, says_usage=says_usage)
        self._reports = [CompletionReport(parts.report) for _ in range(parts.num_outputs)]

    def _begin(self, output_index: int) -> bytes:
        echo = self._echo
        if echo is None or not echo.is_whole_at_once:
            return b""
        logprobs = self._reports[output_index].of(echo.token_ids, [None]) if echo.with_logprobs else None
        return self._chunk(output_index, self._choice(echo.text, logprobs, None))

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> bytes | None:
        """Returns the chunks of a run of the prompt, one for each output."""
        if self._echo is None:
            return None
        text, tokens, logprobs = self._echo.run(first_token_index, columns)
        reported = [report.of(tokens, logprobs) for report in self._reports]
        return b"".join([self._chunk(index, self._choice(text, one, None)) for index, one in enumerate(reported)])

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        parts: Sequence[Part] | None = None,
    ) -> bytes | None:
        """Returns the chunk of new tokens; nothing where the prompt alone is wanted."""
        if self._only_scores:
            return b""
        return super().delta(output_index, first_token_index, token_ids, text, logprobs, parts)

    def _choice(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(
        self, output_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        return self._reports[output_index].of(token_ids, logprobs)
