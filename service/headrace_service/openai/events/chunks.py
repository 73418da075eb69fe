"""A generation's events as server-sent events: one chunk of JSON for each delta.

An `EventWire` for each generation. Owns the encoding. What stands around a chunk's text is encoded
once for each output, since every token passes here.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.v1 import generation_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.openai.events import head as heads
from headrace_service.openai.events.echo import Echo
from headrace_service.openai.events.head import Head
from headrace_service.openai.events.token_report import CompletionReport, TokenReport
from headrace_service.openai.events.usage import Usage
from headrace_service.streams.wires import TokenLogprobs
from headrace_service.tracing.recording import Recording

END = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
# Stands where a chunk's text goes.
_TEXT = "\x00text\x00"


def event(content: bytes) -> bytes:
    """Returns JSON as one server-sent event."""
    return b"data: " + content + b"\n\n"


class Chunks(abc.ABC):
    """The chunks of one generation.

    Args:
        head: which answer this is.
        num_outputs: how many outputs it has.
        first_index: index of its first output among all of the request.
        usage: counts its tokens at its end; None: the chunks then say nothing of usage.
        report: how tokens are written.

    Attributes:
        error: why an output could not be computed; None if none failed.
        request_id: names the whole answer; to be set before the first event.
    """

    def __init__(
        self, head: Head, num_outputs: int, first_index: int, usage: Usage, report: TokenReport, *, says_usage: bool
    ) -> None:
        self.error: errors.ServiceError | None = None
        self.request_id = ""
        self._head = head
        self._num_outputs = num_outputs
        self._first_index = first_index
        self._usage = usage
        self._report = report
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

    def record(self, recording: Recording) -> bool:
        """Notes nothing: whoever writes a chunk does."""
        return False

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> bytes | None:
        """Returns what each output begins with."""
        self._fields = self._head.fields(self.request_id, chunk=True)
        marked = [self._chunk(index, self._choice(_TEXT, None, None)) for index in range(self._num_outputs)]
        mark = _encode(_TEXT)
        self._around = [(before, after) for before, _, after in (chunk.partition(mark) for chunk in marked)]
        return b"".join([self._begin(index) for index in range(self._num_outputs)]) or None

    def started(self, cached_tokens: int) -> bytes | None:
        """OpenAI's API has no word for it."""
        return None

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> bytes | None:
        """Chats do not report them."""
        return None

    def resumed(self, pause_ns: int) -> bytes | None:
        """OpenAI's API has no word for it."""
        return None

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> bytes | None:
        """Returns the chunk of new tokens."""
        if logprobs is None:
            before, after = self._around[output_index]
            return before + _encode(text) + after
        return self._chunk(output_index, self._choice(text, self._logprobs(output_index, token_ids, logprobs), None))

    def output_finished(self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str]) -> bytes | None:
        """Returns the chunk that says why an output ended."""
        try:
            reason = heads.finish_reason(end)
        except errors.ServiceError as error:
            self.error = self.error or error
            return None
        choice = self._choice("", None, reason)
        choice["stop_reason"] = heads.matched_stop(end, stop_strings)
        return self._chunk(end.output_index, choice)

    def done(self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger) -> None:
        """Counts the tokens; the request's end is the writer's to say."""
        self._usage.add(engine_done, only_scores=False)

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
    """The chunks of one completion.

    Args:
        head, num_outputs, first_index, usage, report, says_usage: as above.
        echo: the prompt that each output begins with; None: none does.
    """

    def __init__(
        self,
        head: Head,
        num_outputs: int,
        first_index: int,
        usage: Usage,
        report: TokenReport,
        *,
        says_usage: bool,
        echo: Echo | None,
    ) -> None:
        super().__init__(head, num_outputs, first_index, usage, report, says_usage=says_usage)
        self._echo = echo
        self._reports = [CompletionReport(report) for _ in range(num_outputs)]

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
    ) -> bytes | None:
        """Returns the chunk of new tokens; nothing where the prompt alone is wanted."""
        if self._echo is not None and self._echo.only:
            return b""
        return super().delta(output_index, first_token_index, token_ids, text, logprobs)

    def done(self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger) -> None:
        """Counts the tokens."""
        self._usage.add(engine_done, only_scores=self._echo is not None and self._echo.only)

    def _choice(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(
        self, output_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        return self._reports[output_index].of(token_ids, logprobs)
