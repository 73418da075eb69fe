"""What a backend says of itself, asked every second over its own protocol.

Owns one connection after the other, and the newest answer. Nothing is inferred from a process being
alive: an engine serves while it says so.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import grpc
import grpc.aio

from headrace_protos.engine.v1 import engine_pb2
from headrace_ray.autoscaling import Load
from headrace_supervisor.processes import engine_probe

LOOK_S = 0.5
# A backend that does not answer in this time hangs.
_SILENCE_S = 5.0


class Seen(NamedTuple):
    """One answer of a backend.

    Attributes:
        serving: whether its workers compute.
        reason: for people.
        load: its queue and batch.
        active: requests that have not ended.
    """

    serving: bool
    reason: str
    load: Load
    active: int


class EngineWatch:
    """Watches the backend at an address.

    Args:
        address: HOST:PORT.
        credentials: of a client that the backend lets in; None: its socket is private.

    Attributes:
        seen: the newest answer; None while the backend does not answer.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._address = address
        self._credentials = credentials
        self.seen: Seen | None = None

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            try:
                async with engine_probe.connected(self._address, self._credentials) as stream:
                    await self._ask(stream)
            except (grpc.aio.AioRpcError, ConnectionError, TimeoutError, asyncio.InvalidStateError):
                # The last is grpc.aio's for a question on a connection that has just ended.
                pass
            except asyncio.CancelledError:
                # grpc.aio raises it too, in readers of a call that was cancelled here.
                if _is_cancelled():
                    raise
            finally:
                self.seen = None
            await asyncio.sleep(LOOK_S)

    async def until_idle(self) -> None:
        """Returns once the backend has had no request for several looks, or does not answer.

        Services that have left it may have sent it requests a moment ago.
        """
        idle_looks = 0
        while idle_looks < 5:
            await asyncio.sleep(LOOK_S)
            idle_looks = idle_looks + 1 if self.seen is None or not self.seen.active else 0

    async def _ask(self, stream: engine_probe.Stream) -> None:
        """Asks on one connection until it ends. Raises TimeoutError: an answer is missing."""
        state = engine_pb2.EngineState()
        while True:
            await stream.write(_QUESTION)
            async with asyncio.timeout(_SILENCE_S):
                state, load = await _answer(stream, state)
            self.seen = _seen(state, load)
            await asyncio.sleep(LOOK_S)


async def _answer(
    stream: engine_probe.Stream, state: engine_pb2.EngineState
) -> tuple[engine_pb2.EngineState, engine_pb2.Load]:
    """Reads up to the answer; returns the newest state with it, `state` where none came."""
    while True:
        message = await engine_probe.next_message(stream)
        if message.HasField("load"):
            return state, message.load
        if message.HasField("welcome"):
            state = message.welcome.state
        elif message.HasField("state"):
            state = message.state


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_QUESTION = engine_pb2.ToEngine(load=engine_pb2.LoadQuery(query_id=1))


def _seen(state: engine_pb2.EngineState, load: engine_pb2.Load) -> Seen:
    numbers = Load(load.waiting_tokens, load.running_sequences, load.max_running_sequences)
    return Seen(state.serving, state.reason, numbers, load.active_requests)
