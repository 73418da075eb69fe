"""Connections that misbehave below the level of calls.

What they cost, and that nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import struct
import time
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest
from tests.service.harness import ANSWER, Running, events_of, running_service, text_of
from tests.support.http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    headers,
    message,
)

from headrace.v1 import generation_pb2, inference_pb2

_REQUEST = inference_pb2.GenerateRequest(spec=generation_pb2.GenerationSpec(text="hi"))


def opened_call(stream_id: int) -> bytes:
    """The frames of a whole Generate request."""
    body = message(_REQUEST.SerializeToString())
    block = headers("/headrace.v1.InferenceService/Generate")
    return frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, body)


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = running.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def closed_by_server(reader: asyncio.StreamReader, timeout_s: float) -> bool:
    """Whether the server ends the connection in time."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(timeout_s):
            while await reader.read(1 << 16):
                pass
            return True
    return reader.at_eof()


async def check_canary(running: Running) -> None:
    assert text_of(await events_of(running.stub.Generate(_REQUEST))) == ANSWER
    assert running.service.core.num_open == 0 and not running.service.core.delivering


@pytest.mark.parametrize("allowed", [300, pytest.param(1000, marks=pytest.mark.slow)])
async def test_half_more_streams_at_once_than_are_allowed_are_answered_or_refused(
    model_path: pathlib.Path, sockets: pathlib.Path, allowed: int
) -> None:
    # Callers, service and engine are one thread here: while it opens calls, nobody hears the
    # engine.
    async with running_service(model_path, sockets, max_open_generations=allowed, engine_silence_s=300) as running:
        running.engine.running.clear()
        calls = [running.stub.Generate(_REQUEST) for _ in range(allowed + allowed // 2)]
        reading = [asyncio.create_task(outcome(call)) for call in calls]
        await running.until(
            lambda: running.service.core.num_open == allowed and sum(task.done() for task in reading) == allowed // 2
        )
        running.engine.running.set()
        outcomes = Counter(await asyncio.gather(*reading))
        assert outcomes == {grpc.StatusCode.OK: allowed, grpc.StatusCode.RESOURCE_EXHAUSTED: allowed // 2}
        await check_canary(running)


async def outcome(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await events_of(call)
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_caller_of_http_1_is_sent_away(running: Running) -> None:
    reader, writer = await connect(running)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await closed_by_server(reader, 60)
    writer.close()
    await check_canary(running)


async def test_connections_that_say_nothing_are_closed(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, handshake_timeout_s=1.0) as running:
        before = psutil.Process().num_fds()
        connections = [await connect(running) for _ in range(400)]
        assert all(await asyncio.gather(*(closed_by_server(reader, 60) for reader, _ in connections)))
        for _, writer in connections:
            writer.close()
        # Both sides of all but a few.
        await running.until(lambda: psutil.Process().num_fds() < before + 100)
        await check_canary(running)


async def test_a_connection_that_begins_a_byte_at_a_time_is_closed(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_service(model_path, sockets, handshake_timeout_s=1.0) as running:
        reader, writer = await connect(running)
        closed = asyncio.create_task(closed_by_server(reader, 60))
        # Never the last one: what ends it is the timeout.
        for place in range(len(PREFACE) - 1):
            with contextlib.suppress(ConnectionError):
                writer.write(PREFACE[place : place + 1])
                await writer.drain()
            await asyncio.wait([closed], timeout=0.5)
            if closed.done():
                break
        assert await closed
        writer.close()
        await check_canary(running)


async def test_streams_reset_as_soon_as_they_are_opened_leave_nothing(running: Running) -> None:
    reader, writer = await connect(running)
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    rss = psutil.Process().memory_info().rss
    for burst in range(100):
        ids = range(1 + burst * 400, 1 + (burst + 1) * 400, 2)
        reset = struct.pack(">I", CANCEL)
        writer.write(b"".join(opened_call(number) + frame(RST_STREAM, 0, number, reset) for number in ids))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if reader.at_eof():
            break
        await asyncio.sleep(0)
    await running.until(lambda: running.service.core.num_open == 0)
    writer.close()
    # Of calls that no handler has taken yet gRPC keeps about a thousand and ends others as
    # cancelled, until it has gone through those that were reset: on a busy machine a call that is
    # answered may come before one that is not.
    async with asyncio.timeout(120):
        answered = 0
        while answered < 20:
            is_cancelled = await outcome(running.stub.Generate(_REQUEST)) is grpc.StatusCode.CANCELLED
            answered = 0 if is_cancelled else answered + 1
            await asyncio.sleep(0.05 if is_cancelled else 0)
    await check_canary(running)
    assert psutil.Process().memory_info().rss - rss < 256 << 20


async def test_a_caller_that_vanished_frees_its_generation(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, keepalive_s=1.0, keepalive_timeout_s=5.0) as running:
        running.engine.running.clear()
        _, writer = await connect(running)
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + opened_call(1))
        await running.until(lambda: running.engine.requests)
        # From here on it answers no ping, as a machine that lost its power.
        began = time.monotonic()
        await running.until(lambda: running.engine.aborts)
        assert time.monotonic() - began < 60
        writer.close()
        running.engine.running.set()
        await check_canary(running)


async def test_a_caller_that_sends_a_byte_at_a_time_holds_nobody_up(running: Running) -> None:
    _, writer = await connect(running)
    slow = PREFACE + frame(SETTINGS, 0, 0) + opened_call(1)
    for place in range(len(slow)):
        writer.write(slow[place : place + 1])
        await writer.drain()
        if place % 40 == 0:
            await check_canary(running)
    await running.until(lambda: len(running.engine.requests) > len(slow) // 40)
    writer.close()


async def test_a_prompt_that_no_message_to_the_engine_can_hold_is_refused_alone(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    """Token ids that take a byte each on the public wire take four behind it.

    The engine's stream is everybody's.
    """
    async with running_service(model_path, sockets, context=400_000, max_engine_message_bytes=1 << 20) as running:
        running.engine.running.clear()
        other = asyncio.ensure_future(events_of(running.stub.Generate(_REQUEST)))
        await running.until(lambda: running.engine.requests)
        long = generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[5] * 300_000))
        with pytest.raises(grpc.aio.AioRpcError, match="takes 120.... bytes .* at most 1048576") as refused:
            await running.stub.Complete(inference_pb2.CompleteRequest(spec=long))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.engine.running.set()
        assert text_of(await other) == ANSWER
        await check_canary(running)


@pytest.mark.parametrize(
    "garbage", [b"\0" * 4096, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, PREFACE + b"\xff" * 4096]
)
async def test_garbage_ends_its_own_connection_alone(running: Running, garbage: bytes) -> None:
    reader, writer = await connect(running)
    writer.write(garbage)
    assert await closed_by_server(reader, 60)
    writer.close()
    await check_canary(running)
