"""What a stream yields: frozen dataclasses that mirror headrace.v1.GenerationEvent.

Owns the Python shape of events, usage, ledger and log probabilities. Does not collect them
(completion.py) nor read sockets (client.py, aio.py). Messages come in through `from_proto`,
dataclasses go out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from headrace.conversations.content import (
    AnswerText,
    Content,
    ReasoningText,
    contents_from_proto,
    num_units,
    without_units,
)
from headrace.errors import HeadraceError, from_status
from headrace.v1 import generation_pb2 as pb


class FinishReason(StrEnum):
    """Why an output ended."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"

    @classmethod
    def from_proto(cls, value: int) -> FinishReason:
        """The reason of a wire value; a value newer than this client is UNSPECIFIED."""
        return _FINISH_REASONS.get(value, cls.UNSPECIFIED)


_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    pb.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    pb.FINISH_REASON_ERROR: FinishReason.ERROR,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities (natural logarithm) of a run of tokens, as flat columns.

    Attributes:
        sampled: One per token: its own log probability.
        ranks: One per token: its rank among all tokens, 1 being the most likely.
        top_counts: One per token: how many entries of the two columns below are its own.
        top_token_ids: The most likely tokens of each position, most likely first, one position
            after another.
        top_logprobs: Their log probabilities.
    """

    sampled: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    top_counts: tuple[int, ...] = ()
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def top(self, position: int) -> dict[int, float]:
        """The most likely tokens of a position with their log probabilities, most likely first."""
        first = sum(self.top_counts[:position])
        rows = slice(first, first + self.top_counts[position])
        return dict(zip(self.top_token_ids[rows], self.top_logprobs[rows], strict=True))

    def from_position(self, position: int) -> Logprobs:
        """Returns these columns without the tokens before `position`."""
        entries = sum(self.top_counts[:position])
        return Logprobs(
            self.sampled[position:],
            self.ranks[position:],
            self.top_counts[position:],
            self.top_token_ids[entries:],
            self.top_logprobs[entries:],
        )

    @classmethod
    def joined(cls, runs: Iterable[Logprobs]) -> Logprobs:
        """The columns of consecutive runs, one after another."""
        parts = list(runs)
        return cls(
            tuple(x for run in parts for x in run.sampled),
            tuple(x for run in parts for x in run.ranks),
            tuple(x for run in parts for x in run.top_counts),
            tuple(x for run in parts for x in run.top_token_ids),
            tuple(x for run in parts for x in run.top_logprobs),
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a run of the prompt's tokens, each given those before it.

    A stream has them if `prompt_logprobs` asked for them.

    The parts of a prompt come in order and without gaps; the first begins at position 1, because
    nothing precedes the token at 0.

    Attributes:
        first_token_index: Position in the prompt of the first of these tokens.
        logprobs: One entry per token; `sampled` is that of the prompt's own token.
    """

    first_token_index: int
    logprobs: Logprobs

    @property
    def next_token_index(self) -> int:
        """Position in the prompt of the token that follows these."""
        return self.first_token_index + len(self.logprobs.sampled)

    @staticmethod
    def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
        """Consecutive parts as one; None where there are none."""
        if not parts:
            return None
        return PromptLogprobs(parts[0].first_token_index, Logprobs.joined([part.logprobs for part in parts]))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted.

    `cached_tokens` are the prompt tokens found in the prefix cache, `reasoning_tokens` the output
    tokens that were reasoning.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """The time of a request in parts, in nanoseconds.

    `queued_ns` to `blocked_on_reader_ns` add up to `end_to_end_ns`. `draft_tokens` were drafted and
    verified by its steps; each of `accepted_tokens` was right, and saved its output a step.
    """

    queued_ns: int
    prefill_ns: int
    decode_ns: int
    preempted_ns: int
    engine_restart_ns: int
    detokenize_and_send_ns: int
    blocked_on_reader_ns: int
    end_to_end_ns: int
    ttft_ns: int
    step_count: int
    preemptions: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and queued; `request_id` names it in subscribe and cancel."""

    request_id: str
    model_revision: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The engine computed a first step; `cached_tokens` of the prompt came from its cache."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one output.

    `token_ids` and `text` cover the same tokens; nothing is sent twice. `text` is the answer's;
    where there is more than that, `content` has all of it in order, and is empty otherwise.
    """

    output_index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: Logprobs | None = None
    content: tuple[Content, ...] = ()

    @property
    def reasoning(self) -> str:
        """Text that the model wrote for itself."""
        return "".join(content.text for content in self.content if isinstance(content, ReasoningText))

    @property
    def num_units(self) -> int:
        """Length of the contents: characters, and beginnings and ends of calls."""
        return num_units(self.content) if self.content else len(self.text)

    def without_units(self, known: int) -> Delta:
        """This delta without so much of its contents, which was read before."""
        content = without_units(self.content, known)
        if not self.content:
            return replace(self, text=self.text[known:])
        text = "".join(part.text for part in content if isinstance(part, AnswerText))
        return replace(self, text=text, content=content)


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """One output ended.

    `matched_stop` is the token id or the stop string that ended it, `error` what went wrong,
    `score` what it was chosen by (`best_of`, `beam_search`).
    """

    output_index: int
    reason: FinishReason
    matched_stop: int | str | None = None
    error: HeadraceError | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A worker of the server was replaced.

    The request goes on after `pause_ns` without a lost or repeated token.
    """

    pause_ns: int


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """The connection of a subscription broke; this client opens it again after `delay` seconds.

    Not on the wire.

    The tokens that follow continue exactly where the last one before this event ended.
    """

    error: HeadraceError
    attempt: int
    delay: float


@dataclass(frozen=True, slots=True)
class Done:
    """All outputs ended. Nothing follows."""

    usage: Usage
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Failed:
    """One generation of a session cannot start or go on.

    Nothing follows for it; the session and its other generations go on.
    """

    error: HeadraceError


Event = Accepted | Started | PromptLogprobs | Delta | OutputFinished | Resumed | Reconnecting | Failed | Done


def from_proto(event: pb.GenerationEvent) -> Event | None:
    """The event of a message; None for a kind that is newer than this client."""
    kind = event.WhichOneof("event")
    return None if kind is None else _CONVERTERS[kind](getattr(event, kind))


def usage_from_proto(usage: pb.Usage) -> Usage:
    """Usage of a Done event or of a Complete answer."""
    return Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens)


def ledger_from_proto(ledger: pb.Ledger) -> Ledger:
    """Ledger of a Done event or of a Complete answer."""
    return Ledger(**{name: getattr(ledger, name) for name in Ledger.__slots__})


def logprobs_from_proto(logprobs: pb.Logprobs) -> Logprobs:
    """The columns of one message."""
    return Logprobs(**{name: tuple(getattr(logprobs, name)) for name in Logprobs.__slots__})


def prompt_logprobs_from_proto(part: pb.PromptLogprobs) -> PromptLogprobs:
    """A run of the prompt's tokens."""
    return PromptLogprobs(part.first_token_index, logprobs_from_proto(part.logprobs))


def text_of(content: Iterable[pb.Content]) -> str:
    """The text of a content list."""
    return "".join(piece.text for piece in content)


def finished_from_proto(finished: pb.OutputFinished) -> OutputFinished:
    """How one output ended."""
    kind = finished.matched_stop.WhichOneof("kind")
    return OutputFinished(
        finished.output_index,
        FinishReason.from_proto(finished.reason),
        getattr(finished.matched_stop, kind) if kind else None,
        from_status(finished.error) if finished.HasField("error") else None,
        finished.score if finished.HasField("score") else None,
    )


def _accepted(accepted: pb.Accepted) -> Accepted:
    return Accepted(accepted.request_id, accepted.model_revision, accepted.prompt_tokens)


def _delta(delta: pb.Delta) -> Delta:
    return Delta(
        delta.output_index,
        delta.first_token_index,
        tuple(delta.token_ids),
        text_of(delta.content),
        logprobs_from_proto(delta.logprobs) if delta.HasField("logprobs") else None,
        contents_from_proto(delta.content),
    )


_CONVERTERS: dict[str, Callable[[Any], Event]] = {
    "accepted": _accepted,
    "started": lambda started: Started(started.cached_tokens),
    "prompt_logprobs": prompt_logprobs_from_proto,
    "delta": _delta,
    "output_finished": finished_from_proto,
    "resumed": lambda resumed: Resumed(resumed.pause_ns),
    "done": lambda done: Done(usage_from_proto(done.usage), ledger_from_proto(done.ledger)),
}
