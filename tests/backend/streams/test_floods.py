"""Floods of HTTP/2 frames on a backend's TCP socket, from peers that do not know its secret."""

from __future__ import annotations

import asyncio
import pathlib

from tests.backend.backend_harness import running_backend
from tests.support.http2_floods import BLOCKS, FloodingPeer
from tests.support.peak_memory import MIB, PeakMemory
from tests.support.ports import free_address


async def test_a_flood_without_the_secret_takes_no_memory(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    address = free_address()
    settings = {"listen": address, "token_file": str(secret)}
    async with running_backend(tmp_path, model, backend=settings) as backend:
        await asyncio.to_thread(backend.wait_listening)
        memory = PeakMemory(backend.process.pid)
        for name in ("large fields", "fields for the table", "a value without end"):
            await asyncio.to_thread(_flood, address, name)
        # Without the bound of gRPC's read buffer 84 MiB.
        assert memory.growth < 24 * MIB


def _flood(address: str, name: str) -> None:
    with FloodingPeer(address) as peer:
        peer.flood(BLOCKS[name], 256 * MIB)
