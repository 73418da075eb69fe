"""Health, readiness and calls of a service while its server loads models.

Models load at the start, at a service's own restart, and by an operator's call.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.kserve import wire
from tests.service.engines.test_models import FAILED, LOADING, READY, TOKENS, UNLOADED, Server, several, spec
from tests.service.harness import events_of, ids_of, quick_start, retry_delay_s

from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace_protos.inference import grpc_service_pb2 as kserve
from headrace_service.config import ServiceConfig
from headrace_service.server import Service
from headrace_service.text.text_loader import TextLoader

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


class Joined:
    """A service that joins a server whose supervisor has something to say already."""

    def __init__(self, service: Service, channel: grpc.aio.Channel) -> None:
        self.service = service
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.kserve = wire.Wire(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def readiness(self) -> tuple[Any, Any, bool]:
        """What the three ways of asking for the whole server's readiness answer."""
        whole = await self._health.Check(health_pb2.HealthCheckRequest())
        service = await self._health.Check(health_pb2.HealthCheckRequest(service="headrace.v1.InferenceService"))
        ready = await self.kserve.ServerReady(kserve.ServerReadyRequest())
        return whole.status, service.status, ready.ready

    async def model_ready(self, name: str) -> bool:
        return bool((await self.kserve.ModelReady(kserve.ModelReadyRequest(name=name))).ready)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(120):
            while not await condition():
                await asyncio.sleep(0.01)

    async def until_reported(self) -> None:
        async with asyncio.timeout(120):
            while self.service.core.models.repository is None:
                await asyncio.sleep(0.01)

    async def is_ready(self) -> bool:
        return await self.readiness() == (SERVING, SERVING, True)

    def tokens(self, model: str) -> Any:
        return events_of(self.stub.Generate(inference_pb2.GenerateRequest(spec=spec(model))))

    async def refusal(self, call: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        return error.value


@contextlib.asynccontextmanager
async def joined(sockets: pathlib.Path) -> AsyncIterator[Joined]:
    with quick_start():
        service = Service(
            ServiceConfig(listen=("127.0.0.1:0",), control=f"unix:{sockets}/control.sock", shutdown_grace_s=0.5)
        )
        (address,) = await service.start()
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                joining = Joined(service, channel)
                await joining.until_reported()
                yield joining
            finally:
                await service.stop(0)


@pytest_asyncio.fixture
async def server(model_path: pathlib.Path, sockets: pathlib.Path) -> AsyncIterator[Server]:
    async with several(model_path, sockets) as running:
        yield running


def starts(server: Server, starting: bool) -> None:
    server.supervisor.state.starting = starting
    server.supervisor.tell()


async def test_readiness_waits_for_all_models_of_the_start(server: Server, sockets: pathlib.Path) -> None:
    server.supervisor.set_model("b", LOADING)
    starts(server, True)
    async with joined(sockets) as service:
        # The default model answers already, and its own readiness says so.
        await service.until(lambda: service.model_ready("a"))
        assert ids_of(await service.tokens("a")) == TOKENS["a"]
        assert await service.readiness() == (NOT_SERVING, NOT_SERVING, False)
        assert not await service.model_ready("b")
        server.supervisor.set_model("b", READY, server.engines["b"].address)
        starts(server, False)
        await service.until(service.is_ready)
        # The moment at which the server is ready is one at which all its models are.
        assert await service.model_ready("b") and ids_of(await service.tokens("b")) == TOKENS["b"]


@pytest.mark.parametrize("engine_runs", [False, True])
async def test_calls_to_a_model_that_loads_are_unavailable(
    server: Server, sockets: pathlib.Path, engine_runs: bool
) -> None:
    address = server.engines["b"].address if engine_runs else ""
    server.supervisor.set_model("b", LOADING, address)
    starts(server, True)
    async with joined(sockets) as service:
        if engine_runs:
            await service.until(lambda: _known(service, "b"))
        calls = [
            service.tokens("b"),
            service.stub.Complete(inference_pb2.CompleteRequest(spec=spec("b"))),
            service.stub.Submit(inference_pb2.SubmitRequest(spec=spec("b"))),
            service.kserve.ModelInfer(wire.text(model="b", stream=False)),
        ]
        if not engine_runs:
            calls.append(service.stub.GetModel(inference_pb2.GetModelRequest(model="b")))
            calls.append(service.kserve.ModelMetadata(kserve.ModelMetadataRequest(name="b")))
        for call in calls:
            error = await service.refusal(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE and "is being loaded" in (error.details() or "")
            assert retry_delay_s(error) is not None
        error = await service.refusal(service.tokens("c"))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def _known(service: Joined, name: str) -> bool:
    return any(model.name == name and model.is_known for model in service.service.core.models)


async def test_a_default_model_that_loads_is_named_as_such(server: Server, sockets: pathlib.Path) -> None:
    server.supervisor.set_model("a", LOADING)
    starts(server, True)
    async with joined(sockets) as service:
        error = await service.refusal(service.tokens(""))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "model 'a' is being loaded" in (error.details() or "")


async def test_a_service_that_joins_late_is_ready_when_it_knows_all_models(
    server: Server, sockets: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, may_read = TextLoader.load, asyncio.Event()

    async def slow_for_b(self: TextLoader, engine: Any) -> Any:
        if engine.name == "b":
            await may_read.wait()
        return await load(self, engine)

    monkeypatch.setattr(TextLoader, "load", slow_for_b)
    async with joined(sockets) as service:
        await service.until(lambda: service.model_ready("a"))
        assert await service.readiness() == (NOT_SERVING, NOT_SERVING, False)
        may_read.set()
        await service.until(service.is_ready)
        assert ids_of(await service.tokens("b")) == TOKENS["b"]


async def test_a_service_that_joins_late_does_not_wait_for_an_engine_that_is_gone(
    server: Server, sockets: pathlib.Path
) -> None:
    await server.engines["b"].stop()
    async with joined(sockets) as service:
        await service.until(service.is_ready)
        assert not await service.model_ready("b") and ids_of(await service.tokens("a")) == TOKENS["a"]


async def test_a_load_at_run_time_leaves_the_servers_readiness_alone(server: Server, sockets: pathlib.Path) -> None:
    async with joined(sockets) as service:
        await service.until(service.is_ready)
        for state, address in ((UNLOADED, ""), (LOADING, ""), (LOADING, "unix:/nowhere"), (FAILED, "")):
            server.supervisor.set_model("b", state, address)
            await service.until(lambda state=state, address=address: _reported(service, "b", state, address))
            assert await service.is_ready() and not await service.model_ready("b")
        # A default model that loads again is as good as one that is not loaded.
        for state, address in ((UNLOADED, ""), (LOADING, ""), (LOADING, "unix:/nowhere")):
            server.supervisor.set_model("b", READY, server.engines["b"].address)
            await service.until(lambda: service.model_ready("b"))
            server.supervisor.set_model("a", state, address)
            await service.until(lambda state=state, address=address: _reported(service, "a", state, address))
            assert await service.is_ready() and not await service.model_ready("a")


async def _reported(service: Joined, name: str, state: Any, address: str) -> bool:
    repository = service.service.core.models.repository
    assert repository is not None
    return any((m.name, m.state, m.engine_address) == (name, state, address) for m in repository.models)
