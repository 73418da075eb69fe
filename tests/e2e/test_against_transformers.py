"""A folder that transformers saved, tokenizer and all, served as it is: greedy answers through gRPC equal those of `generate` in fp32."""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers
from tests.support.rpc import connected, generate, greedy
from tests.support.running_server import running_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.v1 import inference_pb2

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "größer 東京 🙂",
    "a block holds sixteen tokens of keys and values",
]
TOKENS = 24
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
CONFIGS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}


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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_answers_as_in_transformers(tmp_path: pathlib.Path, name: str) -> None:
    torch.manual_seed(3)
    tokenizer = byte_level_tokenizer()
    config = CONFIGS[name](**_SIZES, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with running_server("--device", "cpu", "--num-blocks", "64", model=tmp_path) as server:
        with connected(server.address) as stub:
            assert stub.GetModel(inference_pb2.GetModelRequest()).model.dtype == "fp32"
        for text in TEXTS:
            prompt = tokenizer(text, return_tensors="pt").input_ids
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
            expected = whole[0, prompt.shape[1] :].tolist()
            answer = generate(server.address, greedy(text, TOKENS))
            assert answer.events[0].accepted.prompt_tokens == prompt.shape[1]
            assert answer.tokens[0] == expected
            assert answer.texts[0] == tokenizer.decode(expected, skip_special_tokens=True)
