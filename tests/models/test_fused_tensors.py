"""Checkpoints that keep several projections in one tensor.

Quantized folders of them as other tools write them, the settings of a server, several ranks, and
what is refused.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.models.checkpoints import VOCAB_SIZE, ignore_progress, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.models.test_quantized_folders import RECIPES
from tests.support.bitsandbytes_folder import write
from tests.support.model_builds import load_model
from tests.support.quantized_folders import Quantized, Recipe, quantize_folder
from tests.support.rank_threads import on_ranks

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.weight_formats.quantized_weight import dequantize
from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_model_folder.config import parse_config

CPU = torch.device("cpu")
NAME = "phi3-blocks"
# fp32 with sums in another order; logits are of order 10.
TOLERANCE = 2e-4
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
PLAIN = {name: recipe for name, recipe in RECIPES.items() if not recipe.rounds_inputs}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("phi3")
    write_checkpoint(path, NAME)
    return path


@functools.cache
def made(source: pathlib.Path, into: pathlib.Path, name: str) -> Quantized:
    return quantize_folder(source, into, RECIPES[name])


def config_of(path: pathlib.Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "config.json").read_text())
    return values


def load(path: pathlib.Path, shard: Shard = ALONE, scheme: Scheme | None = None) -> CausalLM:
    folder = ModelFolder.open(path)
    about = (folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress)
    return load_model(*about, scheme=scheme, shard=shard)  # type: ignore[arg-type]


def logits(model: CausalLM) -> torch.Tensor:
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 40).tolist()
    return PagedDriver(model).step([Row(tokens)], [40])[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLAIN)
def test_quantized_folders_compute_what_their_numbers_say(
    source: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    folder = made(source, tmp_path, name)
    assert any("qkv_proj" in tensor for tensor in folder.tensors)
    found = load(folder.path)
    assert found.low_bit_weights and found.quantization is not None
    torch.testing.assert_close(logits(found), logits(load(folder.plain)), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed asymmetric", "int8 one scale", "fp8 rows kept"])
def test_ranks_read_their_parts_of_each_projection(source: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    folder = made(source, tmp_path, name)
    whole = dequantized(load(folder.path))
    ranks = on_ranks(2, lambda shard: dequantized(load(folder.path, shard)))
    assert len(whole) == 4 * 3
    for path, weight in whole.items():
        parts = {"qkv_proj": 3, "gate_up_proj": 2}.get(path.split(".")[-2])
        if parts is None:
            found = torch.cat([rank[path] for rank in ranks], dim=1)
        else:
            # Each rank has its half of every projection.
            halves = [rank[path].chunk(parts) for rank in ranks]
            found = torch.cat([half[part] for part in range(parts) for half in halves])
        torch.testing.assert_close(found, weight, atol=0, rtol=0)


def dequantized(model: CausalLM) -> dict[str, torch.Tensor]:
    """The numbers of every quantized weight, by path."""
    return {
        path: dequantize(weight.quantized, torch.empty(weight.num_outputs, weight.num_inputs))
        for path, weight in model.low_bit_weights.items()
    }


@pytest.mark.parametrize("setting", [("int8", 128), ("fp8", 128), ("int4", 32), ("nf4", 64)])
def test_a_server_quantizes_it_as_it_loads(
    source: pathlib.Path, tmp_path: pathlib.Path, setting: tuple[str, int]
) -> None:
    """To the logits of the same weights in a Llama's folder, where each projection has a tensor."""
    stored, values = safetensors.torch.load_file(source / "model.safetensors"), config_of(source)
    for layer in range(values["num_hidden_layers"]):
        for name, parts in PARTS.items():
            whole = stored.pop(f"model.layers.{layer}.{name}.weight").chunk(len(parts))
            own = {f"model.layers.{layer}.{part}.weight": rows for part, rows in zip(parts, whole, strict=True)}
            stored.update((part, rows.clone()) for part, rows in own.items())
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))
    found, expected = (load(path, scheme=Scheme.named(*setting)) for path in (source, tmp_path))
    assert found.low_bit_weights or found.block_weights
    assert torch.equal(logits(found), logits(expected))


def test_records_of_fused_tensors_are_projections_and_share_no_byte(source: pathlib.Path) -> None:
    folder = ModelFolder.open(source)
    stored = safetensors.torch.load_file(source / "model.safetensors")
    whole = stored["model.layers.1.self_attn.qkv_proj.weight"]
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    for name, part in zip(names, whole.split(128), strict=True):
        record = folder.tensors[name]
        raw = (source / record.file).read_bytes()[record.offset : record.offset + record.num_bytes]
        assert raw == part.numpy().tobytes() and record.shape == tuple(part.shape)
    assert not any("qkv_proj" in name or "gate_up" in name for name in folder.tensors)
    assert sum(record.num_bytes for record in folder.tensors.values()) == sum(
        tensor.nbytes for tensor in stored.values()
    )


def test_a_part_that_begins_within_a_word_is_refused(tmp_path: pathlib.Path) -> None:
    values = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    path = write_plain(tmp_path / "small", **values)
    with pytest.raises(InvalidModelFolder, match=r"k_proj is outputs 8 to 12 of model\.layers\.0\.self_attn\.qkv_proj"):
        ModelFolder.open(quantize_folder(path, tmp_path, Recipe("awq", group=0, symmetric=False)).path)


def test_a_packed_tensor_that_states_another_shape_is_refused(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = quantize_folder(source, tmp_path, RECIPES["packed"])
    folder.tensors["model.layers.1.mlp.gate_up_proj.weight_shape"][0] -= 8
    folder.rewrite()
    with pytest.raises(
        InvalidModelFolder, match=r"gate_up_proj\.weight_shape' is not the shape that config\.json says"
    ):
        ModelFolder.open(folder.path)


def test_a_fused_tensor_is_named_by_the_folders_name(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    stored = safetensors.torch.load_file(source / "model.safetensors")
    name = "model.layers.2.self_attn.qkv_proj.weight"
    stored[name] = stored[name][:-1].contiguous()
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModelFolder, match=rf"{name}' has shape \[383, 128\], \[384, 128\] expected"):
        ModelFolder.open(tmp_path)
    del stored[name]
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModelFolder, match=f"{name}' is missing"):
        ModelFolder.open(tmp_path)


def test_a_part_of_nf4_that_begins_within_a_nested_scale_is_refused(tmp_path: pathlib.Path) -> None:
    """Each output of 64 inputs has one block, and 256 share a scale."""
    bits = write(write_plain(tmp_path / "plain"), tmp_path / "nf4")
    assert "model.layers.0.mlp.gate_up_proj.weight" in bits
    with pytest.raises(InvalidModelFolder, match=r"qkv_proj' is in NF4, and .*k_proj, from its output 64 on"):
        ModelFolder.open(tmp_path / "nf4")
    write(tmp_path / "plain", tmp_path / "single", double=False)
    assert ModelFolder.open(tmp_path / "single").tensors["model.layers.0.self_attn.k_proj.weight"].nf4 is not None


def write_plain(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A folder of Phi-3 with random weights and other sizes."""
    values = {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64,
    } | changes  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    shapes = parse_config(values).description.stored_tensors()
    safetensors.torch.save_file(
        {name: torch.randn(shape) for name, shape in shapes.items()}, path / "model.safetensors"
    )
    return path
