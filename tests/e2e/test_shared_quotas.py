"""A key's quota holds over engines in processes of their own, whatever services and engines do.

Services and backends are real; the workers compute nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
import structlog
from tests.backend.backend_harness import BackendProcess, start_backend, write_model_folder
from tests.service.auth.credentials_case import bearer, entry, write_keys
from tests.service.harness import quick_start

from headrace.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_service.auth.api_keys import Limits
from headrace_service.config import ServiceConfig
from headrace_service.server import Service

STREAMS = 6
# Of a request that runs until the test ends it.
LONG = 1900


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BackendProcess]]:
    folder = tmp_path_factory.mktemp("engines")
    model = write_model_folder(folder / "tiny")
    started = []
    for index in range(2):
        (folder / str(index)).mkdir()
        started.append(start_backend(folder / str(index), model, "--step-ms", "40", "--blocks", "2048"))
    for engine in started:
        engine.wait_listening()
    yield started
    for engine in started:
        engine.process.kill()
        engine.process.wait(240)


class Caller:
    """A service of its own, and what one key runs there."""

    def __init__(self, service: Service, channel: grpc.aio.Channel) -> None:
        self.service = service
        self.calls: list[Any] = []
        self._generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate

    async def open(self, number: int) -> list[str]:
        """Begins so many long generations at once, of prompts that go to different engines.

        Keeps the calls that were admitted; returns why the others were refused.
        """
        calls = [self._begin(first) for first in range(5, 5 + number)]
        answers = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert all(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for error in refused), refused
        self.calls += [call for call, answer in zip(calls, answers, strict=True) if answer not in refused]
        return [str(error.details()) for error in refused]

    def _begin(self, first: int) -> Any:
        spec = generation_pb2.GenerationSpec(
            token_ids=generation_pb2.TokenIds(ids=[first] * 64),
            stop=generation_pb2.StopConditions(max_tokens=LONG, ignore_eos=True),
        )
        return self._generate(inference_pb2.GenerateRequest(spec=spec), metadata=bearer("key"))

    def num_open(self) -> list[int]:
        """How many of this service's generations each engine has."""
        return [model.num_open for model in self.service.core.models]


@contextlib.asynccontextmanager
async def caller(engines: list[BackendProcess], keys: pathlib.Path, streams: int = STREAMS) -> AsyncIterator[Caller]:
    limits = Limits(concurrent_streams=streams)
    write_keys(keys, entry("key", "key", limits=limits))
    addresses = tuple(engine.address for engine in engines)
    config = ServiceConfig(listen=("127.0.0.1:0",), engine=addresses, keys_file=keys, engine_retry_max_s=0.05)
    with quick_start():
        service = Service(config)
        (address,) = await service.start()
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                await until(lambda: sum(model.serving for model in service.core.models) == len(engines))
                yield Caller(service, channel)
            finally:
                await service.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.02)


async def end(one: Caller, number: int) -> None:
    """Cancels so many of its generations, and waits until no engine has them."""
    left = sum(one.num_open()) - number
    for _ in range(number):
        one.calls.pop().cancel()
    await until(lambda: sum(one.num_open()) == left)


async def test_a_key_has_its_quota_once_over_two_services_and_two_engines_and_when_one_is_killed(
    engines: list[BackendProcess], tmp_path: pathlib.Path
) -> None:
    async with caller(engines, tmp_path / "one.json") as one, caller(engines[::-1], tmp_path / "other.json") as other:
        reasons = await asyncio.gather(one.open(10), other.open(10))
        assert len(one.calls) + len(other.calls) == STREAMS
        # The last ones may be free still, but others wait for them.
        refused = sum(reasons, [])
        assert all(text.startswith("concurrent_streams: ") and str(STREAMS) in text for text in refused), refused
        # What ends at one engine can be had at any.
        await end(one if one.calls else other, 1)
        await until_admitted(other, 1)
        assert len(one.calls) + len(other.calls) == STREAMS
        assert len(await one.open(3)) == 3
        # A lost engine's generations go on at the other one, and are not counted twice.
        lost = one.num_open()[0] + other.num_open()[1]
        with structlog.testing.capture_logs() as logged:
            engines[0].process.kill()
            # What the other engine has not heard of yet, it can't count.
            await until(lambda: [line["event"] for line in logged].count("generation.continued") == lost)
        assert [max(one.num_open()), max(other.num_open())] == [len(one.calls), len(other.calls)]
        assert len(await one.open(3)) == len(await other.open(3)) == 3
        await end(other, len(other.calls))
        await until_admitted(one, STREAMS - len(one.calls))
        assert len(one.calls) == STREAMS and len(await other.open(1)) == 1


async def until_admitted(one: Caller, number: int) -> None:
    """Begins so many generations, again while the engine has not heard of what has ended."""
    wanted = len(one.calls) + number
    async with asyncio.timeout(240):
        while len(one.calls) < wanted:
            await one.open(1)
