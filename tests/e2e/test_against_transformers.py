"""A folder that transformers saved, tokenizer and all, is served as it is.

Greedy answers through gRPC equal those of `generate` in fp32, and prompt logprobs are those of its
logits.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy
from tests.support.running_server import running_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.v1 import generation_pb2, inference_pb2

# Models are compared with transformers in tests/models, servers with one another in
# test_equal_answers.
pytestmark = pytest.mark.slow

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "größer 東京 🙂",
    "a block holds sixteen tokens of keys and values",
]
TOKENS = 24
# Too few blocks for all at once, in steps of 16 tokens.
CRAMPED = (
    "--device", "cpu", "--num-blocks", "20", "--max-num-seqs", "8", "--max-num-batched-tokens", "16",
    "--max-model-len", "128",
)  # fmt: skip
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Ten times the usual: random models with small weights hardly depend on their context.
    "initializer_range": 0.2,
}


def byte_level_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A BPE tokenizer over bytes with a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A random model with its tokenizer, saved by transformers, and a server of the folder."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerFast
    address: str


# Of one family: what the others compute is compared with transformers in tests/models, from folders
# that were saved like this one.
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(3)
    tokenizer = byte_level_tokenizer()
    config = transformers.LlamaConfig(
        **_SIZES, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with running_server(*CRAMPED, model=folder) as server:
        yield Saved(model, tokenizer, server.address)


def test_a_saved_model_answers_as_in_transformers(saved: Saved) -> None:
    with connected(saved.address) as stub:
        assert stub.GetModel(inference_pb2.GetModelRequest()).model.dtype == "fp32"
    for text in TEXTS:
        prompt = saved.tokenizer(text, return_tensors="pt").input_ids
        whole = saved.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        expected = whole[0, prompt.shape[1] :].tolist()
        answer = generate(saved.address, greedy(text, TOKENS))
        assert answer.events[0].accepted.prompt_tokens == prompt.shape[1]
        assert answer.tokens[0] == expected
        assert answer.texts[0] == saved.tokenizer.decode(expected, skip_special_tokens=True)


NUM_TOPS = 3
# fp32 on both sides, with sums in another order, through the layers.
TOLERANCE = 1e-3


def test_prompt_logprobs_are_those_of_transformers(saved: Saved) -> None:
    """Ten prompts at once, one of them twice, in steps of 16 tokens and with too few blocks.

    Bias and temperature change nothing in their prompt logprobs.
    """
    generator = np.random.default_rng(1)
    prompts = [[int(token) for token in generator.integers(1, 320, length)] for length in range(1, 82, 9)]
    prompts.append(prompts[-1])
    specs = [greedy(prompt, 30, prompt_logprobs=NUM_TOPS) for prompt in prompts]
    for spec in specs[::2]:
        spec.sampling.temperature = 0.5
        spec.sampling.logit_bias[5] = 50.0
    # Requests that come one after the other, as on a busy machine, do not press each other out.
    for _ in range(10):
        with concurrent.futures.ThreadPoolExecutor(len(specs)) as pool:
            answers = list(pool.map(lambda spec: generate(saved.address, spec), specs))
        if any(answer.done.ledger.preemptions for answer in answers if answer.done is not None):
            break
    with connected(saved.address) as stub:
        whole = stub.Complete(inference_pb2.CompleteRequest(spec=specs[-1]), timeout=CALL_TIMEOUT_S)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_prompt(saved.model, prompt, parts_of(answer))
        assert answer.done is not None and answer.done.usage.cached_tokens == 0
    assert any(answer.done.ledger.preemptions for answer in answers if answer.done is not None)
    check_prompt(saved.model, prompts[-1], list(whole.prompt_logprobs))


def parts_of(answer: Transcript) -> list[generation_pb2.PromptLogprobs]:
    kinds = [event.WhichOneof("event") for event in answer.events]
    last = max((place for place, kind in enumerate(kinds) if kind == "prompt_logprobs"), default=0)
    assert last < kinds.index("delta")
    return [event.prompt_logprobs for event in answer.events if event.HasField("prompt_logprobs")]


def check_prompt(
    model: transformers.PreTrainedModel, prompt: list[int], parts: list[generation_pb2.PromptLogprobs]
) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    joined = generation_pb2.Logprobs()
    for part in parts:
        assert part.first_token_index == 1 + len(joined.sampled)
        joined.MergeFrom(part.logprobs)
    np.testing.assert_allclose(joined.sampled, own[:, 0], atol=TOLERANCE)
    assert list(joined.ranks) == (1 + (expected > own).sum(1)).tolist()
    assert list(joined.top_counts) == [NUM_TOPS] * len(own)
    values, ids = expected.topk(NUM_TOPS)
    assert list(joined.top_token_ids) == ids.flatten().tolist()
    np.testing.assert_allclose(joined.top_logprobs, values.flatten(), atol=TOLERANCE)
