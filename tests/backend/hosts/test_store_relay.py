"""Connections to the store cross the agent's stream whole, in order, and end with either side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator

import psutil
import pytest

from headrace_backend.config import EngineConfig
from headrace_backend.rank_agent.store_entrance import ADDRESS, StoreEntrance
from headrace_backend.server.hosts import store_relay
from headrace_backend.server.hosts.host_table import HostTable
from headrace_backend.server.hosts.store_relay import StoreRelay, TooManyConnections


@dataclasses.dataclass
class Ends:
    """An agent's end and the backend's, joined as by their stream, before a store that echoes."""

    entrance: StoreEntrance
    relay: StoreRelay
    store: asyncio.Server
    has_room: bool = True
    crossed: int = 0
    given: list[asyncio.StreamWriter] = dataclasses.field(default_factory=list)

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(ADDRESS, self.entrance.port)


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.given.append(writer)
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    store = await asyncio.start_server(echo, ADDRESS, 0)
    opening = functools.partial(asyncio.open_connection, ADDRESS, store.sockets[0].getsockname()[1])

    def to_backend(number: int, data: bytes) -> None:
        made.crossed += len(data)
        if data and number not in made.relay:
            made.relay.open(number, opening)
        made.relay.take(number, data)

    def has_room() -> bool:
        return made.has_room

    relay = StoreRelay(lambda number, data: made.entrance.take(number, data), has_room)
    made = Ends(StoreEntrance(to_backend, has_room), relay, store)
    await made.entrance.start()
    try:
        yield made
    finally:
        made.entrance.close()
        made.relay.close()
        store.close()


async def test_each_connection_has_its_own_bytes_in_order() -> None:
    async with ends() as joined, asyncio.timeout(60):

        async def talk(seed: int) -> None:
            reader, writer = await joined.connected()
            said = bytes((seed + index) % 251 for index in range(200_000))
            for first in range(0, len(said), 17_000):
                writer.write(said[first : first + 17_000])
            assert await reader.readexactly(len(said)) == said
            writer.close()

        await asyncio.gather(*(talk(seed) for seed in range(8)))
        while len(joined.relay):
            await asyncio.sleep(0.01)


async def test_a_connection_ends_with_either_of_its_sides() -> None:
    async with ends() as joined, asyncio.timeout(60):
        reader, writer = await joined.connected()
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        joined.given[0].close()
        assert await reader.read(1) == b""
        assert len(joined.relay) == 0
        # A store that is gone: the rank sees its connection end.
        joined.store.close()
        reader, writer = await joined.connected()
        writer.write(b"y")
        assert await reader.read(1) == b""


async def test_nothing_is_read_while_the_stream_has_no_room() -> None:
    async with ends() as joined, asyncio.timeout(60):
        _, writer = await joined.connected()
        joined.has_room = False
        writer.write(bytes(10 << 20))
        await asyncio.sleep(0.2)
        assert joined.crossed == 0
        joined.has_room = True
        while joined.crossed < 10 << 20:
            await asyncio.sleep(0.01)


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_relay, "MAX_CONNECTIONS", 2)
    async with ends() as joined, asyncio.timeout(60):
        held = [await joined.connected() for _ in range(2)]
        for reader, writer in held:
            writer.write(b"x")
            assert await reader.read(1) == b"x"
        # The agent closes one too many; the backend gives an agent up that opens it all the same.
        one_more, _ = await joined.connected()
        assert await one_more.read(1) == b""
        with pytest.raises(TooManyConnections, match="more than 2 connections to the store"):
            joined.relay.open(9, lambda: pytest.fail("it is not opened"))


async def test_no_other_host_reaches_the_store_itself() -> None:
    config = EngineConfig(model="m", device="cpu", pp=2, hosts=2)
    ranks = HostTable(config, 1.0).new_meeting()
    try:
        assert ranks.meeting is not None and ranks.meeting.address == "127.0.0.1"
        listening = await asyncio.to_thread(_listening_addresses, ranks.meeting.port)
        assert listening == {"127.0.0.1"}
    finally:
        ranks.close()


def _listening_addresses(port: int) -> set[str]:
    return {each.laddr.ip for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port}
