"""Greedy answers in fp32 do not depend on how they were computed.

Token budget, cache size, preemption, prefix hits and n vary; a full queue says that it is full.
"""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, details, generate, greedy, idle_load
from tests.support.running_server import RunningServer, running_server

from headrace.v1 import generation_pb2, inference_pb2

_RANDOM = random.Random(5)
_SHARED = [_RANDOM.randrange(10, 4000) for _ in range(90)]
# Every other prompt begins with the same 90 tokens, so that servers with a prefix cache find some.
PROMPTS = [
    [*(_SHARED if index % 2 else []), *(_RANDOM.randrange(10, 4000) for _ in range(_RANDOM.randrange(3, 100)))]
    for index in range(10)
]
OUTPUT = 32
# 22 blocks of 16 tokens, for up to 10 rows of up to 222 tokens.
CRAMPED = ("--num-blocks", "22", "--max-model-len", "256", "--max-num-seqs", "10", "--max-waiting-requests", "12")


@pytest.fixture(scope="module")
def cramped_server() -> Iterator[RunningServer]:
    """A server that must preempt, in steps of at most 16 tokens."""
    options = ("--dtype", "fp32", "--device", "cpu", "--max-num-batched-tokens", "16")
    with running_server(*options, *CRAMPED) as server:
        yield server


@pytest.fixture(scope="module")
def golden(shared_server: RunningServer) -> list[list[int]]:
    """The answers of a server with room, one request at a time."""
    return [generate(shared_server.address, greedy(prompt, OUTPUT)).tokens[0] for prompt in PROMPTS]


def all_at_once(address: str, specs: list[generation_pb2.GenerationSpec]) -> list[Transcript]:
    with concurrent.futures.ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(lambda spec: generate(address, spec), specs))


def everything() -> list[generation_pb2.GenerationSpec]:
    return [greedy(prompt, OUTPUT) for prompt in PROMPTS]


def preemptions(transcript: Transcript) -> int:
    assert transcript.done is not None
    return transcript.done.ledger.preemptions


def test_a_batch_answers_like_single_requests(server: RunningServer, golden: list[list[int]]) -> None:
    assert [transcript.tokens[0] for transcript in all_at_once(server.address, everything())] == golden


def until_preempted(address: str, specs: list[generation_pb2.GenerationSpec]) -> Iterator[list[Transcript]]:
    """Answers to all at once, again and again until some pressed others out.

    Requests that come one after the other, as on a busy machine, do not.
    """
    for _ in range(10):
        answers = all_at_once(address, specs)
        yield answers
        if any(preemptions(transcript) for transcript in answers):
            return
    raise AssertionError("nobody was preempted")


@pytest.mark.slow  # test_speculation.py presses rows out of a batch every day.
def test_small_steps_and_preemption_change_nothing(cramped_server: RunningServer, golden: list[list[int]]) -> None:
    for answers in until_preempted(cramped_server.address, everything()):
        assert [transcript.tokens[0] for transcript in answers] == golden
    wait_until(lambda: idle_load(cramped_server.address), 60, "no request and no block left")


def test_a_prefix_hit_changes_nothing(server: RunningServer) -> None:
    prompt = [17 * index % 4000 for index in range(3, 203)]
    first, second = (generate(server.address, greedy(prompt, OUTPUT)) for _ in range(2))
    assert first.done is not None and second.done is not None
    assert first.done.usage.cached_tokens == 0
    assert second.done.usage.cached_tokens == second.done.ledger.cached_tokens == 192
    assert second.tokens == first.tokens
    other = generate(server.address, greedy(prompt, OUTPUT, cache_salt="another caller"))
    assert other.done is not None and other.done.usage.cached_tokens == 0
    assert other.tokens == first.tokens


@pytest.mark.slow  # test_speculation.py preempts a server's rows too.
def test_several_outputs_under_preemption_answer_like_one(
    cramped_server: RunningServer, golden: list[list[int]]
) -> None:
    short = min(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    for both in until_preempted(cramped_server.address, [greedy(PROMPTS[short], OUTPUT, n=5)] * 2):
        for transcript in both:
            assert [transcript.tokens[index] for index in range(5)] == [golden[short]] * 5


@pytest.mark.slow  # tests/engine/limits/test_quotas.py fills the queue of an engine.
def test_a_full_queue_refuses_and_says_when_to_come_back(cramped_server: RunningServer) -> None:
    with connected(cramped_server.address) as stub:
        request = inference_pb2.SubmitRequest(spec=greedy(PROMPTS[0], 150))
        accepted: list[str] = []
        with pytest.raises(grpc.RpcError) as error:
            while len(accepted) < 50:
                accepted.append(stub.Submit(request, timeout=CALL_TIMEOUT_S).request_id)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = details(error.value.trailing_metadata())["RetryInfo"]
        assert isinstance(retry, error_details_pb2.RetryInfo) and retry.retry_delay.ToNanoseconds() > 0
        assert len(accepted) >= 4
        for request_id in accepted:
            stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=CALL_TIMEOUT_S)
    wait_until(lambda: idle_load(cramped_server.address), 60, "no request and no block left")
    after = generate(cramped_server.address, greedy(PROMPTS[0], 4))
    assert after.reason() == generation_pb2.FINISH_REASON_LENGTH
