"""Folders that other tools quantized.

Every format's numbers arrive as an unpacker of the tests' own reads them, logits are those of the
same weights in fp32, and memory is what the plan says.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable

import pytest
import torch
from tests.models.checkpoints import VOCAB_SIZE, ignore_progress, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_pinned_loader import load_late
from tests.support.kernel_case import kernels_on
from tests.support.model_builds import PROJECTIONS, load_model, weight_memory
from tests.support.quantized_folders import Quantized, Recipe, layer_names, quantize_folder, words

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.folder_layers import stage_layers
from headrace_backend.quantization.linear_weight import LinearWeight, PlainWeight
from headrace_backend.quantization.mixed_format_weight import MixedFormatWeight
from headrace_backend.quantization.rounded_inputs import describe_inputs
from headrace_backend.quantization.source_numbers import zeros_of
from headrace_backend.quantization.stored_weight import StoredWeight
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.weights.placement import Placement, Shard
from headrace_kernels import card
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.weight_formats.quantized_weight import QuantKind, dequantize
from headrace_model_folder import InvalidModelFolder, LayerFormat, Layout, ModelFolder, expected_tensors

CPU = torch.device("cpu")
RECIPES = {
    "gptq": Recipe("gptq"),
    "gptq v2": Recipe("gptq_v2", symmetric=False),
    "gptq asymmetric": Recipe("gptq", symmetric=False),
    "gptq rows": Recipe("gptq", group=0),
    "gptq ordered": Recipe("gptq", ordered=True),
    "gptq 8 bits": Recipe("gptq", bits=8),
    "gptq 8 bits asymmetric": Recipe("gptq", bits=8, symmetric=False, group=64),
    "gptq 8 bits ordered rows": Recipe("gptq_v2", bits=8, group=0, symmetric=False),
    "awq": Recipe("awq", symmetric=False),
    "awq 64": Recipe("awq", group=64, symmetric=False),
    "packed": Recipe("packed"),
    "packed asymmetric": Recipe("packed", symmetric=False),
    "packed rows": Recipe("packed", group=0),
    "packed ordered": Recipe("packed", ordered=True, symmetric=False),
    "packed 8 bits": Recipe("packed", bits=8, group=0),
    "packed 8 bits asymmetric": Recipe("packed", bits=8, symmetric=False),
    "packed 8 bits ordered": Recipe("packed", bits=8, ordered=True),
    "int8": Recipe("whole", bits=8, group=0, activations="dynamic"),
    "int8 static": Recipe("whole", bits=8, group=0, activations="static"),
    "int8 dynamic with zero points": Recipe("whole", bits=8, group=0, activations="dynamic with zero points"),
    "int8 static with zero points": Recipe("whole", bits=8, group=0, activations="static with zero points"),
    "int8 groups dynamic": Recipe("whole", bits=8, group=32, activations="dynamic"),
    "int8 one scale": Recipe("whole", bits=8, group=-1),
    "int8 asymmetric": Recipe("whole", bits=8, group=0, symmetric=False),
    "int8 groups": Recipe("whole", bits=8, group=32),
    "int4 in bytes": Recipe("whole", bits=4, group=32, symmetric=False),
    "fp8 one scale": Recipe("fp8", bits=8, group=-1),
    "fp8 static": Recipe("fp8", bits=8, group=-1, activations="static"),
    "fp8 rows": Recipe("fp8", bits=8, group=0, activations="dynamic"),
    "fp8 rows kept": Recipe("fp8", bits=8, group=0),
    "fp8 blocks": Recipe("fp8", bits=8, group=128),
    "fp8 blocks dynamic": Recipe("fp8", bits=8, group=128, activations="dynamic"),
    "fp8 inverse blocks": Recipe("fp8-inv", bits=8, group=128),
}
recipes = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("wide")
    write_checkpoint(made, "llama-wide")
    return made


class Made(dict[str, Quantized]):
    """Folders by the name of their recipe, each written when it is first asked for."""

    def __init__(self, source: pathlib.Path, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._source, self._factory = source, factory

    def __missing__(self, name: str) -> Quantized:
        self[name] = quantize_folder(self._source, self._factory.mktemp("folder"), RECIPES[name])
        return self[name]


@pytest.fixture(scope="module")
def folders(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(source, tmp_path_factory)


def load(path: pathlib.Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> CausalLM:
    folder = ModelFolder.open(path)
    return load_model(folder, folder.config, dtype, device, "folder", 0, ignore_progress)


def numbers(model: CausalLM) -> dict[str, torch.Tensor]:
    """Every quantized projection as the model has it, by its name in the folder."""
    found = {}
    for path, weight in model.low_bit_weights.items():
        whole = dequantize(weight.quantized, torch.empty(weight.num_outputs, weight.num_inputs))
        layer, _, rest = path.partition(".weight")
        parent, _, own = layer.rpartition(".")
        names = [f"{parent}.{part}" for part in PROJECTIONS.get(own, (own,))]
        if rest:
            names = [names[int(rest.removeprefix(".parts."))]]
        sizes = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 128, "up": 128, "down": 64}
        rows = [sizes[part.rsplit(".", 1)[1].removesuffix("_proj")] for part in names]
        found.update(zip(names, whole.split(rows), strict=True))
    return found


def bits(model: CausalLM) -> dict[tuple[str, str], torch.Tensor]:
    """What every quantized weight holds, by path and field."""
    fields = ("packed", "scales", "zeros", "order")
    held = {
        (path, field): getattr(weight.quantized, field)
        for path, weight in model.low_bit_weights.items()
        for field in fields
    }
    return {name: part for name, part in held.items() if part is not None}


def logits(model: CausalLM) -> torch.Tensor:
    tokens = [(7 * index) % VOCAB_SIZE for index in range(40)]
    return PagedDriver(model).step([Row(tokens)], [40])[0]


def round_inputs(model: CausalLM, recipe: Recipe) -> None:
    """Has the layers of a plain model round what they multiply."""
    for module in model.modules():
        if isinstance(module, PlainWeight):
            module.multiply = functools.partial(_rounded_product, recipe, module.multiply)  # type: ignore[method-assign]
            # Its products with an activation go that way as well.
            module.gated = functools.partial(LinearWeight.gated, module)  # type: ignore[method-assign]


def _rounded_product(
    recipe: Recipe,
    multiply: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    x: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return multiply(recipe.rounded(x), bias)


def check_numbers(model: CausalLM, folder: Quantized) -> None:
    found = numbers(model)
    assert found.keys() == folder.weights.keys()
    for layer, weight in folder.weights.items():
        torch.testing.assert_close(found[layer], weight.float(), rtol=1e-6, atol=1e-9, msg=layer)


@pytest.mark.one_in(2)
@recipes
def test_a_folder_is_loaded_as_its_format_says(name: str, folders: Made) -> None:
    """Numbers are what the tests' own unpacker reads; logits follow from these weights in fp32.

    Inputs are rounded as the recipe says, memory is what the plan says, and the summary is true.
    """
    folder, recipe = folders[name], RECIPES[name]
    model, plain, opened = load(folder.path), load(folder.plain), ModelFolder.open(folder.path)
    check_numbers(model, folder)
    kept = logits(plain)
    round_inputs(plain, recipe)
    rounded, found = logits(plain), logits(model)
    if recipe.rounds_inputs:
        # Few inputs are so near the middle of two numbers that sums in another order round them
        # otherwise; all of them are rounded.
        assert float((found - rounded).norm()) < 0.15 * float((rounded - kept).norm())
    else:
        # The same products, summed in another order where inputs are in one.
        torch.testing.assert_close(found, kept, rtol=1e-4, atol=1e-3)
    for parameter, value in model.named_parameters():
        assert torch.equal(value, plain.get_parameter(parameter))
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(part.nbytes for part in bits(model).values())
    assert weight_memory(opened.config, torch.float32, None, CPU).weights == model.weight_bytes == held
    assert model.parameter_count == opened.parameter_count
    summary = model.quantization
    assert isinstance(summary, StoredSummary)
    kind = "fp8" if recipe.is_float else f"int{recipe.bits}"
    assert summary.scheme == f"{recipe.config()['quant_method']} {kind}"
    assert summary.group_size == max(recipe.group, 0)
    # Tiles of int4 hold 128 inputs, of which small models fill half; then scales, zero points and
    # orders.
    assert recipe.bits < summary.bits_per_weight < (13 if recipe.bits == 4 else 11)


# Recipe -> what a processor does, and what an H200 does.
ROUNDED = {
    "gptq": ("", ""),
    "int8 one scale": ("", ""),
    "int8": ("int8 per token", "int8 per token from 65 tokens on"),
    "int8 static": ("int8 static", "int8 static from 65 tokens on"),
    "int8 dynamic with zero points": (
        "int8 per token with zero points",
        "kept (the folder says int8 per token with zero points)",
    ),
    "int8 static with zero points": (
        "int8 static with zero points",
        "kept (the folder says int8 static with zero points)",
    ),
    "int8 groups dynamic": ("int8 per token", "kept (the folder says int8 per token)"),
    "fp8 one scale": ("fp8 per token", "fp8 per token from 65 tokens on"),
    "fp8 rows": ("fp8 per token", "fp8 per token from 65 tokens on"),
    "fp8 rows kept": ("", ""),
    "fp8 static": ("fp8 static", "fp8 static from 65 tokens on"),
    "fp8 blocks": ("", ""),
    "fp8 blocks dynamic": ("fp8 per 128 inputs", "kept (the folder says fp8 per 128 inputs)"),
    "fp8 inverse blocks": ("fp8 per 128 inputs", "kept (the folder says fp8 per 128 inputs)"),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_is_stated(name: str, folders: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    on_processor, on_card = ROUNDED[name]
    model = load(folders[name].path, torch.bfloat16)
    assert describe_inputs(model.low_bit_weights.values()) == on_processor
    # Rules are asked as on a card that multiplies 8 bits by 8 bits.
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(card, "has_fp8_products", lambda device: True)
    assert describe_inputs(model.low_bit_weights.values()) == on_card


def test_layers_of_one_input_round_it_each_by_its_own_scale(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    recipe = RECIPES["int8 static"]
    folder = quantize_folder(source, tmp_path, recipe)
    keys = [name for name in folder.tensors if name.endswith("k_proj.input_scale")]
    for name in keys:
        folder.tensors[name] = torch.tensor([0.2], dtype=torch.bfloat16)
    folder.rewrite()
    model = load(folder.path)
    assert sum(isinstance(module, MixedFormatWeight) for module in model.modules()) == 3
    for path, weight in model.low_bit_weights.items():
        assert weight.quantized.inputs is not None
        expected = torch.tensor(0.2).bfloat16() if path.endswith("qkv_proj.weight.parts.1") else torch.tensor(0.05)
        assert weight.quantized.inputs.scale == float(expected)
    assert model.parameter_count == ModelFolder.open(folder.path).parameter_count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@recipes
def test_a_card_holds_the_bits_that_a_cpu_holds(name: str, folders: Made) -> None:
    found = bits(load(folders[name].path, torch.bfloat16, torch.device("cuda", 0)))
    expected = bits(load(folders[name].path, torch.bfloat16))
    assert found.keys() == expected.keys()
    for field, part in expected.items():
        # Scales of blocks lie apart, and bytes are those of what lies side by side.
        ours, theirs = (each.clone(memory_format=torch.contiguous_format) for each in (found[field].cpu(), part))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), field


@pytest.mark.one_in(3)
@recipes
def test_pieces_of_any_size_give_the_same_weights(name: str, folders: Made) -> None:
    folder = ModelFolder.open(folders[name].path)
    model = empty(folder)
    staged = stage_layers(folder.config, model.weight_targets(), expected_tensors(folder.config), folder.tensors)
    load_late(folder.path, staged.targets, 300, 2)
    staged.check(folder.tensors)
    check_numbers(model, folders[name])


def test_memory_in_another_type_is_what_the_plan_said(folders: Made) -> None:
    folder = ModelFolder.open(folders["packed asymmetric"].path)
    model = load(folder.path, torch.bfloat16)
    assert weight_memory(folder.config, torch.bfloat16, None, CPU).weights == model.weight_bytes


def empty(folder: ModelFolder, shard: Shard | None = None) -> CausalLM:
    assert folder.config.quantization is not None
    formats = folder.config.quantization.layers
    placement = Placement(torch.float32, CPU, shard or Shard(), formats=formats)
    return CausalLM(folder.config.description, placement, 64)


def test_layers_of_one_format_lie_in_one_weight(folders: Made) -> None:
    for name in ("gptq ordered", "fp8 one scale", "fp8 blocks", "int8"):
        model = load(folders[name].path)
        assert all(isinstance(weight, StoredWeight) for weight in model.low_bit_weights.values())
        assert len(model.low_bit_weights) == 3 * 4


def test_layers_whose_inputs_are_in_different_orders_lie_apart(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(source, tmp_path, Recipe("gptq", ordered=True), one_order=False)
    model = load(folder.path)
    assert sum(isinstance(module, MixedFormatWeight) for module in model.modules()) == 3 * 2
    check_numbers(model, folder)
    torch.testing.assert_close(logits(model), logits(load(folder.plain)), rtol=1e-4, atol=1e-3)
    opened = ModelFolder.open(folder.path)
    assert weight_memory(opened.config, torch.float32, None, CPU).weights == model.weight_bytes
    assert model.parameter_count == opened.parameter_count


def test_an_order_that_changes_nothing_is_none(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(source, tmp_path, Recipe("gptq"))
    folder.change_config(desc_act=True)
    assert all(weight.quantized.order is None for weight in load(folder.path).low_bit_weights.values())


def mixed(forms: dict[str, Recipe | None]) -> dict[str, Recipe | None]:
    """Recipe by layer, from the names inside a decoder layer."""
    return {name: forms[name.rsplit(".", 1)[1].removesuffix("_proj")] for name in layer_names(3)}


def test_groups_of_compressed_tensors_may_differ_by_layer(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    four, eight = Recipe("packed"), Recipe("packed", bits=8, group=0)
    forms = {"q": four, "k": eight, "v": None, "o": four, "gate": four, "up": eight, "down": None}
    config = four.config()
    group = eight.config()["config_groups"]["group_0"] | {"targets": ["re:.*(k|up)_proj$"]}
    config["config_groups"]["group_1"] = group
    config["ignore"] = ["lm_head", "re:.*down_proj", *[f"model.layers.{layer}.self_attn.v_proj" for layer in range(3)]]
    folder = quantize_folder(source, tmp_path, mixed(forms), config)
    model = load(folder.path)
    check_numbers(model, folder)
    torch.testing.assert_close(logits(model), logits(load(folder.plain)), rtol=1e-4, atol=1e-3)
    summary, opened = model.quantization, ModelFolder.open(folder.path)
    assert isinstance(summary, StoredSummary)
    assert (summary.scheme, summary.group_size) == ("compressed-tensors int4+int8", 0)
    assert weight_memory(opened.config, torch.float32, None, CPU).weights == model.weight_bytes
    assert model.parameter_count == opened.parameter_count


def test_steps_are_fused_only_where_all_layers_fuse(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Plain weights of bf16 fuse up to 8 rows, those of few bits up to 16.

    The first layer says nothing of the others.
    """
    forms = mixed(dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), Recipe("gptq")))
    forms.update((name, None) for name in forms if name.startswith("model.layers.1."))
    config = Recipe("gptq").config() | {"dynamic": {r"-:model\.layers\.1\.": {}}}
    folder = ModelFolder.open(quantize_folder(source, tmp_path, forms, config).path)
    model = load_model(folder, folder.config, torch.bfloat16, CPU, "folder", 0, ignore_progress)
    for layer in (model.model.layers[0], model.model.layers[2]):
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            assert isinstance(linear.weight, StoredWeight)
    # As on a card, where outputs of one input do not lie together.
    for name, weight in model.named_parameters():
        if name.endswith(".tensor"):
            weight.data = weight.data.contiguous()
    with kernels_on("cpu"):
        assert [model.model.fuses(rows) for rows in (1, 8, 9, 16)] == [True, True, False, False]


def test_a_layer_of_other_bits_is_asked_whether_it_fuses(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps fuse for weights of 8 bits and not for those of 4.

    That both are quantized says nothing.
    """
    forms = mixed(dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), Recipe("gptq", bits=8)))
    forms.update((name, Recipe("gptq")) for name in forms if name.startswith("model.layers.1."))
    config = Recipe("gptq", bits=8).config() | {"dynamic": {r"+:model\.layers\.1\.": {"bits": 4}}}
    model = load(quantize_folder(source, tmp_path, forms, config).path)
    monkeypatch.setattr(quantized_linear, "fuses", lambda num_rows, weight: weight.kind is QuantKind.INT8)
    assert [layer.fuses(32) for layer in model.model.layers] == [True, False, True]
    assert not model.model.fuses(32)


def test_gptq_may_differ_by_layer(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    four, eight = Recipe("gptq"), Recipe("gptq", bits=8, group=64)
    forms = {"q": four, "k": four, "v": four, "o": eight, "gate": four, "up": four, "down": None}
    config = four.config() | {"dynamic": {"-:.*down_proj$": {}, r"+:.*\.o_proj": {"bits": 8, "group_size": 64}}}
    folder = quantize_folder(source, tmp_path, mixed(forms), config)
    check_numbers(load(folder.path), folder)


def test_gptq_may_name_the_modules_of_a_block(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    forms = {part: Recipe("gptq") if part in ("q", "k", "v", "down") else None for part in
             ("q", "k", "v", "o", "gate", "up", "down")}  # fmt: skip
    named = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    config = Recipe("gptq").config() | {"modules_in_block_to_quantize": named}
    folder = quantize_folder(source, tmp_path, mixed(forms), config)
    check_numbers(load(folder.path), folder)


@pytest.mark.parametrize("layout", ["awq", "fp8"])
def test_modules_that_are_not_converted_are_plain(layout: str, source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    recipe = Recipe("awq", symmetric=False) if layout == "awq" else Recipe("fp8", bits=8, group=-1)
    forms = {part: None if part == "v" else recipe for part in ("q", "k", "v", "o", "gate", "up", "down")}
    config = recipe.config() | {"modules_to_not_convert": ["v_proj", "lm_head"]}
    folder = quantize_folder(source, tmp_path, mixed(forms), config)
    check_numbers(load(folder.path), folder)


def test_biases_of_zeros_are_let_pass_and_others_refused(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path / "source", "llama-group-8")
    folder = quantize_folder(tmp_path / "source", tmp_path, Recipe("gptq", group=0))
    name = "model.layers.1.mlp.up_proj.bias"
    folder.tensors[name] = torch.zeros(80, dtype=torch.float16)
    folder.rewrite()
    load(folder.path)
    folder.tensors[name][3] = 1
    folder.rewrite()
    with pytest.raises(ValueError, match=rf"model.safetensors: tensor '{name}' is a bias that .* is not 0"):
        load(folder.path)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed asymmetric", "int8", "fp8 rows", "int8 groups"])
def test_the_parts_of_all_ranks_are_slices_of_the_whole(name: str, folders: Made) -> None:
    folder = ModelFolder.open(folders[name].path)
    halves = []
    for rank in range(2):
        model = empty(folder, Shard(rank, 2))
        targets = model.weight_targets()
        staged = stage_layers(folder.config, targets, expected_tensors(folder.config), folder.tensors)
        load_late(folder.path, staged.targets, 1 << 20, 2)
        staged.check(folder.tensors)
        halves.append({path: dequantize(weight.quantized) for path, weight in model.low_bit_weights.items()})
    for layer in range(3):
        down, gate = f"model.layers.{layer}.mlp.down_proj", f"model.layers.{layer}.mlp.gate_proj"
        found = torch.cat([half[f"{down}.weight"] for half in halves], dim=1)
        torch.testing.assert_close(found, folders[name].weights[down].float(), rtol=1e-6, atol=1e-9)
        gates = torch.cat([half[f"model.layers.{layer}.mlp.gate_up_proj.weight"][:64] for half in halves])
        torch.testing.assert_close(gates, folders[name].weights[gate].float(), rtol=1e-6, atol=1e-9)


def negative(value: torch.Tensor) -> torch.Tensor:
    return -value


def first_to(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(value: torch.Tensor) -> torch.Tensor:
        changed = value.clone()
        changed.view(-1)[0] = number
        return changed

    return change


@pytest.mark.parametrize(
    ("recipe", "suffix", "change", "rule"),
    [
        ("gptq", "scales", first_to(math.nan), "holds a value that is not finite"),
        ("gptq", "scales", first_to(math.inf), "holds a value that is not finite"),
        ("gptq asymmetric", "scales", negative, "has a scale that is negative, or 0 where numbers are not"),
        ("packed", "weight_scale", first_to(0), "has a scale that is negative, or 0 where numbers are not"),
        ("gptq", "qzeros", first_to(0), "has a zero point that is not the middle of its range"),
        ("gptq 8 bits", "qzeros", first_to(0), "has a zero point that is not the middle of its range"),
        ("packed", "weight_shape", first_to(65), "is not the shape that config.json says"),
        ("int4 in bytes", "weight", first_to(8), "has a number that is not from -8 to 7"),
        ("fp8 static", "input_scale", first_to(0), "is not above 0"),
        ("int8 static", "input_scale", first_to(math.inf), "holds a value that is not finite"),
        (
            "int8 static with zero points",
            "input_zero_point",
            lambda value: value.to(torch.int32) + 200,
            "is 191, no integer from -128 to 127",
        ),
        ("fp8 rows", "weight", lambda value: first_to(0x7F)(value.view(torch.uint8)).view(value.dtype), "not finite"),
        ("fp8 rows", "weight_scale", negative, "has a scale that is negative"),
        ("fp8 inverse blocks", "weight_scale_inv", negative, "has a scale that is negative"),
        ("fp8 inverse blocks", "weight_scale_inv", first_to(0), "has a scale that is negative, or 0 where numbers are"),
        ("gptq", "scales", first_to(0), "has a scale that is negative, or 0 where numbers are not"),
        ("gptq", "qzeros", lambda value: value + 0x11111111, "they would be it with checkpoint_format gptq_v2"),
        ("gptq 8 bits", "qzeros", lambda value: value + 0x01010101, "they would be it with checkpoint_format gptq_v2"),
    ],
)
def test_values_that_can_not_be_are_refused_by_file_and_tensor(
    recipe: str,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    rule: str,
    source: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    folder = quantize_folder(source, tmp_path, RECIPES[recipe])
    name = f"model.layers.2.self_attn.k_proj.{suffix}"
    folder.tensors[name] = change(folder.tensors[name])
    folder.rewrite()
    with pytest.raises(InvalidModelFolder) as error:
        load(folder.path)
    assert str(error.value).startswith(f"model.safetensors: tensor '{name}' ") and rule in str(error.value)


def test_scales_that_the_models_type_does_not_hold_are_refused(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(source, tmp_path, Recipe("packed"))
    name = "model.layers.0.mlp.up_proj.weight_scale"
    folder.tensors[name] = folder.tensors[name].float() * 1e7
    folder.rewrite()
    load(folder.path)
    with pytest.raises(InvalidModelFolder, match=f"tensor '{name}' has a scale that is too large or too small"):
        load(folder.path, torch.float16)


def test_a_zero_point_of_0_survives_the_first_version_of_gptq() -> None:
    """Minus one in every place borrows from the next; adding it back gives all eight their own."""
    form = LayerFormat(Layout.GPTQ, "int4", "group", 32, is_symmetric=False, is_less_one=True, has_borrows=True)
    zeros = torch.tensor([[0, 5, 0, 0, 15, 1, 0, 9]])
    stored = words(zeros.numpy(), 4) - 0x11111111
    found = zeros_of(form, stored, slice(0, 8), 1, CPU)
    assert found is not None and found.t().tolist() == zeros.tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_the_first_version_of_gptq_are_each_by_themselves(bits: int) -> None:
    """The largest that can be stored stands for 0, and its neighbour stays as it is."""
    top = (1 << bits) - 1
    form = LayerFormat(Layout.GPTQ, "int4" if bits == 4 else "int8", "group", 32, is_symmetric=False, is_less_one=True)
    stored = torch.tensor([[top, 4, top, top, 14, 0, top, 8]])
    found = zeros_of(form, words(stored.numpy(), bits), slice(0, 8), 1, CPU)
    middle = 0 if bits == 4 else 128
    assert found is not None
    assert (found.t().int() + middle).tolist() == [[0, 5, 0, 0, 15, 1, 0, 9]]


@pytest.mark.parametrize("name", ["gptq", "gptq rows", "int8", "packed"])
def test_scales_of_symmetric_layers_may_be_negative(name: str, source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Tools that search for the better sign of each group write negative scales."""
    folder = quantize_folder(source, tmp_path, RECIPES[name])
    for layer in folder.weights:
        scales = next(key for key in folder.tensors if key in (f"{layer}.scales", f"{layer}.weight_scale"))
        folder.tensors[scales] = -folder.tensors[scales]
        folder.weights[layer] = -folder.weights[layer]
    folder.rewrite()
    check_numbers(load(folder.path), folder)


def test_a_block_of_zeros_may_have_a_scale_of_0(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(source, tmp_path, RECIPES["fp8 inverse blocks"])
    layer = "model.layers.2.self_attn.k_proj"
    for suffix in ("weight", "weight_scale_inv"):
        folder.tensors[f"{layer}.{suffix}"] = torch.zeros_like(folder.tensors[f"{layer}.{suffix}"])
    folder.weights[layer] = torch.zeros_like(folder.weights[layer])
    folder.rewrite()
    check_numbers(load(folder.path), folder)
