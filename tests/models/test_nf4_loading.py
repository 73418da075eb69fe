"""Weights in NF4 as loaders make them.

The same however they come, exact in memory, with their distance stated, and refused by name where
they are not what was read.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from tests.models.checkpoints import ignore_progress, load, write_checkpoint
from tests.models.test_gguf_models import logits
from tests.models.test_pinned_loader import load_late
from tests.support.model_builds import PROJECTIONS, load_model, weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization import nf4_weight, product_check
from headrace_backend.quantization.summaries import QuantizationSummary
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.weights.placement import Placement, Shard
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_kernels.linear.block_quantized import dequantized
from headrace_kernels.weight_formats.block_weight import BlockWeight
from headrace_kernels.weight_formats.nf4 import quantize_rows
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
NF4 = Scheme.named("nf4", 128)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("wide")
    write_checkpoint(made, "llama-wide")
    return made


def quantized(path: pathlib.Path, dtype: torch.dtype = torch.float32, load_as: str = "folder") -> CausalLM:
    folder = ModelFolder.open(path)
    return load_model(folder, folder.config, dtype, CPU, load_as, 5, ignore_progress, scheme=NF4)  # type: ignore[arg-type]


def numbers(model: CausalLM) -> dict[str, torch.Tensor]:
    return {path: dequantized(weight.blocks[0]) for path, weight in model.block_weights.items()}


def test_logits_are_those_of_the_rounded_numbers(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = quantized(path)
    stored = safetensors.torch.load_file(path / "model.safetensors")
    for layer, whole in numbers(model).items():
        parent, _, last = layer.removesuffix(".weight").rpartition(".")
        names = [f"{parent}.{part}.weight" for part in PROJECTIONS.get(last, (last,))]
        for name, block in zip(names, whole.split([len(stored[name]) for name in names]), strict=True):
            assert 0.03 < float((block - stored[name]).norm() / stored[name].norm()) < 0.13
            stored[name] = block.clone()
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    torch.testing.assert_close(logits(model), logits(load(tmp_path)), atol=3e-4, rtol=0)


def test_experts_are_those_of_their_rounded_numbers(tmp_path: pathlib.Path) -> None:
    """All of a layer in one weight; a router stays as it is."""
    write_checkpoint(tmp_path / "source", "qwen3-moe-wide")
    model, stored = quantized(tmp_path / "source"), safetensors.torch.load_file(tmp_path / "source/model.safetensors")
    for layer, whole in numbers(model).items():
        parent, _, last = layer.removesuffix(".weight").rpartition(".")
        parts = PROJECTIONS.get(last, (last,))
        experts = [f"{parent}.experts.{number}" for number in range(4)] if parent.endswith("mlp") else [parent]
        names = [f"{expert}.{part}.weight" for expert in experts for part in parts]
        for name, block in zip(names, whole.split([len(stored[name]) for name in names]), strict=True):
            assert 0.03 < float((block - stored[name]).norm() / stored[name].norm()) < 0.13
            stored[name] = block.clone()
    plain = tmp_path / "plain"
    plain.mkdir()
    safetensors.torch.save_file(stored, plain / "model.safetensors")
    (plain / "config.json").write_text((tmp_path / "source/config.json").read_text())
    torch.testing.assert_close(logits(model), logits(load(plain)), atol=3e-4, rtol=0)
    assert isinstance(model.quantization, QuantizationSummary) and model.quantization.worst_relative_error < 0.13
    config = ModelFolder.open(plain).config
    assert weight_memory(config, torch.float32, NF4, CPU).weights == model.weight_bytes

    def of_rank(shard: Shard) -> torch.Tensor:
        folder, whole = ModelFolder.open(tmp_path / "source"), dataclasses.replace(shard, whole_experts=True)
        arguments = (folder, folder.config, torch.float32, CPU, "folder", 5, ignore_progress)
        return logits(load_model(*arguments, scheme=NF4, shard=whole))

    # A scale over all scales of a row is each rank's own: no farther from the original.
    for found in on_ranks(2, of_rank):
        assert float((found - logits(model)).norm() / logits(model).norm()) < 0.1


def test_what_is_said_was_measured(path: pathlib.Path) -> None:
    model = quantized(path)
    summary = model.quantization
    assert isinstance(summary, QuantizationSummary) and (summary.scheme.name, summary.scheme.group_size) == ("nf4", 64)
    weights = sum(weight.num_block_weights for weight in model.block_weights.values())
    assert summary.bits_per_weight == 8 * sum(weight.num_bytes for weight in model.block_weights.values()) / weights
    assert 0.05 < summary.mean_relative_error <= summary.worst_relative_error < 0.13
    assert summary.worst_tensor in ModelFolder.open(path).tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_plan_said(path: pathlib.Path, dtype: torch.dtype) -> None:
    model, config = quantized(path, dtype), ModelFolder.open(path).config
    held = [
        *model.parameters(),
        *(p for weight in model.block_weights.values() for b in weight.blocks for p in b.parts),
    ]
    assert model.weight_bytes == sum(tensor.nbytes for tensor in held) == weight_memory(config, dtype, NF4, CPU).weights
    assert model.parameter_count == ModelFolder.open(path).parameter_count


@pytest.mark.one_in(3)
@pytest.mark.parametrize("piece_bytes", [300, 4097, 1 << 20])
def test_pieces_of_any_size_give_the_same_weights(path: pathlib.Path, piece_bytes: int) -> None:
    config = ModelFolder.open(path).config
    late = CausalLM(config.description, Placement(torch.float32, CPU, scheme=NF4), 16)
    load_late(path, late.weight_targets(), piece_bytes, 3)
    for layer, expected in numbers(quantized(path)).items():
        assert torch.equal(numbers(late)[layer], expected)


def test_dummy_weights_are_rounded_too(path: pathlib.Path) -> None:
    summary = quantized(path, load_as="dummy").quantization
    assert isinstance(summary, QuantizationSummary) and 0.05 < summary.mean_relative_error < 0.13


def _nibbles_reversed(weight: BlockWeight, rows: slice) -> None:
    assert weight.nibbles is not None
    weight.nibbles[rows] = weight.nibbles[rows].roll(1, 1)


def _scales_of_other_groups(weight: BlockWeight, rows: slice) -> None:
    weight.scales[rows] *= -1
    assert weight.mins is not None
    weight.mins[rows] *= 1.6


@pytest.mark.parametrize("fault", [_nibbles_reversed, _scales_of_other_groups])
def test_a_tensor_that_is_packed_wrongly_is_refused_by_name(
    path: pathlib.Path, fault: Callable[[BlockWeight, slice], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rows: torch.Tensor, target: BlockWeight, first_row: int) -> None:
        quantize_rows(rows, target, first_row)
        if target.num_inputs == 128:
            fault(target, slice(first_row, first_row + len(rows)))

    monkeypatch.setattr(nf4_weight, "quantize_rows", broken)
    with pytest.raises(QuantizationRefused, match=r"tensor 'model\.layers\.0\.mlp\.down_proj\.weight' is not what was"):
        quantized(path)


def test_a_product_that_differs_from_its_reference_is_refused_by_layer(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = product_check.block_quantized.linear

    def broken(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
        return linear(x, weight) * (1.01 if weight.num_inputs == 128 else 1)

    monkeypatch.setattr(product_check.block_quantized, "linear", broken)
    with pytest.raises(
        QuantizationRefused, match=r"layer 'model\.layers\.0\.mlp\.down_proj': its NF4 product of 8 rows"
    ):
        quantized(path)


def test_what_does_not_suit_is_refused(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, "llama")
    config = EngineConfig(model=tmp_path, quantize="nf4")
    said = unsuitable_quantization(config, ModelFolder.open(tmp_path).config)
    assert (
        said is not None
        and "whose blocks of 64 do not divide the 80 inputs of model.layers.0.mlp.down_proj.weight" in said
    )
    assert unsuitable_quantization(config, ModelFolder.open(path).config) is None
    with pytest.raises(QuantizationRefused, match="and 32 inputs: NF4 needs a multiple"):
        placement = Placement(torch.float32, CPU, Shard(0, 2), NF4)
        CausalLM(ModelFolder.open(path).config.description, placement, 16)


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("load_as", ["folder", "dummy"])
def test_a_card_quantizes_and_checks_itself(path: pathlib.Path, load_as: str) -> None:
    folder, card = ModelFolder.open(path), torch.device("cuda", 0)
    model = load_model(folder, folder.config, torch.bfloat16, card, load_as, 5, ignore_progress, scheme=NF4)  # type: ignore[arg-type]
    assert model.quantization is not None
