"""The outputs that leave the engine for one service stream.

Token columns and rare events are merged until the server takes them.

Owns the columns of tokens (as `array`, whose `tobytes()` is what the protocol carries) and the
place of events among them. Does not own the log that tokens come from (`token_log`, `prompt_log`),
the shapes of events (`events`) nor the message they go into (the server). Within an outbox, events
come after its tokens, but for those that precede every token of their request: Started and
PromptLogprobs.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Set as AbstractSet

from headrace_backend.engine.events import Event, LogprobColumns, u16, u32


@dataclasses.dataclass(slots=True)
class Outbox:
    """Tokens and events of one stream since it was last taken."""

    # One entry per released token, in order within a handle and output.
    handles: array[int] = dataclasses.field(default_factory=u32)
    output_indices: array[int] = dataclasses.field(default_factory=u16)
    tokens: array[int] = dataclasses.field(default_factory=u32)
    # For those tokens that have log probabilities, in the same order, and their rows in the columns
    # above.
    logprobs: LogprobColumns = dataclasses.field(default_factory=LogprobColumns)
    logprob_rows: array[int] = dataclasses.field(default_factory=u32)
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
