"""Envoy before several hosts: calls are spread by the load that the hosts report.

Slow, since weights count after 10 s; what Envoy does beside that, test_picker_proxy.py covers.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from tests.service.harness import events_of
from tests.service.model_folder import write_model_folder
from tests.stack.several_services import Front, several_services

from headrace.v1 import inference_pb2
from headrace_protos.engine.v1 import engine_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
CALLS = 120
BLACKOUT_S = 10


def load(number: int) -> engine_pb2.Load:
    """Makes up a load: the second engine needs twice the rows for as many requests."""
    return engine_pb2.Load(
        running_sequences=4 * number,
        max_running_sequences=16,
        waiting_tokens=number,
        taken_requests=int(time.monotonic() * 50),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    model_path = write_model_folder(tmp_path_factory.mktemp("models") / "tiny")
    async with several_services(model_path, "balanced.yaml", {}, load_reports="always") as running:
        for number, service in enumerate(running.services, 1):
            service.engine.other_load = lambda number=number: load(number)  # type: ignore[misc]
        yield running


async def shares(front: Front, calls: int) -> list[int]:
    """How many of some calls each service answered."""
    answered: collections.Counter[int] = collections.Counter()
    for _ in range(calls):
        request = inference_pb2.GetLoadRequest()
        answered[(await front.stub.GetLoad(request, metadata=front.metadata, wait_for_ready=True)).waiting_tokens] += 1
    return [answered[number] for number in (1, 2)]


async def test_hosts_get_what_they_can_do(front: Front) -> None:
    await shares(front, 20)
    await asyncio.sleep(BLACKOUT_S)
    first = second = 0
    async with asyncio.timeout(240):
        while not 1.6 * second < first < 2.5 * second:
            first, second = await shares(front, CALLS)
            await asyncio.sleep(0.5)


async def test_a_host_that_does_not_serve_gets_nothing(front: Front) -> None:
    loser = front.services[0].engine
    loser.state = engine_pb2.EngineState(serving=False, reason="no worker", stale_after_ns=60_000_000_000)
    async with asyncio.timeout(240):
        while (await shares(front, 10))[0]:
            await asyncio.sleep(0.5)
    assert len(await events_of(front.generate())) > 0
    assert front.answered[0] == 0
    loser.state = engine_pb2.EngineState(serving=True, reason="serving", stale_after_ns=60_000_000_000)
    async with asyncio.timeout(240):
        while not (await shares(front, 10))[0]:
            await asyncio.sleep(0.5)


async def test_a_call_without_key_is_the_services_to_refuse(front: Front) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.stub.GetLoad(inference_pb2.GetLoadRequest())
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
