"""Mixtures of experts that other tools quantized, before torch.

What their tensors must be, that routers may be plain, and what is refused by name.
"""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, write_safetensors
from tests.model_folder.test_quantized_folders import AWQ, FP8, GPTQ, PACKED, WIDTHS, refusal

from headrace_backend.config import EngineConfig
from headrace_backend.tp_rules import unsuitable_tp
from headrace_model_folder import ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config

SIZES = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
EXPERT = "model.layers.1.mlp.experts.5"


def tensors_of(quantization: dict[str, Any], routers_too: bool) -> Tensors:
    """Type and shape of what a folder holds by name, its experts and attention in few bits."""
    found: Tensors = {}
    for name, shape in expected_tensors(parse_config(SIZES)).items():
        layer = name.removesuffix(".weight")
        if "_proj" in name or (routers_too and name.endswith("mlp.gate.weight")):
            found.update((f"{layer}.{suffix}", part) for suffix, part in _parts(quantization, *shape).items())
        else:
            found[name] = ("F32", shape)
    return found


def _parts(quantization: dict[str, Any], outputs: int, inputs: int) -> Tensors:
    method = quantization["quant_method"]
    if method == "fp8":
        return {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale_inv": ("F32", (1, 1))}
    if method == "compressed-tensors":
        return {"weight_packed": ("I32", (outputs, inputs // 8)), "weight_shape": ("I64", (2,)),
                "weight_scale": ("F16", (outputs, inputs // 32))}  # fmt: skip
    words = (inputs, outputs // 8) if method == "awq" else (inputs // 8, outputs)
    zeros = (inputs // 32, outputs // 8)
    parts: Tensors = {"qweight": ("I32", words), "qzeros": ("I32", zeros), "scales": ("F16", (inputs // 32, outputs))}
    return parts if method == "awq" else parts | {"g_idx": ("I32", (inputs,))}


def write(
    path: pathlib.Path,
    quantization: dict[str, Any],
    change: Callable[[Tensors], object] = lambda tensors: None,
    routers_too: bool = False,
    order: list[int] | None = None,
) -> pathlib.Path:
    """A folder of zeros, in which each g_idx is `order`, or absent."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SIZES | {"quantization_config": quantization}))
    tensors = tensors_of(quantization, routers_too)
    if order is None:
        tensors = {name: each for name, each in tensors.items() if not name.endswith("g_idx")}
    change(tensors)
    header: dict[str, dict[str, Any]] = {}
    end, orders = 0, []
    for name, (dtype, shape) in tensors.items():
        size = WIDTHS[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        if name.endswith("g_idx") and shape == (64,):
            orders.append(end)
        end += size
    file = path / "model.safetensors"
    write_safetensors(file, header, end)
    if order is not None:
        content = bytearray(file.read_bytes())
        start = len(content) - end
        for offset in orders:
            content[start + offset : start + offset + 256] = struct.pack("<64i", *order)
        file.write_bytes(content)
    return path


@pytest.mark.parametrize("routers_too", [False, True])
@pytest.mark.parametrize("quantization", [GPTQ, AWQ, FP8, PACKED], ids=lambda value: value["quant_method"])
def test_routers_are_as_the_folder_has_them(
    quantization: dict[str, Any], routers_too: bool, tmp_path: pathlib.Path
) -> None:
    """Most tools leave routers plain, and not all say so in config.json."""
    config = ModelFolder.open(write(tmp_path, quantization, routers_too=routers_too)).config
    assert config.quantization is not None
    assert ("model.layers.0.mlp.gate" in config.quantization.layers) == routers_too
    # Attention's four projections, and three of each of 8 experts, in two layers.
    assert len(config.quantization.layers) == 2 * (4 + 3 * 8 + routers_too)


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def misshapen(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: (tensors[name][0], shape)})


@pytest.mark.parametrize(
    ("quantization", "change", "message"),
    [
        (GPTQ, without(f"{EXPERT}.up_proj.qweight"), f"tensor '{EXPERT}.up_proj.qweight' is missing, which"),
        (AWQ, without(f"{EXPERT}.down_proj.scales"), f"tensor '{EXPERT}.down_proj.scales' is missing, which"),
        (FP8, without(f"{EXPERT}.gate_proj.weight_scale_inv"), "gate_proj.weight_scale_inv' is missing, which"),
        (PACKED, without(f"{EXPERT}.gate_proj.weight_packed"), "gate_proj.weight_packed' is missing, which"),
        (FP8, misshapen(f"{EXPERT}.up_proj.weight", (64, 64)), "has shape [64, 64], [32, 64] expected"),
        (GPTQ, misshapen(f"{EXPERT}.down_proj.scales", (2, 64)), "has shape [2, 64], [1, 64] expected"),
        (GPTQ, without("model.layers.0.mlp.gate.weight"), "tensor 'model.layers.0.mlp.gate.qweight' is missing"),
    ],
)
def test_what_is_missing_or_misshapen_is_named_with_its_file(
    quantization: dict[str, Any], change: Callable[[Tensors], object], message: str, tmp_path: pathlib.Path
) -> None:
    text = refusal(write(tmp_path, quantization, change))
    assert text.startswith("model.safetensors: ") and message in text


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
COARSER = {"targets": ["re:.*experts.5.up_proj"], "weights": WEIGHTS}


@pytest.mark.parametrize(
    "quantization",
    [
        GPTQ | {"dynamic": {"-:.*experts\\.5\\.up_proj": {}}},
        GPTQ | {"dynamic": {".*experts\\.5\\.up_proj": {"bits": 8}}},
        AWQ | {"modules_to_not_convert": ["experts.5.up_proj"]},
        FP8 | {"modules_to_not_convert": ["experts.5.up_proj"]},
        PACKED | {"ignore": ["lm_head", "re:.*experts.5.up_proj"]},
        PACKED | {"config_groups": {**PACKED["config_groups"], "b": COARSER}},
    ],
)
def test_experts_of_one_layer_in_different_formats_are_refused(
    quantization: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    text = refusal(write(tmp_path, quantization))
    first, other = (f"model.layers.0.mlp.experts.{name}" for name in ("0.gate_proj", "5.up_proj"))
    assert f"{first} and {other} are in different formats" in text


def test_gates_and_downs_may_be_in_different_formats() -> None:
    config = parse_config(SIZES | {"quantization_config": GPTQ | {"dynamic": {".*down_proj": {"bits": 8}}}})
    assert config.quantization is not None
    assert {form.number for form in config.quantization.layers.values()} == {"int4", "int8"}


def test_an_order_of_inputs_is_refused_and_a_plain_sequence_is_not(tmp_path: pathlib.Path) -> None:
    ordered = GPTQ | {"desc_act": True}
    sequence = [place // 32 for place in range(64)]
    ModelFolder.open(write(tmp_path / "a", ordered, order=sequence))
    text = refusal(write(tmp_path / "b", ordered, order=sequence[::-1]))
    assert "model.layers.0.mlp.experts.0.gate_proj are in an order of groups (act-order)" in text


def test_a_list_of_names_that_there_are_not_is_refused_in_one_short_line(tmp_path: pathlib.Path) -> None:
    text = refusal(write(tmp_path, GPTQ | {"modules_in_block_to_quantize": ["mlp.experts.8.up_proj"]}))
    assert text.endswith(", ..., has 'mlp.experts.8.up_proj'")


def test_ranks_that_would_cut_groups_have_whole_experts(tmp_path: pathlib.Path) -> None:
    config = ModelFolder.open(write(tmp_path, PACKED)).config
    engine = EngineConfig(model=tmp_path, device="cpu", tp=2)
    reason = unsuitable_tp(engine, config)
    assert reason is not None and reason.endswith("tp 1 works, expert_parallel works with tp 2")
    assert "experts.0.down_proj does not bear: its 32 inputs give 16 to each" in reason
    assert unsuitable_tp(engine.model_copy(update={"expert_parallel": True}), config) is None
