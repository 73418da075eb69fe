"""A generation's events as responses of the KServe wire.

Owns what has come of each output since the last response, and the responses made of it: one
response reports all outputs, and the last one says that it is. The stream that calls this
(`EventWire`) writes nothing itself; whoever reads the stream calls `take` after it. What is too
much for one response of a stream, because its reader was behind, becomes several. The response of
one output's text and nothing else is joined from bytes encoded before (`ResponseTemplate`), all
others are built by the convention.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from headrace.v1 import generation_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.kserve.messages import responses
from headrace_service.kserve.messages.infer_request import InferRequest
from headrace_service.kserve.messages.tensors import Tensor
from headrace_service.output_forms.parts import Part
from headrace_service.streams.wires import TokenLogprobs
from headrace_service.tracing.recording import Recording

_REASONS = {engine_pb2.OUTPUT_END_REASON_STOP: "stop", engine_pb2.OUTPUT_END_REASON_LENGTH: "length"}


# Beyond, a response is cut, unless a message's limit asks for less: some MiB are the default limit
# of a client.
_CUT_BYTES = 1 << 20
# A cut response and the delta that made it so long have room below a message's limit, the bytes of
# characters included.
_CUT_SHARE = 4
# About what one of the reported tokens takes in the conventions' log probabilities.
_LOGPROB_BYTES = 80


@dataclasses.dataclass(slots=True)
class Piece:
    """The part of one output that no response has reported yet.

    Attributes:
        text: new text.
        token_ids: new tokens.
        logprobs: one per new token; empty if not asked for.
        cumulative: sum of the log probabilities of all its tokens so far.
        reason: why it ended; None while it goes on.
    """

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    cumulative: float = 0.0
    reason: str | None = None

    def begin_anew(self) -> None:
        """Forgets what was reported, so that the next response begins anew."""
        self.text = ""
        self.token_ids, self.logprobs = [], []


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What one response reports.

    Attributes:
        pieces: per output what is new.
        num_prompt_tokens: length of the prompt.
    """

    pieces: Sequence[Piece]
    num_prompt_tokens: int


# Makes the outputs of a response.
Render = Callable[[Progress], Mapping[str, Tensor]]


class GenerationWire:
    """The responses of one generation.

    Args:
        request: asked for it.
        num_outputs: how many outputs it has.
        render: makes a response's outputs.
        names: what fields of GenerationSpec are called in the request.
        text_shape: shape of text_output where each response holds one text and nothing else; None
            otherwise.
        max_bytes: largest message of a stream, whose responses are cut to it; None: one response
            holds everything.

    Attributes:
        error: set once an output could not be computed, or was cancelled.
    """

    __slots__ = (
        "_cut", "_cut_bytes", "_names", "_new", "_num_prompt_tokens", "_pending_bytes", "_pieces", "_render",
        "_request", "_template", "error",
    )  # fmt: skip

    def __init__(
        self,
        request: InferRequest,
        num_outputs: int,
        render: Render,
        names: Mapping[str, str],
        text_shape: Sequence[int] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.error: errors.ServiceError | None = None
        self._request = request
        self._render = render
        self._names = names
        self._pieces = [Piece() for _ in range(num_outputs)]
        self._cut_bytes = min(_CUT_BYTES, max_bytes // _CUT_SHARE) if max_bytes is not None else None
        # Responses that were cut off and not taken yet.
        self._cut: collections.deque[bytes] = collections.deque()
        # About what the next response takes.
        self._pending_bytes = 0
        self._new = False
        self._num_prompt_tokens = 0
        self._template: responses.ResponseTemplate | None = None
        if text_shape is not None:
            self._template = responses.ResponseTemplate(request, [("text_output", "BYTES", text_shape)])

    @property
    def num_cut_bytes(self) -> int:
        """Memory of the responses that were cut off and not taken yet."""
        return sum(map(len, self._cut))

    def take(self, done: bool) -> tuple[bytes | None, bool]:
        """Returns the next ModelStreamInferResponse, and whether to ask again.

        The response is None if nothing is new.

        Args:
            done: whether everything has come. The last response is then given even if it has
                nothing new.
        """
        if self._cut:
            return self._cut.popleft(), True
        return (self._flush(done) if self._new or done else None), False

    def _flush(self, final: bool) -> bytes:
        """Returns the ModelStreamInferResponse of what is new."""
        self._new = False
        self._pending_bytes = 0
        if self._template is not None:
            piece = self._pieces[0]
            text, piece.text = piece.text, ""
            return self._template.fill_text(text.encode(), final)
        return responses.in_stream(self._whole(final))

    def answer(self) -> bytes:
        """Returns the ModelInferResponse that reports everything."""
        return self._whole(final=True)

    def _whole(self, final: bool) -> bytes:
        progress = Progress(self._pieces, self._num_prompt_tokens)
        outputs = self._render(progress)
        encoded = responses.whole(self._request, outputs, decoupled=True, final=final)
        for piece in self._pieces:
            piece.begin_anew()
        return encoded

    # -- EventWire

    def record(self, recording: Recording) -> bool:
        """Takes the columns of a recorded generation.

        Returns whether this wire notes deltas itself.
        """
        return False

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> None:
        """Notes that the request is valid and queued."""
        self._num_prompt_tokens = prompt_tokens

    def started(self, cached_tokens: int) -> None:
        """Notes that the engine computed a first step for the request."""

    def resumed(self, pause_ns: int) -> None:
        """Notes that a worker was replaced, which paused the request for `pause_ns` nanoseconds."""

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> None:
        """Notes log probabilities of a run of the prompt's tokens."""

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """Notes new tokens of one output, and their text."""
        assert parts is None, "KServe has no conversations, whose outputs alone have parts"
        self._new = True
        piece = self._pieces[output_index]
        piece.text += text
        self._pending_bytes += len(text)
        if self._template is None:
            piece.token_ids.extend(token_ids)
            if logprobs is not None:
                piece.logprobs.extend(logprobs)
                piece.cumulative += sum(entry.sampled for entry in logprobs)
                self._pending_bytes += _LOGPROB_BYTES * sum(1 + len(entry.top_ids) for entry in logprobs)
        if self._cut_bytes is not None and self._pending_bytes > self._cut_bytes:
            self._cut.append(self._flush(False))

    def output_finished(
        self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str], calls_tools: bool = False
    ) -> None:
        """Notes the end of one output."""
        self._new = True
        reason = _REASONS.get(end.reason)
        if reason is None:
            self.error = self.error or errors.renamed(_failure(end), self._names)
        else:
            self._pieces[end.output_index].reason = reason

    def done(
        self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger, reasoning_tokens: int = 0
    ) -> None:
        """Notes the end of the request; the last event."""


def _failure(end: engine_pb2.OutputEnd) -> errors.ServiceError:
    if end.reason == engine_pb2.OUTPUT_END_REASON_DEADLINE:
        return errors.deadline_exceeded("Request timeout expired")
    if end.HasField("error"):
        return errors.from_status(end.error)
    return errors.cancelled()
