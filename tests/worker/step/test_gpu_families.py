"""Every family in bf16 on a card, against the same weights in fp32 on a CPU.

A card may be as far from fp32 as the references are in bf16 on a CPU, which round in the same
places and sum in another order. Routers that choose other experts for a token, which is right
within rounding, make few tokens' errors large: so medians are compared.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from tests.models.checkpoints import CONFIGS, randomize_vectors
from tests.models.paged_driver import PagedDriver, Row
from tests.support.engine_on_runner import EngineOnRunner, MakeRunner, greedy, layout_of
from tests.support.model_builds import load_model
from tests.worker.step.test_cache_groups import BLOCK_SIZE, prompt_of
from tests.worker.step.test_gpu_cache_groups import gpu_runner

from headrace_backend.models.causal_lm import CausalLM
from headrace_model_folder import ModelFolder

FAMILIES = (
    "llama", "mistral-window", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3", "glm4", "gemma3", "gemma4",
    "gemma4-small", "qwen3.5-wide", "qwen3-moe-wide", "mixtral-wide", "glm4-moe-wide", "gemma4-moe-wide",
    "gpt-oss-wide", "qwen3.5-moe-wide", "seed-oss", "exaone4", "ministral3",
)  # fmt: skip
# Alike in all families that take them, so that kernels are compiled once.
_SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_SIZES |= {"intermediate_size": 128}
NUM_TOKENS = 24
# The medians are of 72 tokens each.
MOST = 2.0


def random_model(name: str, path: pathlib.Path) -> pathlib.Path:
    """A folder in bf16, so that both sides have the same weights."""
    config: Any = CONFIGS[name]()
    # Layers of Gemma 4 have heads of their own.
    sizes = {"intermediate_size": 128} if name.startswith("gemma4") else _SIZES
    for size, value in sizes.items():
        if hasattr(config, size):
            setattr(config, size, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    randomize_vectors(model)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def read(path: pathlib.Path, dtype: torch.dtype, device: str = "cpu") -> CausalLM:
    folder = ModelFolder.open(path)
    return load_model(folder, folder.config, dtype, torch.device(device), "folder", 0, lambda *_: None)


def answered(path: pathlib.Path, device: str, make: MakeRunner) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, the most likely tokens behind them, and their log probabilities, in bf16."""
    layout = layout_of(ModelFolder.open(path).config)
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    engine = EngineOnRunner(read(path, torch.bfloat16, device), layout, 200, make=make, **settings)
    prompts = [prompt_of(length, length) for length in (90, 3, 41)]
    readers = engine.readers_of([greedy(prompt, NUM_TOKENS, num_logprobs=0) for prompt in prompts])
    return [
        (prompt, reader.tokens[0], [entry[0] for entry in reader.logprobs])
        for prompt, reader in zip(prompts, readers, strict=True)
    ]


def logprobs(model: CausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log probabilities of tokens behind a prompt, all in one step."""
    row = Row([*prompt, *tokens])
    (logits,) = PagedDriver(model).step([row], [len(row.tokens) - 1])
    own = logits[len(prompt) - 1 :].float().log_softmax(1)
    return own.gather(1, torch.tensor(tokens)[:, None]).flatten()


def errors(path: pathlib.Path, device: str, make: MakeRunner) -> tuple[float, float]:
    """Median distance from fp32 of bf16 on the device, and of the references in bf16."""
    exact, rounded = read(path, torch.float32), read(path, torch.bfloat16)
    found, usual = [], []
    for prompt, tokens, given in answered(path, device, make):
        expected = logprobs(exact, prompt, tokens)
        found.append((torch.tensor(given) - expected).abs())
        usual.append((logprobs(rounded, prompt, tokens) - expected).abs())
    assert all(error.isfinite().all() for error in found)
    return float(torch.cat(found).median()), float(torch.cat(usual).median())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_card_is_no_further_from_fp32_than_the_references_in_bf16(name: str, tmp_path: pathlib.Path) -> None:
    found, usual = errors(random_model(name, tmp_path), "cuda:0", functools.partial(gpu_runner, (1, 2, 4)))
    assert found <= MOST * usual + 2**-10
