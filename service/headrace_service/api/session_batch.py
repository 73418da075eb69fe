"""What a session's next messages hold.

The tokens of all its generations as columns, and their events.

Owns the form of `SessionResponse`, in which events come after tokens; those that must come before
(accepted, started, the prompt's log probabilities) make a message of their own. `SessionWire` is
the `EventWire` of one generation: it adds to the batch and leaves nothing else to be written. A
token costs three appends here; the message is encoded once per engine step. What is too much for
one message (logs of generations that are joined) becomes several; an event that no message can hold
is the failure of its generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.rpc import status_pb2

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.api import event_wire
from headrace_service.output_forms.parts import Part
from headrace_service.streams.wires import TokenLogprobs
from headrace_service.tracing.recording import OUTPUT_SHIFT, Recording, SharedWrite

# Beyond, a message is cut; well under a client's default limit of 4 MiB.
_CUT_BYTES = 1 << 20
# Tag and length of an event in a message.
_EVENT_FRAME_BYTES = 6
# Around the text of one token in a message that holds nothing else: ids, tags and lengths.
_ROW_BYTES = 64
# A byte that is no character's becomes U+FFFD.
_UTF8_PER_BYTE = 3


class SessionBatch:
    """The events of a session that wait for its next message; `take` collects them.

    Args:
        max_bytes: largest message.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.stream_ids: list[int] = []
        self.output_indices: list[int] = []
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        # The message that is being collected, once a recorded generation is in it.
        self.write: SharedWrite | None = None
        self._before: list[inference_pb2.SessionEvent] = []
        self._events: list[inference_pb2.SessionEvent] = []

    @property
    def num_events(self) -> int:
        """How many events wait."""
        return len(self._before) + len(self._events)

    def add_event(self, stream_id: int, event: generation_pb2.GenerationEvent, before_tokens: bool) -> None:
        """Adds an event of one generation."""
        events = self._before if before_tokens else self._events
        events.append(inference_pb2.SessionEvent(stream_id=stream_id, event=event))

    def add_error(self, stream_id: int, error: status_pb2.Status) -> None:
        """Adds the failure of one request or generation."""
        self._events.append(inference_pb2.SessionEvent(stream_id=stream_id, error=error))

    def take(self) -> list[bytes]:
        """Returns what was collected as SessionResponses, mostly one or two, and begins anew."""
        cut_bytes = min(_CUT_BYTES, self.max_bytes)
        messages = _messages_of(self._before, cut_bytes)
        if self.stream_ids or self._events:
            message = self._encoded(0, len(self.stream_ids), self._events)
            if len(message) <= cut_bytes:
                messages.append(message)
            else:
                messages += self._messages_of_tokens(0, len(self.stream_ids), cut_bytes)
                messages += _messages_of(self._events, cut_bytes)
        self.__init__(self.max_bytes)  # type: ignore[misc]
        return messages

    def _messages_of_tokens(self, first: int, end: int, cut_bytes: int) -> Iterator[bytes]:
        """Yields the messages of a run of tokens, halved until each is small enough."""
        if first == end:
            return
        message = self._encoded(first, end, ())
        if len(message) <= cut_bytes or end - first == 1:
            yield message
        else:
            middle = (first + end) // 2
            yield from self._messages_of_tokens(first, middle, cut_bytes)
            yield from self._messages_of_tokens(middle, end, cut_bytes)

    def _encoded(self, first: int, end: int, events: Sequence[inference_pb2.SessionEvent]) -> bytes:
        """Returns one message of a run of tokens, and events."""
        response = inference_pb2.SessionResponse(events=events)
        if first < end:
            tokens, run = response.tokens, slice(first, end)
            tokens.stream_ids.extend(self.stream_ids[run])
            tokens.token_ids.extend(self.token_ids[run])
            if any(self.output_indices[run]):
                tokens.output_indices.extend(self.output_indices[run])
            if any(self.texts[run]):
                tokens.texts.extend(self.texts[run])
        return response.SerializeToString()


def _messages_of(events: list[inference_pb2.SessionEvent], cut_bytes: int) -> list[bytes]:
    return [
        inference_pb2.SessionResponse(events=events).SerializeToString() for events in _cut_events(events, cut_bytes)
    ]


def _cut_events(events: list[inference_pb2.SessionEvent], cut_bytes: int) -> Iterator[list[inference_pb2.SessionEvent]]:
    """Yields the events in order, in lists that make messages of about `cut_bytes`.

    A prompt's log probabilities may be many megabytes.
    """
    taken: list[inference_pb2.SessionEvent] = []
    num_bytes = 0
    for event in events:
        size = event.ByteSize() + _EVENT_FRAME_BYTES
        if taken and num_bytes + size > cut_bytes:
            yield taken
            taken, num_bytes = [], 0
        taken.append(event)
        num_bytes += size
    if taken:
        yield taken


class SessionWire:
    """One generation's events, added to its session's batch.

    Args:
        batch: the session's.
        stream_id: the caller's name for the generation.
        deltas_are_events: whether tokens come as Delta events, which tell their position; for
            readers that start in the middle.
        max_piece_bytes: most bytes that a token of the model is.

    Attributes:
        error: set once an event was larger than any message; nothing of the generation is added
            from then on.
    """

    def __init__(self, batch: SessionBatch, stream_id: int, deltas_are_events: bool, max_piece_bytes: int = 0) -> None:
        self._batch = batch
        self._stream_id = stream_id
        self._deltas_are_events = deltas_are_events
        self._recording: Recording | None = None
        self.error: errors.ServiceError | None = None
        # Whether one token may be too much for a message; of no vocabulary that is used.
        self._has_long_pieces = max_piece_bytes * _UTF8_PER_BYTE + _ROW_BYTES > batch.max_bytes

    def record(self, recording: Recording) -> bool:
        """Takes the columns of a recorded generation.

        Returns whether this wire notes deltas itself.
        """
        self._recording = recording
        return True

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> None:
        """Adds that the request is valid and queued."""
        self._add(event_wire.accepted(request_id, model_revision, prompt_tokens), before_tokens=True)

    def started(self, cached_tokens: int) -> None:
        """Adds that the engine computed a first step for the request."""
        self._add(event_wire.started(cached_tokens), before_tokens=True)

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> None:
        """Adds log probabilities of a run of the prompt's tokens."""
        self._add(event_wire.prompt_logprobs(first_token_index, columns), before_tokens=True)

    def resumed(self, pause_ns: int) -> None:
        """Adds that a worker was replaced, which paused the request for `pause_ns` nanoseconds."""
        self._add(event_wire.resumed(pause_ns), before_tokens=True)

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """Adds new tokens of one output, and their text or parts."""
        recording = self._recording
        if recording is not None:
            write = self._batch.write
            if write is None:
                write = self._batch.write = SharedWrite()
            recording.shared.append(write)
            recording.entries.append((output_index << OUTPUT_SHIFT) + len(token_ids))
        # Parts and text of one output keep their order among events.
        if self._deltas_are_events or logprobs is not None or parts is not None:
            self._add(event_wire.delta(output_index, first_token_index, token_ids, text, logprobs, parts))
            return
        batch = self._batch
        if (self._has_long_pieces or len(token_ids) > 1) and not self._fits(len(text.encode()) + _ROW_BYTES):
            return
        if len(token_ids) == 1:
            batch.stream_ids.append(self._stream_id)
            batch.output_indices.append(output_index)
            batch.token_ids.append(token_ids[0])
            batch.texts.append(text)
            return
        num_tokens = len(token_ids)
        batch.stream_ids.extend([self._stream_id] * num_tokens)
        batch.output_indices.extend([output_index] * num_tokens)
        batch.token_ids.extend(token_ids)
        batch.texts.extend([""] * (num_tokens - 1))
        batch.texts.append(text)

    def output_finished(
        self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str], calls_tools: bool = False
    ) -> None:
        """Adds the end of one output."""
        self._add(event_wire.output_finished(end, stop_strings, calls_tools))

    def done(
        self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger, reasoning_tokens: int = 0
    ) -> None:
        """Adds the end of the request; the last event."""
        self._add(event_wire.done(engine_done, ledger, reasoning_tokens))

    def _add(self, encoded: bytes, before_tokens: bool = False) -> None:
        """Adds an event that `event_wire` encoded as an answer of Generate."""
        if self._fits(len(encoded) + _EVENT_FRAME_BYTES + _ROW_BYTES):
            event = inference_pb2.GenerateResponse.FromString(encoded).event
            self._batch.add_event(self._stream_id, event, before_tokens)

    def _fits(self, num_bytes: int) -> bool:
        """Returns whether a message can hold so much, and everything before it could.

        Notes the failure if not.
        """
        if num_bytes > self._batch.max_bytes and self.error is None:
            self.error = errors.too_large("an event", num_bytes, self._batch.max_bytes)
        return self.error is None
