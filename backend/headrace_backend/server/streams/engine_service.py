"""The EngineService: streams of services, their questions to the engine, and the answers.

Owns the RPC from the first message to the status that ends it, and the table of streams. Shape of a
message's way in: recv -> check (`incoming`) -> engine -> answer (`outgoing`). The way out: outbox
-> `service_stream`'s queue -> one `StepOutputs`.

One message's mistake is answered with `Refused` (or, where the question has no such answer, with
the answer that finds nothing) and never leaves that message; a mistake in the conversation itself
(no hello, unknown message, bytes that are no message) ends the stream.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace_backend.engine.answers import AbortOutcome
from headrace_backend.engine.errors import RefusalCode, RequestRefused, Violation
from headrace_backend.engine.request import EngineRequest, Subscriber
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.server.engine_loop import EngineLoop
from headrace_backend.server.health import Health
from headrace_backend.server.logs import get_logger
from headrace_backend.server.streams import incoming, log_replay, outgoing
from headrace_backend.server.streams.compiling_adds import CompilingAdds
from headrace_backend.server.streams.guard_offers import GuardOffers
from headrace_backend.server.streams.held_engines import HeldEngines
from headrace_backend.server.streams.quota_exchange import QuotaExchange
from headrace_backend.server.streams.secrets import check_secret
from headrace_backend.server.streams.service_stream import ServiceStream
from headrace_backend.server.streams.statuses import (
    StreamEnded,
    ended,
    internal_status,
    new_error_id,
    refusal_status,
    status_code,
)
from headrace_backend.server.telemetry import Teller
from headrace_backend.structured_output.compiler import Compiled, GrammarCompiler
from headrace_backend.structured_output.reasoning_place import behind_reasoning
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import LAYOUT

PROTOCOL_VERSION = 4
_SERVICE_NAME = "headrace_engine.v1.EngineService"
_MAX_STREAMS = 64
_MAX_SERVICE_NAME_CHARACTERS = 64
_HELLO_TIMEOUT_S = 5.0
_FLUSH_S = 1.0
_MAX_BACKLOG_BYTES = 64 << 20
# A replay up to this size comes in one message; a reader then renders it without waiting for
# another.
_MAX_ATTACHED_BYTES = 4 << 20


def _deserialize(data: bytes) -> engine_pb2.ToEngine | None:
    """Parses a message; returns None for bytes that are no message.

    An exception here would reach the peer as UNKNOWN with its text.
    """
    try:
        return engine_pb2.ToEngine.FromString(data)
    except DecodeError:
        return None


class EngineService:
    """Serves any number of service processes at once."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        health: Health,
        describe_model: Callable[[], engine_pb2.EngineModel],
        clock: Callable[[], int],
        *,
        secret: bytes | None,
        max_message_bytes: int,
        log_ttl_s: float,
        teller: Teller | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """A service without streams.

        Args:
            engine_loop: Driver of the engine.
            health: The state of the engine that streams report.
            describe_model: The model as it is known now.
            clock: The engine's.
            secret: What callers must present as bearer token; None: the socket's folder protects.
            max_message_bytes: Largest message.
            log_ttl_s: How long the log of an ended request is kept, in seconds.
            teller: Hears of requests and refusals; None: no telemetry.
            grammars: Compiles structured output; None: the model can't have any.
        """
        self._teller = teller
        self._engine_loop = engine_loop
        self._engine = engine_loop.engine
        # Reports of quotas from and to other engines.
        self.quotas = QuotaExchange(engine_loop.engine)
        self._health = health
        self._describe_model = describe_model
        self._clock = clock
        self._secret = secret
        self._max_message_bytes = max_message_bytes
        self._log_ttl_ns = int(log_ttl_s * 1e9)
        self._log = get_logger()
        self._compiling = CompilingAdds(engine_loop.engine, grammars, clock)
        self._streams: dict[int, ServiceStream] = {}
        self._guards = GuardOffers(engine_loop.engine, self._streams)
        self._held = HeldEngines(clock)
        self._stream_ids = itertools.count(1)
        self._handlers: dict[str, Callable[[ServiceStream, Any], None]] = {
            "add": self._add,
            "abort": self._abort,
            "attach": self._attach,
            "detach": self._detach,
            "list": self._list,
            "load": self._load,
            "find_key": self._find_key,
            "quota_peers": self.quotas.name_peers,
            "held_engines": self._held.read,
            "quota_report": lambda _stream, report: self.quotas.read(report),
        }
        health.listen(self.send_state)

    def handler(self) -> grpc.GenericRpcHandler[engine_pb2.ToEngine, engine_pb2.FromEngine]:
        """Returns what a grpc.aio server registers."""
        connect = grpc.stream_stream_rpc_method_handler(
            self.connect,
            request_deserializer=_deserialize,
            response_serializer=engine_pb2.FromEngine.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_SERVICE_NAME, {"Connect": connect})

    # --- to all streams

    def deliver(self, outboxes: dict[int, Outbox]) -> None:
        """Queues outboxes on their streams."""
        for stream_id, outbox in outboxes.items():
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.send_outbox(outbox)

    def send_state(self) -> None:
        """Tells every stream the newest state: on a change, and as heartbeat."""
        state = outgoing.write_state(self._health.state, self._engine.report_load())
        for stream in self._streams.values():
            stream.send_state(state)

    def send_welcome(self) -> None:
        """Tells every stream what is served, after that has changed."""
        for stream in self._streams.values():
            stream.send(self._welcome())

    def end_streams(self, reason: StreamEnded) -> None:
        """Ends every stream, after what is queued for it."""
        for stream in self._streams.values():
            stream.end(reason)

    def close(self) -> None:
        """Ends what computes beside the event loop."""
        self._compiling.close()

    @property
    def num_streams(self) -> int:
        """Number of services that are connected."""
        return len(self._streams)

    # --- one stream

    async def connect(self, _requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Runs the RPC; its peer gets one status and nothing of our insides."""
        try:
            await self._serve(context)
        except StreamEnded as reason:
            await self._abort_rpc(context, reason)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            error_id = new_error_id()
            self._log.exception("stream failed", error_id=error_id)
            await self._abort_rpc(context, StreamEnded(internal_status(error_id)))

    async def _abort_rpc(self, context: grpc.aio.ServicerContext[Any, Any], reason: StreamEnded) -> None:
        details = (("grpc-status-details-bin", reason.status.SerializeToString()),)
        await context.abort(status_code(reason.status), reason.status.message, details)

    async def _serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        check_secret(self._secret, context)
        if len(self._streams) >= _MAX_STREAMS:
            raise ended(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MAX_STREAMS} services are connected; more are not taken"
            )
        hello = await self._read_hello(context)
        steps = self._engine.steps.reader() if hello.wants_step_records else None
        stream = ServiceStream(
            next(self._stream_ids), self._max_message_bytes, _MAX_BACKLOG_BYTES, self._clock, steps, hello.guards
        )
        log = self._log.bind(stream=stream.stream_id, service=hello.service_name[:_MAX_SERVICE_NAME_CHARACTERS])
        stream.send(self._welcome())
        self._streams[stream.stream_id] = stream
        # Services log their connections themselves; the supervisor and health checks come and go
        # every few seconds.
        log.debug("service connected")
        if stream.guards:
            self._guards.offer_all()
        try:
            await self._run_stream(stream, context)
        finally:
            del self._streams[stream.stream_id]
            self._compiling.stream_lost(stream.stream_id)
            self._engine.stream_lost(stream.stream_id)
            self.quotas.stream_lost(stream.stream_id)
            self._held.stream_lost(stream.stream_id)
            self._engine_loop.changed()
            self._guards.offer_all()
            log.debug("service gone", merged_steps=stream.num_merged)

    async def _read_hello(self, context: grpc.aio.ServicerContext[Any, Any]) -> engine_pb2.Hello:
        try:
            first = await asyncio.wait_for(context.read(), _HELLO_TIMEOUT_S)
        except TimeoutError:
            raise ended(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_TIMEOUT_S:g} s") from None
        if not isinstance(first, engine_pb2.ToEngine) or first.WhichOneof("message") != "hello":
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        if incoming.unknown_field(first) is not None:
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "hello has fields that protocol version 4 does not know")
        version = first.hello.protocol_version
        if version != PROTOCOL_VERSION:
            text = f"protocol_version is {version}; this backend speaks {PROTOCOL_VERSION}"
            raise ended(grpc.StatusCode.FAILED_PRECONDITION, text)
        if first.hello.request_layout != LAYOUT:
            text = f"request_layout is not {LAYOUT}: service and backend are of different versions of Headrace"
            raise ended(grpc.StatusCode.FAILED_PRECONDITION, text)
        return first.hello

    def _welcome(self) -> engine_pb2.FromEngine:
        welcome = engine_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            model=self._describe_model(),
            state=outgoing.write_state(self._health.state, self._engine.report_load()),
            engine=self._engine.steps.engine,
            unix_offset_ns=self._engine.steps.unix_offset_ns,
            log_ttl_ns=self._log_ttl_ns,
            shares_quotas=True,
        )
        return engine_pb2.FromEngine(welcome=welcome)

    async def _run_stream(self, stream: ServiceStream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Reads and writes until one of the two ends or the stream is to end.

        A half-closed stream is a lost one.
        """
        reader = asyncio.ensure_future(self._run_reader(stream, context))
        writer = asyncio.ensure_future(stream.run_writer(context.write))
        try:
            await asyncio.wait([reader, writer, stream.ending], return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                await stream.wait_idle(_FLUSH_S)
            for task in (stream.ending, reader):
                if task.done():
                    task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            # A cancelled write or read of a broken call ends with grpc's own errors; the call is
            # over either way.
            await asyncio.gather(reader, writer, return_exceptions=True)
            if not stream.ending.cancel():
                stream.ending.exception()  # retrieved, so that asyncio does not report it

    async def _run_reader(self, stream: ServiceStream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (received := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            if not isinstance(received, engine_pb2.ToEngine):
                raise ended(grpc.StatusCode.INVALID_ARGUMENT, "the message is no ToEngine")
            self._handle(stream, received)
            self._engine_loop.changed()

    def _handle(self, stream: ServiceStream, received: engine_pb2.ToEngine) -> None:
        kind = received.WhichOneof("message")
        handler = self._handlers.get(kind or "")
        if handler is None:
            text = "hello came twice" if kind == "hello" else "the message is empty or not known to protocol version 4"
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, text)
        if incoming.has_unknown_fields_beside(received):
            raise ended(
                grpc.StatusCode.INVALID_ARGUMENT, f"{kind} stands beside fields that protocol version 4 does not know"
            )
        question = getattr(received, kind)
        # What the engine released before this question comes before its answer.
        self._engine_loop.flush()
        self._answer(stream, kind or "", question, lambda: handler(stream, question))

    def _answer(self, stream: ServiceStream, kind: str, question: Any, act: Callable[[], None]) -> bool:
        """Does what was asked and says whether that was done.

        A refusal, or a mistake of ours, is answered.
        """
        try:
            act()
            return True
        except RequestRefused as refused:
            if self._teller is not None and kind == "add" and not refused.asks_others:
                self._teller.refused(refused.reason)
            ask_again_ns = refused.retry_after_ns or 0 if refused.asks_others else 0
            self._refuse(stream, question, refusal_status(refused), ask_again_ns)
        except StreamEnded:
            raise
        except Exception:
            error_id = new_error_id()
            request_id = getattr(question, "request_id", None)
            self._log.exception("question failed", error_id=error_id, question=kind, request_id=request_id)
            self._refuse(stream, question, internal_status(error_id))
        return False

    def _refuse(self, stream: ServiceStream, question: Any, status: Any, ask_again_ns: int = 0) -> None:
        handle, query_id = getattr(question, "handle", 0), getattr(question, "query_id", 0)
        refused = engine_pb2.Refused(handle=handle, query_id=query_id, status=status, ask_again_ns=ask_again_ns)
        stream.send(engine_pb2.FromEngine(refused=refused))

    # --- questions

    def _claim_handle(self, stream: ServiceStream, handle: int) -> Subscriber:
        if handle in stream.handles or self._compiling.claims(stream.stream_id, handle):
            raise RequestRefused.invalid([Violation("handle", f"{handle} is in use on this stream")])
        return Subscriber(stream.stream_id, handle)

    def _add(self, stream: ServiceStream, add: engine_pb2.AddRequest) -> None:
        received_ns = self._clock()
        request = incoming.read_add(add, received_ns)
        request.source = stream.stream_id
        if request.asked.structured_output is None or request.has_ended:
            request.grammar = behind_reasoning(request.asked.reasoning, None)
            self._enter(stream, add, request, received_ns)
            return
        if add.handle:
            self._claim_handle(stream, add.handle)
        enter = functools.partial(self._enter_compiled, stream, add, request, received_ns)
        self._compiling.start(stream.stream_id, add.handle, request, enter)

    def _enter_compiled(
        self,
        stream: ServiceStream,
        add: engine_pb2.AddRequest,
        request: EngineRequest,
        received_ns: int,
        compiled: Compiled,
    ) -> bool:
        """Enters a request whose form was compiled, or refuses it.

        One whose form was given up ends as soon as it is entered. Returns whether the engine has
        it.
        """

        def enter() -> None:
            form = None if compiled.cancelled() else compiled.result()
            request.grammar = behind_reasoning(request.asked.reasoning, form)
            self._enter(stream, add, request, received_ns)

        self._engine_loop.flush()
        entered = self._answer(stream, "add", add, enter)
        self._engine_loop.changed()
        return entered

    def _enter(
        self, stream: ServiceStream, add: engine_pb2.AddRequest, request: EngineRequest, received_ns: int
    ) -> None:
        if add.unasked_engines and not self._knows_key(add):
            self._held.check_unheld(add.unasked_engines, add.stands_in, received_ns)
        subscriber = self._claim_handle(stream, add.handle) if add.handle else None
        outcome = self._engine.add(request, subscriber)
        if self._teller is not None and not outcome.existing:
            self._teller.began(outcome.number, request.request_id, request.span)
        is_followed = subscriber is not None and not outcome.existing and not request.has_ended
        if subscriber is not None and is_followed:
            stream.handles.add(subscriber.handle)
        added = engine_pb2.Added(
            handle=add.handle,
            query_id=add.query_id,
            request_id=outcome.request_id,
            existing=outcome.existing,
            prompt_tokens=outcome.prompt_tokens,
        )
        stream.send(engine_pb2.FromEngine(added=added))
        if is_followed and request.detached:
            self._guards.offer_second(request, stream.stream_id)
        traced = {"trace_id": request.span.trace_id} if request.span is not None else {}
        self._log.debug(
            "request added", request_id=outcome.request_id, existing=outcome.existing, stream=stream.stream_id, **traced
        )

    def _abort(self, stream: ServiceStream, abort: engine_pb2.AbortRequest) -> None:
        cause = incoming.read_abort_cause(abort)

        def end() -> AbortOutcome:
            return self._engine.abort(abort.request_id, abort.tenant, cause)

        is_compiling = self._compiling.delay_abort(abort.request_id, abort.tenant, end)
        found, was_active = (True, True) if is_compiling else end()
        aborted = engine_pb2.Aborted(query_id=abort.query_id, found=found, was_active=was_active)
        stream.send(engine_pb2.FromEngine(aborted=aborted))
        self._log.debug("request aborted", request_id=abort.request_id, cause=cause.name, was_active=was_active)

    def _attach(self, stream: ServiceStream, attach: engine_pb2.AttachRequest) -> None:
        limits = incoming.read_attach_limits(attach)
        subscriber = self._claim_handle(stream, attach.handle)
        output_index = attach.output_index if attach.HasField("output_index") else None
        if attach.guards:
            snapshot = self._engine.guard(subscriber, attach.request_id, attach.tenant)
        else:
            snapshot = self._engine.attach(
                subscriber, attach.request_id, attach.tenant, output_index, attach.from_token, limits
            )
        if snapshot.done is None:
            stream.handles.add(attach.handle)
        limit = min(_MAX_ATTACHED_BYTES, self._max_message_bytes // 2)
        answers = log_replay.write_attached(attach.handle, snapshot, self._clock(), limit)
        stream.send_replay(answers, log_replay.snapshot_bytes(snapshot))
        self._log.debug("reader attached", request_id=attach.request_id, stream=stream.stream_id)

    def _detach(self, stream: ServiceStream, detach: engine_pb2.DetachRequest) -> None:
        if incoming.unknown_field(detach) is not None:
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "detach has fields that protocol version 4 does not know")
        leave = functools.partial(self._leave, stream, detach.handle)
        if not self._compiling.delay_detach(stream.stream_id, detach.handle, leave):
            leave()

    def _leave(self, stream: ServiceStream, handle: int) -> None:
        # A subscription may have ended while its detach was on the way.
        if handle in stream.handles:
            stream.handles.discard(handle)
            self._engine.detach(Subscriber(stream.stream_id, handle))

    def _list(self, stream: ServiceStream, query: engine_pb2.ListQuery) -> None:
        state = incoming.read_list_state(query)
        page = self._engine.list_requests(query.tenant, state, query.page_size, query.before)
        stream.send(outgoing.write_page(query.query_id, page))

    def _knows_key(self, add: engine_pb2.AddRequest) -> bool:
        return self._engine.find_key(add.tenant, add.idempotency_key, add.spec_digest) is not None

    def _find_key(self, stream: ServiceStream, query: engine_pb2.KeyQuery) -> None:
        incoming.check_key(query)
        found = self._engine.find_key(query.tenant, query.idempotency_key, query.spec_digest)
        if found is None:
            raise RequestRefused(RefusalCode.NOT_FOUND, "idempotency_key: not in use")
        added = engine_pb2.Added(
            query_id=query.query_id, request_id=found.request_id, existing=True, prompt_tokens=found.prompt_tokens
        )
        stream.send(engine_pb2.FromEngine(added=added))

    def _load(self, stream: ServiceStream, query: engine_pb2.LoadQuery) -> None:
        if incoming.unknown_field(query) is not None:
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "load has fields that protocol version 4 does not know")
        stream.send(outgoing.write_load(query.query_id, self._engine.load()))
