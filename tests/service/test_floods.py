"""Floods of HTTP/2 frames that need no key, on a service's own socket: what they may cost it."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from tests.service.auth.credentials_case import bearer, entry, write_keys
from tests.service.harness import running_service
from tests.service.service_process import engine, service_process, until_serving
from tests.support.http2_floods import BLOCKS, FRAMES, Flood, FloodingPeer
from tests.support.peak_memory import MIB, PeakMemory
from tests.support.ports import free_address

from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace_service.auth import api_keys
from headrace_service.config import ServiceConfig

KEY = api_keys.new_key()
LIST = inference_pb2.ListModelsRequest()
# Without the bound of gRPC's read buffer four of the blocks take 48 to 118 MiB each.
SENT, MOST = 192 * MIB, 24 * MIB
# What costs the service more time than memory is sent in smaller amounts.
SLOW = {"small fields": 16 * MIB, "a large field of the table": 16 * MIB, "single bytes": 32 * MIB, "pings": MIB}


@dataclass
class ServiceProcess:
    """A service that asks for a key, in a process of its own."""

    address: str
    pid: int
    stub: inference_pb2_grpc.InferenceServiceStub

    async def lists(self) -> None:
        """A caller with a key is answered."""
        await self.stub.ListModels(LIST, metadata=bearer(KEY), timeout=240)

    async def growth(self, flood: Flood, total_bytes: int, *, acknowledges: bool = True) -> int:
        """Bytes of memory that one connection's flood takes at most."""
        memory = PeakMemory(self.pid)

        def floods() -> None:
            with FloodingPeer(self.address, acknowledges=acknowledges) as peer:
                peer.flood(flood, total_bytes)

        await asyncio.to_thread(floods)
        # Whatever the service still had to read, it is past it, and it serves others.
        await self.lists()
        return memory.growth


@asynccontextmanager
async def service(model_path: pathlib.Path, sockets: pathlib.Path, **settings: object) -> AsyncIterator[ServiceProcess]:
    """Starts it beside a fake engine."""
    keys_file = write_keys(sockets / "keys.json", entry(KEY, "app"))
    async with engine(model_path, sockets) as fake:
        address = free_address()
        config = ServiceConfig(listen=(address,), engine=(fake.address,), keys_file=keys_file, **settings)  # type: ignore[arg-type]
        with service_process(config.model_dump_json()) as process:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                found = ServiceProcess(address, process.pid, stub)
                await until_serving(stub, process, bearer(KEY))
                yield found


@pytest.mark.parametrize(
    "floods",
    [
        pytest.param(BLOCKS, id="header blocks without end"),
        # tests/stack/test_proxy.py: they do not reach the service.
        pytest.param(FRAMES, marks=pytest.mark.slow, id="frames beside any flow control"),
    ],
)
async def test_a_flood_without_a_key_takes_no_memory(
    model_path: pathlib.Path, sockets: pathlib.Path, floods: dict[str, Flood]
) -> None:
    async with service(model_path, sockets) as running:
        taken = {name: await running.growth(flood, SLOW.get(name, SENT)) for name, flood in floods.items()}
        assert max(taken.values()) < MOST, taken


async def test_a_peer_that_does_not_acknowledge_the_settings_is_closed(
    model_path: pathlib.Path, sockets: pathlib.Path
) -> None:
    """Metadata is limited from the acknowledgement on.

    What a peer holds before, it holds for a time.
    """

    def until_one_is_closed(address: str) -> tuple[bytes, bytes]:
        with FloodingPeer(address) as compliant, FloodingPeer(address, acknowledges=False) as silent:
            silent.flood(BLOCKS["large fields"], MIB)
            silent.wait_closed()
            compliant.ping(b"livelong")
            return bytes(silent.received), bytes(compliant.received)

    async with running_service(model_path, sockets, handshake_timeout_s=1.0) as running:
        silent, compliant = await asyncio.to_thread(until_one_is_closed, running.address)
        assert b"settings_timeout" in silent and b"settings_timeout" not in compliant
