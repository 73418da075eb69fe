"""A server with a quantized cache says so and answers right.

Answers do not depend on how they came about: prefix hits, small steps, preemption, several outputs
of one prompt.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, idle_load, read
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import generation_pb2, inference_pb2
from headrace_model_folder import ModelFolder

# Runners over quantized caches are in tests/worker/step, cramped servers in test_equal_answers, one
# of quantized weights in test_quantized_server.
pytestmark = pytest.mark.slow

ANSWERS = {
    "What is 17 plus 25?": "42",
    "What is 9 times 8?": "72",
    "What is 31 plus 46?": "77",
    "What is 6 times 7?": "42",
    "What is 58 minus 23?": "35",
    "What is 12 plus 13?": "25",
}
# 5 blocks of 16 tokens: about two of these chats.
CRAMPED = ("--num-blocks", "5", "--max-model-len", "80", "--max-num-seqs", "6", "--max-num-batched-tokens", "16")


# Which of the two types makes no difference to where blocks and their scales are copied and freed;
# what is computed over each is in tests/kernels/attention/test_quantized_kv.
@pytest.fixture(scope="module", params=["int8", "fp8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(kv_dtype: str) -> Iterator[RunningServer]:
    options = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "512", "--kv-dtype", kv_dtype)
    with running_server(*options) as running:
        yield running


def chat(address: str, question: str, n: int = 1) -> Transcript:
    message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text=question)])
    spec = generation_pb2.GenerationSpec(sampling=generation_pb2.SamplingParameters(temperature=0), n=n)
    with connected(address) as stub:
        return read(stub.Chat(inference_pb2.ChatRequest(messages=[message], spec=spec), timeout=CALL_TIMEOUT_S))


@pytest.fixture(scope="module")
def golden(server: RunningServer) -> list[list[int]]:
    """The answers one at a time, with room."""
    return [chat(server.address, question).tokens[0] for question in ANSWERS]


def test_the_model_says_what_a_token_takes(server: RunningServer, kv_dtype: str) -> None:
    with connected(server.address) as stub:
        model = stub.GetModel(inference_pb2.GetModelRequest()).model
    config = ModelFolder.open(DEMO, require_weights=False).config
    assert (model.dtype, model.kv_dtype) == ("fp32", kv_dtype)
    # A byte a number, and a scale of 4 for each head's key and value.
    assert model.kv_bytes_per_token == 2 * len(
        config.description.layers
    ) * config.description.attention.num_kv_heads * (config.description.attention.head_dim + 4)
    assert model.memory_plan.kv_cache_bytes == 512 * 16 * model.kv_bytes_per_token


def test_answers_are_right(server: RunningServer) -> None:
    for question, answer in ANSWERS.items():
        transcript = chat(server.address, question)
        assert transcript.reason() == generation_pb2.FINISH_REASON_STOP and answer in transcript.texts[0]


def test_a_prefix_hit_gives_the_answer_of_a_miss(server: RunningServer) -> None:
    # Begins unlike what the other tests ask this server, in whatever order they come.
    text = "The longest river of Italy is the Po. " * 12
    first, second = (generate(server.address, greedy(text, 40)) for _ in range(2))
    other = generate(server.address, greedy(text, 40, cache_salt="another caller"))
    assert first.done is not None and second.done is not None and other.done is not None
    assert first.done.usage.cached_tokens == other.done.usage.cached_tokens == 0
    assert second.done.usage.cached_tokens >= 64
    assert second.tokens == first.tokens == other.tokens


def test_small_steps_and_preemption_change_nothing(
    kv_dtype: str, server: RunningServer, golden: list[list[int]]
) -> None:
    # Three outputs that begin together and outgrow the cache: one has to give way, however fast the
    # machine is.
    long = greedy("The capital of France is Paris.", 40, n=3)
    with running_server("--dtype", "fp32", "--device", "cpu", "--kv-dtype", kv_dtype, *CRAMPED) as cramped:
        with concurrent.futures.ThreadPoolExecutor(len(ANSWERS)) as pool:
            found = list(pool.map(lambda question: chat(cramped.address, question), ANSWERS))
        assert [transcript.tokens[0] for transcript in found] == golden
        crowd, roomy = generate(cramped.address, long), generate(server.address, long)
        assert crowd.done is not None and crowd.done.ledger.preemptions > 0
        assert crowd.tokens == roomy.tokens
        wait_until(lambda: idle_load(cramped.address), 60, "no request and no block left")


def test_outputs_that_share_a_prompt_and_copy_on_write_answer_like_one(
    server: RunningServer, golden: list[list[int]]
) -> None:
    for question, answer in zip(ANSWERS, golden, strict=True):
        transcript = chat(server.address, question, n=3)
        assert [transcript.tokens[index] for index in range(3)] == [answer] * 3


def test_a_type_that_there_is_not_ends_the_start() -> None:
    ended, _ = refused("--kv-dtype", "int9")
    assert ended.returncode == 2
    assert "--kv-dtype: must be auto, fp8 or int8, not 'int9' (nearest: int8)" in ended.stderr
