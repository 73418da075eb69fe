"""What the engine reports of a request to whoever reads it, as plain data.

Owns the shapes: columns of log probabilities, and the rare events of a request's life. Which of
them waits for which service is the outbox's (`requests.outbox`); what they look like on the wire is
the server's.
"""

from __future__ import annotations

import dataclasses
import enum
from array import array

import msgspec

from headrace_request.rule_kinds import Violation


class EndReason(enum.IntEnum):
    """Why an output ended. Values as in the protocol."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


def u32() -> array[int]:
    """An empty column of uint32."""
    return array("I")


def u16() -> array[int]:
    """An empty column of uint16."""
    return array("H")


def f32() -> array[float]:
    """An empty column of float32."""
    return array("f")


@dataclasses.dataclass(slots=True)
class LogprobColumns:
    """Log probabilities of a run of tokens, as columns.

    Each token has one entry in three columns; the most likely tokens of all tokens are flat.
    """

    # Per token: natural logarithm of its probability, its rank (1 is the most likely), how many top
    # entries are its own.
    sampled: array[float] = dataclasses.field(default_factory=f32)
    ranks: array[int] = dataclasses.field(default_factory=u32)
    top_counts: array[int] = dataclasses.field(default_factory=u16)
    # Flat, most likely first within a token.
    top_token_ids: array[int] = dataclasses.field(default_factory=u32)
    top_logprobs: array[float] = dataclasses.field(default_factory=f32)

    def __len__(self) -> int:
        """Number of tokens in the columns."""
        return len(self.sampled)

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns."""
        return 10 * len(self.sampled) + 8 * len(self.top_token_ids)

    def extend_from(self, other: LogprobColumns, first: int = 0) -> None:
        """Appends the entries of another run's tokens from index `first` on."""
        first_top = sum(other.top_counts[:first])
        self.sampled.extend(other.sampled[first:])
        self.ranks.extend(other.ranks[first:])
        self.top_counts.extend(other.top_counts[first:])
        self.top_token_ids.extend(other.top_token_ids[first_top:])
        self.top_logprobs.extend(other.top_logprobs[first_top:])

    def copy(self) -> LogprobColumns:
        """Returns other columns with the same entries."""
        copied = LogprobColumns()
        copied.extend_from(self)
        return copied


@dataclasses.dataclass(slots=True, frozen=True)
class Started:
    """Says that the request's first step was planned."""

    cached_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens.

    Written once; readers and the request's log share it.
    """

    first_token_index: int
    columns: LogprobColumns

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.first_token_index + len(self.columns)


@dataclasses.dataclass(slots=True, frozen=True)
class Resumed:
    """Says that computing goes on after a worker was replaced."""

    pause_ns: int


@dataclasses.dataclass(slots=True, frozen=True)
class OutputEnd:
    """One output ended; all its tokens are released."""

    output_index: int
    reason: EndReason
    # For STOP: the token, or the index of the string.
    stop_token_id: int | None = None
    stop_string_index: int | None = None
    # Bytes to cut from the end of the output's text: a matched stop string and what followed it
    # within its token.
    trim_bytes: int = 0
    # For ERROR: what to tell the client where the server is at fault. Its code is INTERNAL.
    error: str = ""
    # For ERROR: the rule that the request turned out to break while the output was generated, so
    # that it can never succeed. Its code is INVALID_ARGUMENT.
    broken: Violation | None = None
    # For ERROR: why the request fits no more, in the words in which it would be refused. Its code
    # is RESOURCE_EXHAUSTED.
    unfit: str = ""
    # Of an output that was chosen from several sequences: what it was chosen by.
    score: float | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class OutputSnapshot:
    """All released tokens of one output, from 0 on."""

    output_index: int
    # uint32.
    token_ids: array[int]
    # For all of these tokens; None where none were asked for.
    logprobs: LogprobColumns | None
    # Set if the output has ended.
    end: OutputEnd | None


class RequestDone(msgspec.Struct, frozen=True):
    """All outputs ended: usage, and where the time went (nanoseconds)."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    # The five parts add up to service_ns plus the time from arrival to end in the engine.
    queued_ns: int
    prefill_ns: int
    decode_ns: int
    preempted_ns: int
    engine_restart_ns: int
    # From the arrival of the call at the service to the first token; 0: there was none.
    ttft_ns: int
    step_count: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    # On the engine's clock.
    ended_at_ns: int
    # Of a recorded request, to the subscription that came with it: `facts.EngineTrace`.
    engine_trace: bytes = b""


Event = Started | PromptLogprobs | Resumed | OutputEnd | RequestDone
