"""A whole server whose two ranks have whole experts answers as one rank does."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch
import transformers
from tests.support.rpc import generate, greedy
from tests.support.running_server import DEMO, refused, run_command, running_server

CPU = ("--device", "cpu", "--dtype", "fp32", "--num-blocks", "40", "--max-model-len", "256")
PROMPTS = [[17 * index % 4000 + 3 + row for index in range(70)] for row in range(2)]
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random Qwen3-MoE of six experts, with the demo model's tokenizer."""
    path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(4)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=33, num_experts=6, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path)
    return path


# Ranks as threads and processes are in tests/parallel.
@pytest.mark.slow
def test_two_ranks_with_whole_experts_answer_as_one(folder: pathlib.Path) -> None:
    answers = []
    # An inner size of 33 is no size that two ranks could have a part of each of.
    for options in ((), ("--tp", "2", "--enable-expert-parallel")):
        with running_server(*CPU, *options, model=folder) as server:
            answers.append([generate(server.address, greedy(prompt, TOKENS)).tokens[0] for prompt in PROMPTS])
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random GLM-4.5 whose experts and shared expert `headrace quantize` rounded to INT4."""
    plain, out = tmp_path_factory.mktemp("glm"), tmp_path_factory.mktemp("quantized") / "glm"
    torch.manual_seed(4)
    config = transformers.Glm4MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, n_routed_experts=6, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    transformers.Glm4MoeForCausalLM(config).save_pretrained(plain)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, plain)
    options = ("--method", "rtn", "--group-size", "32", "--device", "cpu")
    assert run_command("quantize", plain, out, *options).returncode == 0
    return out


# Formats and families are in tests/models/test_published_experts.py.
@pytest.mark.slow
@pytest.mark.parametrize("options", [("--tp", "2"), ("--tp", "2", "--expert-parallel")])
def test_ranks_answer_as_one_from_a_quantized_folder(quantized: pathlib.Path, options: tuple[str, ...]) -> None:
    answers = []
    for each in ((), options):
        with running_server(*CPU, *each, model=quantized) as server:
            answers.append([generate(server.address, greedy(prompt, TOKENS)).tokens[0] for prompt in PROMPTS])
    assert answers[0] == answers[1]


def test_whole_experts_of_a_model_without_any_end_the_start() -> None:
    ended, _ = refused("--tp", "2", "--expert-parallel")
    assert ended.returncode == 2
    assert "expert_parallel is set, and the model has no experts" in ended.stderr
