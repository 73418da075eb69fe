"""A backend process and one stream to it, for benchmarks without the text service in front.

Owns the conversation: requests as token ids in, columns of `StepOutputs` into a `TokenLog`. Per
message it does no work that grows with the tokens, so that it stays out of the way of the engine
that it measures. Does not own the process (`backend_process`), workloads or figures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from benchmarks.backend_process import PROGRAM, BackendProcess, backend_process
from benchmarks.token_log import Logprobs, Seconds, TokenLog, Tokens
from headrace_protos.engine.v1 import engine_pb2, engine_pb2_grpc
from headrace_request.request import LAYOUT, Request
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop
from headrace_request.structured_output import StructuredOutput

_PROGRESS_S = 0.1
_GREEDY = Sampling(temperature=0.0)


class Answer:
    """What one request brought back, and when (perf_counter seconds)."""

    def __init__(self, log: TokenLog, handle: int, request_id: str) -> None:
        """Nothing has come yet."""
        self._log = log
        self._handle = handle
        self.request_id = request_id
        # How its outputs ended, in the order in which they did.
        self.ends: list[engine_pb2.OutputEnd] = []
        self.start_s = time.perf_counter()
        self.done: engine_pb2.RequestDone | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        ids: list[int] = self._log.of(self._handle)[0].tolist()
        return ids

    def outputs(self, num_outputs: int) -> list[Tokens]:
        """The tokens of each of its outputs.

        Raises ValueError for a token of one that there is not.
        """
        return self._log.outputs_of(self._handle, num_outputs)

    @property
    def logprobs(self) -> Logprobs:
        """Log probabilities of its tokens; none where none were asked for."""
        return self._log.logprobs_of(self._handle)

    @property
    def arrivals_array(self) -> Seconds:
        """[tokens] when each of them arrived."""
        return self._log.of(self._handle)[1]

    @property
    def arrivals_s(self) -> list[float]:
        """When each of them arrived."""
        times: list[float] = self.arrivals_array.tolist()
        return times

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.arrivals_s[0] - self.start_s


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A request that is ready to be sent: its encoding is no part of a measurement."""

    token_ids: bytes
    num_tokens: int
    max_tokens: int
    # Requests with different salts find nothing of each other in the prefix cache.
    salt: bytes = b""
    stop_ids: bytes = b""
    # None: greedy.
    sampling: Sampling | None = None
    min_tokens: int = 0
    # Outputs.
    n: int = 1
    # Most likely tokens to report beside each sampled one; None: no log probabilities.
    logprobs: int | None = None
    priority: int = 0
    # Form of the answer; None: any tokens.
    structured_output: StructuredOutput | None = None
    # Most drafts of a step; 0: none, and no token that a form leaves no choice about is skipped.
    max_drafts: int = -1

    @classmethod
    def of(cls, prompt: Sequence[int], max_tokens: int, salt: bytes = b"", stop_ids: Sequence[int] = ()) -> Prompt:
        """Packs the ids."""
        packed = np.asarray(prompt, "<u4").tobytes()
        return cls(packed, len(prompt), max_tokens, salt, np.asarray(stop_ids, "<u4").tobytes())


class EngineSession:
    """Sends requests as token ids and collects their tokens. One reader task deals all answers."""

    def __init__(self, stream: Any, process: BackendProcess) -> None:
        self._stream = stream
        self.process = process
        # A grpc.aio call takes one write at a time.
        self._writing = asyncio.Lock()
        self._log = TokenLog()
        self._answers: dict[int, Answer] = {}
        # Questions without their answers, by query id.
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._next = 1
        self._run = f"{time.time_ns():x}"
        self._model: engine_pb2.EngineModel | None = None

    @property
    def model(self) -> engine_pb2.EngineModel:
        """What the engine serves."""
        assert self._model is not None, "not greeted yet"
        return self._model

    async def _write(self, message: engine_pb2.ToEngine) -> None:
        async with self._writing:
            await self._stream.write(message)

    async def read(self) -> None:
        """Deals messages until the stream ends.

        Whoever waits for a message that will not come gets the reason.
        """
        try:
            while isinstance(message := await self._stream.read(), engine_pb2.FromEngine):
                self._take(message)
            raise RuntimeError(f"the backend ended its stream: {self.process.log_tail()}")
        except Exception as error:
            unanswered: list[asyncio.Future[Any]] = [*self._asked.values()]
            unanswered += [answer.finished for answer in self._answers.values()]
            for waiting in unanswered:
                if not waiting.done():
                    waiting.set_exception(error)
            raise

    def _take(self, message: engine_pb2.FromEngine) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            self._deal(message.step)
        elif kind == "load":
            self._reply(message.load)
        elif kind == "aborted":
            self._reply(message.aborted)
        elif kind == "refused":
            raise RuntimeError(f"refused: {message.refused.status}")

    def _reply(self, message: engine_pb2.Load | engine_pb2.Aborted) -> None:
        """To who asked; they may have been cancelled meanwhile."""
        asked = self._asked.pop(message.query_id)
        if not asked.done():
            asked.set_result(message)

    def _deal(self, step: engine_pb2.StepOutputs) -> None:
        self._log.append(time.perf_counter(), step.handles, step.tokens, step.output_indices)
        if step.logprob_rows:
            columns = step.logprobs
            values = columns.sampled, columns.ranks, columns.top_counts
            self._log.append_logprobs(step.handles, step.logprob_rows, *values)
        for event in step.events:
            self._note(event)

    def _note(self, event: engine_pb2.RequestEvent) -> None:
        kind = event.WhichOneof("event")
        answer = self._answers.get(event.handle)
        if answer is None:
            raise RuntimeError(f"{kind} of request {event.handle}, which has ended or never was")
        if kind == "output_end":
            answer.ends.append(event.output_end)
        elif kind == "done":
            del self._answers[event.handle]
            answer.done = event.done
            # Who waited may have been cancelled meanwhile, and the future with them.
            if not answer.finished.done():
                answer.finished.set_result(None)

    async def hello(self) -> None:
        """Opens the conversation and waits until the engine serves; then `model` says what."""
        hello = engine_pb2.Hello(protocol_version=4, service_name="benchmark", request_layout=LAYOUT)
        await self._stream.write(engine_pb2.ToEngine(hello=hello))
        while self._model is None:
            message = await self._stream.read()
            if not isinstance(message, engine_pb2.FromEngine):
                raise RuntimeError(f"the backend ended while it started: {self.process.log_tail()}")
            if message.WhichOneof("message") == "welcome" and message.welcome.model.kv_blocks:
                self._model = message.welcome.model

    async def send(self, prompt: Prompt) -> Answer:
        """Sends a request of `max_tokens` tokens per output.

        It ends earlier where one of its stop ids comes.

        Returns when it is written.
        """
        handle, self._next = self._next, self._next + 1
        answer = self._answers[handle] = Answer(self._log, handle, f"bench-{self._run}-{handle}")
        request = Request(
            prompt_token_ids=prompt.token_ids,
            sampling=prompt.sampling or _GREEDY,
            stop=Stop(prompt.max_tokens, prompt.min_tokens, token_ids=prompt.stop_ids),
            n=prompt.n,
            num_logprobs=-1 if prompt.logprobs is None else prompt.logprobs,
            priority=prompt.priority,
            cache_salt=prompt.salt,
            max_drafts=prompt.max_drafts,
            structured_output=prompt.structured_output,
        )
        add = engine_pb2.AddRequest(
            handle=handle, request_id=answer.request_id, request=request.encode(), spec_digest=bytes(32)
        )
        await self._write(engine_pb2.ToEngine(add=add))
        return answer

    async def ask(self, prompt: Prompt) -> Answer:
        """Sends a request and returns when it has ended."""
        answer = await self.send(prompt)
        await answer.finished
        return answer

    async def generate(self, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> Answer:
        """`ask` with ids that are not packed yet."""
        return await self.ask(Prompt.of(prompt, max_tokens, stop_ids=stop_ids))

    async def load(self) -> engine_pb2.Load:
        """The backend's counters now."""
        query, future = self._question()
        await self._write(engine_pb2.ToEngine(load=engine_pb2.LoadQuery(query_id=query)))
        load: engine_pb2.Load = await future
        return load

    async def abort(self, answer: Answer, cause: engine_pb2.AbortCause) -> engine_pb2.Aborted:
        """Asks for a request's end; the answer says whether there was anything left to end."""
        query, future = self._question()
        abort = engine_pb2.AbortRequest(query_id=query, request_id=answer.request_id, cause=cause)
        await self._write(engine_pb2.ToEngine(abort=abort))
        aborted: engine_pb2.Aborted = await future
        return aborted

    def _question(self) -> tuple[int, asyncio.Future[Any]]:
        query, self._next = self._next, self._next + 1
        future = self._asked[query] = asyncio.get_running_loop().create_future()
        return query, future


async def _while_it_lives(process: BackendProcess, step: Any, deadline_s: float) -> None:
    """Waits for a step of the start; the backend's end, or the deadline, ends the waiting."""
    task = asyncio.ensure_future(step)
    while not task.done():
        if process.exit_code is not None or time.monotonic() > deadline_s:
            task.cancel()
            raise _did_not_start(process)
        await asyncio.wait([task], timeout=_PROGRESS_S)
    try:
        await task
    except grpc.aio.AioRpcError as error:
        # A backend that ends refuses calls before it has said why it does.
        while process.exit_code is None and time.monotonic() < deadline_s:
            await asyncio.sleep(_PROGRESS_S)
        raise _did_not_start(process) from error


def _did_not_start(process: BackendProcess) -> RuntimeError:
    return RuntimeError(f"the backend did not start (exit code {process.exit_code}): {process.log_tail()}")


@asynccontextmanager
async def engine_session(
    engine: dict[str, Any],
    timeout_s: float = 120.0,
    telemetry_socket: str = "",
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[EngineSession]:
    """Starts a backend with these EngineConfig fields, yields a session, and stops the backend."""
    with backend_process(engine, telemetry_socket, program) as process:
        deadline_s = time.monotonic() + timeout_s
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
        async with grpc.aio.insecure_channel(process.address, options=options) as channel:
            await _while_it_lives(process, channel.channel_ready(), deadline_s)
            session = EngineSession(engine_pb2_grpc.EngineServiceStub(channel).Connect(), process)
            await _while_it_lives(process, session.hello(), deadline_s)
            reader = asyncio.create_task(session.read())
            try:
                yield session
            finally:
                reader.cancel()
                await asyncio.wait([reader])
