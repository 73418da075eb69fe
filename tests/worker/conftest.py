"""A tiny random Llama on disk, and loaded."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.support.model_builds import load_model

from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.attention import plan
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_model_folder import ModelFolder


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits contexts for a small card where the interpreter runs programs one after the other.

    A launch of decode attention has as many as fill a card, most of them with nothing to do.
    """
    if INTERPRETED:
        monkeypatch.setattr(plan, "TARGET_PROGRAMS", 16)


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write(tmp_path_factory.mktemp("models") / "tiny-llama", 2)


def write(path: pathlib.Path, num_layers: int) -> pathlib.Path:
    """Grouped heads, 97 tokens: written by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=256,
        eos_token_id=2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(path: pathlib.Path, device: str) -> CausalLM:
    folder = ModelFolder.open(path)
    where = torch.device(device)
    return load_model(folder, folder.config, torch.float32, where, "folder", 0, lambda phase, done, total, unit: None)


@pytest.fixture(scope="session")
def llama(llama_path: pathlib.Path) -> CausalLM:
    return load(llama_path, "cpu")


@pytest.fixture(scope="session")
def shallow_llama(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A model of one layer for the interpreter, where each layer takes seconds.

    A second layer is in `test_gpu_runner`'s tests of tokens.
    """
    return load(write(tmp_path_factory.mktemp("models") / "shallow-llama", 1), "cpu")


@pytest.fixture(scope="session")
def llama_on_gpu(llama_path: pathlib.Path) -> CausalLM:
    return load(llama_path, "cuda:0")
