"""ModelStreamInfer: many requests of one caller on one stream, their responses told apart by id.

Owns what is on such a stream (its frame is `SharedCall`): a task for each request, and one writer
for all responses. The engine's side marks generations that have news (`GenerationStream.listener`);
since a step is dealt out without a pause, the writer finds all of it together. Responses of models
that give one each keep the order of their requests. A request that fails is answered in its place,
and the stream goes on, unless the caller asked for a status. Dropping the call cancels what runs on
it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import AsyncIterator

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service import errors
from headrace_service.calls import failures
from headrace_service.calls.call import Call
from headrace_service.calls.shared_call import SharedCall
from headrace_service.kserve.accounting import Account
from headrace_service.kserve.handlers.infer_handlers import Inference
from headrace_service.kserve.language_models.language_model import check_ended
from headrace_service.kserve.messages import refusals, responses
from headrace_service.kserve.messages.generation_wire import GenerationWire
from headrace_service.messages.parsing import Unparsed
from headrace_service.service_core import ServiceCore
from headrace_service.streams.generation_stream import GenerationStream

_CAP_FACTOR = 64
_MAX_REQUESTS = 4096
# Responses that may wait for the caller before no more requests are read.
_MAX_WAITING = 1024
_Requests = AsyncIterator[Unparsed[pb.ModelInferRequest]]


class StreamHandlers:
    """Handler of the RPC ModelStreamInfer."""

    def __init__(self, core: ServiceCore, inference: Inference) -> None:
        self._core = core
        self._inference = inference

    async def stream_infer(self, requests: _Requests, call: Call) -> None:
        """Serves one stream until its caller and its requests are done, or the call ends."""
        stream = _InferStream(self._inference, call)
        self._core.delivering.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._core.delivering.discard(stream)


class _Followed:
    """A generation whose responses are being sent.

    One that no message can hold is the failure of its request, not of the stream.
    """

    __slots__ = ("_marked", "_owner", "account", "ended", "final", "stream", "wire")

    def __init__(self, owner: _InferStream, stream: GenerationStream, wire: GenerationWire, account: Account) -> None:
        self.stream = stream
        self.wire = wire
        self.account = account
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whether what `take` returned was the last.
        self.final = False
        self._owner = owner
        self._marked = False

    def note(self, stream: GenerationStream) -> None:
        """Called on news; a generation waits for the writer once, however much comes."""
        if not self._marked:
            self._marked = True
            self._owner.add_news(self)

    def take(self) -> bytes | None:
        """Returns the next response of what is new.

        A generation that failed gives none, and ends.
        """
        self._marked = False
        if self.final or self.ended.done():
            return None
        try:
            return self._next()
        except Exception as error:
            # A mistake of ours about this generation is no reason to end the others.
            self.ended.set_exception(failures.unexpected(error))
            return None

    def _next(self) -> bytes | None:
        stream, wire = self.stream, self.wire
        stream.take()
        if stream.failure is not None or wire.error is not None:
            self._fail()
            return None
        is_done = stream.done is not None
        message, more = wire.take(is_done)
        if message is not None and len(message) > self._owner.max_bytes:
            self._fail(message)
            return None
        if more:
            self.note(stream)
        self.final = is_done and not more
        return message

    def _fail(self, message: bytes = b"") -> None:
        """Ends the generation by its early failure, or by a response that is too large."""
        try:
            check_ended(self.stream, self.wire)
            self._owner.check_size(message)
        except errors.ServiceError as reason:
            self.ended.set_exception(reason)

    def sent(self) -> None:
        """Ends the generation if what was sent was the last."""
        if self.final and not self.ended.done():
            self.ended.set_result(None)


class _Request:
    """One request: the `Responder` of its model."""

    __slots__ = ("_account", "_before", "_owner")

    def __init__(self, owner: _InferStream, account: Account, before: asyncio.Event | None) -> None:
        self._owner = owner
        self._account = account
        # Set when the request before this one was answered, if the order counts.
        self._before = before

    async def send(self, response: bytes) -> None:
        """Sends one response, serialized."""
        message = responses.in_stream(response)
        self._owner.check_size(message)
        await _turn(self._before)
        await self._owner.send(message, self._account)

    async def follow(self, stream: GenerationStream, wire: GenerationWire) -> None:
        """Sends the responses of a generation until it has ended."""
        await self._owner.follow(stream, wire, self._account)


class _InferStream(SharedCall[pb.ModelInferRequest]):
    """A call of ModelStreamInfer: its requests, and the writer of their responses."""

    def __init__(self, inference: Inference, call: Call) -> None:
        super().__init__(call, _CAP_FACTOR)
        self._inference = inference
        self.max_bytes, self.check_size = inference.max_bytes, inference.check_size
        self._errors_are_status = _wants_status(call)
        self._tasks: set[asyncio.Task[None]] = set()
        self._live_ids: set[str] = set()
        self._followed: set[_Followed] = set()
        # Generations with news, in the order in which it came.
        self._news: collections.deque[_Followed] = collections.deque()
        self._out: collections.deque[tuple[bytes, Account | None, asyncio.Future[None] | None]] = collections.deque()
        self._last_in_order: asyncio.Event | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def pending_bytes(self) -> int:
        """Memory that undelivered tokens and responses take."""
        tokens = sum(followed.stream.pending_bytes + followed.wire.num_cut_bytes for followed in self._followed)
        return tokens + sum(len(message) for message, _, _ in self._out)

    def is_full(self) -> bool:
        """Returns whether nothing more is to be read before `has_room` is set."""
        return len(self._out) > _MAX_WAITING or len(self._tasks) >= _MAX_REQUESTS

    def note_failure(self, failure: errors.ServiceError) -> None:
        """Passes what the call ends with to the generations that have not ended."""
        for followed in self._followed:
            followed.stream.note_failure(failure)

    def give_up(self) -> list[asyncio.Task[None]]:
        """Gives up what still runs, at the end of the call.

        Returns tasks that are then waited for.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def wake(self) -> None:
        """Has the writer look again."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    # -- requests

    def take(self, message: pb.ModelInferRequest) -> None:
        """Takes one message of the caller."""
        call = dataclasses.replace(self.call, arrival_ns=time.monotonic_ns())
        if message.id and message.id in self._live_ids:
            self._fail(message.id, refusals.invalid(f"id: {errors.echo(message.id)} names a live request", "id"))
            return
        self._live_ids.add(message.id)
        # Models that give one response each keep the order of their requests; the others have no
        # place in it.
        before, finished = self._last_in_order, asyncio.Event()
        if self._inference.is_decoupled(message, call):
            before = None
        else:
            self._last_in_order = finished
        task = asyncio.create_task(self._answer(message, call, before, finished))
        self._tasks.add(task)

    async def _answer(
        self, message: pb.ModelInferRequest, call: Call, before: asyncio.Event | None, finished: asyncio.Event
    ) -> None:
        try:
            with self._inference.request(message, call) as (model, request, account):
                await model.respond(request, call, account, _Request(self, account, before))
        except errors.ServiceError as error:
            await _turn(before)
            self._fail(message.id, error)
        except Exception as error:
            self._fail(message.id, failures.unexpected(error))
        finally:
            finished.set()
            self._live_ids.discard(message.id)
            task = asyncio.current_task()
            assert task is not None
            self._tasks.discard(task)
            self.has_room.set()
            self.wake()

    def _fail(self, request_id: str, error: errors.ServiceError) -> None:
        """Answers a request that failed."""
        if self._errors_are_status:
            self.failure = self.failure or error
        else:
            self._out.append((responses.failure(request_id, error.message), None, None))
        self.wake()

    # -- responses

    async def send(self, message: bytes, account: Account) -> None:
        """Writes one response of a request; returns when the connection has taken it."""
        sent = asyncio.get_running_loop().create_future()
        self._out.append((message, account, sent))
        self.wake()
        await sent

    async def follow(self, stream: GenerationStream, wire: GenerationWire, account: Account) -> None:
        """Writes the responses of a generation.

        Returns when its last one was taken, and raises what ended it before its time.
        """
        followed = _Followed(self, stream, wire, account)
        self._followed.add(followed)
        stream.listener = followed.note
        followed.note(stream)
        try:
            await followed.ended
        finally:
            stream.listener = None
            self._followed.discard(followed)
            followed.ended.cancel()

    def add_news(self, followed: _Followed) -> None:
        """Has the writer look at a generation."""
        self._news.append(followed)
        self.wake()

    async def write_until_over(self) -> None:
        """Writes until the caller has closed its side and all has ended.

        Flat, because every response passes here.
        """
        write, news, out = self.call.context.write, self._news, self._out
        while self.failure is None:
            if out:
                await self._write_one(*out.popleft())
            elif news:
                followed = news.popleft()
                message = followed.take()
                if message is not None:
                    ready_ns = self.writing_since_ns = time.monotonic_ns()
                    await write(message)
                    self.writing_since_ns = 0
                    followed.account.responded(ready_ns)
                    if followed.stream.at_edge:
                        followed.stream.tokens_left(time.monotonic_ns())
                    if followed.stream.recording is not None:
                        followed.stream.recording.wrote_all(ready_ns, time.monotonic_ns())
                followed.sent()
            elif self.closed_by_caller and not self._tasks:
                return
            else:
                self.over_cap_since_ns = 0
                self.has_room.set()
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        raise self.failure

    async def _write_one(self, message: bytes, account: Account | None, sent: asyncio.Future[None] | None) -> None:
        ready_ns = self.writing_since_ns = time.monotonic_ns()
        await self.call.context.write(message)
        self.writing_since_ns = 0
        if account is not None:
            account.responded(ready_ns)
        if sent is not None and not sent.done():
            sent.set_result(None)
        self.has_room.set()


async def _turn(before: asyncio.Event | None) -> None:
    if before is not None:
        await before.wait()


def _wants_status(call: Call) -> bool:
    """Whether the caller wants failures of requests as the status of the whole call."""
    metadata = call.context.invocation_metadata() or ()
    return any(key == "triton_grpc_error" and value == "true" for key, value in metadata)
