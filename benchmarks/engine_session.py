"""A backend process and one stream to it, for benchmarks that measure the engine without the text service in front.

Owns starting and stopping the process, and turning `StepOutputs` columns into per-request arrival times. Does not own workloads or figures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from headrace_protos.engine.v1 import engine_pb2, engine_pb2_grpc


@dataclasses.dataclass(slots=True)
class Answer:
    """What one request brought back, and when (perf_counter seconds)."""

    start_s: float
    token_ids: list[int] = dataclasses.field(default_factory=list)
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    done: engine_pb2.RequestDone | None = None
    finished: asyncio.Future[None] = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.arrivals_s[0] - self.start_s


class EngineSession:
    """Sends requests as token ids and collects their tokens. One reader task deals all answers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # A grpc.aio call takes one write at a time.
        self._writing = asyncio.Lock()
        self._answers: dict[int, Answer] = {}
        self._loads: dict[int, asyncio.Future[engine_pb2.Load]] = {}
        self._next = 1
        self._run = f"{time.time_ns():x}"
        self.model: engine_pb2.EngineModel | None = None

    async def _write(self, message: engine_pb2.ToEngine) -> None:
        async with self._writing:
            await self._stream.write(message)

    async def read(self) -> None:
        """Deals messages until the stream ends; whoever waits for one that will not come is told why."""
        try:
            while isinstance(message := await self._stream.read(), engine_pb2.FromEngine):
                self._take(message)
        except Exception as error:
            unanswered: list[asyncio.Future[Any]] = [*self._loads.values()]
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
            self._loads.pop(message.load.query_id).set_result(message.load)
        elif kind == "refused":
            raise RuntimeError(f"refused: {message.refused.status}")

    def _deal(self, step: engine_pb2.StepOutputs) -> None:
        now = time.perf_counter()
        handles = np.frombuffer(step.handles, "<u4").tolist()
        for handle, token in zip(handles, np.frombuffer(step.tokens, "<u4").tolist(), strict=True):
            answer = self._answers[handle]
            answer.token_ids.append(token)
            answer.arrivals_s.append(now)
        for event in step.events:
            if event.WhichOneof("event") == "done":
                answer = self._answers.pop(event.handle)
                answer.done = event.done
                answer.finished.set_result(None)

    async def hello(self) -> None:
        """Opens the conversation and waits until the engine serves; afterwards `model` tells what."""
        hello = engine_pb2.Hello(protocol_version=1, service_name="benchmark")
        await self._stream.write(engine_pb2.ToEngine(hello=hello))
        while self.model is None:
            message = await self._stream.read()
            if message.WhichOneof("message") == "welcome" and message.welcome.model.kv_blocks:
                self.model = message.welcome.model

    async def generate(self, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> Answer:
        """Greedy generation. Exactly `max_tokens` tokens unless one of `stop_ids` comes first. Returns when it has ended."""
        handle, self._next = self._next, self._next + 1
        answer = self._answers[handle] = Answer(time.perf_counter())
        add = engine_pb2.AddRequest(
            handle=handle,
            request_id=f"bench-{self._run}-{handle}",
            prompt_token_ids=np.asarray(prompt, "<u4").tobytes(),
            sampling=engine_pb2.EngineSampling(top_p=1.0, repetition_penalty=1.0),
            stop=engine_pb2.EngineStop(max_tokens=max_tokens, token_ids=np.asarray(stop_ids, "<u4").tobytes()),
            n=1,
            spec_digest=bytes(32),
        )
        await self._write(engine_pb2.ToEngine(add=add))
        await answer.finished
        return answer

    async def load(self) -> engine_pb2.Load:
        """The backend's counters now."""
        query, self._next = self._next, self._next + 1
        future: asyncio.Future[engine_pb2.Load] = asyncio.get_running_loop().create_future()
        self._loads[query] = future
        await self._write(engine_pb2.ToEngine(load=engine_pb2.LoadQuery(query_id=query)))
        return await future


async def _connect(address: str, process: subprocess.Popen[bytes], timeout_s: float) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", 64 << 20)])
    ready = asyncio.create_task(channel.channel_ready())
    deadline = time.monotonic() + timeout_s
    while not ready.done():
        if process.poll() is not None or time.monotonic() > deadline:
            ready.cancel()
            raise RuntimeError(f"the backend did not start (exit code {process.poll()})")
        await asyncio.wait([ready], timeout=0.1)
    return channel


@asynccontextmanager
async def engine_session(engine: dict[str, Any], timeout_s: float = 120.0) -> AsyncIterator[EngineSession]:
    """Starts a backend with the given EngineConfig fields, yields a session, and stops the backend."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = pathlib.Path(name)
        address = f"unix:{folder / 'engine.sock'}"
        config = folder / "backend.json"
        config.write_text(json.dumps({"engine": engine, "listen": address, "log_level": "warning"}))
        process = subprocess.Popen([sys.executable, "-m", "headrace_backend", "--config-json", str(config)])
        try:
            channel = await _connect(address, process, timeout_s)
            session = EngineSession(engine_pb2_grpc.EngineServiceStub(channel).Connect())
            await asyncio.wait_for(session.hello(), timeout_s)
            reader = asyncio.create_task(session.read())
            yield session
            reader.cancel()
            await channel.close(None)
        finally:
            process.terminate()
            process.wait(30)
