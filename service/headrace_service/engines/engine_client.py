"""The service's one stream to the backend.

Owns the table of subscriptions, the questions that wait for answers, what is known of the engine's
state, and what becomes of all of them when the stream breaks: everything open ends UNAVAILABLE with
a retry hint. Does not own the connection's life (`engine_connection` does). Questions are written
by one task in the order they were asked; answers and steps are dealt out as they are read.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from google.protobuf import message

from headrace_facts import facts
from headrace_protos.engine.v1 import engine_pb2
from headrace_service import deadlines, errors
from headrace_service.calls.call import Call
from headrace_service.engines.engine_holds import EngineHolds
from headrace_service.engines.quota_relay import QuotaRelay
from headrace_service.engines.routing.engine_load import EngineLoad, LoadReport
from headrace_service.engines.step_dealing import deal
from headrace_service.streams.ending import Endings
from headrace_service.streams.engine_reader import EngineReader
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.tracing.tracer import Tracer

_log = structlog.get_logger("headrace.service")
_MAX_HANDLE = (1 << 32) - 1
# What a question takes beside itself: the mark of its kind, its length and its handle.
_ENVELOPE_BYTES = 32
_NOT_CONNECTED = "the engine cannot be reached"
# Engines answer each other within milliseconds, and give one up that does not within a second.
_QUOTA_PATIENCE_S = 2.0

Answer = TypeVar("Answer")


class EngineClient:
    """Questions to the engine and subscriptions to its requests.

    Args:
        max_message_bytes: most that one question may take; a larger one would end the stream, which
            is everybody's.
        tracer: receives generations that end, and steps; None where there is no telemetry.
        quotas: carries what this engine reports of quotas to the others of its model; None: there
            are none.
        holds: tells engines of its model which of them this process holds; None: nobody asks.
        number: its number among the model's engines.
    """

    def __init__(
        self,
        max_message_bytes: int,
        tracer: Tracer | None = None,
        quotas: QuotaRelay | None = None,
        holds: EngineHolds | None = None,
        number: int = 0,
    ) -> None:
        self._quotas = quotas
        self._holds = holds
        self._number = number
        self._max_message_bytes = max_message_bytes
        self._tracer = tracer
        self._endings = Endings(tracer, self.leave) if tracer is not None else None
        # The backend's name for itself in traces, and what takes its times to UNIX time.
        self._engine_clock = ("", 0)
        self.streams: dict[int, EngineReader] = {}
        # Called when a connection that was open is lost, after its subscriptions have heard of it.
        self.on_lost: Callable[[], None] | None = None
        # Called with detached requests of the engine that have no guardian.
        self.on_unguarded: Callable[[engine_pb2.Unguarded], None] | None = None
        # How long the engine keeps the log of an ended request.
        self.log_ttl_ns = 0
        # What routing goes by.
        self.known_load = EngineLoad()
        self.last_heard_ns = 0
        # When the present connection was opened, the last one was lost, or this began without one.
        self.since_s = time.monotonic()
        # Connections that were lost after they were open.
        self.num_losses = 0
        self._state = engine_pb2.EngineState(serving=False, reason=_NOT_CONNECTED)
        self._connected = False
        self._next_handle = 1
        self._query_ids = itertools.count(1)
        self._outgoing: collections.deque[engine_pb2.ToEngine] = collections.deque()
        self._outgoing_wake = asyncio.Event()
        # Keyed by handle where the question has one, else by query id.
        self._by_handle: dict[int, asyncio.Future[Any]] = {}
        self._by_query: dict[int, asyncio.Future[Any]] = {}

    # -- state

    @property
    def serving(self) -> bool:
        """Whether the engine says it makes progress, and said so lately."""
        return self.is_reachable and self._state.serving

    @property
    def is_reachable(self) -> bool:
        """Whether new work has somebody to take it, now or once a worker is replaced."""
        return self._connected and time.monotonic_ns() - self.last_heard_ns <= self._state.stale_after_ns

    def check_reachable(self) -> None:
        """Raises UNAVAILABLE while new work has nobody to take it.

        An engine that replaces a worker is reachable: it queues. One that is silent is not.
        """
        if not self._connected:
            raise errors.unavailable(_NOT_CONNECTED)
        if time.monotonic_ns() - self.last_heard_ns > self._state.stale_after_ns:
            raise errors.unavailable("the engine makes no progress")

    def open_streams(self) -> list[GenerationStream]:
        """Returns the streams that still expect something of the engine for a reader."""
        endings = self._endings
        streams = [stream for stream in self.streams.values() if isinstance(stream, GenerationStream)]
        return [stream for stream in streams if endings is None or not endings.keeps(stream)]

    def new_handle(self) -> int:
        """Returns a handle that no open subscription has."""
        while self._next_handle in self.streams:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        handle, self._next_handle = self._next_handle, self._next_handle % _MAX_HANDLE + 1
        return handle

    # -- questions

    async def add(self, request: engine_pb2.AddRequest, stream: EngineReader | None) -> engine_pb2.Added:
        """Asks for a generation; `stream`, if given, gets its tokens from then on.

        Raises:
            ServiceError: what the engine refused it with, UNAVAILABLE, or RESOURCE_EXHAUSTED, the
                engine can't be asked for so much.
        """
        request.query_id = next(self._query_ids)
        self._check_size(request)

        async def ask(waited_ns: int) -> engine_pb2.Added:
            request.service_ns += waited_ns
            if request.remaining_ns:
                # One whose time is over ends by the engine's word.
                request.remaining_ns = max(1, request.remaining_ns - waited_ns)
            if stream is not None:
                request.handle = stream.handle
                self.streams[stream.handle] = stream
            added: engine_pb2.Added = await self._ask(
                engine_pb2.ToEngine(add=request), self._by_query, request.query_id
            )
            return added

        return await _patiently(ask)

    async def attach(self, request: engine_pb2.AttachRequest, stream: EngineReader) -> engine_pb2.Attached:
        """Asks for a running or ended request's events; `stream` gets them, from the start.

        Raises:
            ServiceError: NOT_FOUND, OUT_OF_RANGE, or UNAVAILABLE.
        """

        async def ask(_waited_ns: int) -> engine_pb2.Attached:
            request.handle = stream.handle
            self.streams[stream.handle] = stream
            attached: engine_pb2.Attached = await self._ask(
                engine_pb2.ToEngine(attach=request), self._by_handle, stream.handle
            )
            return attached

        return await _patiently(ask)

    async def find_key(self, query: engine_pb2.KeyQuery) -> engine_pb2.Added:
        """Asks for the request of an idempotency key.

        Raises:
            ServiceError: NOT_FOUND, it has none; ALREADY_EXISTS, with another spec; UNAVAILABLE.
        """
        query.query_id = next(self._query_ids)
        found: engine_pb2.Added = await self._ask(engine_pb2.ToEngine(find_key=query), self._by_query, query.query_id)
        return found

    async def cancel(self, request_id: str, tenant: str) -> engine_pb2.Aborted:
        """Ends a request at its owner's request.

        Raises:
            ServiceError: UNAVAILABLE.
        """
        abort = engine_pb2.AbortRequest(
            query_id=next(self._query_ids), request_id=request_id, tenant=tenant, cause=engine_pb2.ABORT_CAUSE_CANCELLED
        )
        aborted: engine_pb2.Aborted = await self._ask(engine_pb2.ToEngine(abort=abort), self._by_query, abort.query_id)
        return aborted

    async def list_requests(self, query: engine_pb2.ListQuery) -> engine_pb2.RequestList:
        """Asks for one page of requests. Raises ServiceError: UNAVAILABLE."""
        query.query_id = next(self._query_ids)
        page: engine_pb2.RequestList = await self._ask(engine_pb2.ToEngine(list=query), self._by_query, query.query_id)
        return page

    async def load(self) -> engine_pb2.Load:
        """Asks how busy the engine is. Raises ServiceError: UNAVAILABLE."""
        query = engine_pb2.LoadQuery(query_id=next(self._query_ids))
        load: engine_pb2.Load = await self._ask(engine_pb2.ToEngine(load=query), self._by_query, query.query_id)
        return load

    @property
    def life(self) -> str:
        """The engine's name for its present life; "" before it was reached."""
        return self._engine_clock[0]

    def leave(self, stream: EngineReader) -> None:
        """Gives a subscription up, if it is still open.

        Its request goes on unless it is attached and this was its only subscription.
        """
        if self.streams.pop(stream.handle, None) is not None:
            self._send(engine_pb2.ToEngine(detach=engine_pb2.DetachRequest(handle=stream.handle)))

    @property
    def wants_step_records(self) -> bool:
        """Whether the engine shall say what it settled."""
        return self._tracer is not None

    def abandon(self, stream: GenerationStream, call: Call) -> None:
        """Ends the request of a caller who left, and gives its subscription up.

        A request that has ended stays as it is. The end is reported to telemetry.
        """
        if stream.handle in self.streams:
            expired = deadlines.left_for_deadline(call.arrival_ns, call.deadline_ns, time.monotonic_ns())
            cause = engine_pb2.ABORT_CAUSE_DEADLINE if expired else engine_pb2.ABORT_CAUSE_CANCELLED
            self.abort(stream.request_id, call.tenant, cause)
            if self._endings is None or not self._endings.keep(stream):
                self.leave(stream)
        elif self._endings is not None:
            self._endings.ended(stream)

    async def all_reported(self) -> None:
        """Returns when the ends of all generations whose readers left are reported to telemetry.

        The time that it takes is bounded.
        """
        if self._endings is not None:
            await self._endings.all_reported()

    def abort(self, request_id: str, tenant: str, cause: engine_pb2.AbortCause) -> None:
        """Ends a request without waiting for the answer."""
        abort = engine_pb2.AbortRequest(
            query_id=next(self._query_ids), request_id=request_id, tenant=tenant, cause=cause
        )
        self._send(engine_pb2.ToEngine(abort=abort))

    def tell(self, to_engine: engine_pb2.ToEngine) -> None:
        """Sends what has no answer; nothing happens while the engine is not connected."""
        self._send(to_engine)

    # -- the connection's side

    def connection_opened(self, welcome: engine_pb2.Welcome) -> None:
        """Takes the first message of a new connection; from now on questions are asked."""
        is_new, self._connected = not self._connected, True
        self._engine_clock = (welcome.engine, welcome.unix_offset_ns)
        if is_new:
            self.since_s = time.monotonic()
            if self._holds is not None:
                self._holds.connected(self._number, self)
        if is_new and welcome.shares_quotas and self._quotas is not None:
            self._quotas.connected(self, welcome.engine)
        self.log_ttl_ns = welcome.log_ttl_ns
        self.last_heard_ns = time.monotonic_ns()
        self._received_state(welcome.state)

    def connection_lost(self) -> None:
        """Ends everything that was open on the connection, or leaves it to another engine."""
        was_connected, self._connected = self._connected, False
        self.num_losses += was_connected
        if was_connected:
            self.since_s = time.monotonic()
        self._state = engine_pb2.EngineState(serving=False, reason=_NOT_CONNECTED)
        self.known_load.forget()
        self._outgoing.clear()
        if self._holds is not None:
            self._holds.lost(self._number, self)
        if self._quotas is not None:
            self._quotas.lost(self)
        failure = errors.unavailable("the connection to the engine was lost")
        lost, self.streams = self.streams, {}
        for stream in lost.values():
            stream.engine_lost(failure)
        for waiting in (self._by_handle, self._by_query):
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(failure)
            waiting.clear()
        if was_connected and self.on_lost is not None:
            self.on_lost()

    def received(self, from_engine: engine_pb2.FromEngine) -> None:
        """Deals one message of the engine out."""
        self.last_heard_ns = time.monotonic_ns()
        kind = from_engine.WhichOneof("message")
        if kind == "step":
            step = from_engine.step
            if step.step_records and self._tracer is not None:
                # Before the generations that end with these steps.
                self._tracer.tell(facts.Steps(*self._engine_clock, step.step_records))
            deal(step, self.streams)
        elif kind == "unguarded":
            if self.on_unguarded is not None:
                self.on_unguarded(from_engine.unguarded)
        elif kind == "state":
            self._received_state(from_engine.state)
        elif kind == "attached":
            self._received_attached(from_engine.attached)
        elif kind == "refused":
            self._received_refused(from_engine.refused)
        elif kind == "quota_report" and self._quotas is not None:
            self._quotas.carry(self, from_engine.quota_report)
        elif kind in ("added", "aborted", "list", "load"):
            answer = getattr(from_engine, kind)
            _resolve(self._by_query, answer.query_id, answer)

    async def next_outgoing(self) -> engine_pb2.ToEngine:
        """Returns the next message to write, when there is one."""
        while not self._outgoing:
            self._outgoing_wake.clear()
            await self._outgoing_wake.wait()
        return self._outgoing.popleft()

    # -- inside

    def _send(self, to_engine: engine_pb2.ToEngine) -> None:
        if self._connected:
            self._outgoing.append(to_engine)
            self._outgoing_wake.set()

    def _check_size(self, request: engine_pb2.AddRequest) -> None:
        """Everything else that is asked is small."""
        num_bytes, limit = request.ByteSize() + _ENVELOPE_BYTES, self._max_message_bytes
        if num_bytes > limit:
            raise errors.exhausted(
                f"the request takes {num_bytes} bytes on its way to the engine, and a message at most {limit}"
            )

    async def _ask(self, question: engine_pb2.ToEngine, waiting: dict[int, asyncio.Future[Any]], key: int) -> Any:
        self.check_reachable()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting[key] = answer
        self._send(question)
        try:
            return await answer
        finally:
            waiting.pop(key, None)

    def _received_state(self, state: engine_pb2.EngineState) -> None:
        self._state, load = state, state.load
        report = LoadReport(
            load.prefill_tokens,
            load.prefill_tokens_per_second,
            load.open_requests,
            load.rows,
            load.row_time_ns / 1e9,
        )
        self.known_load.reported(report, len(self.streams), self.last_heard_ns / 1e9)

    def _received_attached(self, attached: engine_pb2.Attached) -> None:
        stream = self.streams.get(attached.handle)
        if stream is not None:
            # At once, so that steps which follow in the same read find the stream ready.
            stream.begin_attached(attached)
            if stream.done is not None:
                del self.streams[attached.handle]
        _resolve(self._by_handle, attached.handle, attached)

    def _received_refused(self, refused: engine_pb2.Refused) -> None:
        self.streams.pop(refused.handle, None)
        waiting, key = (
            (self._by_query, refused.query_id)
            if refused.query_id in self._by_query
            else (self._by_handle, refused.handle)
        )
        answer = waiting.get(key)
        if answer is not None and not answer.done():
            error = errors.from_status(refused.status)
            answer.set_exception(_AskAgain(error, refused.ask_again_ns) if refused.ask_again_ns else error)


class _AskAgain(Exception):
    """The engine asks the others what is left of a quota, and is to be asked again soon."""

    def __init__(self, error: errors.ServiceError, after_ns: int) -> None:
        super().__init__(error.message)
        self.error = error
        self.after_s = min(after_ns / 1e9, _QUOTA_PATIENCE_S)


async def _patiently(ask: Callable[[int], Awaitable[Answer]]) -> Answer:
    """Asks until an engine knows whether a quota is used up.

    Each time `ask` is given the nanoseconds since the time before.

    Raises:
        ServiceError: what the engine refuses with; RESOURCE_EXHAUSTED also if it never knows.
    """
    began_ns = time.monotonic_ns()
    waited_ns = 0
    while True:
        asked_ns = time.monotonic_ns()
        try:
            return await ask(waited_ns)
        except _AskAgain as again:
            if asked_ns - began_ns > _QUOTA_PATIENCE_S * 1e9:
                raise again.error from None
            await asyncio.sleep(again.after_s)
            waited_ns = time.monotonic_ns() - asked_ns


def _resolve(waiting: dict[int, asyncio.Future[Any]], key: int, answer: message.Message) -> None:
    future = waiting.get(key)
    if future is not None and not future.done():
        future.set_result(answer)
