"""Step plans of the largest requests, through a real backend process and its real rings."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from tests.backend.backend_harness import add_message, connected, running_backend, settled, until, write_model_folder
from tests.backend.fake_worker import VOCABULARY, expected_tokens

from headrace_backend.config import EngineConfig
from headrace_backend.server.workers.host_ranks import WorkerLaunch, plan_ring_bytes, result_ring_bytes
from headrace_backend.step.plan import MAX_PROMPT_LOGPROBS, StepResult
from headrace_backend.step.plan_bytes import max_plan_bytes
from headrace_backend.step.ring import RingWriter, create_ring
from headrace_protos.engine.v1 import engine_pb2
from headrace_request import limits
from headrace_request.sampling import Sampling

CONTEXT = 131_072
# A fake worker's blocks take no memory.
BLOCKS = ("--blocks", "16384")
SLOW = ("--step-ms", "100")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "long", CONTEXT)


def prompt_of(length: int) -> list[int]:
    return [4 + i % (VOCABULARY - 4) for i in range(length)]


def penalized() -> Sampling:
    return Sampling(temperature=0.0, repetition_penalty=1.1)


async def test_128_penalized_outputs_of_a_prompt_of_the_whole_context_end(
    long_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    options = {"max_outputs": 128, "max_num_seqs": 128, "max_num_batched_tokens": 16_384}
    async with (
        running_backend(tmp_path, long_model, *BLOCKS, **options) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        request = await settled(await client.add(prompt_of(130_900), 4, n=128, sampling=penalized()))
        assert request.done is not None and request.done.output_tokens == 4 * 128, request.refused
        assert [end.reason for end in request.ends.values()] == [engine_pb2.OUTPUT_END_REASON_LENGTH] * 128
        assert backend.log_lines("worker lost") == []


async def test_20_penalized_requests_behind_one_warm_prompt_end(
    long_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    options = {"max_num_seqs": 512, "max_num_batched_tokens": 16_384}
    async with (
        running_backend(tmp_path, long_model, *BLOCKS, *SLOW, **options) as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        prompt = prompt_of(65_400)
        await settled(await client.add(prompt, 1))
        subscriptions = []
        for _ in range(20):
            subscription = client.subscription()
            message = add_message(prompt, 2, handle=subscription.handle, n=16, sampling=penalized())
            subscription.request_id = message.request_id
            subscriptions.append((subscription, engine_pb2.ToEngine(add=message)))
        # While the first one's steps are computed the others come, so that they join one step.
        for _, message in subscriptions:
            await client.stream.write(message)
        for subscription, _ in subscriptions:
            await settled(subscription)
            assert subscription.done is not None and subscription.done.output_tokens == 2 * 16
        assert backend.log_lines("worker lost") == []


async def test_a_plan_that_outgrows_its_ring_ends_the_request_that_is_to_blame(
    long_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The engine makes none; here the ring is smaller than the engine knows."""
    (tmp_path / "small-ring").write_text(str(128 << 10))
    async with (
        running_backend(tmp_path, long_model, "--blocks", "16384", "--step-ms", "5") as backend,
        connected(backend.address) as client,
    ):
        await client.wait_serving()
        prompts = [[10 + i, 20 + i, 30 + i] for i in range(4)]
        requests = [(prompt, await client.add(prompt, 800)) for prompt in prompts]
        await until(lambda: all(len(request.tokens) >= 5 for _, request in requests))
        guilty = await settled(await client.add(prompt_of(40_000), 10, sampling=penalized()))
        [end] = guilty.ends.values()
        assert end.reason == engine_pb2.OUTPUT_END_REASON_ERROR
        for prompt, request in requests:
            assert (await settled(request)).tokens == expected_tokens(prompt, 800)
        assert all("a step plan: payload of" in line["reason"] for line in backend.log_lines("worker lost"))
        assert len(backend.log_lines("request ended that made steps fail")) == 1


@pytest.mark.parametrize(("rows", "budget"), [(1, 16), (64, 2048), (4096, 1 << 20)])
def test_rings_take_two_of_the_largest_records(long_model: pathlib.Path, rows: int, budget: int) -> None:
    config = EngineConfig(model=long_model, max_num_seqs=rows, max_num_batched_tokens=budget)
    prompts, tops = min(budget, MAX_PROMPT_LOGPROBS), limits.MAX_LOGPROBS
    result = StepResult(1, 1, 2, np.zeros(rows, np.int32), np.ones(rows, np.uint8))
    for part, count in (("logprob", rows), ("prompt", prompts)):
        for column, size in (("sampled", count), ("ranks", count)):
            setattr(result, f"{part}_{column}", np.zeros(size, np.float32 if column == "sampled" else np.int32))
    result.logprob_indices = result.logprob_counts = np.zeros(rows, np.int32)
    result.top_token_ids, result.top_logprobs = np.zeros(rows * tops, np.int32), np.zeros(rows * tops, np.float32)
    result.prompt_top_token_ids = np.zeros(prompts * tops, np.int32)
    result.prompt_top_logprobs = np.zeros(prompts * tops, np.float32)
    largest = {result_ring_bytes(config): len(result.encode())}
    largest[plan_ring_bytes(WorkerLaunch(config, CONTEXT))] = max_plan_bytes(config, CONTEXT)
    for capacity, num_bytes in largest.items():
        ring = create_ring(capacity, 1)
        writer = RingWriter(ring)
        for _ in range(2):
            writer.write(1, bytes(num_bytes), timeout_s=0)
        assert writer.max_payload_at_once >= num_bytes
        writer.close()
        ring.close()
