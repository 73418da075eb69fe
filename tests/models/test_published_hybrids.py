"""Qwen3.5, dense and with experts, in the formats that it is published in.

Folders have the names and the form of those that see: a text part, its tensors below
`model.language_model`, logits of decay, correction and gates plain, and a quantization that names
layers so.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from tests.models.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.model_builds import load_model, weight_memory
from tests.support.quantized_folders import Quantized, Recipe, quantize_folder
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import ALONE, Shard
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % VOCAB_SIZE for index in range(50)]
_KEPT = ["in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "conv1d", "norm", "A_log", "dt_bias"]
# What stays plain by the name of its layer, as the official FP8 folders list it.
_LISTED = [f"model.language_model.layers.{layer}.linear_attn.{part}" for layer in range(4) for part in _KEPT[:2]]
_LISTED += [f"model.language_model.layers.{layer}.mlp.{part}" for layer in range(4) for part in _KEPT[2:4]]
# Name -> recipe, `quantization_config` beside the recipe's, and what is quantized.
FOLDERS: dict[str, tuple[Recipe, dict[str, Any], str]] = {
    # Qwen's own FP8 and GPTQ-Int4, llm-compressor's FP8 and INT4.
    "fp8": (Recipe("fp8-inv", bits=8, group=128), {"modules_to_not_convert": ["lm_head", *_LISTED]}, ""),
    "gptq": (
        Recipe("gptq", group=128),
        {"dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mlp\\.gate$": {}}},
        "mlp.",
    ),
    "packed": (
        Recipe("packed", group=32),
        {"ignore": ["lm_head", "re:model\\.language_model\\..*linear_attn.in_proj_[ab]$", "re:.*gate$", *_LISTED]},
        "",
    ),
    "fp8 rows": (
        Recipe("fp8", bits=8, group=0, activations="dynamic"),
        {"ignore": ["lm_head", "re:.*visual.*", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]},
        "self_attn|mlp.",
    ),
}
FAMILIES = {"qwen3.5-wide": "Qwen3_5", "qwen3.5-moe-wide": "Qwen3_5Moe"}
CASES = [(family, name) for family in FAMILIES for name in FOLDERS]
# One of each family, and of each tool.
EVERYDAY = (("qwen3.5-wide", "packed"), ("qwen3.5-moe-wide", "fp8"), ("qwen3.5-moe-wide", "gptq"))


def published(source: pathlib.Path, into: pathlib.Path, family: str, name: str) -> Quantized:
    """The folder of a text model in the form of one that sees."""
    recipe, config, quantized = FOLDERS[name]
    folder = quantize_folder(source, into, recipe, recipe.config() | config)
    for layer in list(folder.weights):
        is_shared = name == "gptq" and ".shared_expert." in layer
        if is_shared or not any(part in layer for part in quantized.split("|")):
            for tensor in [tensor for tensor in folder.tensors if tensor.startswith(f"{layer}.")]:
                del folder.tensors[tensor]
            folder.tensors[f"{layer}.weight"] = folder.weights.pop(layer).float()
    folder.tensors = {
        tensor if tensor.startswith("lm_head") else tensor.replace("model.", "model.language_model.", 1): values
        for tensor, values in folder.tensors.items()
    } | {"model.visual.patch_embed.weight": torch.zeros(3, 2)}
    folder.rewrite()
    text = json.loads((folder.path / "config.json").read_text())
    whole = {
        "architectures": [f"{FAMILIES[family]}ForConditionalGeneration"],
        "quantization_config": text.pop("quantization_config"),
        "text_config": text,
        "vision_config": {},
    }
    (folder.path / "config.json").write_text(json.dumps(whole))
    return folder


def opened_with_inputs_kept(path: pathlib.Path) -> ModelFolder:
    """The folder, whose layers multiply inputs as they are, as transformers does."""
    folder = ModelFolder.open(path)
    assert folder.config.quantization is not None
    formats = {name: dataclasses.replace(form, inputs=None) for name, form in folder.config.quantization.layers.items()}
    quantization = dataclasses.replace(folder.config.quantization, layers=formats)
    return dataclasses.replace(folder, config=dataclasses.replace(folder.config, quantization=quantization))


def loaded(folder: ModelFolder, shard: Shard = ALONE) -> CausalLM:
    return load_model(folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None, shard=shard)


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=() if case in EVERYDAY else pytest.mark.slow) for case in CASES]
)
def test_a_published_folder_is_what_transformers_has(tmp_path: pathlib.Path, family: str, name: str) -> None:
    write_checkpoint(tmp_path / "source", family)
    folder = published(tmp_path / "source", tmp_path, family, name)
    opened = opened_with_inputs_kept(folder.path)
    model = loaded(opened)
    assert opened.config.quantization is not None
    quantized = {linear.name for linear in opened.config.description.linears if linear.stored.name in folder.weights}
    assert set(opened.config.quantization.layers) == quantized
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder.plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    found = logits(model)
    # fp32 with sums in another order, over states that add up what was rounded.
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert isinstance(model.quantization, StoredSummary)
    assert weight_memory(opened.config, torch.float32, None, CPU).weights == model.weight_bytes
    if unsuitable_tp(EngineConfig(model=folder.path, device="cpu", tp=2), opened.config) is None:
        parts = on_ranks(2, lambda shard: logits(loaded(opened, shard)))
        torch.testing.assert_close(parts[0], found, atol=1e-3, rtol=1e-3)
