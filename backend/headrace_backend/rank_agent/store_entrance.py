"""The store in which all ranks meet, as this host's ranks reach it: at the agent's loopback port.

Owns the port of one life of the workers. What comes in crosses the agent's stream
(`server.hosts.store_relay`).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable

from headrace_backend.server.hosts.store_relay import StoreRelay, Streams, TooManyConnections

ADDRESS = "127.0.0.1"


class StoreEntrance:
    """Listens as soon as it is made, and accepts once `start` was awaited."""

    def __init__(self, send: Callable[[int, bytes], None], has_room: Callable[[], bool]) -> None:
        """Opens the port.

        Args:
            send: Takes a connection's number and its bytes; none: it has ended.
            has_room: Whether the stream takes more.

        Raises:
            OSError: There are no ports or descriptors left.
        """
        self._relay = StoreRelay(send, has_room)
        self._numbers = itertools.count(1)
        self._listener = socket.create_server((ADDRESS, 0))
        self.port: int = self._listener.getsockname()[1]
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Accepts connections from now on."""
        self._server = await asyncio.start_server(self._accepted, sock=self._listener)

    def take(self, number: int, data: bytes) -> None:
        """Takes what the store has sent; nothing: it has ended the connection."""
        self._relay.take(number, data)

    def close(self) -> None:
        """Closes the port and all connections."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        self._relay.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def opened() -> Streams:
            return reader, writer

        try:
            self._relay.open(next(self._numbers), opened)
        except TooManyConnections:
            writer.close()
