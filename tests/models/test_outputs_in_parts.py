"""Experts' outputs that nobody has added up are added up by the norm behind their layer."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.models.checkpoints import VOCAB_SIZE, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row

from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.experts import mixture
from headrace_kernels.rounded_tokens import Activations

PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(24)]


def leave_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has mixtures leave two halves, which sum to the bits of the whole; takes tokens of each."""
    found: list[int] = []

    def in_parts(x: Activations, *about: Any) -> torch.Tensor:
        found.append(len(x))
        half = mixture.mixture(x, *about) / 2
        return torch.stack((half, half), 1)

    monkeypatch.setattr(mixture, "mixture_in_parts", in_parts)
    return found


def logits_of(model: CausalLM) -> torch.Tensor:
    """Logits of a prompt's tokens in two chunks."""
    driver, row = PagedDriver(model), Row(list(PROMPT))
    return torch.cat([logits for count in (16, 8) for logits in driver.step([row], [count])])


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("qwen3-moe", True),
        ("qwen3-moe-dense-layers", True),
        # A shared expert is added to a whole output; an MLP beside the experts has norms behind it.
        ("glm4-moe", False),
        ("gemma4-moe", False),
    ],
)
def test_logits_are_those_of_whole_outputs_to_the_bit(
    name: str, leaves: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, name)
    model = load(tmp_path)
    expected = logits_of(model)
    left = leave_parts(monkeypatch)
    assert torch.equal(logits_of(model), expected)
    mixtures = [layer for layer in model.modules() if isinstance(layer, ExpertMlp)]
    assert mixtures and left == ([16] * len(mixtures) + [8] * len(mixtures) if leaves else [])


def test_what_leaves_a_stage_is_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3-moe")
    model = load(tmp_path)
    driver = PagedDriver(model)
    norm, model.model.norm = model.model.norm, None
    assert norm is not None
    monkeypatch.setattr(model, "logits", lambda hidden: hidden)
    (expected,) = driver.step([Row(list(PROMPT))], [24])
    left = leave_parts(monkeypatch)
    (found,) = driver.step([Row(list(PROMPT))], [24])
    assert left and torch.equal(found, expected)
