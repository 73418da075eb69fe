"""Layers whose products take activations of 8 bits.

What makes the activations rounds them, to the same bits as the products would, in every kind of
model and on several ranks.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from tests.models.checkpoints import ignore_progress, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.model_builds import load_model
from tests.support.quantized_folders import Recipe, quantize_folder
from tests.support.rank_threads import on_ranks

from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.experts import mixture
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.quantized import Path
from headrace_kernels.rounded_tokens import Activations, RoundedTokens, round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight
from headrace_model_folder import ModelFolder

PER_TOKEN = InputRounding(torch.float8_e4m3fn)
NUM_LAYERS = 3
# Tokens from which products round, here.
FEWEST = 5
PROMPT = [3 * i % 50 + 1 for i in range(12)]
schemes = pytest.mark.parametrize("scheme", ["int8", "fp8"])


@functools.cache
def folder(base: pathlib.Path, name: str) -> ModelFolder:
    write_checkpoint(base / name, name)
    return ModelFolder.open(base / name)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("rounded")


def load(opened: ModelFolder, scheme: str | None, shard: Shard = ALONE) -> CausalLM:
    return load_model(
        opened,
        opened.config,
        torch.float32,
        torch.device("cpu"),
        "folder",
        0,
        ignore_progress,
        scheme=None if scheme is None else Scheme.named(scheme, 128),
        shard=shard,
    )


def logits(model: CausalLM) -> torch.Tensor:
    """Logits of a prompt's chunk, of its rest beside another row, and of a step of few tokens."""
    driver, rows = PagedDriver(model), [Row(list(PROMPT)), Row(list(PROMPT[:3]))]
    return torch.cat(driver.step(rows[:1], [7]) + driver.step(rows, [4, 2]) + driver.step(rows, [1, 1]))


class ManyRowsRound:
    """The rule of a card that multiplies 8 bits by 8 bits, and what products are then given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounded, self.plain = 0, 0
        self._monkeypatch = monkeypatch
        multiply, multiply_rounded = LowBitWeight.multiply, LowBitWeight.multiply_rounded

        def counted(weight: LowBitWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.plain += len(x) >= FEWEST
            return multiply(weight, x, bias)

        def counted_rounded(weight: LowBitWeight, tokens: RoundedTokens, bias: torch.Tensor | None) -> torch.Tensor:
            assert len(tokens.numbers) >= FEWEST
            self.rounded += 1
            return multiply_rounded(weight, tokens, bias)

        monkeypatch.setattr(quantized_linear, "path_rule", self._rule)
        monkeypatch.setattr(LowBitWeight, "multiply", counted)
        monkeypatch.setattr(LowBitWeight, "multiply_rounded", counted_rounded)

    def _rule(self, num_rows: int, weight: QuantizedWeight) -> Path:
        return Path.SCALED if num_rows >= FEWEST else Path.BLOCKS

    def nobody_rounds_before(self) -> None:
        """From here on products round for themselves."""
        self._monkeypatch.setattr(LowBitWeight, "rounds_to", lambda weight, num_tokens: None)


@schemes
@pytest.mark.parametrize("name", ["llama-wide", "qwen2", "qwen3-tied-bias"])
def test_norms_and_activation_round_for_the_products_behind_them(
    name: str, scheme: str, base: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder(base, name), scheme)
    exact = logits(model)
    calls = ManyRowsRound(monkeypatch)
    found = logits(model)
    # Two steps of many tokens: queries, keys and values, gate and up, and down are given rounded
    # tokens; attention's output is not.
    assert (calls.rounded, calls.plain) == (2 * 3 * NUM_LAYERS, 2 * NUM_LAYERS)
    calls.nobody_rounds_before()
    assert torch.equal(logits(model), found)
    assert (calls.rounded, calls.plain) == (2 * 3 * NUM_LAYERS, 2 * 5 * NUM_LAYERS)
    # Rounded they are, and by no more than 8 bits explain over three layers.
    off = (found[:13] - exact[:13]).norm() / exact[:13].norm()
    assert 1e-4 < float(off) < (0.05 if scheme == "int8" else 0.2)


def test_layers_in_blocks_are_given_tokens_rounded_in_their_groups(
    base: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(base, "llama-wide")
    recipe = Recipe("fp8", bits=8, group=128, activations="dynamic")
    opened = ModelFolder.open(quantize_folder(base / "llama-wide", tmp_path, recipe).path)
    model = load(opened, None)
    calls = ManyRowsRound(monkeypatch)
    found = logits(model)
    assert (calls.rounded, calls.plain) == (2 * 3 * NUM_LAYERS, 2 * NUM_LAYERS)
    calls.nobody_rounds_before()
    assert torch.equal(logits(model), found)


@schemes
def test_several_ranks_add_up_before_they_round(
    scheme: str, base: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = folder(base, "llama-wide")
    models = on_ranks(2, lambda shard: load(opened, scheme, shard))
    calls = ManyRowsRound(monkeypatch)
    found = on_ranks(2, lambda shard: logits(models[shard.rank]))
    assert (calls.rounded, calls.plain) == (2 * 2 * 3 * NUM_LAYERS, 2 * 2 * NUM_LAYERS)
    calls.nobody_rounds_before()
    expected = on_ranks(2, lambda shard: logits(models[shard.rank]))
    assert all(torch.equal(each, expected[0]) for each in (*found, *expected))


class ExpertsRound:
    """Experts as on a card that multiplies e4m3 by e4m3; counts the forms of tokens they get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounded = self.plain = 0
        self._multiply = mixture.mixture
        monkeypatch.setattr(mixture, "rounds_to", lambda num_tokens, *_: PER_TOKEN if num_tokens >= FEWEST else None)
        monkeypatch.setattr(mixture, "mixture", self._rounding)
        # Whole outputs are parts of themselves.
        monkeypatch.setattr(mixture, "mixture_in_parts", self._rounding)

    def _rounding(self, x: Activations, *about: Any) -> torch.Tensor:
        if isinstance(x, RoundedTokens):
            self.rounded += 1
        else:
            self.plain += len(x) >= FEWEST
            if len(x) < FEWEST:
                return self._multiply(x, *about)
            x = round_tokens_reference(x, PER_TOKEN)
        return self._multiply(x.numbers.float() * x.scales, *about)


# A mixture alone; beside a shared expert, behind a dense layer; beside the layer's MLP.
@pytest.mark.parametrize("name", ["mixtral-wide", "glm4-moe-wide", "gemma4-moe-wide"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_are_given_rounded_tokens_and_their_router_the_model_s_type(
    name: str, world_size: int, base: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = folder(base, name)
    models = on_ranks(world_size, lambda shard: load(opened, "fp8", shard))
    mixtures = sum(isinstance(module, ExpertMlp) for module in models[0].modules())

    def steps() -> list[torch.Tensor]:
        return on_ranks(world_size, lambda shard: logits(models[shard.rank]))

    calls = ExpertsRound(monkeypatch)
    found = steps()
    # Two steps of many tokens.
    assert (calls.rounded, calls.plain) == (2 * world_size * mixtures, 0)
    monkeypatch.setattr(mixture, "rounds_to", lambda num_tokens, *_: None)
    assert all(torch.equal(each, found[0]) for each in steps())
    assert calls.plain == calls.rounded
