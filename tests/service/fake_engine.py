"""An engine without a model.

Serves engine.proto on a unix socket, and gives every request the tokens that a test's script says.

Keeps what the backend keeps as far as the service can see it: logs of requests for attach,
idempotency keys, cancellation. Time is the test's: a request gets a token when `step` is called, or
as fast as possible while `running` is set.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import msgspec
import numpy as np
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from tests.support.engine_requests import asked

from headrace_backend.engine.errors import RequestRefused, Violation
from headrace_backend.server.streams.held_engines import HeldEngines
from headrace_backend.server.streams.statuses import refusal_status
from headrace_facts import facts, step_records, token_steps
from headrace_protos.engine.v1 import engine_pb2, engine_pb2_grpc
from headrace_request.request import LAYOUT

ENGINE, UNIX_OFFSET_NS = "00112233aabbccdd", 1_000
_HEARTBEAT_S = 0.2
Script = Callable[[engine_pb2.AddRequest, int], Sequence[int]]


@dataclasses.dataclass
class Output:
    tokens: list[int]
    released: int = 0
    end: engine_pb2.OutputEnd | None = None


@dataclasses.dataclass
class Request:
    add: engine_pb2.AddRequest
    outputs: list[Output]
    added_ns: int
    sequence: int
    first_token_ns: int = 0
    ended_ns: int = 0
    started: bool = False
    # Connection, handle, and the one output wanted, if only one.
    readers: list[tuple[Connection, int, int | None]] = dataclasses.field(default_factory=list)
    guardian: Connection | None = None
    second: Connection | None = None

    def unguard(self, connection: Connection) -> None:
        """A guardian is gone; who is left is the first."""
        if connection in (self.guardian, self.second):
            self.guardian, self.second = self.second if self.guardian is connection else self.guardian, None

    @property
    def done(self) -> bool:
        return all(output.end is not None for output in self.outputs)

    def done_message(self) -> engine_pb2.RequestDone:
        first = self.first_token_ns or self.ended_ns
        trace = engine_trace(self) if self.add.HasField("recording") else b""
        return engine_pb2.RequestDone(
            engine_trace=trace,
            prompt_tokens=len(asked(self.add).prompt_token_ids) // 4,
            output_tokens=sum(output.released for output in self.outputs),
            queued_ns=self.add.service_ns + first - self.added_ns,
            decode_ns=self.ended_ns - first,
            ttft_ns=self.add.service_ns + first - self.added_ns if self.first_token_ns else 0,
            step_count=max(output.released for output in self.outputs),
            ended_ago_ns=time.monotonic_ns() - self.ended_ns,
        )


class Connection:
    def __init__(self, wants_step_records: bool, guards: bool) -> None:
        self.wants_step_records = wants_step_records
        self.guards = guards
        self.service_name = ""
        self.queue: asyncio.Queue[engine_pb2.FromEngine | None] = asyncio.Queue()

    def send(self, **message: Any) -> None:
        self.queue.put_nowait(engine_pb2.FromEngine(**message))


class FakeEngine(engine_pb2_grpc.EngineServiceServicer):
    """One engine; `model` and `script` are the test's."""

    def __init__(self, model: engine_pb2.EngineModel, script: Script) -> None:
        self.model = model
        self.script = script
        self.running = asyncio.Event()
        self.running.set()
        self.requests: dict[str, Request] = {}
        self.aborts: list[engine_pb2.AbortRequest] = []
        self.attaches: list[engine_pb2.AttachRequest] = []
        self.detached: list[int] = []
        self.key_queries: list[engine_pb2.KeyQuery] = []
        # What services hold, judged as a backend does.
        self.held = HeldEngines(time.monotonic_ns, quiet_ns=200_000_000)
        self.refusal: status_pb2.Status | None = None
        self.state = engine_pb2.EngineState(serving=True, reason="serving", stale_after_ns=60_000_000_000)
        # Names of services that can't reach it.
        self.shunned: set[str] = set()
        # Whether it tells its state again and again.
        self.beats = True
        self.logprobs = 0
        self.hold_tokens = 0
        # How many tokens of a prompt are reported at once.
        self.prompt_part_tokens = 3
        # Whether its requests are preempted, as while a worker is replaced.
        self.preempts = False
        self.step_id = 0
        # What it says of its load in place of the truth.
        self.other_load: Callable[[], engine_pb2.Load] = engine_pb2.Load
        # Whether it wants a second guardian for what is submitted.
        self.wants_seconds = False
        # Whether the end of an aborted request is kept to itself.
        self.silent_aborts = False
        self._connections: set[Connection] = set()
        self._sequence = itertools.count(1)
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""
        # Another one than before in its next life.
        self.life = ENGINE

    # -- life

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> None:
        self.address = address
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        if credentials is None:
            assert self._server.add_insecure_port(address)
        else:
            assert self._server.add_secure_port(address, credentials)
        await self._server.start()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.queue.put_nowait(None)
        if self._server is not None:
            await self._server.stop(0)

    def disconnect(self) -> None:
        """Ends all connections; the engine lives on."""
        for connection in self._connections:
            connection.queue.put_nowait(None)

    def shun(self, service_name: str) -> None:
        """Cuts one service off."""
        self.shunned.add(service_name)
        for connection in self._connections:
            if connection.service_name == service_name:
                connection.queue.put_nowait(None)

    # -- the protocol

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        hello = await context.read()
        assert (hello.hello.protocol_version, hello.hello.request_layout) == (4, LAYOUT)
        if hello.hello.service_name in self.shunned:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this test cuts it off")
        connection = Connection(hello.hello.wants_step_records, hello.hello.guards)
        connection.service_name = hello.hello.service_name
        self._connections.add(connection)
        connection.send(
            welcome=engine_pb2.Welcome(
                protocol_version=4,
                model=self.model,
                state=self.state,
                engine=self.life,
                unix_offset_ns=UNIX_OFFSET_NS,
                log_ttl_ns=600 * 10**9,
            )
        )
        writer = asyncio.create_task(self._write(connection, context))
        reader = asyncio.create_task(self._read(connection, context))
        try:
            await asyncio.wait([writer, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.cancel()
            reader.cancel()
            self._connections.discard(connection)
            self.held.stream_lost(id(connection))
            for request in self.requests.values():
                request.readers = [reader for reader in request.readers if reader[0] is not connection]
                request.unguard(connection)
                if not request.add.detached:
                    self._end_all(request, engine_pb2.OUTPUT_END_REASON_CANCELLED)
            self._offer_guards()

    def _offer_guards(self) -> None:
        guarding = [connection for connection in self._connections if connection.guards]
        adds = [r.add for r in self.requests.values() if r.add.detached and r.guardian is None and not r.done]
        owned = [engine_pb2.OwnedRequest(request_id=add.request_id, tenant=add.tenant) for add in adds]
        if guarding and owned:
            guarding[0].send(unguarded=engine_pb2.Unguarded(requests=owned))
        for request in self.requests.values():
            if request.guardian is not None:
                self._offer_second(request)

    def _offer_second(self, request: Request) -> None:
        """Offers a running request to all services; the one that has it hears of it too."""
        if not self.wants_seconds or not request.add.detached or request.second is not None or request.done:
            return
        owned = engine_pb2.OwnedRequest(request_id=request.add.request_id, tenant=request.add.tenant)
        for connection in self._connections:
            if connection.guards:
                connection.send(unguarded=engine_pb2.Unguarded(requests=[owned]))

    async def _write(self, connection: Connection, context: Any) -> None:
        while (message := await connection.queue.get()) is not None:
            await context.write(message)

    async def _read(self, connection: Connection, context: Any) -> None:
        while isinstance(message := await context.read(), engine_pb2.ToEngine):
            kind = message.WhichOneof("message")
            getattr(self, f"_on_{kind}")(connection, getattr(message, kind))

    def _on_add(self, connection: Connection, add: engine_pb2.AddRequest) -> None:
        known = next(
            (r for r in self.requests.values() if add.idempotency_key and r.add.idempotency_key == add.idempotency_key),
            None,
        )
        try:
            if known is None:
                self.held.check_unheld(add.unasked_engines, add.stands_in, time.monotonic_ns())
        except RequestRefused as refused:
            status = refusal_status(refused)
            connection.send(refused=engine_pb2.Refused(handle=add.handle, query_id=add.query_id, status=status))
            return
        if self.refusal is not None:
            connection.send(refused=engine_pb2.Refused(handle=add.handle, query_id=add.query_id, status=self.refusal))
            return
        if known is not None and known.add.spec_digest != add.spec_digest:
            status = status_pb2.Status(
                code=code_pb2.ALREADY_EXISTS, message="idempotency_key: in use for another request"
            )
            connection.send(refused=engine_pb2.Refused(handle=add.handle, query_id=add.query_id, status=status))
            return
        earlier = self.requests.get(add.request_id)
        if known is None and earlier is not None and not (add.emitted and earlier.done):
            status = status_pb2.Status(code=code_pb2.ALREADY_EXISTS, message="request_id: in use")
            connection.send(refused=engine_pb2.Refused(handle=add.handle, query_id=add.query_id, status=status))
            return
        request = known or self._new_request(connection, add)
        connection.send(
            added=engine_pb2.Added(
                handle=add.handle,
                query_id=add.query_id,
                request_id=request.add.request_id,
                existing=known is not None,
                prompt_tokens=len(asked(add).prompt_token_ids) // 4,
            )
        )
        if known is None:
            self._offer_second(request)

    def _new_request(self, connection: Connection, add: engine_pb2.AddRequest) -> Request:
        most, num_outputs = asked(add).stop.max_tokens, asked(add).n
        outputs = [Output(list(self.script(add, index))[:most]) for index in range(num_outputs)]
        for output, emitted in zip(outputs, add.emitted, strict=bool(add.emitted)):
            # A continuation goes on behind what the service had; this engine's answer begins alike.
            known = np.frombuffer(emitted.token_ids, "<u4").tolist()
            assert output.tokens[: len(known)] == known
            output.released = len(known)
            output.end = emitted.end if emitted.HasField("end") else None
        request = Request(add, outputs, time.monotonic_ns(), next(self._sequence))
        if request.done:
            request.ended_ns, request.started = request.added_ns, True
        elif add.handle:
            request.readers.append((connection, add.handle, None))
            request.guardian = connection if add.detached else None
        self.requests[add.request_id] = request
        return request

    def _on_find_key(self, connection: Connection, query: engine_pb2.KeyQuery) -> None:
        self.key_queries.append(query)
        known = next((r for r in self.requests.values() if r.add.idempotency_key == query.idempotency_key), None)
        if known is None:
            status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="idempotency_key: not in use")
            connection.send(refused=engine_pb2.Refused(query_id=query.query_id, status=status))
            return
        if known.add.spec_digest != query.spec_digest:
            status = status_pb2.Status(code=code_pb2.ALREADY_EXISTS, message="idempotency_key: in use")
            connection.send(refused=engine_pb2.Refused(query_id=query.query_id, status=status))
            return
        connection.send(
            added=engine_pb2.Added(
                query_id=query.query_id,
                request_id=known.add.request_id,
                existing=True,
                prompt_tokens=len(asked(known.add).prompt_token_ids) // 4,
            )
        )

    def _on_held_engines(self, connection: Connection, held: engine_pb2.HeldEngines) -> None:
        self.held.report(id(connection), held.reached, held.guarded)

    def _on_abort(self, connection: Connection, abort: engine_pb2.AbortRequest) -> None:
        self.aborts.append(abort)
        request = self.requests.get(abort.request_id)
        active = request is not None and not request.done
        if request is not None and active and not self.silent_aborts:
            by_deadline = abort.cause == engine_pb2.ABORT_CAUSE_DEADLINE
            self._end_all(
                request,
                engine_pb2.OUTPUT_END_REASON_DEADLINE if by_deadline else engine_pb2.OUTPUT_END_REASON_CANCELLED,
            )
        connection.send(
            aborted=engine_pb2.Aborted(query_id=abort.query_id, found=request is not None, was_active=active)
        )

    def _on_attach(self, connection: Connection, attach: engine_pb2.AttachRequest) -> None:
        self.attaches.append(attach)
        request = self.requests.get(attach.request_id)
        if request is None:
            status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="request is not known, or its log has expired")
            connection.send(refused=engine_pb2.Refused(handle=attach.handle, status=status))
            return
        attached = engine_pb2.Attached(
            handle=attach.handle,
            service_state=request.add.service_state,
            prompt_tokens=len(asked(request.add).prompt_token_ids) // 4,
            started=request.started,
        )
        if attach.guards:
            if request.guardian is None:
                request.guardian = connection
            elif self.wants_seconds and request.second is None and request.guardian is not connection:
                request.second, attached.second_guardian = connection, True
            else:
                status = status_pb2.Status(code=code_pb2.ALREADY_EXISTS, message="guards: it has its guardians")
                connection.send(refused=engine_pb2.Refused(handle=attach.handle, status=status))
                return
            attached.request.CopyFrom(request.add)
            for field in ("handle", "emitted", "earlier", "unasked_engines", "stands_in"):
                attached.request.ClearField(field)
        if request.started:
            attached.prompt_logprobs.extend(prompt_parts(request.add, self.prompt_part_tokens))
        for index, output in enumerate(request.outputs):
            if attach.HasField("output_index") and attach.output_index != index:
                continue
            if attach.from_token > output.released:
                status = status_pb2.Status(
                    code=code_pb2.OUT_OF_RANGE, message=f"from_token: the output has {output.released} tokens"
                )
                connection.send(refused=engine_pb2.Refused(handle=attach.handle, status=status))
                return
            log = attached.outputs.add(output_index=index, token_ids=_u32(output.tokens[: output.released]))
            if asked(request.add).num_logprobs >= 0:
                log.logprobs.CopyFrom(self._logprobs_of(output.tokens[: output.released]))
            if output.end is not None:
                log.end.CopyFrom(output.end)
        if request.done:
            attached.done.CopyFrom(request.done_message())
        else:
            request.readers.append(
                (connection, attach.handle, attach.output_index if attach.HasField("output_index") else None)
            )
        connection.send(attached=attached)

    def _on_detach(self, connection: Connection, detach: engine_pb2.DetachRequest) -> None:
        self.detached.append(detach.handle)
        for request in self.requests.values():
            request.readers = [reader for reader in request.readers if reader[:2] != (connection, detach.handle)]

    def _on_list(self, connection: Connection, query: engine_pb2.ListQuery) -> None:
        newest_first = sorted(self.requests.values(), key=lambda request: -request.sequence)
        rows = [request for request in newest_first if not query.before or request.sequence < query.before]
        page = rows[: query.page_size]
        listing = engine_pb2.RequestList(
            query_id=query.query_id, next_before=page[-1].sequence if len(rows) > len(page) else 0
        )
        for request in page:
            listing.rows.add(
                request_id=request.add.request_id,
                state=3 if request.done else 2,
                created_at_ns=1_700_000_000_000_000_000,
                output_tokens=sum(output.released for output in request.outputs),
                finish_reasons=[output.end.reason for output in request.outputs if output.end is not None],
                detached=request.add.detached,
                sequence_number=request.sequence,
            )
        connection.send(list=listing)

    def _on_load(self, connection: Connection, query: engine_pb2.LoadQuery) -> None:
        active = sum(not request.done for request in self.requests.values())
        load = engine_pb2.Load(
            query_id=query.query_id,
            running_sequences=0 if self.preempts else active,
            active_requests=active,
            kv_blocks=64,
            max_waiting_requests=8,
            max_running_sequences=8,
            taken_requests=len(self.requests),
        )
        load.MergeFrom(self.other_load())
        connection.send(load=load)

    # -- steps

    async def _run(self) -> None:
        while True:
            await self.running.wait()
            self.step()
            await asyncio.sleep(0.001)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if self.beats:
                self.send_state()

    def send_state(self) -> None:
        for connection in self._connections:
            connection.send(state=self.state)

    def resume(self, pause_ns: int) -> None:
        for request in self.requests.values():
            self._tell(request, resumed=engine_pb2.RequestResumed(pause_ns=pause_ns))

    def step(self) -> None:
        """One token for every unfinished output; all of a connection's in one StepOutputs."""
        steps: dict[int, tuple[Connection, list[tuple[int, int, int]], list[engine_pb2.RequestEvent]]] = {}
        for request in list(self.requests.values()):
            if request.done:
                continue
            rows, events = self._advance(request)
            for connection, handle, only in request.readers:
                _, all_rows, all_events = steps.setdefault(id(connection), (connection, [], []))
                all_rows.extend((handle, index, token) for index, token in rows if only in (None, index))
                for event in events:
                    if event.HasField("output_end") and only not in (None, event.output_end.output_index):
                        continue
                    all_events.append(engine_pb2.RequestEvent())
                    all_events[-1].CopyFrom(event)
                    all_events[-1].handle = handle
        self.step_id += 1
        record = np.zeros(1, step_records.RECORD)
        record["step_id"] = self.step_id
        for connection, rows, events in steps.values():
            message = self._step_message(rows, events)
            message.step_records = record.tobytes() if connection.wants_step_records else b""
            connection.send(step=message)

    def _advance(self, request: Request) -> tuple[list[tuple[int, int]], list[engine_pb2.RequestEvent]]:
        rows: list[tuple[int, int]] = []
        events: list[engine_pb2.RequestEvent] = []
        if not request.started:
            request.started = True
            events.append(engine_pb2.RequestEvent(started=engine_pb2.RequestStarted(cached_tokens=3)))
            events += [
                engine_pb2.RequestEvent(prompt_logprobs=part)
                for part in prompt_parts(request.add, self.prompt_part_tokens)
            ]
        request.first_token_ns = request.first_token_ns or time.monotonic_ns()
        for index, output in enumerate(request.outputs):
            if output.end is not None:
                continue
            if output.released < len(output.tokens):
                rows.append((index, output.tokens[output.released]))
                output.released += 1
            # The last tokens before an end may be held back, as the engine does for a possible stop
            # string.
            if output.released >= len(output.tokens) - self.hold_tokens:
                rows += [(index, token) for token in output.tokens[output.released :]]
                output.released = len(output.tokens)
                output.end = self._natural_end(request.add, index, output)
                events.append(engine_pb2.RequestEvent(output_end=output.end))
        if request.done:
            request.ended_ns = time.monotonic_ns()
            events.append(engine_pb2.RequestEvent(done=request.done_message()))
        return rows, events

    def _natural_end(self, add: engine_pb2.AddRequest, index: int, output: Output) -> engine_pb2.OutputEnd:
        stops = np.frombuffer(asked(add).stop.token_ids, "<u4").tolist()
        if output.tokens and output.tokens[-1] in stops:
            return engine_pb2.OutputEnd(
                output_index=index, reason=engine_pb2.OUTPUT_END_REASON_STOP, stop_token_id=output.tokens[-1]
            )
        if asked(add).stop.strings:
            trim = len(asked(add).stop.strings[0])
            return engine_pb2.OutputEnd(
                output_index=index, reason=engine_pb2.OUTPUT_END_REASON_STOP, stop_string_index=0, trim_bytes=trim
            )
        return engine_pb2.OutputEnd(output_index=index, reason=engine_pb2.OUTPUT_END_REASON_LENGTH)

    def _step_message(
        self, rows: list[tuple[int, int, int]], events: list[engine_pb2.RequestEvent]
    ) -> engine_pb2.StepOutputs:
        step = engine_pb2.StepOutputs(
            handles=_u32([row[0] for row in rows]),
            output_indices=np.array([row[1] for row in rows], "<u2").tobytes(),
            tokens=_u32([row[2] for row in rows]),
            events=events,
        )
        wanting = [row for row, (handle, _, _) in enumerate(rows) if self._wants_logprobs(handle)]
        if wanting:
            step.logprob_rows = _u32(wanting)
            step.logprobs.CopyFrom(self._logprobs_of([rows[row][2] for row in wanting]))
        return step

    def _logprobs_of(self, tokens: Sequence[int]) -> engine_pb2.LogprobColumns:
        tops = self.logprobs
        return engine_pb2.LogprobColumns(
            sampled=np.array([-float(token) for token in tokens], "<f4").tobytes(),
            ranks=_u32([1] * len(tokens)),
            top_counts=np.array([tops] * len(tokens), "<u2").tobytes(),
            top_token_ids=_u32([token + top for token in tokens for top in range(tops)]),
            top_logprobs=np.array([-float(token) - top for token in tokens for top in range(tops)], "<f4").tobytes(),
        )

    def _wants_logprobs(self, handle: int) -> bool:
        return any(
            asked(r.add).num_logprobs >= 0 for r in self.requests.values() for _, h, _ in r.readers if h == handle
        )

    def end_with_error(self, request_id: str, message: str, code: int = code_pb2.INTERNAL) -> None:
        error = status_pb2.Status(code=code, message=message)
        self._end_all(self.requests[request_id], engine_pb2.OUTPUT_END_REASON_ERROR, error)

    def end_unmet(self, request_id: str, field: str, rule: str) -> None:
        """Ends a request that turned out to break a rule."""
        error = refusal_status(RequestRefused.invalid([Violation(field, rule)]))
        self._end_all(self.requests[request_id], engine_pb2.OUTPUT_END_REASON_ERROR, error)

    def _end_all(self, request: Request, reason: Any, error: status_pb2.Status | None = None) -> None:
        ended = []
        for index, output in enumerate(request.outputs):
            if output.end is None:
                output.end = engine_pb2.OutputEnd(output_index=index, reason=reason, error=error)
                ended.append(output.end)
        if ended:
            request.ended_ns = time.monotonic_ns()
            for end in ended:
                self._tell(request, output_end=end)
            self._tell(request, done=request.done_message())

    def expire(self, request_id: str) -> None:
        self._end_all(self.requests[request_id], engine_pb2.OUTPUT_END_REASON_DEADLINE)

    def _tell(self, request: Request, **event: Any) -> None:
        for connection, handle, _ in request.readers:
            connection.send(step=engine_pb2.StepOutputs(events=[engine_pb2.RequestEvent(handle=handle, **event)]))


def engine_trace(request: Request) -> bytes:
    """Returns what the engine notes of a recorded request: token n is of step n."""
    added, first, ended = request.added_ns, request.first_token_ns or request.ended_ns, request.ended_ns
    trace = facts.EngineTrace(
        engine=ENGINE,
        number=request.sequence,
        unix_offset_ns=UNIX_OFFSET_NS,
        phases=[facts.PhaseSpan("queued", added, first), facts.PhaseSpan("decode", first, ended)],
        chunks=b"",
        token_steps=[token_steps.of_runs([(0, 1)], output.released) for output in request.outputs],
    )
    return msgspec.msgpack.encode(trace)


def prompt_parts(add: engine_pb2.AddRequest, part_tokens: int = 3) -> list[engine_pb2.PromptLogprobColumns]:
    """What the engine reports about a prompt.

    For each token after the first its own id as rank, and as log probability its negative.
    """
    parts, tops = [], asked(add).num_prompt_logprobs
    if tops < 0:
        return []
    prompt = np.frombuffer(asked(add).prompt_token_ids, "<u4").tolist()
    for first in range(1, len(prompt), part_tokens):
        ids = prompt[first : first + part_tokens]
        columns = engine_pb2.LogprobColumns(
            sampled=(-np.array(ids, "<f4")).tobytes(),
            ranks=_u32(ids),
            top_counts=np.array([tops] * len(ids), "<u2").tobytes(),
            top_token_ids=_u32([token + top for token in ids for top in range(tops)]),
            top_logprobs=np.array([-float(token) - top for token in ids for top in range(tops)], "<f4").tobytes(),
        )
        parts.append(engine_pb2.PromptLogprobColumns(first_token_index=first, columns=columns))
    return parts


def queue_full(retry_after_s: int) -> status_pb2.Status:
    """What the engine refuses with when its queue is full."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=retry_after_s)))
    return status_pb2.Status(
        code=code_pb2.RESOURCE_EXHAUSTED, message="the queue is full: 8 requests wait", details=[detail]
    )


def _u32(values: Sequence[int]) -> bytes:
    return np.array(values, "<u4").tobytes()
