"""A service of several fake engines, named by their addresses, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.service.fake_engine import FakeEngine
from tests.service.harness import engine_model, events_of, ids_of, quick_start

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_service.config import ServiceConfig
from headrace_service.server import Service

TOKENS = [10, 11, 12]


@dataclasses.dataclass
class Joined:
    """A service and a client of it."""

    service: Service
    stub: Any
    health: Any
    address: str

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_used(self, number: int) -> None:
        """Waits until so many engines serve."""
        await self.until(lambda: sum(model.serving for model in self.service.core.models) == number)

    async def submit(self, first: int) -> str:
        spec = generation_pb2.GenerationSpec(token_ids=generation_pb2.TokenIds(ids=[first] * 64))
        made = await self.stub.Submit(inference_pb2.SubmitRequest(spec=spec))
        return str(made.request_id)

    async def read(self, request_id: str) -> list[int]:
        return ids_of(await events_of(self.stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id))))

    async def model(self) -> inference_pb2.Model:
        response = await self.stub.GetModel(inference_pb2.GetModelRequest())
        model: inference_pb2.Model = response.model
        return model

    async def status(self, name: str) -> Any:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=name))).status


@contextlib.asynccontextmanager
async def joined(engines: Sequence[str], **config: Any) -> AsyncIterator[Joined]:
    """A service of these engines; it is not waited for."""
    settings = {"listen": ("127.0.0.1:0",), "engine": tuple(engines), "engine_retry_max_s": 0.05, **config}
    with quick_start():
        service = Service(ServiceConfig(**settings))
        (address,) = await service.start()
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                yield Joined(
                    service,
                    inference_pb2_grpc.InferenceServiceStub(channel),
                    health_pb2_grpc.HealthStub(channel),
                    address,
                )
            finally:
                await service.stop(0)


@contextlib.asynccontextmanager
async def running(*engines: FakeEngine, sockets: pathlib.Path) -> AsyncIterator[list[str]]:
    """Engines at sockets of their own; their addresses."""
    for index, engine in enumerate(engines):
        await engine.start(f"unix:{sockets}/engine-{index}.sock")
    try:
        yield [engine.address for engine in engines]
    finally:
        for engine in engines:
            await engine.stop()


def fake(folder: pathlib.Path, kind: type[FakeEngine] = FakeEngine, **changes: str) -> FakeEngine:
    model = engine_model(folder)
    for name, value in changes.items():
        setattr(model, name, value)
    return kind(model, lambda add, index: TOKENS)


async def replace(old: FakeEngine, new: FakeEngine) -> FakeEngine:
    """Has another engine listen where one did."""
    await old.stop()
    await new.start(old.address)
    return new
