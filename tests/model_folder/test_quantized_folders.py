"""Folders that other tools quantized, before torch.

What config.json may say, and what its tensors must then be; every refusal names file, field or
tensor, and rule.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.model_folder.folders import CONFIG, write_safetensors
from tests.support.quantized_folders import layer_names

from headrace_model_folder import InvalidModelFolder, LayerFormat, ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config
from headrace_model_folder.formats.layer_format import InputFormat, Layout
from headrace_model_folder.formats.layer_names import Patterns
from headrace_model_folder.formats.quantization_config import read_quantization

SIZES = CONFIG | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}
LAYER = "model.layers.1.mlp.down_proj"
WIDTHS = {"I32": 4, "F16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8, "I8": 1}


def inputs(**changes: Any) -> dict[str, Any]:
    """INT8 weights whose inputs are rounded, too."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True} | changes
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return PACKED | {"format": "int-quantized", "config_groups": {"a": group}}


def packed(**changes: Any) -> dict[str, Any]:
    """compressed-tensors with other weights."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | changes}
    return PACKED | {"config_groups": {"group_0": group}}


def tensors_of(quantization: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a folder of one of the formats above holds: type and shape by name."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in expected_tensors(parse_config(SIZES)).items():
        layer = name.removesuffix(".weight")
        if "_proj" not in name:
            found[name] = ("F32", shape)
            continue
        outputs, inputs = shape
        parts: dict[str, tuple[str, tuple[int, ...]]]
        if quantization["quant_method"] == "gptq":
            parts = {"qweight": ("I32", (inputs // 8, outputs)), "qzeros": ("I32", (inputs // 32, outputs // 8)),
                     "scales": ("F16", (inputs // 32, outputs)), "g_idx": ("I32", (inputs,))}  # fmt: skip
        elif quantization["quant_method"] == "awq":
            parts = {"qweight": ("I32", (inputs, outputs // 8)), "qzeros": ("I32", (inputs // 32, outputs // 8)),
                     "scales": ("F16", (inputs // 32, outputs))}  # fmt: skip
        elif quantization["quant_method"] == "fp8":
            parts = {"weight": ("F8_E4M3", shape), "weight_scale_inv": ("F32", (1, 1))}
        else:
            parts = {"weight_packed": ("I32", (outputs, inputs // 8)), "weight_shape": ("I64", (2,)),
                     "weight_scale": ("F16", (outputs, inputs // 32))}  # fmt: skip
        found.update((f"{layer}.{suffix}", part) for suffix, part in parts.items())
    return found


def write(
    path: pathlib.Path,
    quantization: dict[str, Any],
    change: Callable[[dict[str, tuple[str, tuple[int, ...]]]], object] | None = None,
) -> pathlib.Path:
    """A folder of zeros (g_idx too, which is then every input in group 0)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SIZES | {"quantization_config": quantization}))
    tensors = tensors_of(quantization)
    if change is not None:
        change(tensors)
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTHS[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    write_safetensors(path / "model.safetensors", header, end)
    return path


def without_orders(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    for name in [name for name in tensors if name.endswith("g_idx")]:
        del tensors[name]


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(InvalidModelFolder) as error:
        ModelFolder.open(path)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize("quantization", [GPTQ, AWQ, FP8, PACKED], ids=lambda value: value["quant_method"])
def test_a_valid_folder_is_opened(quantization: dict[str, Any], tmp_path: pathlib.Path) -> None:
    folder = ModelFolder.open(write(tmp_path, quantization, without_orders))
    assert folder.config.quantization is not None
    assert folder.config.quantization.method == quantization["quant_method"]
    assert len(folder.config.quantization.layers) == 2 * 7
    assert folder.parameter_count == sum(
        rows * (columns[0] if columns else 1) for rows, *columns in expected_tensors(folder.config).values()
    )


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "quanto"},
         "quant_method must be one of gptq, awq, compressed-tensors, fp8, mxfp4, bitsandbytes, is 'quanto'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True},
         "load_in_4bit must be True: of bitsandbytes only NF4 is read"),
        ({}, "quant_method is missing"),
        ([], "must be an object"),
        (GPTQ | {"bits": 3}, "bits must be 4 or 8, is 3"),
        (GPTQ | {"bits": "4"}, "bits must be an integer"),
        (GPTQ | {"group_size": 96}, "group_size must be one of 32, 64, 128, -1, is 96"),
        (GPTQ | {"group_size": 0}, "group_size must be one of 32, 64, 128, -1, is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or 'gptq_v2', is 'marlin'"),
        (GPTQ | {"format": "marlin"}, "format must be 'gptq' or 'gptq_v2', is 'marlin'"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
         "checkpoint_format is 'gptq', and format, which means the same, differs: 'gptq_v2'"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype must be 'int32'"),
        (GPTQ | {"lm_head": True},
         "lm_head is true: an output layer that the folder has in few bits is not supported (quantize_head"),
        (GPTQ | {"sym": "yes"}, "sym must be true or false"),
        (GPTQ | {"dynamic": ["x"]}, "dynamic must be an object"),
        (GPTQ | {"dynamic": {"(": {}}}, "which is no regular expression"),
        (GPTQ | {"dynamic": {"(a+)+$": {}}}, "no repeated group"),
        (GPTQ | {"dynamic": {".*.*.*.*.*": {}}}, "4 repetitions"),
        (GPTQ | {"dynamic": {".*": {"bits": 2}}}, "dynamic '.*': bits must be 4 or 8, is 2"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"group_size": 7}}}, "dynamic '+:.*up_proj': group_size must be one of"),
        (GPTQ | {"dynamic": {f".*{index}.*.*.*": {} for index in range(16)}},
         "other patterns, which together may take too long"),
        (GPTQ | {"dynamic": {f"layer{index}": {} for index in range(4097)}},
         "after 4096 other patterns, which together"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "gptq is asked for, and no layer is left that it is for"),
        (GPTQ | {"modules_in_block_to_quantize": []}, "gptq is asked for, and no layer is left that it is for"),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.qproj"]]}, "mlp.down_proj, has 'self_attn.qproj'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format must be false"),
        (GPTQ | {"modules_in_block_to_quantize": "mlp"}, "modules_in_block_to_quantize must be a list"),
        (AWQ | {"bits": 8}, "bits must be 4"),
        (AWQ | {"version": "gemv"}, "version must be 'gemm', is 'gemv'"),
        (AWQ | {"version": "GEMM", "format": "gemv_fast"}, "format must be 'gemm', is 'gemv_fast'"),
        (AWQ | {"backend": "llm-awq"}, "backend must not be 'llm-awq'"),
        (AWQ | {"zero_point": False}, "zero_point must be true"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of strings"),
        (AWQ | {"w_bit": 8}, "bits is 4, and w_bit, which means the same, differs: 8"),
        (AWQ | {"q_group_size": 128}, "group_size is 32, and q_group_size, which means the same, differs: 128"),
        (AWQ | {"modules_to_not_convert": [""]}, "awq is asked for, and no layer is left that it is for"),
        (AWQ | {"modules_to_not_convert": ["x"] * 16385}, "must have at most 16384 entries, has 16385"),
        (FP8 | {"modules_to_not_convert": ["v_proj"], "ignored_layers": ["q_proj"]},
         "and ignored_layers, which means the same, differs: a list of 1 entries"),
        (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size must be [128, 128] or null"),
        (FP8 | {"activation_scheme": "lazy"}, "activation_scheme must be 'dynamic' or 'static', is 'lazy'"),
        (FP8 | {"fmt": "e5m2"}, "fmt must be 'e4m3', is 'e5m2'"),
        (PACKED | {"format": "marlin-24"},
         "format must be one of pack-quantized, int-quantized, naive-quantized, float-quantized, is 'marlin-24'"),
        (PACKED | {"config_groups": {}}, "config_groups must be an object of 1 to"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        (inputs(num_bits=16), "num_bits is 16 of type 'int', and weights are int8"),
        (inputs(type="float"), "num_bits is 8 of type 'float', and weights are int8"),
        (inputs(dynamic="local"), "dynamic must be true or false, is 'local'"),
        (inputs(dynamic=False, strategy="token"), "strategy must be 'tensor' where dynamic is false, is 'token'"),
        (inputs(strategy="channel"),
         "strategy must be 'token', 'tensor' or 'group' where dynamic is true, is 'channel'"),
        (inputs(strategy="group", group_size=96), "group_size must be one of 32, 64, 128, is 96"),
        (PACKED | {"quantization_status": "calibration"},
         "quantization_status must be 'compressed' or 'frozen', is 'calibration'"),
        (PACKED | {"ignore": ["re:.*"]}, "compressed-tensors is asked for, and no layer is left that it is for"),
        (PACKED | {"config_groups": {"a": {"targets": ["Conv2d"], "weights": WEIGHTS}}},
         "no layer is left that it is for"),
        (PACKED | {"config_groups": {str(index): {"targets": ["Linear"], "weights": WEIGHTS} for index in range(65)}},
         "an object of 1 to 64 groups"),
        (PACKED | {"format": "float-quantized"}, "type must be 'float' in the format 'float-quantized'"),
        (packed(type="float", num_bits=8, strategy="channel", group_size=None) | {"format": "int-quantized"},
         "type must be 'int' in the format 'int-quantized'"),
        (packed(strategy="channel", group_size=128),
         "group_size must be absent or -1 where strategy is 'channel', is 128"),
        (packed(strategy="tensor", group_size=32), "group_size must be absent or -1 where strategy is 'tensor', is 32"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config must be absent"),
        (PACKED | {"transform_config": {"config_groups": {"a": 1}}}, "transform_config is set"),
        (PACKED | {"ignore": []}, "ignore must name lm_head"),
        (PACKED | {"ignore": ["re:(.*)*"]}, "ignore has the pattern"),
        (packed(num_bits=3), "num_bits must be 4 or 8 of type 'int' or 8 of type 'float', is 3"),
        (packed(type="float", num_bits=8), "type must be 'int' in the format 'pack-quantized'"),
        (packed(group_size=16), "group_size must be one of 32, 64, 128, is 16"),
        (packed(strategy="tensor_group"),
         "strategy must be 'tensor', 'channel', 'group' or 'block', is 'tensor_group'"),
        (packed(strategy="block", block_structure=[128, 128], group_size=None),
         "strategy must not be 'block' where type is 'int'"),
        (packed(actorder="sideways"), "actorder must be"),
        (packed(actorder="group", strategy="channel", group_size=-1), "actorder is for strategy 'group'"),
        (packed(dynamic=True), "dynamic must be false"),
        (PACKED | {"config_groups": {"a": {"targets": ["Linear"], "weights": None}}}, "weights is missing"),
        (
            PACKED | {"config_groups": {"a": {
                "targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 8, "type": "int"},
            }}},
            "input_activations: num_bits is 8 of type 'int', and weights are int4: inputs are rounded to 8 bits, of "
            "type 'int' beside int8 and 'float' beside fp8 and int4",
        ),
        (
            PACKED | {"config_groups": {
                name: {"targets": ["Linear"], "weights": WEIGHTS | {"num_bits": bits}}
                for name, bits in (("a", 4), ("b", 8))
            }},
            "config_groups has several groups for model.layers.0.self_attn.q_proj",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_can_not_be_served_is_refused_by_field(quantization: Any, words: str) -> None:
    with pytest.raises(InvalidModelFolder) as error:
        parse_config(SIZES | {"quantization_config": quantization})
    assert str(error.value).startswith("config.json: quantization_config") and words in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("quantization", "suffix", "record", "words"),
    [
        (GPTQ, "scales", None, "is missing, which quantization_config (gptq) in config.json asks for"),
        (GPTQ, "qweight", ("I32", (15, 64)), "has shape [15, 64], [16, 64] expected"),
        (GPTQ, "qweight", ("F32", (16, 64)), "has dtype F32, one of I32 expected"),
        (GPTQ, "weight", ("F16", (64, 128)), "is surplus"),
        (GPTQ | {"bits": 8}, None, None, "has shape"),
        (GPTQ | {"group_size": 64}, None, None, "has shape"),
        (AWQ, "qzeros", ("I32", (4, 9)), "has shape [4, 9], [4, 8] expected"),
        (AWQ | {"modules_to_not_convert": ["down_proj"]}, None, None,
         "model.layers.0.mlp.down_proj.weight' is missing"),
        (FP8, "weight_scale_inv", ("F32", (1, 2)), "has shape [1, 2], [1, 1] expected"),
        (FP8, "weight_scale_inv", None, "is missing"),
        (FP8 | {"weight_block_size": None}, None, None, "weight_scale' is missing"),
        (PACKED, "weight_shape", None, "is missing"),
        (PACKED, "weight_scale", ("F16", (64, 3)), "has shape [64, 3], [64, 4] expected"),
        (PACKED, "weight_zero_point", ("I32", (8, 4)), "is surplus"),
        (packed(symmetric=False), None, None, "weight_zero_point' is missing"),
        (packed(actorder="group"), None, None, "weight_g_idx' is missing"),
        (PACKED | {"ignore": ["lm_head", "re:.*down_proj"]}, None, None,
         "model.layers.0.mlp.down_proj.weight' is missing"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_configuration_are_refused_by_name(
    quantization: dict[str, Any], suffix: str | None, record: Any, words: str, tmp_path: pathlib.Path
) -> None:
    def change(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        without_orders(tensors)
        if suffix is not None:
            tensors.pop(f"{LAYER}.{suffix}", None)
            if record is not None:
                tensors[f"{LAYER}.{suffix}"] = record

    message = refusal(write(tmp_path, quantization, change))
    assert message.startswith("model.safetensors: tensor ") and words in message
    assert suffix is None or f"{LAYER}.{suffix}" in message


def test_groups_that_do_not_divide_name_the_layer(tmp_path: pathlib.Path) -> None:
    message = refusal(write(tmp_path, GPTQ | {"group_size": 128}))
    assert "group size 128 does not divide the 64 inputs of model.layers.0.self_attn.q_proj" in message


def test_an_order_that_can_not_be_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    # Zeros: all inputs are said to be in group 0.
    ordered = write(tmp_path / "ordered", GPTQ | {"desc_act": True})
    assert "q_proj.g_idx' has 64 inputs in group 0, groups have 32" in refusal(ordered)
    plain = write(tmp_path / "plain", GPTQ)
    assert "q_proj.g_idx' puts inputs into other groups than their neighbours', config.json says" in refusal(plain)
    data = bytearray((tmp_path / "ordered/model.safetensors").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = 8 + int.from_bytes(data[:8], "little")
    name = "model.layers.0.self_attn.q_proj.g_idx"
    place = begin + header[name]["data_offsets"][0]
    data[place : place + 4] = (9).to_bytes(4, "little")
    (tmp_path / "ordered/model.safetensors").write_bytes(data)
    assert f"tensor '{name}' names group 9, there are 0 to 1" in refusal(tmp_path / "ordered")


def test_what_ignore_and_targets_name(tmp_path: pathlib.Path) -> None:
    groups = {
        "class": {"targets": ["Linear"], "weights": WEIGHTS},
        "pattern": {"targets": ["re:.*gate_proj"], "weights": WEIGHTS | {"num_bits": 8}},
        "name": {"targets": ["model.layers.1.mlp.gate_proj"], "weights": WEIGHTS | {"group_size": 64}},
    }
    ignore = ["lm_head", "model.layers.0.self_attn.q_proj", r"re:model\.layers\.1\.self_attn.*"]
    config = parse_config(SIZES | {"quantization_config": PACKED | {"config_groups": groups, "ignore": ignore}})
    assert config.quantization is not None
    layers = config.quantization.layers
    assert "model.layers.0.self_attn.q_proj" not in layers and "model.layers.0.self_attn.k_proj" in layers
    assert not any(name.startswith("model.layers.1.self_attn") for name in layers)
    assert layers["model.layers.0.mlp.gate_proj"].number == "int8"
    assert (layers["model.layers.1.mlp.gate_proj"].number, layers["model.layers.1.mlp.gate_proj"].group_size) == (
        "int4",
        64,
    )
    assert layers["model.layers.0.mlp.up_proj"].group_size == 32


def layers_of(quantization: dict[str, Any], num_layers: int = 2) -> Mapping[str, LayerFormat]:
    config = parse_config(SIZES | {"quantization_config": quantization, "num_hidden_layers": num_layers})
    assert config.quantization is not None
    return config.quantization.layers


def test_folders_whose_status_is_frozen_are_read_by_their_tensors(tmp_path: pathlib.Path) -> None:
    """Tools of 2024 called compressed folders frozen.

    One whose weights are still floats is refused by tensor.
    """
    frozen = PACKED | {"quantization_status": "frozen"}
    assert layers_of(frozen) == layers_of(PACKED)
    ModelFolder.open(write(tmp_path / "numbers", frozen))

    def floats(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            dtype, (outputs, inputs) = "F16", tensors.pop(name)[1]
            tensors[name.replace("weight_packed", "weight")] = dtype, (outputs, 8 * inputs)

    assert "weight_packed' is missing" in refusal(write(tmp_path / "floats", frozen, floats))


@pytest.mark.parametrize(
    "pattern",
    [
        "(.|.)*X", "(?:.*.)*X", "(.?.?)*X", "(.?){200}X", "((.|.)*)X", ".?" * 250 + "X", "(.*.)*", "(?:(.)*)+X",
        "(.+)+X", "(?x)(.*) *X", "(?#)(.*)(?#)*X", "(?i).*X", "(.|.)" * 100 + "X", "(?:a|.)" * 60 + "X",
        ".*(.|.|.|.)(.|.|.|.)(.|.|.|.)(.|.|.|.)(.|.|.|.)(.|.|.|.)(.|.|.|.)(.|.|.|.)X", r"(\(.|.)*X", "([)]|.)*X",
        "x" * 513,
    ],
)  # fmt: skip
def test_patterns_that_may_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidModelFolder, match="has the pattern"):
        Patterns().compiled(pattern, "here")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (".*down_proj$", "model.layers.1.mlp.down_proj"),
        (r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj", "model.layers.1.mlp.down_proj"),
        (r"model\.layers\.(" + "|".join(map(str, range(80))) + r")\.mlp.*", "model.layers.79.mlp.up_proj"),
        (r"^model\.layers\.[0-9]{1,2}\.mlp\.(?:gate|up|down)_proj$", "model.layers.17.mlp.up_proj"),
        (r".*layers\.[0-9]+\.mlp\.[a-z]+_proj.*", "model.layers.1.mlp.down_proj"),
        (r"model\.layers\.(?!0\.).*", "model.layers.1.mlp.down_proj"),
        (r"(?P<all>.*)\.mlp[.]down(_proj)?", "model.layers.1.mlp.down_proj"),
        (r"[^)*]*[(*+]*.*\)*down_proj", "model.layers.1.mlp.down_proj"),
        ("lm_head", "lm_head"),
    ],
)  # fmt: skip
def test_usual_patterns_match(pattern: str, name: str) -> None:
    assert Patterns().compiled(pattern, "here").match(name)


def test_entries_are_looked_up_whatever_their_number() -> None:
    """Each name is compared with none of them, but looked up.

    As fast as a few, and the same layers.
    """
    others = [f"other.{index}" for index in range(16000)]
    named = "model.layers.1.mlp.down_proj"
    assert named not in layers_of(PACKED | {"ignore": [*others, "lm_head", named]})
    assert named not in layers_of(FP8 | {"modules_to_not_convert": [*others, "1.mlp"]})
    assert named in layers_of(FP8 | {"modules_to_not_convert": [*others, "1.ml", "layers.11", ""]})


def test_which_tool_wrote_a_folder_says_how_its_zero_points_are() -> None:
    def has_borrows(**changes: Any) -> set[bool]:
        return {form.has_borrows for form in layers_of(GPTQ | changes).values()}

    assert has_borrows() == {False}
    for tools in ("gptqmodel:2.0.0", ["gptqmodel:1.4.5"], ["optimum:1.23.3", "gptqmodel:1.4.2"]):
        assert has_borrows(meta={"quantizer": tools}) == {True}
        assert has_borrows(meta={"quantizer": tools}, checkpoint_format="gptq_v2") == {False}
    for meta in (None, {}, [], {"quantizer": None}, {"quantizer": "intel/auto-round:0.4"}, {"quantizer": [1]}):
        assert has_borrows(meta=meta) == {False}


def test_fields_that_say_the_same_twice_are_let_pass() -> None:
    assert layers_of(AWQ | {"w_bit": 4, "q_group_size": 32}) == layers_of(AWQ)
    assert layers_of({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}) == layers_of(AWQ)
    both = {"modules_to_not_convert": ["v_proj", "lm_head"], "ignored_layers": ["lm_head", "v_proj"]}
    assert len(layers_of(FP8 | both)) == 2 * 6
    assert layers_of(packed(strategy="channel", group_size=-1)) == layers_of(
        packed(strategy="channel", group_size=None)
    )


def test_dynamic_changes_go_from_what_holds_for_all() -> None:
    """What a pattern does not name stays."""
    layers = layers_of(
        GPTQ | {"dynamic": {r".*up_proj": {"bits": 8, "unknown": 1}, r"-:.*down_proj": {}}, "sym": False}
    )
    assert {name.rsplit(".")[-1] for name in layers}.isdisjoint({"down_proj"})
    up = layers["model.layers.0.mlp.up_proj"]
    assert (up.number, up.group_size, up.is_symmetric) == ("int8", 32, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, InputFormat("token")),
        # A scale of all tokens of a step would make answers depend on each other.
        ({"strategy": "tensor"}, InputFormat("token")),
        ({"strategy": None}, InputFormat("token")),
        ({"symmetric": False}, InputFormat("token", is_symmetric=False)),
        ({"strategy": "group", "group_size": 64}, InputFormat("group", 64)),
        ({"strategy": None, "group_size": 64}, InputFormat("group", 64)),
        ({"strategy": "tensor", "dynamic": False}, InputFormat("static")),
        ({"strategy": None, "dynamic": None, "symmetric": False}, InputFormat("static", is_symmetric=False)),
    ],
    ids=str,
)
def test_how_inputs_are_rounded_is_read(changes: dict[str, Any], expected: InputFormat) -> None:
    found = read_quantization(inputs(**changes), layer_names(1))
    assert found is not None and {form.inputs for form in found.layers.values()} == {expected}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, InputFormat("group", 128)),
        ({"weight_block_size": None}, InputFormat("token")),
        ({"weight_block_size": None, "activation_scheme": "static"}, InputFormat("static")),
        ({"activation_scheme": "static"}, InputFormat("static")),
    ],
    ids=str,
)
def test_how_inputs_of_fp8_are_rounded_is_read(changes: dict[str, Any], expected: InputFormat) -> None:
    found = read_quantization(FP8 | {"weight_block_size": [128, 128]} | changes, layer_names(1))
    assert found is not None and {form.inputs for form in found.layers.values()} == {expected}


def test_what_does_not_round_inputs_says_so() -> None:
    for quantization in (GPTQ, AWQ, PACKED):
        found = read_quantization(quantization, layer_names(1))
        assert found is not None and {form.inputs for form in found.layers.values()} == {None}


def test_ranks_do_not_cut_groups_of_inputs_that_are_rounded_together() -> None:
    form = LayerFormat(Layout.WHOLE, "int8", "channel", inputs=InputFormat("group", 64))
    assert form.cuts(32, 128, (32, 256)) is None and form.cuts(16, 96, (32, 96)) is None
    said = "its 192 inputs give 96 to each, which groups of 64 that are rounded together do not divide"
    assert form.cuts(32, 96, (32, 192)) == said
