"""A server whose model is divided over pipeline stages gives the answers of one stage.

It does so under pressure too, with two steps for different rows in flight; settings that don't suit
end the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.e2e.test_tensor_parallel import PATIENCE, TOKENS, prompt, read_all
from tests.support.processes import wait_until
from tests.support.rpc import connected, generate, greedy, idle_load
from tests.support.running_server import RunningServer, refused, running_server

from headrace.v1 import generation_pb2, inference_pb2

# 20 blocks of 16 tokens; the streams together need 24 and more, so that one has to make room for
# another.
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "20", "--pp", "2")


# tests/parallel/test_pipeline_stages.py has stages within a process, every day.
@pytest.fixture(scope="module", params=[pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 2)], ids=["tp1", "tp2"])
def staged(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running_server(*OPTIONS, "--tp", str(request.param), *PATIENCE) as running:
        with connected(running.address) as stub:
            model = stub.GetModel(inference_pb2.GetModelRequest()).model
        assert model.device == f"cpu x{2 * request.param}"
        yield running
        wait_until(lambda: idle_load(running.address), 60, "no request and no block left")


def seeded(index: int) -> generation_pb2.GenerationSpec:
    """A request that draws, with an option that depends on its earlier tokens."""
    spec = greedy(prompt(index), TOKENS)
    spec.sampling.temperature = 0.9
    spec.sampling.seed = 100 + index
    spec.sampling.repetition_penalty = 1.1
    return spec


def test_greedy_answers_are_those_of_one_stage_under_pressure(
    staged: RunningServer, shared_server: RunningServer
) -> None:
    golden = [reader.tokens for reader in asyncio.run(read_all(shared_server.address))]
    # Requests that come one after the other, as on a busy machine, do not press each other out.
    for _ in range(10):
        readers = asyncio.run(read_all(staged.address))
        assert [reader.tokens for reader in readers] == golden
        if any(reader.preemptions for reader in readers):
            return
    raise AssertionError("nobody was preempted")


# Stages draw with every option in tests/parallel/test_pipeline_stages.
def test_seeded_answers_are_those_of_one_stage(staged: RunningServer, shared_server: RunningServer) -> None:
    def drawn(server: RunningServer) -> list[list[int]]:
        return [generate(server.address, seeded(index)).tokens[0] for index in range(3)]

    assert drawn(staged) == drawn(shared_server)


def test_a_long_prompt_and_its_prefix_give_the_same_answer(staged: RunningServer, shared_server: RunningServer) -> None:
    long = [17 * index % 4000 + 3 for index in range(150)]
    first, second = (generate(staged.address, greedy(long, 20)) for _ in range(2))
    assert second.done is not None and second.done.usage.cached_tokens == 144
    assert first.tokens == second.tokens == generate(shared_server.address, greedy(long, 20)).tokens


def test_log_probabilities_of_prompts_come_from_the_last_stage(
    staged: RunningServer, shared_server: RunningServer
) -> None:
    spec = greedy([17 * index % 4000 + 3 for index in range(40)], 2, prompt_logprobs=2)
    found, expected = (_prompt_logprobs(server, spec) for server in (staged, shared_server))
    assert list(found.top_token_ids) == list(expected.top_token_ids) and found.top_token_ids
    # Ranks sum parts of products in another order.
    assert list(found.sampled) == pytest.approx(list(expected.sampled), abs=1e-4)
    assert list(found.top_logprobs) == pytest.approx(list(expected.top_logprobs), abs=1e-4)


def _prompt_logprobs(server: RunningServer, spec: generation_pb2.GenerationSpec) -> generation_pb2.Logprobs:
    """All parts of a prompt's log probabilities as one."""
    whole = generation_pb2.Logprobs()
    with connected(server.address) as stub:
        for response in stub.Generate(inference_pb2.GenerateRequest(spec=spec)):
            if response.event.HasField("prompt_logprobs"):
                whole.MergeFrom(response.event.prompt_logprobs.logprobs)
    return whole


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--pp", "9"), "--pp: must be at most 8"),
        (("--pp", "4", "--tp", "4"), "pp is 4 and tp is 4, which are 16 ranks; one machine has at most 8"),
        (("--pp", "2", "--tp", "3"), "tp is 3, which does not divide num_attention_heads 8; tp 1, 2, 4, 8 work"),
    ],
)
def test_stages_that_can_not_be_end_the_start(options: tuple[str, ...], reason: str) -> None:
    ended, _ = refused("--device", "cpu", *options)
    assert ended.returncode == 2 and reason in ended.stderr
