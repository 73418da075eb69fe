"""What a session's next messages hold: the tokens of all its generations as columns, and their events.

Owns the form of `SessionResponse`, in which events come after tokens; those that must come before (accepted, started, the prompt's log
probabilities) make a message of their own. `SessionWire` is the `EventWire` of one generation: it adds to the batch and leaves nothing else to be written. A token
costs three appends here; the message is encoded once per engine step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.rpc import status_pb2

from headrace.v1 import generation_pb2, inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import event_wire
from headrace_service.tracing.recording import OUTPUT_SHIFT, Recording, SharedWrite
from headrace_service.wires import TokenLogprobs

# Of events that precede tokens; well under a client's default limit of 4 MiB.
_MAX_MESSAGE_BYTES = 1 << 20


class SessionBatch:
    """Collects until `take`."""

    def __init__(self) -> None:
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
        """Adds the failure of one wish or generation."""
        self._events.append(inference_pb2.SessionEvent(stream_id=stream_id, error=error))

    def take(self) -> list[bytes]:
        """Returns what was collected as SessionResponses, mostly one or two, and begins anew."""
        messages = [inference_pb2.SessionResponse(events=events).SerializeToString() for events in _cut(self._before)]
        if self.stream_ids or self._events:
            messages.append(self._after().SerializeToString())
        self.__init__()  # type: ignore[misc]
        return messages

    def _after(self) -> inference_pb2.SessionResponse:
        response = inference_pb2.SessionResponse(events=self._events)
        if self.stream_ids:
            tokens = response.tokens
            tokens.stream_ids.extend(self.stream_ids)
            tokens.token_ids.extend(self.token_ids)
            if any(self.output_indices):
                tokens.output_indices.extend(self.output_indices)
            if any(self.texts):
                tokens.texts.extend(self.texts)
        return response


def _cut(events: list[inference_pb2.SessionEvent]) -> Iterator[list[inference_pb2.SessionEvent]]:
    """Yields the events in order, in lists of about _MAX_MESSAGE_BYTES: a prompt's log probabilities may be many megabytes."""
    taken: list[inference_pb2.SessionEvent] = []
    num_bytes = 0
    for event in events:
        size = event.ByteSize()
        if taken and num_bytes + size > _MAX_MESSAGE_BYTES:
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
        deltas_are_events: whether tokens come as Delta events, which tell their position; for readers that start in the middle.
    """

    def __init__(self, batch: SessionBatch, stream_id: int, deltas_are_events: bool) -> None:
        self._batch = batch
        self._stream_id = stream_id
        self._deltas_are_events = deltas_are_events
        self._recording: Recording | None = None

    def record(self, recording: Recording) -> bool:
        """See EventWire."""
        self._recording = recording
        return True

    def accepted(self, request_id: str, model_revision: str, prompt_tokens: int) -> None:
        """See EventWire."""
        self._add(event_wire.accepted(request_id, model_revision, prompt_tokens), before_tokens=True)

    def started(self, cached_tokens: int) -> None:
        """See EventWire."""
        self._add(event_wire.started(cached_tokens), before_tokens=True)

    def prompt_logprobs(self, first_token_index: int, columns: engine_pb2.LogprobColumns) -> None:
        """See EventWire."""
        self._add(event_wire.prompt_logprobs(first_token_index, columns), before_tokens=True)

    def resumed(self, pause_ns: int) -> None:
        """See EventWire."""
        self._add(event_wire.resumed(pause_ns), before_tokens=True)

    def delta(
        self,
        output_index: int,
        first_token_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> None:
        """See EventWire."""
        recording = self._recording
        if recording is not None:
            write = self._batch.write
            if write is None:
                write = self._batch.write = SharedWrite()
            recording.shared.append(write)
            recording.entries.append((output_index << OUTPUT_SHIFT) + len(token_ids))
        if self._deltas_are_events or logprobs is not None:
            self._add(event_wire.delta(output_index, first_token_index, token_ids, text, logprobs))
            return
        batch = self._batch
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

    def output_finished(self, end: engine_pb2.OutputEnd, stop_strings: Sequence[str]) -> None:
        """See EventWire."""
        self._add(event_wire.output_finished(end, stop_strings))

    def done(self, engine_done: engine_pb2.RequestDone, ledger: generation_pb2.Ledger) -> None:
        """See EventWire."""
        self._add(event_wire.done(engine_done, ledger))

    def _add(self, encoded: bytes, before_tokens: bool = False) -> None:
        """Adds an event that `event_wire` encoded as an answer of Generate."""
        event = inference_pb2.GenerateResponse.FromString(encoded).event
        self._batch.add_event(self._stream_id, event, before_tokens)
