"""Mixtures of experts in few bits: the numbers of their own bits, slices of ranks, and memory."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.models.checkpoints import VOCAB_SIZE, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_quantized_loading import CPU, SCHEMES, quantized, scheme_names
from tests.support.model_builds import weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.expert_weight import RoundedExpertWeight
from headrace_backend.quantization.linear_weight import PlainWeight
from headrace_backend.weights.placement import ALONE, Shard
from headrace_kernels.weight_formats.quantized_weight import dequantize
from headrace_model_folder import ModelFolder

PROMPT = [17 * index % VOCAB_SIZE for index in range(40)]


# gpt-oss' folders have experts in stacked tensors, inputs before outputs; GLM has a shared expert.
# Gemma 4's experts stand beside an MLP.
SLOW = ("gpt-oss-wide", "glm4-moe-wide", "gemma4-moe-wide")
FAMILIES = ["mixtral-wide", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Sizes that groups of 32 divide, on two ranks too."""
    made = tmp_path_factory.mktemp("experts")
    write_checkpoint(made, request.param)
    return made


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


@scheme_names
def test_quantized_experts_multiply_by_the_numbers_of_their_bits(path: pathlib.Path, name: str) -> None:
    found, restored = quantized(path, name), load(path)
    experts = [weight for weight in found.low_bit_weights.values() if isinstance(weight, RoundedExpertWeight)]
    mixtures = [module for module in found.modules() if isinstance(module, ExpertMlp)]
    assert len(experts) == 2 * len(mixtures) and all(isinstance(each.router.weight, PlainWeight) for each in mixtures)
    for weight_path, weight in found.low_bit_weights.items():
        restored.get_parameter(f"{weight_path}.tensor").copy_(dequantize(weight.quantized))
    # The router has the model's type, so that both choose alike; fp32 sums in another order.
    torch.testing.assert_close(logits(found), logits(restored), atol=2e-4, rtol=0)
    # Far enough from the original that taking it by mistake would show.
    assert float((logits(found) - logits(load(path))).abs().max()) > 0.05


@scheme_names
def test_ranks_have_slices_of_the_whole_s_numbers(path: pathlib.Path, name: str) -> None:
    whole = quantized(path, name)
    ranks = on_ranks(2, lambda shard: _numbers(quantized(path, name, shard)))
    for weight_path, numbers in _numbers(whole).items():
        if not weight_path.endswith("mlp.down_proj.weight"):
            continue
        parts = torch.cat([rank[weight_path] for rank in ranks], dim=1)
        torch.testing.assert_close(parts, numbers, rtol=0, atol=0)


def _numbers(model: CausalLM) -> dict[str, torch.Tensor]:
    return {path: dequantize(weight.quantized) for path, weight in model.low_bit_weights.items()}


@pytest.mark.parametrize("name", [None, *SCHEMES])
@pytest.mark.parametrize("shard", [ALONE, Shard(1, 2)])
def test_the_planned_memory_is_what_the_weights_take(path: pathlib.Path, name: str | None, shard: Shard) -> None:
    config = ModelFolder.open(path).config
    scheme = None if name is None else SCHEMES[name]
    planned = weight_memory(config, torch.bfloat16, scheme, CPU, shard).weights
    whole = weight_memory(config, torch.bfloat16, scheme, CPU).weights
    if shard is ALONE:
        model = load(path, torch.bfloat16) if name is None else None
        assert model is None or model.weight_bytes == planned
        # All experts, at least in the scheme's bits.
        bits = {None: 16, "int8": 8, "fp8": 8, "int4": 4}[name]
        assert planned > sum(mixture.size for mixture in config.description.expert_layers) * bits // 8
    else:
        assert whole / 2 <= planned < whole
