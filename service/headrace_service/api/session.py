"""Session: many generations of one caller over one stream, one message per engine step.

Owns what is in a session (its frame is `SharedCall`): the table of its generations by the caller's
ids, a short task for each request, and one writer for all of them. The engine's side marks
generations that have news (`GenerationStream.listener`); since a step is dealt out without a pause,
the writer finds all of it together. A request that fails is answered by an error event, and nothing
else ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

from headrace.v1 import inference_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors, validation
from headrace_service.api.session_batch import SessionBatch, SessionWire
from headrace_service.calls import failures
from headrace_service.calls.call import Call
from headrace_service.calls.shared_call import SharedCall
from headrace_service.engines.served_model import ServedModel
from headrace_service.messages.parsing import Unparsed
from headrace_service.service_core import ServiceCore
from headrace_service.streams.generation_stream import GenerationStream

_CAP_FACTOR = 64
# Events that may wait for the caller before no more requests are read; a refusal has up to 1 KiB.
_MAX_WAITING_EVENTS = 4096


def _nothing() -> None:
    """What there is to give up of a generation that has not begun."""


def _take(stream: GenerationStream, entry: _Entry) -> errors.ServiceError | None:
    """Moves a generation's news into the batch; returns what it failed by.

    A mistake of ours about it is no reason to end the others.
    """
    assert entry.wire is not None
    try:
        stream.take()
    except Exception as error:
        return failures.unexpected(error)
    return entry.wire.error or stream.failure


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One generation of a session: being started, then read (`stream`, `cancel`, `give_up`)."""

    stream_id: int
    resources: contextlib.ExitStack
    task: asyncio.Task[None] | None = None
    stream: GenerationStream | None = None
    wire: SessionWire | None = None
    cancel: Callable[[], None] = _nothing
    give_up: Callable[[], None] = _nothing


class SessionHandlers:
    """Handler of the RPC Session."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    async def session(self, requests: AsyncIterator[Unparsed[inference_pb2.SessionRequest]], call: Call) -> None:
        """Serves one session until its caller and its generations are done, or the call ends."""
        session = _Session(self._core, call)
        self._core.delivering.add(session)
        try:
            await session.run(requests)
        finally:
            self._core.delivering.discard(session)


class _Session(SharedCall[inference_pb2.SessionRequest]):
    """A call of Session: its generations by stream id, and the writer of their events."""

    def __init__(self, core: ServiceCore, call: Call) -> None:
        super().__init__(call, _CAP_FACTOR)
        self._core = core
        self._batch = SessionBatch(core.config.max_message_bytes)
        self._entries: dict[int, _Entry] = {}
        self._by_stream: dict[GenerationStream, _Entry] = {}
        # Generations with news, in the order in which it came.
        self._with_news: dict[GenerationStream, None] = {}
        self._woken = asyncio.Event()
        # Generations whose first tokens may be in what is being written.
        self._first_leaving: list[GenerationStream] = []
        # What is to be done when what is being written has left.
        self._when_written: list[Callable[[], None]] = []

    @property
    def pending_bytes(self) -> int:
        """Memory that undelivered tokens of all generations take."""
        return sum(stream.pending_bytes for stream in self._by_stream)

    def wake(self) -> None:
        """Has the writer look again."""
        self._woken.set()

    def is_full(self) -> bool:
        """Returns whether nothing more is to be read before `has_room` is set."""
        return self._batch.num_events > _MAX_WAITING_EVENTS

    def note_failure(self, failure: errors.ServiceError) -> None:
        """Passes what the call ends with to the generations that have not ended."""
        for stream in self._by_stream:
            stream.note_failure(failure)

    def give_up(self) -> list[asyncio.Task[None]]:
        """Gives up what still runs, at the end of the call.

        Returns tasks that are then waited for.
        """
        entries = list(self._entries.values())
        for entry in entries:
            self._forget(entry)
        self._finish_written()
        return [entry.task for entry in entries if entry.task is not None]

    # -- the caller's requests

    def take(self, request: inference_pb2.SessionRequest) -> None:
        """Takes one message of the caller."""
        stream_id, action = request.stream_id, request.WhichOneof("action")
        if action == "cancel":
            self._cancel(stream_id, request.cancel.detach)
        elif action is None:
            self._refuse(stream_id, errors.invalid_field("action", "one of submit, attach and cancel must be set"))
        elif stream_id == 0:
            self._refuse(0, errors.invalid_field("stream_id", "must be at least 1"))
        elif stream_id in self._entries:
            self._refuse(0, errors.invalid_field("stream_id", f"{stream_id} names a generation that has not ended"))
        else:
            entry = self._entries[stream_id] = _Entry(stream_id, contextlib.ExitStack())
            entry.task = asyncio.create_task(self._begin(entry, request, time.monotonic_ns()))

    def _refuse(self, stream_id: int, error: errors.ServiceError) -> None:
        """Answers a request that fails.

        One about a generation that has not ended must not look like that one's end.
        """
        shown = 0 if stream_id in self._entries else stream_id
        self._batch.add_error(shown, errors.to_status(error))
        self.wake()

    async def _begin(self, entry: _Entry, request: inference_pb2.SessionRequest, arrival_ns: int) -> None:
        """Starts or joins the generation of one request that arrived at `arrival_ns`."""
        try:
            entry.resources.enter_context(self._core.open_generation())
            submit = request.submit
            call = self.call.of_request(arrival_ns, submit.traceparent, submit.tracestate)
            if request.HasField("submit"):
                await self._submit(entry, submit, call)
            else:
                await self._attach(entry, request.attach, call)
        except errors.ServiceError as error:
            self._end(entry, error)
        except Exception as error:
            self._end(entry, failures.unexpected(error))
        else:
            assert entry.stream is not None
            self._by_stream[entry.stream] = entry
            entry.stream.listener = self._note
            self._note(entry.stream)

    async def _submit(self, entry: _Entry, submit: inference_pb2.SessionSubmit, call: Call) -> None:
        model = self._core.models.find(submit.spec.model, call.caller)
        if submit.idempotency_key and not submit.detached:
            raise errors.invalid_field("idempotency_key", "must not be set unless detached is")
        validation.check_idempotency_key(submit.idempotency_key)
        spec = validation.resolve(submit.spec, model.text.facts, in_chat=bool(submit.messages))
        generations = self._core.generations
        prompt = await generations.prompt_of_either(submit, model)
        if submit.detached:
            added = await generations.start_detached(spec, prompt, model, call, submit.idempotency_key)
            await self._join(entry, engine_pb2.AttachRequest(request_id=added.request_id), model, call)
            return
        wire = entry.wire = self._wire(entry, model, deltas_are_events=False)
        model = generations.placed(spec, prompt, model, call)
        generation = await generations.start(spec, prompt, model, call, wire)
        entry.stream, entry.cancel, entry.give_up = generation.stream, generation.cancel, generation.abandon

    async def _attach(self, entry: _Entry, attach: inference_pb2.SessionAttach, call: Call) -> None:
        output_index = attach.output_index if attach.HasField("output_index") else None
        validation.check_subscription(attach.request_id, output_index)
        model = self._core.models.holders(attach.request_id)[0]
        request = engine_pb2.AttachRequest(
            request_id=attach.request_id, from_token=attach.from_token, output_index=output_index
        )
        await self._join(entry, request, model, call)

    async def _join(self, entry: _Entry, attach: engine_pb2.AttachRequest, model: ServedModel, call: Call) -> None:
        wire = entry.wire = self._wire(entry, model, deltas_are_events=attach.from_token > 0)
        subscription = await self._core.generations.subscribe(attach, call, wire)
        entry.stream, entry.cancel, entry.give_up = subscription.stream, subscription.cancel, subscription.leave

    def _wire(self, entry: _Entry, model: ServedModel, deltas_are_events: bool) -> SessionWire:
        return SessionWire(self._batch, entry.stream_id, deltas_are_events, model.text.pieces.max_piece_bytes)

    def _cancel(self, stream_id: int, detach: bool) -> None:
        entry = self._entries.get(stream_id)
        if entry is None:
            self._refuse(stream_id, errors.not_found(f"stream_id: {stream_id} names no generation of this session"))
        elif detach or entry.stream is None:
            self._forget(entry)
            if not detach:
                self._refuse(stream_id, errors.cancelled())
        else:
            entry.cancel()

    # -- the writer

    def _note(self, stream: GenerationStream) -> None:
        self._with_news[stream] = None
        self.wake()

    async def write_until_over(self) -> None:
        """Writes until the caller has closed its side and all has ended."""
        while not self._is_over():
            await self._woken.wait()
            self._woken.clear()
            self._collect()
            recorded = self._batch.write
            messages = self._batch.take()
            if recorded is not None:
                recorded.made_ns = time.monotonic_ns()
            for message in messages:
                self.writing_since_ns = time.monotonic_ns()
                await self.call.context.write(message)
                self.writing_since_ns = 0
            if recorded is not None:
                recorded.written_ns = time.monotonic_ns()
            self._note_first_left()
            self._finish_written()
            self.has_room.set()
            if self.failure is not None:
                raise self.failure

    def _is_over(self) -> bool:
        return self.closed_by_caller and not (self._entries or self._with_news or self._batch.num_events)

    def _collect(self) -> None:
        """Moves all news into the batch."""
        self.over_cap_since_ns = 0
        with_news, self._with_news = self._with_news, {}
        for stream in with_news:
            entry = self._by_stream.get(stream)
            if entry is None:
                continue
            failure = _take(stream, entry)
            if failure is not None:
                self._give_up_when_written(entry)
                self._end(entry, failure)
            elif stream.at_edge:
                self._first_leaving.append(stream)
                if stream.done is not None:
                    stream.take_done()
                    self._give_up_when_written(entry)
                    self._forget(entry)

    def _note_first_left(self) -> None:
        """Notes of generations at their edges that what was taken has left."""
        if self._first_leaving:
            streams, self._first_leaving = self._first_leaving, []
            now_ns = time.monotonic_ns()
            for stream in streams:
                stream.tokens_left(now_ns)

    def _give_up_when_written(self, entry: _Entry) -> None:
        """Keeps an ended generation's stream until its last message has left.

        Its trace reports when that was.
        """
        self._when_written.append(entry.give_up)
        entry.give_up = _nothing

    def _finish_written(self) -> None:
        """Gives up what was held until its last message had left, or can't leave any more."""
        finished, self._when_written = self._when_written, []
        for give_up in finished:
            give_up()

    def _end(self, entry: _Entry, error: errors.ServiceError) -> None:
        """Ends a generation of the session by an error event."""
        if entry.stream is not None:
            entry.stream.note_failure(error)
        self._forget(entry)
        self._refuse(entry.stream_id, error)

    def _forget(self, entry: _Entry) -> None:
        """Gives up what a generation holds; its id may be used again."""
        self._entries.pop(entry.stream_id, None)
        if entry.stream is not None:
            self._by_stream.pop(entry.stream, None)
            entry.stream.listener = None
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        entry.give_up()
        entry.resources.close()
        self.wake()
