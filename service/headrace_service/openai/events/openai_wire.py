"""What whole answers and chunks have in common as wires of a generation's events.

Owns the events of which OpenAI's API says nothing, the count of tokens at a generation's end, and
the failure of an output.
"""

from __future__ import annotations

import dataclasses

from headrace.v1 import generation_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.openai.events import head as heads
from headrace_service.openai.events.echo import Echo
from headrace_service.openai.events.head import Head
from headrace_service.openai.events.token_report import TokenReport
from headrace_service.openai.events.usage import Usage
from headrace_service.tracing.recording import Recording


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerParts:
    """What the answer of one generation is made of, however it is sent.

    Attributes:
        head: which answer this is.
        num_outputs: how many outputs it has.
        usage: counts the generation's tokens at its end.
        report: how tokens are written.
        echo: the prompt that each output begins with; None: none does.
    """

    head: Head
    num_outputs: int
    usage: Usage
    report: TokenReport
    echo: Echo | None = None


class OpenAIWire:
    """The part of an `EventWire` that does not depend on how an answer is sent.

    Args:
        parts: what the answer is made of.

    Attributes:
        error: why an output could not be computed; None if none failed.
        request_id: names the whole answer; to be set before the first event.
    """

    def __init__(self, parts: AnswerParts) -> None:
        self.error: errors.ServiceError | None = None
        self.request_id = ""
        self._head = parts.head
        self._usage = parts.usage
        self._report = parts.report
        self._echo = parts.echo

    def record(self, recording: Recording) -> bool:
        """Notes nothing: whoever sends the answer, or writes a chunk, does."""
        return False

    def started(self, cached_tokens: int) -> None:
        """OpenAI's API has no word for it."""

    def resumed(self, pause_ns: int) -> None:
        """OpenAI's API has no word for it."""

    def done(
        self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger, reasoning_tokens: int = 0
    ) -> None:
        """Counts the tokens; the request's end is the writer's to say."""
        self._usage.add(engine_done, reasoning_tokens, only_scores=self._only_scores)

    @property
    def _only_scores(self) -> bool:
        """Whether the prompt alone is wanted, and no output."""
        return self._echo is not None and self._echo.only

    def _finish_reason(self, end: engine_pb2.OutputEnd, calls_tools: bool) -> str | None:
        """Returns why an output ended; None, and `error` is set, if it could not be computed."""
        try:
            return heads.finish_reason(end, calls_tools)
        except errors.ServiceError as error:
            self.error = self.error or error
            return None
