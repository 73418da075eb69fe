"""Folders that other tools quantized, shared by several ranks.

Every format's part is a slice of the whole, nothing is rounded anew, and each rank reads its own
bytes.
"""

from __future__ import annotations

import functools
import math
import pathlib

import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.models.test_quantized_folders import RECIPES
from tests.parallel.rank_group import ranks
from tests.parallel.shared_run import CPU, load, plans, run
from tests.support.model_builds import weight_memory
from tests.support.quantized_folders import Quantized, quantize_folder
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import Shard
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, dequantize
from headrace_model_folder import ModelFolder, expected_tensors
from headrace_model_folder.formats.layer_part import LayerPart

SHARED = {name: recipe for name, recipe in RECIPES.items() if not recipe.ordered}


@functools.cache
def _source(base: pathlib.Path, name: str) -> pathlib.Path:
    path = base / name
    write_checkpoint(path, name)
    return path


@functools.cache
def _folder(base: pathlib.Path, name: str) -> Quantized:
    # Blocks of 128 need longer inputs; a rank's keys and values begin in the middle of one.
    source = _source(base, "llama-blocks" if "blocks" in name else "llama-wide")
    into = base / f"{name} folder"
    into.mkdir()
    return quantize_folder(source, into, RECIPES[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Quantized]:
    torch.set_num_threads(1)
    return functools.partial(_folder, tmp_path_factory.mktemp("shared"))


# Weights are shared out by blocks of bits and groups; every second format in everyday runs.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if index % 2 else ()) for index, name in enumerate(SHARED)]
)
def test_ranks_draw_the_tokens_of_one(folders: functools.partial[Quantized], name: str) -> None:
    folder = ModelFolder.open(folders(name).path)
    assert unsuitable_tp(EngineConfig(model=folder.path, device="cpu", tp=2), folder.config) is None
    tokens, logits, alone = run(folder)
    shared = on_ranks(2, lambda shard: run(folder, shard))
    for rank, (own_tokens, own_logits, model) in enumerate(shared):
        if RECIPES[name].rounds_inputs:
            # A rank rounds what it has of a token's inputs by itself, and inputs near the middle of
            # two numbers go either way: 8 bits' error over three layers.
            assert own_tokens == shared[0][0] and float((own_logits - logits).norm() / logits.norm()) < 0.2
        else:
            assert own_tokens == tokens
            # The same numbers, summed in another order.
            torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-3)
        assert torch.equal(own_logits, shared[0][1])
        planned = weight_memory(folder.config, torch.float32, None, CPU, Shard(rank, 2), folder.tensors)
        # Tiles of int4 hold 128 inputs, of which parts of small layers fill a quarter.
        assert planned.weights == model.weight_bytes < 0.85 * alone.weight_bytes
        assert model.quantization is not None and model.quantization.bits_per_weight > RECIPES[name].bits


def numbers(weight: QuantizedWeight) -> torch.Tensor:
    return dequantize(weight, torch.empty(weight.num_outputs, weight.num_inputs))


@pytest.mark.parametrize("name", ["gptq 8 bits asymmetric", "awq 64"])
def test_groups_that_straddle_ranks_are_kept_in_pieces(folders: functools.partial[Quantized], name: str) -> None:
    made = folders(name)
    folder = ModelFolder.open(made.path)
    parts = on_ranks(2, lambda shard: load(folder, shard).low_bit_weights)
    for layer in range(3):
        # 64 inputs, one group: half of it on each rank.
        own = f"model.layers.{layer}.self_attn.o_proj"
        assert [part[f"{own}.weight"].quantized.group_size for part in parts] == [32, 32]
        found = torch.cat([numbers(part[f"{own}.weight"].quantized) for part in parts], dim=1)
        torch.testing.assert_close(found, made.weights[own].float(), rtol=1e-6, atol=1e-9)


def test_scales_of_blocks_hold_for_ranks_that_begin_within_one(folders: functools.partial[Quantized]) -> None:
    made = folders("fp8 blocks")
    folder = ModelFolder.open(made.path)
    parts = on_ranks(2, lambda shard: load(folder, shard).low_bit_weights)
    for layer in range(3):
        path = f"model.layers.{layer}.self_attn"
        halves = [numbers(part[f"{path}.qkv_proj.weight"].quantized).split([128, 64, 64]) for part in parts]
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            found = torch.cat([half[index] for half in halves])
            torch.testing.assert_close(found, made.weights[f"{path}.{name}"].float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SHARED)
def test_ranks_read_their_own_parts(folders: functools.partial[Quantized], name: str) -> None:
    folder = ModelFolder.open(folders(name).path)
    assert folder.config.quantization is not None
    shapes = expected_tensors(folder.config)
    for layer, form in folder.config.quantization.layers.items():
        outputs, inputs = shapes[f"{layer}.weight"]
        by_inputs = layer.endswith(("o_proj", "down_proj"))
        read = 0
        for rank in range(2):
            split = Shard(rank, 2).split(inputs if by_inputs else outputs)
            part = LayerPart(range(outputs), split) if by_inputs else LayerPart(split, range(inputs))
            for tensor in form.tensors(outputs, inputs):
                record = folder.tensors.get(f"{layer}.{tensor.suffix}")
                if record is None:
                    continue
                rows, columns = part.places(form, tensor.role, record.shape or (1,))
                share = len(rows) * (1 if columns is None else len(columns)) / math.prod(record.shape)
                read += round(share * record.num_bytes)
        whole = sum(
            record.num_bytes
            for own, record in folder.tensors.items()
            if own.rpartition(".")[0] == layer and not own.endswith("bias")
        )
        # Scales of outputs, of whole tensors or of straddled groups and blocks are everybody's.
        assert whole <= read < 1.3 * whole, layer


def test_an_order_of_inputs_is_not_shared_out(folders: functools.partial[Quantized]) -> None:
    folder = ModelFolder.open(folders("gptq ordered").path)
    with pytest.raises(QuantizationRefused, match=r"self_attn.o_proj': its 64 inputs are in an order of groups"):
        load(folder, Shard(0, 2))


# The arithmetic of all formats is tried with threads above; here, whether processes do the same
# with integers and with floats.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gptq v2", "awq 64", "int8 one scale", "fp8 blocks"],
)
async def test_real_ranks_draw_the_tokens_of_one(folders: functools.partial[Quantized], name: str) -> None:
    folder = folders(name)
    alone = run(ModelFolder.open(folder.path)).tokens
    async with ranks(folder.path, 2) as group:
        ready = await group.group.wait_ready()
        assert all(message.memory and message.memory.num_blocks == 64 for message in ready)
        found = await group.answered(plans())
    assert [token for result in found for token in result.tokens.tolist()] == alone
