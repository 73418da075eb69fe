"""Connections of OpenAI's HTTP API: callers who leave, who are slow or too much, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator, Iterator
from unittest import mock

import pytest
from tests.openai_api.harness import CHAT, COMPLETIONS, HELLO, TIMEOUT_S, Running, running_door

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.openai import gate

LONG = {"prompt": "the", "max_tokens": 500, "stream": True}


def request(path: str, body: dict[str, object], *headers: str) -> bytes:
    """A whole HTTP request."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(content)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + content


@contextlib.asynccontextmanager
async def raw(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection without any client's manners."""
    host, _, port = running.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Everything that comes until the server closes."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


@pytest.fixture
def patience() -> Iterator[None]:
    """Bounds on time that a test can wait for."""
    with mock.patch.object(gate, "_BODY_TIMEOUT_S", 0.3):
        yield


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_leaves_ends_the_generation(
    model_path: pathlib.Path, sockets: pathlib.Path, stream: bool
) -> None:
    async with running_door(model_path, sockets) as running:
        running.engine.running.clear()
        async with raw(running) as (_, writer):
            writer.write(request(CHAT, {"messages": HELLO, "stream": stream}))
            await running.until(lambda: running.engine.requests)
        await running.until(lambda: running.engine.aborts)
        assert running.engine.aborts[0].cause == engine_pb2.ABORT_CAUSE_CANCELLED
        await running.until(lambda: running.door.core.num_open == 0)
        running.engine.running.set()
        assert (await running.post(CHAT, {"messages": HELLO})).status_code == 200


async def test_a_caller_with_another_request_behind_the_first_may_leave_too(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_door(model_path, sockets) as running:
        running.engine.script = lambda add, index: running.ids("the") * 500
        async with raw(running) as (reader, writer):
            writer.write(request(COMPLETIONS, LONG) * 3)
            await reader.read(100)
            running.engine.running.clear()
            writer.transport.abort()
        running.engine.running.set()
        await running.until(lambda: running.engine.aborts)
        await running.until(lambda: running.door.core.num_open == 0)
        assert len(running.engine.requests) == 1


async def test_a_reader_who_takes_nothing_is_cut_off(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    settings = {"reader_stall_timeout_s": 0.5, "reader_cap_bytes": 4096, "reader_timeout_s": 0.5}
    async with running_door(model_path, sockets, **settings) as running:
        running.engine.script = lambda add, index: running.ids("the") * 500
        async with raw(running) as (_, writer):
            # More than sockets hold, and nobody reads.
            many = {**LONG, "n": 16, "prompt": ["the"] * 64, "logprobs": 5, "echo": True}
            writer.write(request(COMPLETIONS, many))
            await running.until(lambda: running.engine.aborts)
            await running.until(lambda: running.door.core.num_open == 0)


async def test_a_request_that_never_comes_whole_is_not_waited_for(
    model_path: pathlib.Path, sockets: pathlib.Path, patience: None
) -> None:
    async with running_door(model_path, sockets, handshake_timeout_s=0.3) as running:
        for begun in (b"", b"POST /v1/chat", b"POST / HTTP/1.1\r\nhost: x\r\n"):
            async with raw(running) as (reader, writer):
                writer.write(begun)
                assert await read_to_end(reader) == b""
        async with raw(running) as (reader, writer):
            writer.write(request(CHAT, {"messages": HELLO})[:-1])
            answer = await read_to_end(reader)
            assert answer.startswith(b"HTTP/1.1 504") and b"did not arrive" in answer
        async with raw(running) as (reader, writer):
            # Also as the second request of a connection.
            writer.write(request(CHAT, {"messages": HELLO, "max_tokens": 1}))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"POST /v1")
            assert b"HTTP" not in await read_to_end(reader)


async def test_heads_and_bodies_have_a_largest_size(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_door(model_path, sockets, max_message_bytes=1 << 16) as running:
        for head in (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\na: " + b"b" * 12_000):
            async with raw(running) as (reader, writer):
                writer.write(head)
                answer = await read_to_end(reader)
                assert answer.startswith(b"HTTP/1.1 431")
                assert "at most 8192 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        async with raw(running) as (reader, writer):
            # Of a next request, while one is being answered.
            running.engine.running.clear()
            writer.write(request(CHAT, {"messages": HELLO, "stream": True}))
            await reader.readuntil(b"\r\n\r\n")
            reading = asyncio.create_task(read_to_end(reader))
            writer.write(b"GET / HTTP/1.1\r\na: ")
            while not reading.done():
                writer.write(b"b" * 4096)
                await asyncio.sleep(0.01)
            await asyncio.gather(reading, return_exceptions=True)
            await running.until(lambda: running.engine.aborts)
            running.engine.running.set()
        large = {"messages": [{"role": "user", "content": "a" * (1 << 16)}]}
        response = await running.post(CHAT, large)
        assert (response.status_code, response.json()["error"]["type"]) == (413, "invalid_request_error")
        async with raw(running) as (reader, writer):
            chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(chunk * 17)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413")
        assert (await running.post(CHAT, {"messages": HELLO})).status_code == 200


async def test_connections_are_counted(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_door(model_path, sockets, max_connections=2) as running, contextlib.AsyncExitStack() as stack:
        # The harness's own client has one.
        await running.client.get("/health")
        await stack.enter_async_context(raw(running))
        reader, _ = await stack.enter_async_context(raw(running))
        with contextlib.suppress(ConnectionError):
            assert await read_to_end(reader) == b""
        assert (await running.client.get("/health")).status_code == 200


async def test_open_generations_are_counted(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_door(model_path, sockets, max_open_generations=2) as running:
        response = await running.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        await running.until(lambda: running.door.core.num_open == 0)
        assert (await running.post(COMPLETIONS, {"prompt": ["a", "b"]})).status_code == 200


async def test_a_shutdown_refuses_new_requests_and_lets_streams_end(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    async with running_door(model_path, sockets) as running:
        running.engine.running.clear()
        streaming = asyncio.create_task(running.post(CHAT, {"messages": HELLO, "stream": True}))
        await running.until(lambda: running.engine.requests)
        stopping = asyncio.create_task(running.door.stop(TIMEOUT_S))
        await running.until(lambda: running.door.core.draining)
        refused = await running.post(CHAT, {"messages": HELLO})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await running.client.get("/health")).status_code == 503
        assert (await running.client.get("/health/live")).status_code == 200
        running.engine.running.set()
        assert (await streaming).text.endswith("data: [DONE]\n\n")
        await stopping


async def test_pages_of_other_origins_may_call_only_if_they_are_named(
    model_path: pathlib.Path, sockets: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with running_door(model_path, sockets) as running:
        response = await running.client.options(CHAT, headers=asked)
        assert (response.status_code, response.headers.get("access-control-allow-origin")) == (405, None)
    async with running_door(model_path, sockets, openai_cors_origins=("https://a.example",)) as running:
        response = await running.client.options(CHAT, headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        answer = await running.post(CHAT, {"messages": HELLO}, origin="https://a.example")
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = await running.client.options(CHAT, headers={**asked, "origin": "https://b.example"})
        assert other.status_code == 400
