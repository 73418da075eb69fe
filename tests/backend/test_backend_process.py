"""Requests through a real backend process.

It has a socket, the engine, the rings, and a worker process without a model.
"""

from __future__ import annotations

import gc
import itertools
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    Subscription,
    connected,
    details,
    error_status,
    idle,
    running_backend,
    settled,
    start_backend,
    until,
)
from tests.backend.fake_worker import expected_tokens, prompt_entry
from tests.support.ports import free_address
from tests.support.processes import alive

from headrace_model_folder import read_token_table
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.stop import Stop

PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def backend(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendProcess]:
    """One backend for the tests that leave it as it was. A step takes 2 ms."""
    started = start_backend(tmp_path_factory.mktemp("backend"), model, "--step-ms", "2", max_num_batched_tokens=256)
    yield started
    assert started.process.poll() is None, started.log
    workers = started.worker_pids()
    started.process.terminate()
    assert started.process.wait(240) == 0, started.log
    assert not alive(workers)
    assert "Traceback" not in started.log, started.log
    assert "never retrieved" not in started.log, started.log


@pytest_asyncio.fixture
async def client(backend: BackendProcess) -> AsyncIterator[EngineClient]:
    async with connected(backend.address) as connection:
        await connection.wait_serving()
        yield connection
        await idle(connection)


async def has_tokens(subscription: Subscription, count: int) -> None:
    await until(lambda: len(subscription.tokens) >= count or subscription.settled.is_set())
    assert not subscription.settled.is_set()


async def test_welcome_describes_the_model(client: EngineClient, model: pathlib.Path) -> None:
    described = (client.welcomes[-1]).model
    assert (described.name, described.folder) == ("tiny", str(model))
    assert described.architecture == "LlamaForCausalLM"
    assert (described.vocabulary_size, described.max_context_tokens) == (300, 2048)
    assert (described.kv_blocks, described.kv_block_tokens, described.device) == (256, 16, "cpu")
    assert (described.dtype, list(described.end_of_text_token_ids)) == ("fp32", [2])
    assert client.states[-1][1].stale_after_ns == 3_000_000_000


async def test_request_gets_its_tokens_and_its_ledger(client: EngineClient) -> None:
    request = await settled(await client.add(PROMPT, 40, service_ns=1_000_000))
    assert request.added is not None and request.added.prompt_tokens == len(PROMPT)
    assert request.tokens == expected_tokens(PROMPT, 40)
    assert request.started
    assert request.ends[0].reason == engine_pb2.OUTPUT_END_REASON_LENGTH
    done = request.done
    assert done is not None
    assert (done.prompt_tokens, done.output_tokens) == (len(PROMPT), 40)
    assert done.queued_ns >= 1_000_000
    assert done.decode_ns >= 39 * 2_000_000
    # Streamed: a message per step, not one at the end. A backend that is held up merges steps.
    assert request.num_messages >= 10


async def test_many_requests_at_once_do_not_disturb_each_other(client: EngineClient) -> None:
    prompts = [[4 + i, 5 + i, *range(4, 4 + i)] for i in range(100)]
    requests = [await client.add(prompt, 10 + i % 7) for i, prompt in enumerate(prompts)]
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        assert (await settled(request)).tokens == expected_tokens(prompt, 10 + i % 7)


async def test_outputs_and_logprobs_arrive_by_index(client: EngineClient) -> None:
    request = await settled(await client.add(PROMPT, 5, n=3, num_logprobs=2))
    expected = expected_tokens(PROMPT, 5)
    assert request.outputs == {0: expected, 1: expected, 2: expected}
    assert len(request.logprobs) == 15
    assert all(sampled == -0.5 and len(tops) == 2 for sampled, tops in request.logprobs)
    assert sorted(tops[0] for _, tops in request.logprobs) == sorted(expected * 3)


async def test_prompt_logprobs_come_before_the_first_token_and_to_later_readers(
    backend: BackendProcess, client: EngineClient
) -> None:
    """The prompt takes several steps of 256 tokens."""
    prompt = [4 + i % 290 for i in range(700)]
    request = await client.add(prompt, 30, n=2, num_prompt_logprobs=2, detached=True)
    await until(lambda: request.prompt)
    async with connected(backend.address) as other:
        late = await settled(await other.attach(request.request_id))
        await settled(request)
        ended = await settled(await other.attach(request.request_id))
    assert request.tokens == expected_tokens(prompt, 30)
    assert request.prompt == [prompt_entry(token, 2) for token in prompt[1:]]
    assert late.prompt == ended.prompt == request.prompt
    assert request.done is not None and request.done.cached_tokens == 0


async def test_prompt_logprobs_beyond_the_bound_are_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with running_backend(tmp_path, model, max_prompt_logprobs_bytes=1 << 16) as backend:
        async with connected(backend.address) as client:
            await client.wait_serving()
            refused = (await settled(await client.add([9] * 1000, 5, num_prompt_logprobs=20))).refused
            assert refused is not None and refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert "spec.prompt_logprobs" in refused.message and "65536" in refused.message
            taken = await settled(await client.add([9] * 1000, 5, num_prompt_logprobs=0))
            assert len(taken.prompt) == 999


async def test_many_readers_of_one_step_get_all_of_it_in_messages_that_may_be_sent(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Each of ten readers is sent 340 kB with the first step; a message may have 1 MiB."""
    # So that all of them read before the first step.
    arguments, limits = ("--start-s", "2"), {"max_message_bytes": 1 << 20}
    async with running_backend(tmp_path, model, *arguments, backend=limits) as backend:
        async with connected(backend.address) as client:
            prompt = [4 + i % 290 for i in range(2000)]
            owner = await client.add(prompt, 5, num_prompt_logprobs=20, detached=True)
            await until(lambda: owner.added)
            readers = [owner, *[await client.attach(owner.request_id) for _ in range(9)]]
            for reader in readers:
                assert (await settled(reader)).tokens == expected_tokens(prompt, 5)
                assert reader.prompt == [prompt_entry(token, 20) for token in prompt[1:]]
            assert client.error is None


async def test_readers_from_any_offset_get_the_same_stream(backend: BackendProcess, client: EngineClient) -> None:
    owner = await client.add(PROMPT, 1000, detached=True, service_state=b"state", num_logprobs=1)
    await has_tokens(owner, 20)
    async with connected(backend.address) as other:
        from_start = await other.attach(owner.request_id)
        from_middle = await client.attach(owner.request_id, from_token=10)
        for reader in (owner, from_start, from_middle):
            await settled(reader)
            assert reader.tokens == expected_tokens(PROMPT, 1000)
        late = await settled(await other.attach(owner.request_id, from_token=1000))
    for reader in (from_start, from_middle, late):
        assert reader.attached is not None
        assert reader.attached.service_state == b"state"
        assert reader.attached.prompt_tokens == len(PROMPT)
        assert reader.attached.started
    assert late.done is not None and late.done.output_tokens == 1000
    assert late.ends[0].reason == engine_pb2.OUTPUT_END_REASON_LENGTH
    assert late.tokens == owner.tokens


async def test_attach_refuses_what_is_not_there(client: EngineClient) -> None:
    owner = await settled(await client.add(PROMPT, 5, detached=True, tenant="alice"))
    for request_id, fields, code in (
        ("nobody", {"tenant": "alice"}, grpc.StatusCode.NOT_FOUND),
        (owner.request_id, {"tenant": "bob"}, grpc.StatusCode.NOT_FOUND),
        (owner.request_id, {"tenant": "alice", "from_token": 6}, grpc.StatusCode.OUT_OF_RANGE),
    ):
        reader = await settled(await client.attach(request_id, **fields))
        assert reader.refused is not None and reader.refused.code == code.value[0]


async def test_abort_ends_the_request_with_its_cause(client: EngineClient) -> None:
    for cause, reason in (
        (engine_pb2.ABORT_CAUSE_CANCELLED, engine_pb2.OUTPUT_END_REASON_CANCELLED),
        (engine_pb2.ABORT_CAUSE_DEADLINE, engine_pb2.OUTPUT_END_REASON_DEADLINE),
    ):
        request = await client.add(PROMPT, 1900)
        await has_tokens(request, 3)
        aborted = await client.abort(request.request_id, cause)
        assert (aborted.found, aborted.was_active) == (True, True)
        await settled(request)
        assert request.ends[0].reason == reason
        assert request.tokens == expected_tokens(PROMPT, len(request.tokens))
        aborted = await client.abort(request.request_id, cause)
        assert (aborted.found, aborted.was_active) == (True, False)
    assert not (await client.abort("nobody")).found


async def test_deadline_ends_the_request(client: EngineClient) -> None:
    request = await settled(await client.add(PROMPT, 1900, remaining_ns=1_500_000_000))
    assert request.ends[0].reason == engine_pb2.OUTPUT_END_REASON_DEADLINE
    # A step takes 2 ms at least: all tokens would take 3.8 s.
    assert 0 < len(request.tokens) < 1900
    assert request.tokens == expected_tokens(PROMPT, len(request.tokens))


async def test_lost_stream_ends_attached_requests_and_keeps_detached_ones(
    backend: BackendProcess, client: EngineClient
) -> None:
    async with connected(backend.address) as other:
        attached = await other.add(PROMPT, 1900)
        detached = await other.add(PROMPT, 600, detached=True)
        await has_tokens(attached, 3)
        await has_tokens(detached, 3)
    reader = await settled(await client.attach(detached.request_id))
    assert reader.tokens == expected_tokens(PROMPT, 600)
    aborted = await client.abort(attached.request_id)
    assert not aborted.was_active


async def test_detach_ends_a_subscription_only(client: EngineClient) -> None:
    request = await client.add(PROMPT, 1000, detached=True)
    reader = await client.attach(request.request_id)
    await has_tokens(reader, 3)
    await client.send(detach=engine_pb2.DetachRequest(handle=reader.handle))
    await settled(request)
    assert request.tokens == expected_tokens(PROMPT, 1000)
    assert not reader.settled.is_set()
    # The handle is free again.
    await client.send(attach=engine_pb2.AttachRequest(handle=reader.handle, request_id=request.request_id))
    assert (await settled(reader)).refused is None


async def test_idempotency_key_names_one_request(client: EngineClient) -> None:
    first = await client.add(PROMPT, 5, idempotency_key="once", detached=True)
    again = await settled(await client.add(PROMPT, 5, idempotency_key="once", detached=True))
    assert again.added is not None and again.added.existing
    assert again.added.request_id == first.request_id
    await settled(first)
    other = await client.subscription_for_other_spec("once")
    assert other.refused is not None and other.refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0]


async def test_listing_shows_ones_own_requests(client: EngineClient) -> None:
    requests = [await settled(await client.add(PROMPT, 3, detached=True, tenant="carol")) for _ in range(5)]
    query = engine_pb2.ListQuery(tenant="carol", state=3, page_size=3)
    first = await client.ask("list", query)
    second = await client.ask("list", engine_pb2.ListQuery(tenant="carol", page_size=3, before=first.next_before))
    listed = [row.request_id for row in (*first.rows, *second.rows)]
    assert listed == [request.request_id for request in reversed(requests)]
    assert second.next_before == 0
    assert list(first.rows[0].finish_reasons) == [engine_pb2.OUTPUT_END_REASON_LENGTH]
    assert len((await client.ask("list", engine_pb2.ListQuery(tenant="dave", page_size=3))).rows) == 0


async def test_heartbeat_comes_every_second(client: EngineClient) -> None:
    known = len(client.states)
    await until(lambda: len(client.states) >= known + 4)
    times = [moment for moment, _ in client.states[known : known + 4]]
    # The middle one of three gaps: one that is held up makes its own gap longer and the next one
    # shorter.
    assert 0.5 < sorted(later - earlier for earlier, later in itertools.pairwise(times))[1] < 2.5


async def test_stop_string_ends_the_output_and_says_what_to_cut(client: EngineClient, model: pathlib.Path) -> None:
    table = read_token_table(model / "tokenizer.json").token_bytes
    texts = [(table[token] if token < len(table) else None) or b"" for token in expected_tokens(PROMPT, 40)]
    at = next(i for i in range(3, 39) if texts[i].isascii() and texts[i + 1].isascii() and texts[i] and texts[i + 1])
    stop = texts[at] + texts[at + 1]
    request = await settled(await client.add(PROMPT, 40, stop=Stop(40, strings=(stop,))))
    end = request.ends[0]
    assert (end.reason, end.stop_string_index) == (engine_pb2.OUTPUT_END_REASON_STOP, 0)
    text, whole = b"".join(texts[: len(request.tokens)]), b"".join(texts)
    assert text[: len(text) - end.trim_bytes] == whole[: whole.index(stop)]


async def test_what_a_worker_replays_is_in_the_log(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with running_backend(tmp_path, model, "--captured", "16", "64") as backend:
        async with connected(backend.address) as client:
            await client.wait_serving()
            assert (await settled(await client.add(PROMPT, 20))).tokens == expected_tokens(PROMPT, 20)
        assert backend.log_lines("workers ready")[0]["captured_mixed_sizes"] == [16, 64]


async def test_full_queue_is_refused_with_a_hint(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = {"max_num_seqs": 1, "max_waiting_requests": 2}
    async with running_backend(tmp_path, model, "--step-ms", "20", **options) as backend:
        async with connected(backend.address) as client:
            await client.wait_serving()
            running = await client.add(PROMPT, 2000)
            await has_tokens(running, 1)
            accepted = [await client.add(PROMPT, 3) for _ in range(2)]
            for _ in range(4):
                request = await settled(await client.add(PROMPT, 3))
                assert request.refused is not None
                assert request.refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert details(request.refused)["RetryInfo"].retry_delay.ToNanoseconds() > 0
            await client.abort(running.request_id)
            for request in accepted:
                assert (await settled(request)).tokens == expected_tokens(PROMPT, 3)


async def health(channel: grpc.aio.Channel) -> list[Any]:
    """What the probe says of the process, and of its being alive."""
    stub = health_pb2_grpc.HealthStub(channel)
    return [(await stub.Check(HealthCheckRequest(service=service), timeout=60)).status for service in ("", "alive")]


async def test_sigterm_lets_requests_finish_and_refuses_new_ones(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    probe = free_address()
    async with (
        running_backend(
            tmp_path, model, "--step-ms", "10", backend={"drain_grace_s": 600.0, "probe": probe}
        ) as backend,
        connected(backend.address) as client,
        grpc.aio.insecure_channel(probe) as channel,
    ):
        await client.wait_serving()
        assert await health(channel) == [HealthCheckResponse.SERVING] * 2
        running = await client.add(PROMPT, 400)
        await has_tokens(running, 5)
        backend.process.terminate()
        await until(lambda: client.states[-1][1].reason == "draining")
        late = await settled(await client.add(PROMPT, 5))
        assert late.refused is not None and late.refused.code == grpc.StatusCode.UNAVAILABLE.value[0]
        # It gets no more work, and must not be killed for that.
        assert await health(channel) == [HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING]
        await settled(running)
        assert running.tokens == expected_tokens(PROMPT, 400)
        assert await backend.wait_exit() == 0
        await until(lambda: client.error)
        assert client.error is not None and client.error.code() is grpc.StatusCode.UNAVAILABLE
        assert "RetryInfo" in details(error_status(client.error))
        assert not backend.socket.exists()


async def test_grace_is_not_endless_and_a_second_signal_ends_it(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for grace_s, signals in ((0.3, 1), (600.0, 2)):
        async with (
            running_backend(tmp_path, model, "--step-ms", "10", backend={"drain_grace_s": grace_s}) as backend,
            connected(backend.address) as client,
        ):
            await client.wait_serving()
            running = await client.add(PROMPT, 2000)
            await has_tokens(running, 1)
            backend.process.terminate()
            if signals == 2:
                # Two signals at once would be one.
                await until(lambda client=client: client.states[-1][1].reason == "draining")
                backend.process.terminate()
            assert await backend.wait_exit() == 0
            await settled(running)
            assert running.done is None
            assert client.error is not None and client.error.code() is grpc.StatusCode.UNAVAILABLE


async def test_process_never_loads_torch(backend: BackendProcess, client: EngineClient) -> None:
    mapped = pathlib.Path(f"/proc/{backend.process.pid}/maps").read_text()
    assert "grpc" in mapped
    assert "torch" not in mapped and "transformers" not in mapped


async def test_descriptors_return_to_the_baseline(backend: BackendProcess, client: EngineClient) -> None:
    def descriptors() -> int:
        return len(list(pathlib.Path(f"/proc/{backend.process.pid}/fd").iterdir()))

    async def visit() -> None:
        async with connected(backend.address) as other:
            await settled(await other.add(PROMPT, 3))

    await visit()
    gc.collect()
    before = descriptors()
    for _ in range(10):
        await visit()
    # grpc's client keeps its end open until Python's garbage collector finds it.
    gc.collect()
    await until(lambda: descriptors() <= before)


async def test_prompts_are_not_logged(backend: BackendProcess, client: EngineClient) -> None:
    marker = [77, 88, 99, 111, 122, 133]
    request = await settled(await client.add(marker, 3, service_state=b"MARKER-STATE", cache_salt=b"MARKER-SALT"))
    assert request.request_id in backend.log
    assert "MARKER" not in backend.log
    assert "77, 88" not in backend.log
