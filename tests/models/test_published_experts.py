"""Mixtures of experts in the formats that other tools publish them in.

Numbers are those that the tests' own unpacker reads, logits those of transformers in fp32 with the
same numbers, on one rank and on two.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch
import transformers
from tests.models.checkpoints import VOCAB_SIZE, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.kernel_case import kernels_on
from tests.support.model_builds import load_model, weight_memory
from tests.support.quantized_folders import Quantized, Recipe, quantize_folder
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.expert_weight import StoredExpertWeight
from headrace_backend.quantization.rounded_inputs import describe_inputs
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import ALONE, Shard
from headrace_kernels.weight_formats.quantized_weight import dequantize
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % VOCAB_SIZE for index in range(40)]
# Attention and the dense layer stay plain where they would round their inputs.
OTHERS_PLAIN: dict[str, dict[str, Any]] = {
    "fp8": {"modules_to_not_convert": ["self_attn", "model.layers.0.mlp", "shared_experts", "mlp.gate", "lm_head"]},
    "compressed-tensors": {
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:model.layers.0.mlp.*_proj",
            "re:.*shared_experts.*",
            "re:.*mlp.gate$",
        ]
    },
}
RECIPES = {
    "fp8 inverse blocks": Recipe("fp8-inv", bits=8, group=128),
    "fp8 blocks": Recipe("fp8", bits=8, group=128),
    "fp8 rows": Recipe("fp8", bits=8, group=0, activations="dynamic"),
    "fp8 static": Recipe("fp8", bits=8, group=-1, activations="static"),
    "fp8 one scale": Recipe("fp8", bits=8, group=-1),
    "packed": Recipe("packed"),
    "packed asymmetric": Recipe("packed", symmetric=False),
    "packed 8 bits": Recipe("packed", bits=8, group=0),
    "int8 groups": Recipe("whole", bits=8, group=32),
    "int8 asymmetric": Recipe("whole", bits=8, group=0, symmetric=False),
    "gptq": Recipe("gptq"),
    "gptq rows": Recipe("gptq", group=0),
    "gptq 8 bits asymmetric": Recipe("gptq_v2", bits=8, symmetric=False),
    "awq": Recipe("awq", symmetric=False),
}
# One of each method, and of each kind of scales that experts have.
EVERYDAY = ("fp8 inverse blocks", "fp8 rows", "packed", "gptq", "awq")
recipes = pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)


FAMILIES = [
    "qwen3-moe-blocks",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral-wide", "glm4-moe-wide")),
]


class Made(dict[str, Quantized]):
    """Folders by the name of their recipe, each written when it is first asked for."""

    def __init__(self, source: pathlib.Path, factory: pytest.TempPathFactory, family: str) -> None:
        super().__init__()
        self._source, self._factory, self.family = source, factory, family

    def __missing__(self, name: str) -> Quantized:
        recipe = RECIPES[name]
        config = recipe.config()
        plain = OTHERS_PLAIN[config["quant_method"]] if recipe.is_float else {}
        self[name] = quantize_folder(self._source, self._factory.mktemp("folder"), recipe, config | plain)
        if plain:
            _leave_others_plain(self[name])
        return self[name]


def _leave_others_plain(folder: Quantized) -> None:
    """Writes the numbers of all projections but the experts' as plain weights."""
    for name in [name for name in folder.weights if ".experts." not in name]:
        for tensor in [tensor for tensor in folder.tensors if tensor.startswith(f"{name}.")]:
            del folder.tensors[tensor]
        folder.tensors[f"{name}.weight"] = folder.weights.pop(name).float()
    folder.rewrite()


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    source = tmp_path_factory.mktemp("experts")
    write_checkpoint(source, request.param)
    return Made(source, tmp_path_factory, request.param)


def loaded(path: pathlib.Path, shard: Shard = ALONE, dtype: torch.dtype = torch.float32) -> CausalLM:
    folder = ModelFolder.open(path)
    return load_model(folder, folder.config, dtype, CPU, "folder", 0, lambda *_: None, shard=shard)


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


def expert_weights(model: CausalLM) -> dict[str, StoredExpertWeight]:
    return {path: each for path, each in model.low_bit_weights.items() if isinstance(each, StoredExpertWeight)}


def expected_numbers(folder: Quantized, path: str) -> torch.Tensor:
    """Numbers of all experts of a weight, side by side."""
    block = path.rpartition(".weight")[0].rpartition(".")[0]
    kinds = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
    own = kinds[path.removeprefix(f"{block}.").removesuffix(".weight")]
    found = []
    for expert in range(16):
        names = [f"{prefix}.experts.{expert}.{kind}" for prefix in _prefixes(block) for kind in own]
        found += [folder.weights[name] for name in names if name in folder.weights]
    return torch.cat(found).float()


def _prefixes(block: str) -> tuple[str, str]:
    return block, block.replace(".mlp", ".block_sparse_moe")


@recipes
def test_published_experts_are_those_that_transformers_has(name: str, folders: Made) -> None:
    folder = folders[name]
    model = loaded(folder.path)
    found = expert_weights(model)
    assert found
    for path, weight in found.items():
        whole = dequantize(weight.quantized, torch.empty(weight.num_outputs, weight.num_inputs))
        torch.testing.assert_close(whole, expected_numbers(folder, path), rtol=1e-6, atol=1e-9)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder.plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    # The same numbers, summed in another order.
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=2e-3)
    config = ModelFolder.open(folder.path).config
    assert weight_memory(config, torch.float32, None, CPU).weights == model.weight_bytes
    summary = model.quantization
    assert isinstance(summary, StoredSummary)
    assert summary.scheme.startswith(RECIPES[name].config()["quant_method"])


@pytest.mark.parametrize(
    "name", ["fp8 inverse blocks", *(pytest.param(name, marks=pytest.mark.slow) for name in list(RECIPES)[1:])]
)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_compute_the_logits_of_one(name: str, whole_experts: bool, folders: Made) -> None:
    path = folders[name].path
    config = EngineConfig(model=path, device="cpu", tp=2, expert_parallel=whole_experts)
    if RECIPES[name].group == 128 and not whole_experts and folders.family != "qwen3-moe-blocks":
        reason = "its 64 inputs give 32 to each, which a block of 128 does not divide"
        assert reason in (unsuitable_tp(config, ModelFolder.open(path).config) or "")
        return
    assert unsuitable_tp(config, ModelFolder.open(path).config) is None
    parts = on_ranks(2, lambda shard: logits(loaded(path, dataclasses.replace(shard, whole_experts=whole_experts))))
    torch.testing.assert_close(parts[0], logits(loaded(path)), rtol=1e-4, atol=2e-3)


def test_experts_multiply_inputs_as_they_are_on_a_processor_and_say_so(folders: Made) -> None:
    stated = "kept (the folder says fp8 per token)"
    assert describe_inputs(loaded(folders["fp8 rows"].path).low_bit_weights.values()) == stated
    assert describe_inputs(loaded(folders["packed"].path).low_bit_weights.values()) == ""


@pytest.mark.parametrize(("name", "said"), [
    ("fp8 rows", "fp8 per token from 2 tokens on"),
    # Inner elements do not fill a block.
    ("fp8 inverse blocks", "kept (the folder says fp8 per 128 inputs), fp8 per 128 inputs from 2 tokens on"),
    ("fp8 static", "kept (the folder says fp8 static)"),
    ("packed", ""),
])  # fmt: skip
def test_experts_on_a_card_round_inputs_as_the_folder_says_where_products_do_just_that(
    name: str, said: str, folders: Made
) -> None:
    if folders.family != "qwen3-moe-blocks":
        pytest.skip("its inputs do not fill blocks")
    weights = expert_weights(loaded(folders[name].path, dtype=torch.bfloat16)).values()
    with kernels_on("cpu"):
        assert describe_inputs(list(weights)) == said


def test_the_tests_own_plain_folder_is_another_model(folders: Made) -> None:
    """Rounding shows in logits: taking one folder for the other would be seen."""
    found, plain = logits(load(folders["packed"].path)), logits(load(folders["awq"].path))
    assert float((found - plain).abs().max()) > 0.05
