"""What the supervisor asks of a backend before it ends it: whether anything is left."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import pytest_asyncio
from tests.service.fake_engine import FakeEngine
from tests.support.engine_requests import greedy_request

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import LAYOUT
from headrace_supervisor.processes import engine_probe

CONNECT = "/headrace_engine.v1.EngineService/Connect"


@pytest.fixture
def short_folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield pathlib.Path(folder)


@pytest_asyncio.fixture
async def engine(short_folder: pathlib.Path) -> AsyncIterator[FakeEngine]:
    made = FakeEngine(engine_pb2.EngineModel(name="a"), lambda add, index: [10, 11, 12])
    made.running.clear()
    await made.start(f"unix:{short_folder}/engine.sock")
    yield made
    await made.stop()


async def ask(engine: FakeEngine) -> None:
    """Has the engine begin a request that outlives this connection."""
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stream = channel.stream_stream(
            CONNECT, engine_pb2.ToEngine.SerializeToString, engine_pb2.FromEngine.FromString
        )()
        hello = engine_pb2.Hello(protocol_version=4, service_name="test", request_layout=LAYOUT)
        await stream.write(engine_pb2.ToEngine(hello=hello))
        add = engine_pb2.AddRequest(query_id=1, request_id="r", detached=True, request=greedy_request([1], 1).encode())
        await stream.write(engine_pb2.ToEngine(add=add))
        async with asyncio.timeout(120):
            while "r" not in engine.requests:
                await asyncio.sleep(0.01)
        stream.cancel()


@pytest.mark.parametrize("preempts", [False, True])
async def test_an_engine_is_idle_when_no_request_is_left_whether_it_runs_or_not(
    engine: FakeEngine, preempts: bool
) -> None:
    await ask(engine)
    engine.preempts = preempts
    idle = asyncio.create_task(engine_probe.until_idle(engine.address))
    # Four looks, and it would have been believed after three.
    await asyncio.sleep(1.0)
    assert not idle.done()
    engine.running.set()
    await asyncio.wait_for(idle, 120)


async def test_nobody_who_answers_has_nothing_left(short_folder: pathlib.Path) -> None:
    await asyncio.wait_for(engine_probe.until_idle(f"unix:{short_folder}/nobody.sock"), 120)
