"""Asks a backend how it is, the way a service does: the engine's own protocol over its socket.

Owns one short conversation at a time: hello, welcome, and then either the wait for "serving" or for
an empty queue. Nothing is inferred from a process being alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from headrace_credentials.client_tls import new_channel
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import LAYOUT

_PROTOCOL_VERSION = 4
_PAUSE_S = 0.05
_IDLE_LOOK_S = 0.1
# Services hear within milliseconds that a model goes; what they sent before has reached the backend
# by then.
_IDLE_LOOKS = 3
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    # A channel of its own for each conversation; a pooled one would still be in the backoff of the
    # last.
    ("grpc.use_local_subchannel_pool", 1),
]
Stream = grpc.aio.StreamStreamCall[Any, Any]


async def until_serving(address: str, credentials: grpc.ChannelCredentials | None = None) -> engine_pb2.EngineModel:
    """Returns what the backend at `address` serves, when its workers are ready.

    An address is unix:PATH, or HOST:PORT with credentials.

    Waits without end.
    """
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError, ConnectionError):
            async with connected(address, credentials) as stream:
                return await _read_until_serving(stream)
        await asyncio.sleep(_PAUSE_S)


async def until_idle(address: str) -> None:
    """Returns when the backend has had no request for some looks in a row.

    Requests count while they wait, run or are preempted. It returns at once if nobody answers, for
    then nothing runs.
    """
    with contextlib.suppress(grpc.aio.AioRpcError, ConnectionError):
        async with connected(address) as stream:
            idle_looks = 0
            while idle_looks < _IDLE_LOOKS:
                idle_looks = 0 if await _num_requests(stream) else idle_looks + 1
                await asyncio.sleep(_IDLE_LOOK_S)


async def _num_requests(stream: Stream) -> int:
    await stream.write(engine_pb2.ToEngine(load=engine_pb2.LoadQuery(query_id=1)))
    while True:
        message = await next_message(stream)
        if message.HasField("load"):
            return int(message.load.active_requests)


@contextlib.asynccontextmanager
async def connected(address: str, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[Stream]:
    """A conversation with the backend at `address`, its hello said.

    Raises grpc.aio.AioRpcError or ConnectionError where the backend ends it.
    """
    async with new_channel(address, credentials, _OPTIONS) as channel:
        connect = channel.stream_stream(
            "/headrace_engine.v1.EngineService/Connect",
            request_serializer=engine_pb2.ToEngine.SerializeToString,
            response_deserializer=engine_pb2.FromEngine.FromString,
        )
        stream: Stream = connect(None)
        try:
            hello = engine_pb2.Hello(
                protocol_version=_PROTOCOL_VERSION, service_name="supervisor", request_layout=LAYOUT
            )
            await stream.write(engine_pb2.ToEngine(hello=hello))
            yield stream
        finally:
            stream.cancel()


async def _read_until_serving(stream: Stream) -> engine_pb2.EngineModel:
    model = engine_pb2.EngineModel()
    while True:
        message = await next_message(stream)
        if message.HasField("welcome"):
            model, state = message.welcome.model, message.welcome.state
        elif message.HasField("state"):
            state = message.state
        else:
            continue
        if state.serving:
            return model


async def next_message(stream: Stream) -> engine_pb2.FromEngine:
    """Returns the next message. Raises ConnectionError where the stream ended without a word."""
    message = await stream.read()
    if not isinstance(message, engine_pb2.FromEngine):
        raise ConnectionError
    return message
