"""A telemetry process for tests of those who report to it.

It listens, keeps what is reported, and can hang or die.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib

from headrace_facts import facts


class Peer:
    """A telemetry process that keeps what was reported on its newest connection."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.taken: list[facts.Fact] = []
        self.num_connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        # Cleared: it reads nothing.
        self.reads = asyncio.Event()
        self.reads.set()
        self.server: asyncio.Server | None = None
        self._life: object | None = None

    async def listen(self) -> None:
        life = self._life = object()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if life is self._life:
                await self._serve(reader, writer)
            else:
                # It was taken, and came to nobody before the end.
                writer.transport.abort()

        self.server = await asyncio.start_unix_server(serve, self.path, limit=1 << 12)

    async def die(self) -> None:
        assert self.server is not None
        self._life = None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        taken = self.taken = []
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                await self.reads.wait()
                length = int.from_bytes(await reader.readexactly(4), "little")
                taken.append(facts.decode_fact(await reader.readexactly(length)))
