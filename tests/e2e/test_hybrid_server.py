"""A model with recurrent layers, served: answers, a lost worker, and what is refused.

Rows are few, steps short and blocks too few for all, so that prompts are cut and requests press
each other out.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import signal
from collections.abc import Iterator

import grpc
import pytest
import torch
import transformers
from tests.e2e.test_against_transformers import CRAMPED, TEXTS, byte_level_tokenizer
from tests.e2e.test_tensor_parallel import PATIENCE
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, read
from tests.support.running_server import RunningServer, refused, running_server

from headrace.v1 import generation_pb2, inference_pb2

# Engine and runner are compared with transformers in tests/worker/step/test_recurrent_states.py.
pytestmark = pytest.mark.slow

TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Saved:
    """A random model with its tokenizer, saved by transformers."""

    path: pathlib.Path
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerFast

    def answer(self, text: str, count: int = TOKENS) -> list[int]:
        """Greedy tokens behind a text."""
        prompt = self.tokenizer(text, return_tensors="pt").input_ids
        whole = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return [int(token) for token in whole[0, prompt.shape[1] :]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(3)
    tokenizer = byte_level_tokenizer()
    # Two stages have layers of both kinds.
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    config = transformers.Qwen3_5TextConfig(
        layer_types=kinds,
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, max_position_embeddings=256, initializer_range=0.1, bos_token_id=None,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Saved(path, model, tokenizer)


@pytest.fixture(scope="module")
def server(saved: Saved) -> Iterator[RunningServer]:
    with running_server(*CRAMPED, model=saved.path) as server:
        yield server


def test_answers_are_those_of_transformers(saved: Saved, server: RunningServer) -> None:
    """Each text twice and all at once."""
    with concurrent.futures.ThreadPoolExecutor(2 * len(TEXTS)) as pool:
        answers = list(pool.map(lambda text: generate(server.address, greedy(text, TOKENS)), TEXTS * 2))
    for text, answer in zip(TEXTS * 2, answers, strict=True):
        assert answer.tokens[0] == saved.answer(text)


def test_a_conversation_goes_on_behind_what_it_said(saved: Saved, server: RunningServer) -> None:
    """A state is kept on the way, so that the next turn begins there."""
    turns = [f"{number} behind the other" for number in range(7)]
    for end in (6, 7):
        text = " ".join(turns[:end])
        answer = generate(server.address, greedy(text, TOKENS))
        assert answer.tokens[0] == saved.answer(text)
    assert answer.done is not None and answer.done.usage.cached_tokens == 64


def test_outputs_and_beams_go_on_from_one_prompt(saved: Saved, server: RunningServer) -> None:
    spec = generation_pb2.GenerationSpec(text=TEXTS[0], n=2, beam_search={"width": 3})
    spec.stop.max_tokens = 12
    prompt = saved.tokenizer(TEXTS[0], return_tensors="pt").input_ids
    wanted = saved.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=3, num_return_sequences=2, do_sample=False,
        max_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    answer = generate(server.address, spec)
    for index in range(2):
        tokens = answer.tokens[index]
        assert tokens == wanted[index, prompt.shape[1] :].tolist()[: len(tokens)]
    several = greedy(TEXTS[1], TOKENS)
    several.n = 3
    outputs = generate(server.address, several).tokens
    assert [outputs[index] for index in range(3)] == [saved.answer(TEXTS[1])] * 3


def test_a_start_says_what_states_take(server: RunningServer) -> None:
    log = "".join(server.lines)
    assert "prefix caching is off" not in log
    assert "state=" in log and "state_checkpoint=" in log
    with connected(server.address) as stub:
        assert stub.GetModel(inference_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S).model.dtype == "fp32"


def drawn_outputs() -> generation_pb2.GenerationSpec:
    """Three outputs of one prompt, whose draws are the same each time."""
    spec = greedy(TEXTS[1], 60, n=3)
    spec.sampling.temperature, spec.sampling.seed = 0.9, 7
    return spec


def read_again(address: str, request_id: str) -> Transcript | None:
    """All of a submitted answer; None: nobody has it now."""
    request = inference_pb2.SubscribeRequest(request_id=request_id)
    try:
        with connected(address) as stub:
            return read(stub.Subscribe(request, timeout=CALL_TIMEOUT_S))
    except grpc.RpcError:
        return None


@pytest.mark.parametrize("lost", ["worker", "backend"])
def test_who_takes_the_states_along_changes_no_token(saved: Saved, server: RunningServer, lost: str) -> None:
    """A greedy answer goes on, and so do several outputs of a prompt that are drawn beside it."""
    specs, drawn = (greedy(TEXTS[0], 100), drawn_outputs()), generate(server.address, drawn_outputs()).tokens
    with connected(server.address) as stub:
        ids = [stub.Submit(inference_pb2.SubmitRequest(spec=spec)).request_id for spec in specs]
        stream = stub.Subscribe(inference_pb2.SubscribeRequest(request_id=ids[0]), timeout=CALL_TIMEOUT_S)
        next(response for response in stream if response.event.HasField("delta"))
        victim = getattr(server, lost)()
        victim.kill()
        victim.wait()
    found = [wait_until(lambda number=number: read_again(server.address, number), 240, "an answer") for number in ids]
    assert found[0].tokens[0] == saved.answer(TEXTS[0], 100)
    assert found[1].tokens == drawn
    assert found[0].done is not None and found[0].done.ledger.engine_restart_ns > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--speculate", "mtp"), "has no MTP layer to draft with"),
        (("--enable-prefix-cache", "--state-checkpoints", "0"), "state_checkpoints 1 or more works"),
        (("--state-checkpoints", "-1"), "state-checkpoints: must be at least 0"),
        (("--tp", "3"), "which does not divide linear_num_value_heads 4; tp 1, 2, 4 work"),
        (("--pp", "3"), "each stage needs a layer with keys and values"),
    ],
)
def test_what_states_cannot_do_yet_is_refused_by_name(saved: Saved, options: tuple[str, ...], words: str) -> None:
    ended, _ = refused("--device", "cpu", *options, model=saved.path)
    assert ended.returncode == 2 and words in ended.stderr


# Stages by themselves are in tests/parallel/test_stages_of_hybrids.py, ranks in the test below.
def test_ranks_of_stages_answer_as_one(saved: Saved) -> None:
    """With prompts that go on from kept states, of which each rank has its part of its layers'.

    Then all texts at once, of which some are cut and some pressed out.
    """
    text = " ".join(f"{number} behind the other" for number in range(6))
    with running_server(*CRAMPED, "--tp", "2", "--pp", "2", *PATIENCE, model=saved.path) as server:
        for end in ("", " again"):
            answer = generate(server.address, greedy(text + end, TOKENS))
            assert answer.tokens[0] == saved.answer(text + end)
        with concurrent.futures.ThreadPoolExecutor(2 * len(TEXTS)) as pool:
            answers = list(pool.map(lambda text: generate(server.address, greedy(text, 60)), TEXTS * 2))
    assert answer.done is not None and answer.done.usage.cached_tokens == 64
    for text, found in zip(TEXTS * 2, answers, strict=True):
        assert found.tokens[0] == saved.answer(text, 60)


def test_drafts_of_ranks_change_no_answer(saved: Saved) -> None:
    """All texts at once, of which some are cut and some pressed out; then a rank is lost."""
    drafting = ("--speculate", "ngram", "--speculate-tokens", "4", "--tp", "2")
    with running_server(*CRAMPED, *drafting, model=saved.path) as server:
        with concurrent.futures.ThreadPoolExecutor(2 * len(TEXTS)) as pool:
            answers = list(pool.map(lambda text: generate(server.address, greedy(text, 60)), TEXTS * 2))
            answer = pool.submit(generate, server.address, greedy(TEXTS[0], 100))
            server.worker().send_signal(signal.SIGKILL)
            assert answer.result(CALL_TIMEOUT_S).tokens[0] == saved.answer(TEXTS[0], 100)
    for text, found in zip(TEXTS * 2, answers, strict=True):
        assert found.tokens[0] == saved.answer(text, 60)
    assert sum(found.done.ledger.draft_tokens for found in answers if found.done is not None) > 0


def test_quantized_layers_are_served(saved: Saved) -> None:
    with running_server(*CRAMPED, "--quantize", "int8", model=saved.path) as server:
        found = generate(server.address, greedy(TEXTS[0], TOKENS)).tokens[0]
    # Rounding changes a token at most here and there; the first ones are far apart.
    assert found[:2] == saved.answer(TEXTS[0])[:2]
