"""Connections of other hosts' ranks to the store in which all ranks meet, in the hosts' streams.

The store is torch's: it asks nobody for a secret and encrypts nothing. So it listens at the
loopback address of the engine's host alone, and every other host's agent listens at its own; what
goes between the two crosses the agent's stream, behind its certificate or secret:

    rank ──loopback──> agent ──stream, StoreBytes──> backend ──loopback──> store (rank 0)

Owns the connections of one end, which are alike at both: by their numbers, from the first byte to
the end of either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# Ranks have a few connections each, of groups and their clones.
MAX_CONNECTIONS = 512
_CHUNK_BYTES = 64 << 10
# Between two looks whether the stream has room again.
_RETRY_S = 0.001


class TooManyConnections(Exception):
    """The other side opened more connections than ranks have."""


@dataclasses.dataclass(slots=True)
class _Connection:
    # None: it is being opened, and what comes for it waits.
    writer: asyncio.StreamWriter | None = None
    unwritten: bytearray = dataclasses.field(default_factory=bytearray)
    # Runs until this side has ended.
    task: asyncio.Task[None] | None = None


class StoreRelay:
    """One end's connections to the store, of one life of the workers.

    Args:
        send: Takes a connection's number and bytes for its other end; none: it has ended here.
        has_room: Whether the stream takes more; nothing is read meanwhile.
    """

    def __init__(self, send: Callable[[int, bytes], None], has_room: Callable[[], bool]) -> None:
        self._send = send
        self._has_room = has_room
        self._connections: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, number: object) -> bool:
        return number in self._connections

    def open(self, number: int, opening: Callable[[], Awaitable[Streams]]) -> None:
        """Opens a connection and relays it until one of its sides ends.

        Raises:
            TooManyConnections: There are too many already.
        """
        if len(self._connections) >= MAX_CONNECTIONS:
            raise TooManyConnections(f"more than {MAX_CONNECTIONS} connections to the store")
        connection = self._connections[number] = _Connection()
        connection.task = asyncio.ensure_future(self._run(number, connection, opening))

    def take(self, number: int, data: bytes) -> None:
        """Takes what came for a connection; none: its other side has ended."""
        connection = self._connections.get(number)
        if connection is None:
            return
        if not data:
            self._drop(number)
        elif connection.writer is None:
            connection.unwritten += data
        else:
            connection.writer.write(data)

    def close(self) -> None:
        """Ends all connections on this side; nobody hears of it."""
        for number in list(self._connections):
            self._drop(number)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        if connection.task is not None:
            connection.task.cancel()

    async def _run(self, number: int, connection: _Connection, opening: Callable[[], Awaitable[Streams]]) -> None:
        try:
            with contextlib.suppress(OSError):
                reader, connection.writer = await opening()
                connection.writer.write(connection.unwritten)
                while data := await reader.read(_CHUNK_BYTES):
                    while not self._has_room():
                        await asyncio.sleep(_RETRY_S)
                    self._send(number, data)
            # This side has ended, and not the other.
            self._connections.pop(number, None)
            self._send(number, b"")
        finally:
            if connection.writer is not None:
                connection.writer.close()
