"""The socket of facts: who may open it, what ends a connection, and what is answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import stat
import time
from collections.abc import AsyncIterator

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.telemetry.story import SERVICE

from headrace_facts import facts
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.hub import Hub

SETTINGS = facts.TraceSettings(0.25, facts.Detail.ARRAY, record_all=False)
LOAD = facts.ServiceLoad(1, 2, 3)


class Ears:
    """A sink, judge and memory that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.left: list[str] = []
        self.found = b""

    def take(self, source: facts.Hello, fact: facts.Fact) -> None:
        if isinstance(fact, facts.Dropped) and fact.facts == 666:
            raise ValueError("no sense")
        self.heard.append(fact)

    def generation(self, source: facts.Hello, generation: facts.Generation, kept: str | None) -> None:
        self.heard.append((generation.request_id, kept))

    def gone(self, source: facts.Hello) -> None:
        self.left.append(source.name)

    def tick(self, now_unix_ns: int) -> None:
        pass

    def decide(self, generation: facts.Generation) -> str | None:
        return "head" if generation.request_id == "kept" else None

    def find(self, key: str) -> bytes:
        return self.found


@contextlib.asynccontextmanager
async def serving(path: pathlib.Path) -> AsyncIterator[tuple[Ears, Hub]]:
    ears = Ears()
    hub = Hub(SETTINGS, ears, [ears], ExportCounts())
    server = await hub.listen(path)
    try:
        yield ears, hub
    finally:
        hub.close()
        server.close()


def framed(message: facts.Fact) -> bytes:
    data = facts.encode(message)
    return len(data).to_bytes(4, "little") + data


async def answer(reader: asyncio.StreamReader) -> facts.Answer:
    size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 60), "little")
    return facts.decode_answer(await reader.readexactly(size))


async def until(condition: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def generation(request_id: str) -> facts.Generation:
    return facts.Generation(request_id, "m", "r", "chat", "chat", 0, 1, 2, 0, 1, 1, 0, ["stop"])


async def test_the_socket_is_this_users_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "telemetry.sock"
    async with serving(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_facts_come_in_order_and_generations_with_the_decision(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "telemetry.sock"
    async with serving(path) as (ears, _):
        reader, writer = await asyncio.open_unix_connection(path)
        data = framed(SERVICE) + framed(LOAD) + framed(generation("kept")) + framed(generation("other"))
        # Also where frames are cut anywhere.
        for begin in range(0, len(data), 7):
            writer.write(data[begin : begin + 7])
            await writer.drain()
        assert await answer(reader) == SETTINGS
        await until(lambda: len(ears.heard) == 4)
        assert ears.heard == [SERVICE, LOAD, ("kept", "head"), ("other", None)]
        writer.close()
        await until(lambda: ears.left == ["service-0"])


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xff\xff\xff",
        (facts.MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x03\0\0\0abc",
        framed(SERVICE),
        framed(facts.Dropped(666, 0)),
        b"\0\0\0\0",
    ],
)
async def test_a_bad_frame_ends_its_connection_and_no_other(tmp_path: pathlib.Path, bad: bytes) -> None:
    path = tmp_path / "telemetry.sock"
    async with serving(path) as (ears, hub):
        good_reader, good = await asyncio.open_unix_connection(path)
        reader, writer = await asyncio.open_unix_connection(path)
        for each in (good, writer):
            each.write(framed(SERVICE))
        await answer(reader)
        writer.write(bad + framed(LOAD))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        assert ears.heard.count(LOAD) == 0
        assert hub.counts.bad_frames == 1
        good.write(framed(LOAD))
        await until(lambda: LOAD in ears.heard)
        assert ears.left == ["service-0"]
        assert not good_reader.at_eof()


async def test_who_does_not_say_hello_is_not_heard(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "telemetry.sock"
    async with serving(path) as (ears, _):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(framed(LOAD))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        assert ears.heard == [] and ears.left == []


@hypothesis.given(st.binary(max_size=300))
@hypothesis.settings(max_examples=50)
async def test_no_bytes_bring_it_down(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("hub") / "t.sock"
    async with serving(path) as (ears, _):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(framed(SERVICE) + data)
        reader, other = await asyncio.open_unix_connection(path)
        other.write(framed(SERVICE))
        assert await answer(reader) == SETTINGS
        writer.close()


async def test_a_change_of_detail_reaches_all(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "telemetry.sock"
    async with serving(path):
        connections = [await asyncio.open_unix_connection(path) for _ in range(2)]
        for reader, writer in connections:
            writer.write(framed(SERVICE))
            await answer(reader)
        connections[0][1].write(framed(facts.SetDetail(facts.Detail.SPAN)))
        for reader, _ in connections:
            assert await answer(reader) == facts.TraceSettings(0.25, facts.Detail.SPAN, record_all=False)
        late_reader, late = await asyncio.open_unix_connection(path)
        late.write(framed(SERVICE))
        said = await answer(late_reader)
        assert isinstance(said, facts.TraceSettings) and said.detail is facts.Detail.SPAN


@pytest.mark.parametrize("size", [0, 10, 1 << 20, (5 << 20) + 3])
async def test_a_trace_is_answered_in_parts(tmp_path: pathlib.Path, size: int) -> None:
    path = tmp_path / "telemetry.sock"
    async with serving(path) as (ears, _):
        ears.found = os.urandom(size)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(framed(SERVICE) + framed(facts.TraceQuery(7, "req_1")))
        await answer(reader)
        parts = []
        while not parts or not parts[-1].last:
            part = await answer(reader)
            assert isinstance(part, facts.TraceFound) and part.query_id == 7
            parts.append(part)
        assert b"".join(part.part for part in parts) == ears.found


async def test_a_socket_that_a_dead_process_left_is_replaced_and_a_living_one_is_not(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "telemetry.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(path):
        with pytest.raises(OSError, match="in use"):
            await Hub(SETTINGS, Ears(), [], ExportCounts()).listen(path)
