"""A tenant's quotas hold over all services of a backend."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio
from google.rpc import status_pb2
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    Subscription,
    connected,
    details,
    idle,
    settled,
    start_backend,
    until,
)
from tests.backend.fake_worker import expected_tokens

from headrace_protos.engine.v1 import engine_pb2

PROMPT = [10, 20, 30]
# Of 16 tokens each.
NUM_BLOCKS = 64
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


@pytest.fixture(scope="module")
def backend(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendProcess]:
    folder = tmp_path_factory.mktemp("backend")
    started = start_backend(folder, model, "--step-ms", "2", "--blocks", str(NUM_BLOCKS), max_num_seqs=8)
    started.wait_listening()
    yield started
    started.process.terminate()
    assert started.process.wait(240) == 0, started.log
    assert "Traceback" not in started.log, started.log


@pytest_asyncio.fixture
async def services(backend: BackendProcess) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    async with connected(backend.address) as first, connected(backend.address) as second:
        await first.wait_serving()
        await second.wait_serving()
        yield first, second
        await idle(first)


def limits(**values: float) -> engine_pb2.TenantLimits:
    return engine_pb2.TenantLimits(**values)  # type: ignore[arg-type]


async def taken(subscription: Subscription) -> bool:
    """Waits for the answer to an add or attach; says whether it was taken."""
    await until(lambda: subscription.added or subscription.attached or subscription.refused)
    return subscription.refused is None


def refusal(subscription: Subscription) -> tuple[status_pb2.Status, float | None]:
    """The status, and its RetryInfo in seconds."""
    status = subscription.refused
    assert status is not None and status.code == EXHAUSTED, status
    retry = details(status).get("RetryInfo")
    return status, None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9


async def test_rate_is_shared_by_two_services_and_the_promised_moment_holds(
    services: tuple[EngineClient, EngineClient],
) -> None:
    rate = limits(requests_per_minute=60)
    began = time.monotonic()
    asked = [await services[i % 2].add(PROMPT, 2, tenant="rate", limits=rate) for i in range(80)]
    answers = [await taken(subscription) for subscription in asked]
    # One a second comes back.
    assert 60 <= sum(answers) <= 60 + (time.monotonic() - began)
    status, retry_s = refusal(asked[-1])
    assert "requests_per_minute" in status.message and "60" in status.message
    assert retry_s is not None and 0 < retry_s <= 1
    # Everybody else is served meanwhile.
    other = await settled(await services[0].add(PROMPT, 5, tenant="other", limits=rate))
    assert other.tokens == expected_tokens(PROMPT, 5)
    await asyncio.sleep(retry_s)
    assert await taken(await services[0].add(PROMPT, 2, tenant="rate", limits=rate))
    for subscription in asked:
        await settled(subscription)


async def test_streams_are_counted_over_two_services(services: tuple[EngineClient, EngineClient]) -> None:
    first, second = services
    two = limits(concurrent_streams=2)
    detached = await first.add(PROMPT, 900, tenant="streams", limits=two, detached=True)
    running = await second.add(PROMPT, 900, tenant="streams", limits=two)
    assert await taken(detached) and await taken(running)
    # What came with the detached request is its guardian, which counts nowhere; its first reader
    # has the request's own stream.
    first_reader = await first.attach(detached.request_id, tenant="streams", limits=two)
    assert await taken(first_reader)
    for service in services:
        refused = await settled(await service.add(PROMPT, 5, tenant="streams", limits=two))
        status, retry_s = refusal(refused)
        assert "concurrent_streams" in status.message and retry_s == 1
        reader = await settled(await service.attach(detached.request_id, tenant="streams", limits=two))
        assert "concurrent_streams" in refusal(reader)[0].message
    await second.send(detach=engine_pb2.DetachRequest(handle=running.handle))
    reader = await second.attach(detached.request_id, tenant="streams", limits=two)
    assert await taken(reader)
    assert not await taken(await first.add(PROMPT, 5, tenant="streams", limits=two))
    await asyncio.gather(settled(detached), settled(first_reader), settled(reader))
    assert detached.tokens == reader.tokens == expected_tokens(PROMPT, 900)
    assert await taken(await first.add(PROMPT, 5, tenant="streams", limits=two))


async def test_lost_service_frees_its_streams(backend: BackendProcess) -> None:
    one = limits(concurrent_streams=1)
    async with connected(backend.address) as first:
        await first.wait_serving()
        async with connected(backend.address) as second:
            assert await taken(await second.add(PROMPT, 900, tenant="lost", limits=one))
            assert not await taken(await first.add(PROMPT, 5, tenant="lost", limits=one))

        async def passes() -> bool:
            return await taken(await first.add(PROMPT, 5, tenant="lost", limits=one))

        while not await passes():
            await asyncio.sleep(0.02)
        await idle(first)


async def test_tokens_are_charged_at_one_service_and_given_back_at_another(
    services: tuple[EngineClient, EngineClient],
) -> None:
    first, second = services
    quota = limits(tokens_per_minute=1000)
    began = time.monotonic()
    held = await first.add(PROMPT, 900, tenant="tokens", limits=quota)
    assert await taken(held)
    refused = await settled(await second.add(PROMPT, 200, tenant="tokens", limits=quota))
    status, retry_s = refusal(refused)
    # 106 more than the 97 that are left: at 1,000 a minute.
    assert "tokens_per_minute" in status.message and retry_s is not None
    wait_s = 106 / 1000 * 60
    assert wait_s - (time.monotonic() - began) - 0.1 <= retry_s <= wait_s + 0.1
    never = await settled(await second.add(PROMPT, 998, tenant="tokens", limits=quota))
    status, retry_s = refusal(never)
    assert retry_s is None and "never" in status.message and "1001" in status.message
    aborted = await second.ask("abort", engine_pb2.AbortRequest(request_id=held.request_id, tenant="tokens", cause=1))
    assert aborted.was_active
    assert await taken(await second.add(PROMPT, 200, tenant="tokens", limits=quota))
    await settled(held)


async def test_known_key_costs_nothing(services: tuple[EngineClient, EngineClient]) -> None:
    once = limits(requests_per_minute=1, tokens_per_minute=20)
    fields = {"tenant": "key", "limits": once, "idempotency_key": "k", "detached": True}
    request = await settled(await services[0].add(PROMPT, 10, **fields))
    for service in (*services, *services):
        again = await settled(await service.add(PROMPT, 10, **fields))
        assert again.added is not None and again.added.existing and again.added.request_id == request.request_id
    assert not await taken(await services[1].add(PROMPT, 10, tenant="key", limits=once))


async def test_share_of_the_cache_leaves_the_rest_to_others(services: tuple[EngineClient, EngineClient]) -> None:
    first, second = services
    quarter = limits(kv_cache_share=0.25)
    beyond = await settled(await first.add(PROMPT, 300, tenant="share", limits=quarter))
    status, retry_s = refusal(beyond)
    assert retry_s is None
    for part in ("kv_cache_share", "302 tokens", "19 blocks", "16 of 64 blocks"):
        assert part in status.message, status.message
    prompts = [[10 + i] * 100 for i in range(6)]
    mine = [await services[i % 2].add(prompts[i], 150, tenant="share", limits=quarter) for i in range(6)]
    others = [await services[i % 2].add([10 + i, 30], 120, tenant="other") for i in range(3)]
    for subscription in others:
        await settled(subscription)
    load = await first.load()
    assert load.used_blocks <= 16 and load.waiting_requests >= 2, "the others passed requests that came before them"
    for prompt, subscription in zip(prompts, mine, strict=True):
        assert (await settled(subscription)).tokens == expected_tokens(prompt, 150)
    assert all(subscription.done is not None and subscription.done.preemptions == 0 for subscription in others)


async def test_load_says_how_many_sequences_the_batch_holds(services: tuple[EngineClient, EngineClient]) -> None:
    assert (await services[0].load()).max_running_sequences == 8
