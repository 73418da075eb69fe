"""What leaves the engine for one service stream: token columns and rare events, merged until the
server takes them.

Owns the columns (as `array`, whose `tobytes()` is what the protocol carries) and the events. Does
not own the log that tokens come from (`token_log`, `prompt_log`) nor the message they go into (the
server). Within an outbox, events come after its tokens, but for those that precede every token of
their request: Started and PromptLogprobs.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Set as AbstractSet

import msgspec

from headrace_backend.engine.request import EndReason


def _u32() -> array[int]:
    return array("I")


def _u16() -> array[int]:
    return array("H")


def _f32() -> array[float]:
    return array("f")


@dataclasses.dataclass(slots=True)
class LogprobColumns:
    """Log probabilities of a run of tokens: three entries' worth per token, and the most likely
    tokens of all of them flat.
    """

    # Per token: natural logarithm of its probability, its rank (1 is the most likely), how many top
    # entries are its own.
    sampled: array[float] = dataclasses.field(default_factory=_f32)
    ranks: array[int] = dataclasses.field(default_factory=_u32)
    top_counts: array[int] = dataclasses.field(default_factory=_u16)
    # Flat, most likely first within a token.
    top_token_ids: array[int] = dataclasses.field(default_factory=_u32)
    top_logprobs: array[float] = dataclasses.field(default_factory=_f32)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.sampled)

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns."""
        return 10 * len(self.sampled) + 8 * len(self.top_token_ids)


@dataclasses.dataclass(slots=True, frozen=True)
class Started:
    """The request's first step was planned."""

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
    """Computing goes on after a worker was replaced."""

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
    # For ERROR: what to tell the client. Its code is INTERNAL.
    error: str = ""


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


@dataclasses.dataclass(slots=True)
class Outbox:
    """Tokens and events of one stream since it was last taken."""

    # One entry per released token, in order within a handle and output.
    handles: array[int] = dataclasses.field(default_factory=_u32)
    output_indices: array[int] = dataclasses.field(default_factory=_u16)
    tokens: array[int] = dataclasses.field(default_factory=_u32)
    # For those tokens that have log probabilities, in the same order, and their rows in the columns
    # above.
    logprobs: LogprobColumns = dataclasses.field(default_factory=LogprobColumns)
    logprob_rows: array[int] = dataclasses.field(default_factory=_u32)
    # (handle, event); after a RequestDone the handle is free again.
    events: list[tuple[int, Event]] = dataclasses.field(default_factory=list)
    # The newest step merged in; 0 if none was.
    step_id: int = 0
    # On the engine's clock.
    planned_at_ns: int = 0
    settled_at_ns: int = 0
    # Sequences of that step's batch, and its tokens.
    batch_sequences: int = 0
    batch_tokens: int = 0


class Stream:
    """One service stream's outbox in the making.

    Subscriptions keep it, so that releasing a token costs no lookup.
    """

    __slots__ = ("_dirty", "_outbox", "stream_id")

    def __init__(self, stream_id: int, dirty: dict[int, Stream]) -> None:
        """A stream that enters itself in `dirty` when it has something to send."""
        self.stream_id = stream_id
        self._dirty = dirty
        self._outbox: Outbox | None = None

    @property
    def outbox(self) -> Outbox:
        """The outbox to write to; the stream counts as having something to send from now on."""
        outbox = self._outbox
        if outbox is None:
            outbox = self._outbox = Outbox()
            self._dirty[self.stream_id] = self
        return outbox

    def take(self) -> Outbox:
        """Hands over what was written; the next write begins a new one."""
        outbox, self._outbox = self._outbox, None
        assert outbox is not None, "only a stream with something to send is taken"
        return outbox


class Outboxes:
    """All streams that have subscriptions."""

    def __init__(self) -> None:
        """No streams yet."""
        self._streams: dict[int, Stream] = {}
        self._dirty: dict[int, Stream] = {}

    def stream(self, stream_id: int) -> Stream:
        """The stream of that id, made on first use."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = Stream(stream_id, self._dirty)
        return stream

    def forget(self, stream_id: int) -> None:
        """Drops a lost stream and what it had not been sent."""
        self._streams.pop(stream_id, None)
        self._dirty.pop(stream_id, None)

    def stamp(self, step_id: int, planned_at_ns: int, settled_at_ns: int, sequences: int, tokens: int) -> None:
        """Notes a settled step on every outbox that has something to send."""
        for stream in self._dirty.values():
            outbox = stream.outbox
            outbox.step_id = step_id
            outbox.planned_at_ns = planned_at_ns
            outbox.settled_at_ns = settled_at_ns
            outbox.batch_sequences = sequences
            outbox.batch_tokens = tokens

    def take(self, leave: AbstractSet[int]) -> dict[int, Outbox]:
        """Everything to send, by stream; the streams in `leave` go on merging instead."""
        taken = {stream_id: stream.take() for stream_id, stream in self._dirty.items() if stream_id not in leave}
        for stream_id in taken:
            del self._dirty[stream_id]
        return taken
