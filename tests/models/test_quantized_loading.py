"""Weights of few bits as loaders make them.

The same however they come, exact in memory, in parts for ranks, and refused by name where they are
not what was read.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import ignore_progress, load, write_checkpoint
from tests.models.test_loading import damage
from tests.models.test_pinned_loader import load_late
from tests.support.examples import examples
from tests.support.model_builds import PROJECTIONS, load_model, weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization import low_bit_weight
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement, Shard
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.weight_formats import dequantized_buffer
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, allocate, dequantize, quantize_rows
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.config import parse_config

CPU, WHOLE = torch.device("cpu"), Shard()
SCHEMES = {name: Scheme.named(*setting) for name, setting in
           {"int8": ("int8", 128), "fp8": ("fp8", 128), "int4": ("int4", 32)}.items()}  # fmt: skip
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip

scheme_names = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("wide")
    write_checkpoint(made, "llama-wide")
    return made


def empty(path: pathlib.Path, name: str, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> CausalLM:
    config = ModelFolder.open(path).config
    return CausalLM(config.description, Placement(dtype, CPU, shard, SCHEMES[name]), 16)


def filled(path: pathlib.Path, name: str, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> CausalLM:
    model = empty(path, name, dtype, shard)
    load_weights(ModelFolder.open(path), model.weight_targets(), ignore_progress)
    return model


def quantized(path: pathlib.Path, name: str, shard: Shard = WHOLE) -> CausalLM:
    folder = ModelFolder.open(path)
    about = (folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress)
    return load_model(*about, scheme=SCHEMES[name], shard=shard)  # type: ignore[arg-type]


def numbers(model: CausalLM) -> dict[str, torch.Tensor]:
    """What the products multiply by, by the path of their weight."""
    return {path: dequantize(weight.quantized) for path, weight in model.low_bit_weights.items()}


@pytest.mark.slow  # test_quantized_folders.py cuts pieces of each format.
@settings(max_examples=examples(12, least=4), deadline=None)
@given(
    piece_bytes=st.sampled_from([1, 300, 1000, 4097, 1 << 20]),
    num_readers=st.integers(1, 4),
    name=st.sampled_from(list(SCHEMES)),
    rank=st.integers(0, 1),
    world=st.sampled_from([1, 2]),
)
def test_pieces_of_any_size_give_the_same_weights(
    path: pathlib.Path, piece_bytes: int, num_readers: int, name: str, rank: int, world: int
) -> None:
    shard = Shard(rank % world, world)
    late, direct = empty(path, name, shard=shard), filled(path, name, shard=shard)
    load_late(path, late.weight_targets(), piece_bytes, num_readers)
    for layer, expected in numbers(direct).items():
        assert torch.equal(numbers(late)[layer], expected)


@scheme_names
def test_quantized_weights_are_the_kernels_own_of_the_stacked_tensors(path: pathlib.Path, name: str) -> None:
    stored = safetensors.torch.load_file(path / "model.safetensors")
    parts = [stored[f"model.layers.1.self_attn.{part}_proj.weight"] for part in ("q", "k", "v")]
    whole, scheme = torch.cat(parts), SCHEMES[name]
    assert scheme is not None
    expected = allocate(scheme.kind, *whole.shape, scheme.group(whole.shape[1]), torch.float32, CPU)
    quantize_rows(whole, expected, 0)
    model = quantized(path, name)
    assert torch.equal(numbers(model)["model.layers.1.self_attn.qkv_proj.weight"], dequantize(expected))
    # All but the layers' products stay exactly as they are.
    plain = load(path)
    for parameter, value in model.named_parameters():
        assert torch.equal(value, plain.get_parameter(parameter))


@scheme_names
def test_the_parts_of_all_ranks_are_slices_of_the_whole(path: pathlib.Path, name: str) -> None:
    whole = numbers(quantized(path, name))
    ranks = on_ranks(2, lambda shard: numbers(quantized(path, name, shard)))
    gate_up, down = "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    gates, ups = zip(*(rank[gate_up].chunk(2) for rank in ranks), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), whole[gate_up])
    assert torch.equal(torch.cat([rank[down] for rank in ranks], dim=1), whole[down])


@scheme_names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_plan_said(path: pathlib.Path, name: str, dtype: torch.dtype) -> None:
    model = filled(path, name, dtype)
    held = [parameter for parameter in model.parameters()]
    for weight in model.low_bit_weights.values():
        held += [
            part
            for part in (weight.quantized.packed, weight.quantized.scales, weight.quantized.zeros)
            if part is not None
        ]
    config = ModelFolder.open(path).config
    assert model.weight_bytes == sum(tensor.nbytes for tensor in held)
    assert weight_memory(config, dtype, SCHEMES[name], CPU).weights == model.weight_bytes
    assert model.parameter_count == ModelFolder.open(path).parameter_count
    assert weight_memory(config, dtype, None, CPU).weights == model.parameter_count * dtype.itemsize


@pytest.mark.parametrize(("setting", "most"), [(("int4", 128), 0.28), (("int8", 128), 0.51), (("fp8", 128), 0.51)])
def test_an_8b_models_layers_take_their_share_of_bf16(setting: tuple[str, int], most: float) -> None:
    config = parse_config(LLAMA_8B)
    layers = sum(math.prod(shape) for name, shape in expected_tensors(config).items() if "_proj" in name)
    plain = weight_memory(config, torch.bfloat16, None, CPU).weights
    low = weight_memory(config, torch.bfloat16, Scheme.named(*setting), CPU).weights
    assert (low - (plain - 2 * layers)) / (2 * layers) <= most


@scheme_names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_the_unquantized_ones_rounded(path: pathlib.Path, name: str, dtype: torch.dtype) -> None:
    config, scheme = ModelFolder.open(path).config, SCHEMES[name]
    plain = load_model(None, config, dtype, CPU, "dummy", 7, ignore_progress).weight_targets()
    model = empty(path, name, dtype)
    fill_with_noise(model.weight_targets(), expected_tensors(config), 7, ignore_progress)
    values = torch.cat([plain[UP_PROJ.replace("up", part)].tensor for part in ("gate", "up")])
    assert scheme is not None
    expected = allocate(scheme.kind, *values.shape, scheme.group(values.shape[1]), dtype, CPU)
    quantize_rows(values, expected, 0)
    assert torch.equal(numbers(model)["model.layers.1.mlp.gate_up_proj.weight"], dequantize(expected))


@scheme_names
def test_the_summary_states_measured_bits_and_distances(path: pathlib.Path, name: str) -> None:
    model, stored = quantized(path, name), safetensors.torch.load_file(path / "model.safetensors")
    summary = model.quantization
    assert summary is not None and summary.scheme == SCHEMES[name]
    weights = sum(weight.num_weights for weight in model.low_bit_weights.values())
    assert summary.bits_per_weight == 8 * sum(w.num_bytes for w in model.low_bit_weights.values()) / weights
    found = {
        part: block
        for layer, whole in numbers(model).items()
        for part, block in zip(*_parts(layer, whole, stored), strict=True)
    }
    errors = {part: float((found[part] - stored[part]).norm() / stored[part].norm()) for part in found}
    assert len(errors) == 3 * 7
    assert summary.mean_relative_error == pytest.approx(sum(errors.values()) / len(errors), rel=1e-3)
    assert summary.worst_relative_error == pytest.approx(max(errors.values()), rel=1e-3)
    assert errors[summary.worst_tensor] == pytest.approx(max(errors.values()), rel=1e-3)
    assert load(path).quantization is None


def _parts(
    layer: str, whole: torch.Tensor, stored: dict[str, torch.Tensor]
) -> tuple[list[str], tuple[torch.Tensor, ...]]:
    """The checkpoint's names of a layer's weights, and their rows in it."""
    parent, _, kind = layer.removesuffix(".weight").rpartition(".")
    stacked = PROJECTIONS.get(kind, (kind,))
    names = [f"{parent}.{part}.weight" for part in stacked]
    return names, whole.split([len(stored[part]) for part in names])


@scheme_names
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_as_without_quantizing(tmp_path: pathlib.Path, name: str, value: float) -> None:
    write_checkpoint(tmp_path, "llama-wide")
    file = damage(tmp_path, UP_PROJ, value)
    with pytest.raises(InvalidModelFolder, match=rf"{file}: tensor '{UP_PROJ}' holds a value that is not finite"):
        quantized(tmp_path, name)


def _zero_point_one_off(weight: QuantizedWeight, rows: slice) -> None:
    if weight.zeros is None:
        weight.packed.view(torch.uint8)[rows] ^= 1 << 5
    else:
        weight.zeros[:, rows] = (weight.zeros[:, rows].int() + 1).clamp(max=15).to(torch.uint8)


def _scale_of_its_neighbour(weight: QuantizedWeight, rows: slice) -> None:
    scales = weight.scales[rows] if weight.zeros is None else weight.scales[:, rows]
    scales.copy_(scales.roll(1, -1))


def _bits_reversed(weight: QuantizedWeight, rows: slice) -> None:
    weight.packed[rows] = weight.packed[rows].roll(1, 1)


@scheme_names
@pytest.mark.parametrize("fault", [_zero_point_one_off, _scale_of_its_neighbour, _bits_reversed])
def test_a_tensor_that_is_packed_wrongly_is_refused_by_name(
    path: pathlib.Path, name: str, fault: Callable[[QuantizedWeight, slice], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = name != "int4" and fault is _scale_of_its_neighbour

    def broken(rows: torch.Tensor, target: QuantizedWeight, first_row: int, magnitudes: torch.Tensor | None) -> None:
        quantize_rows(rows, target, first_row, magnitudes)
        if target.num_outputs == 64 and target.num_inputs == 128:
            if worse:  # Rows of random models are alike; those of real ones are not.
                target.scales[first_row : first_row + len(rows)] *= 1.2
            fault(target, slice(first_row, first_row + len(rows)))

    monkeypatch.setattr(low_bit_weight, "quantize_rows", broken)
    with pytest.raises(QuantizationRefused, match=r"tensor 'model\.layers\.0\.mlp\.down_proj\.weight' is not what was"):
        quantized(path, name)


@scheme_names
def test_a_product_that_differs_from_its_reference_is_refused_by_layer(
    path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = quantized_linear.linear

    def broken(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        out = linear(x, weight, bias)
        if len(x) == 8 and weight.num_inputs == 128:
            out[:, 3] = 0
        return out

    monkeypatch.setattr(quantized_linear, "linear", broken)
    with pytest.raises(
        QuantizationRefused, match=r"layer 'model\.layers\.0\.mlp\.down_proj': its .* product of 8 rows"
    ):
        quantized(path, name)


def test_groups_that_do_not_divide_a_ranks_inputs_are_refused(path: pathlib.Path) -> None:
    config = parse_config({**json.loads((path / "config.json").read_text()), "intermediate_size": 96})
    placement = Placement(torch.float32, CPU, Shard(0, 2), SCHEMES["int4"])
    with pytest.raises(QuantizationRefused, match="quantize_group is 32, which does not divide 48 inputs"):
        CausalLM(config.description, placement, 16)


def test_the_buffer_of_a_cards_products_is_planned_for() -> None:
    """One for all layers: the gate and up projections of an 8B model, in the activations' type."""
    config, card = parse_config(LLAMA_8B), torch.device("cuda", 0)
    assert weight_memory(config, torch.bfloat16, Scheme.named("int8", 128), card).scratch == 2 * 14336 * 4096 * 2
    assert weight_memory(config, torch.bfloat16, Scheme.named("int8", 128), CPU).scratch == 0
    assert weight_memory(config, torch.bfloat16, None, card).scratch == 0


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@on_a_card
@scheme_names
@pytest.mark.parametrize("load_as", ["folder", "dummy"])
def test_a_card_quantizes_and_checks_itself(path: pathlib.Path, name: str, load_as: str) -> None:
    folder, card = ModelFolder.open(path), torch.device("cuda", 0)
    model = load_model(folder, folder.config, torch.bfloat16, card, load_as, 3, ignore_progress, scheme=SCHEMES[name])  # type: ignore[arg-type]
    assert model.quantization is not None
    if load_as == "folder":
        for layer, expected in numbers(filled(path, name, torch.bfloat16)).items():
            found = dequantize(model.low_bit_weights[layer].quantized).cpu()
            # A card divides a last bit differently now and then, which may round a number to its
            # neighbour.
            assert (found != expected).float().mean() < 1e-3


@pytest.mark.gpu
@on_a_card
def test_nothing_of_the_original_stays_on_a_card(path: pathlib.Path) -> None:
    config, card = parse_config({**LLAMA_8B, "num_hidden_layers": 2}), torch.device("cuda", 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scheme = Scheme.named("int4", 128)
    model = load_model(None, config, torch.bfloat16, card, "dummy", 0, ignore_progress, 64, scheme)
    planned = model.weight_bytes + dequantized_buffer.scratch_bytes(2 * 14336, 4096, torch.bfloat16)
    # The rotary table, sums of errors and libraries' workspaces beside the weights and the room
    # that restores one.
    assert torch.cuda.memory_allocated() - before - planned < 80 << 20
    # The largest tensor as it was drawn, and a few pieces of it in fp32; or the embedding's.
    assert torch.cuda.max_memory_allocated() - before - planned < 2 * 14336 * 4096 + (300 << 20)
