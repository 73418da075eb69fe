"""gpt-oss: windows by layer, sinks, stacked experts plain and in MXFP4, and what is refused.

All without torch.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, header_of, write_safetensors

from headrace_backend.config import EngineConfig
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.server.model_cost import model_cost
from headrace_backend.tp_rules import unsuitable_tp
from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_model_folder.config import parse_config
from headrace_model_folder.description import ClampedGating, Experts

GPT_OSS = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"} | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
QUANTIZED = GPT_OSS | {"quantization_config": MXFP4}
EXPERTS = "model.layers.{}.mlp.experts"


def experts_of(layer: int = 0, **changes: Any) -> Experts:
    mlp = parse_config(GPT_OSS | changes).description.layers[layer].mlp
    assert isinstance(mlp, Experts)
    return mlp


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(model=pathlib.Path("m"), device="cpu", **settings)


def windows(**changes: Any) -> list[int | None]:
    return [layer.attention.window for layer in parse_config(GPT_OSS | changes).description.layers]


def folder_tensors(quantized: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a folder, by name."""
    found: dict[str, tuple[tuple[int, ...], str]] = {
        name: (shape, "BF16") for name, shape in parse_config(GPT_OSS).description.stored_tensors().items()
    }
    if quantized:
        for layer in range(3):
            for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
                path = f"{EXPERTS.format(layer)}.{name}"
                del found[path]
                found[f"{path}_blocks"] = ((3, outputs, inputs // 32, 16), "U8")
                found[f"{path}_scales"] = ((3, outputs, inputs // 32), "U8")
    return found


def write_folder(path: pathlib.Path, config: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], str]]) -> None:
    header, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        own, size = header_of({name: shape}, dtype, 2 if dtype == "BF16" else 1)
        header[name] = {**own[name], "data_offsets": [end, end + size]}
        end += size
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", header, end)


def test_layers_look_back_by_turns_or_as_config_says() -> None:
    assert windows() == [128, None, 128]
    assert windows(sliding_window=40) == [40, None, 40]
    assert windows(layer_types=["full_attention", "sliding_attention", "full_attention"]) == [None, 128, None]
    assert windows(layer_types=["full_attention"] * 3, sliding_window=None) == [None] * 3


def test_what_a_file_leaves_out_is_as_published() -> None:
    rope = parse_config(GPT_OSS).description.rope
    assert (rope.rope_type, rope.factor, rope.truncate, rope.theta) == ("yarn", 32.0, False, 150_000.0)
    experts = experts_of()
    assert experts.gating == ClampedGating(1.702, 7.0) and experts.renormalized
    assert experts.router.bias and experts.down.bias
    assert experts_of(swiglu_limit=5.0).gating == ClampedGating(1.702, 5.0)
    # A file of transformers 5 has its rotation under another name.
    other = parse_config(GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})
    assert (other.description.rope.rope_type, other.description.rope.theta) == ("default", 9.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers (3)"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must hold"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window must be"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok must be"),
        ({"experts_per_token": 3}, "experts_per_token must be num_experts_per_tok"),
        ({"swiglu_limit": 0}, "swiglu_limit must be"),
        ({"swiglu_alpha": "1.702"}, "swiglu_alpha must be"),
        ({"attention_bias": 1}, "attention_bias must be"),
        ({"hidden_act": "gelu"}, "hidden_act must be"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'mxfp4' for stacked experts"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"quantization_config": {**MXFP4, "modules_to_not_convert": 1}}, "modules_to_not_convert must be a list"),
        (
            {"quantization_config": {**MXFP4, "modules_to_not_convert": ["model.layers.1.mlp"]}},
            "modules_to_not_convert has 'model.layers.1.mlp': experts of some layers",
        ),
        (
            {"quantization_config": {**MXFP4, "modules_to_not_convert": ["model.layers.*"]}},
            "modules_to_not_convert has 'model.layers.*'",
        ),
    ],
)
def test_a_bad_value_is_refused_by_field_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        parse_config(GPT_OSS | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_mxfp4_of_models_without_stacked_experts_is_refused() -> None:
    with pytest.raises(InvalidModelFolder, match="mxfp4 is asked for, and no layer is left"):
        parse_config(CONFIG | {"quantization_config": MXFP4})
    mixtral = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "quantization_config": MXFP4}
    with pytest.raises(InvalidModelFolder, match="'mxfp4', in which this mixture of experts is not supported"):
        parse_config(mixtral)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_folders_are_split_into_records_of_single_experts(tmp_path: pathlib.Path, is_quantized: bool) -> None:
    write_folder(tmp_path, QUANTIZED if is_quantized else GPT_OSS, folder_tensors(is_quantized))
    folder = ModelFolder.open(tmp_path)
    first, last = (f"{EXPERTS.format(1)}.{number}.gate_up_proj" for number in (0, 2))
    suffix, shape = ("_blocks", (192, 32)) if is_quantized else ("", (64, 192))
    records = [folder.tensors[f"{name}{suffix}"] for name in (first, last)]
    assert [record.shape for record in records] == [shape, shape]
    assert records[1].offset - records[0].offset == 2 * records[0].num_bytes
    assert folder.tensors[f"{last}_bias"].shape == (192,)
    # Numbers, not bytes.
    assert folder.parameter_count == sum(
        shape[0] * shape[1] if len(shape) == 2 else shape[0] for _, shape in folder.config.description.tensors()
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_blocks", None, "is missing, which quantization_config (mxfp4)"),
        ("down_proj_scales", None, "is missing"),
        ("down_proj_scales", ((3, 64, 4), "U8"), "[3, 64, 3] expected"),
        ("gate_up_proj_blocks", ((3, 192, 2, 16), "I8"), "one of U8 expected"),
        ("gate_up_proj_bias", ((3, 96), "BF16"), "[3, 192] expected"),
        ("down_proj", ((3, 96, 64), "BF16"), "is surplus"),
    ],
)
def test_tensors_that_contradict_config_are_named(
    tmp_path: pathlib.Path, name: str, change: tuple[tuple[int, ...], str] | None, message: str
) -> None:
    tensors = folder_tensors(True)
    path = f"{EXPERTS.format(2)}.{name}"
    tensors.pop(path, None)
    if change is not None:
        tensors[path] = change
    write_folder(tmp_path, QUANTIZED, tensors)
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(tmp_path)
    assert str(error.value).startswith(f"model.safetensors: tensor '{path}' ") and message in str(error.value)


def test_groups_that_do_not_divide_inputs_are_refused(tmp_path: pathlib.Path) -> None:
    config = QUANTIZED | {"intermediate_size": 80}
    write_folder(tmp_path, config, folder_tensors(True))
    with pytest.raises(InvalidModelFolder, match="group size 32 does not divide the 80 inputs of .*experts.down_proj"):
        ModelFolder.open(tmp_path)


def test_ranks_that_would_cut_groups_are_refused_by_name() -> None:
    assert unsuitable_tp(engine(tp=2), parse_config(GPT_OSS)) is None
    reason = unsuitable_tp(engine(tp=2), parse_config(QUANTIZED))
    assert reason is not None and reason.startswith(
        "tp is 2, which model.layers.0.mlp.experts.0.down_proj does not bear: its 96 inputs give 48 to each, which a "
        "smallest group of 32 does not divide"
    )
    assert unsuitable_tp(engine(tp=2), parse_config(QUANTIZED | {"intermediate_size": 128})) is None
    # Which whole experts do not.
    assert unsuitable_tp(engine(tp=2, expert_parallel=True), parse_config(QUANTIZED | {"num_local_experts": 4})) is None


def test_dummy_weights_may_be_mxfp4_and_no_other_bits_are_put_over_it() -> None:
    config = parse_config(QUANTIZED)
    assert unsuitable_quantization(engine(load="dummy"), config) is None
    reason = unsuitable_quantization(engine(quantize="int8"), config)
    assert reason == "quantize is int8, and the folder is quantized already (mxfp4); quantize off works"


def test_costs_count_only_experts_in_few_bits() -> None:
    plain, few = model_cost(parse_config(GPT_OSS), "bf16"), model_cost(parse_config(QUANTIZED), "bf16", layer_bits=4.25)
    assert plain.weight_bytes == few.weight_bytes
    assert few.expert_bytes == 3 * 3 * 3 * 64 * 96 * 4.25 / 8 == plain.expert_bytes * 4.25 / 16
