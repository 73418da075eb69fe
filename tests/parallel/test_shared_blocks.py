"""GGUF files and bitsandbytes' NF4, shared by several ranks.

The file's own bits, each rank's bytes of its rows, vocabularies in blocks included.
"""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.models.test_gguf_models import MIXES, kind_of
from tests.parallel.rank_group import ranks
from tests.parallel.shared_run import CPU, SharedRun, load, plans, run
from tests.support import bitsandbytes_folder
from tests.support.gguf_writer import from_folder
from tests.support.model_builds import weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.config import EngineConfig
from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.tp_rules import unsuitable_tp
from headrace_backend.weights.placement import Shard
from headrace_kernels.weight_formats.block_weight import BlockWeight, dequantize_rows
from headrace_model_folder import ModelFolder

# Whole files of one type, and mixes in which every other type is: what is in a mix is slow alone.
IN_MIXES = ["F16", "Q5_1", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
KINDS = ["Q4_0", "Q8_0", "Q2_K", "IQ4_XS", "Q4_K_M", "odd"]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in IN_MIXES]


@functools.cache
def _source(base: pathlib.Path, name: str) -> pathlib.Path:
    write_checkpoint(base / name, name)
    return base / name


@functools.cache
def _file(base: pathlib.Path, kind: str) -> pathlib.Path:
    path = base / f"{kind}.gguf"
    made, _ = from_folder(_source(base, "llama-long"), (lambda name, _: kind_of(kind, name)) if kind in MIXES else kind)
    made.write(path)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("blocks")


def check_shared(folder: ModelFolder) -> list[SharedRun]:
    """Two ranks draw what one does, from memory that was planned."""
    assert unsuitable_tp(EngineConfig(model=folder.path, device="cpu", tp=2), folder.config) is None
    alone, shared = run(folder), on_ranks(2, lambda shard: run(folder, shard))
    for rank, own in enumerate(shared):
        assert own.tokens == alone.tokens
        torch.testing.assert_close(own.logits, alone.logits, rtol=1e-4, atol=1e-3)
        assert torch.equal(own.logits, shared[0].logits)
        planned = weight_memory(folder.config, torch.float32, None, CPU, Shard(rank, 2), folder.tensors)
        assert planned.weights == own.model.weight_bytes < 0.6 * alone.model.weight_bytes
    return shared


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_a_gguf_file(base: pathlib.Path, kind: str) -> None:
    shared = check_shared(ModelFolder.open(_file(base, kind)))
    if kind == "Q8_0":
        # The embedding and the output layer too.
        assert all(isinstance(own.model.lm_head.weight, BlockLinearWeight) for own in shared)
        assert all(isinstance(own.model.model.embed_tokens.weight, BlockLinearWeight) for own in shared)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("skip", [(), ("v_proj", "layers.0.mlp")])
def test_ranks_share_a_folder_of_nf4(
    base: pathlib.Path, tmp_path: pathlib.Path, double: bool, skip: tuple[str, ...]
) -> None:
    bitsandbytes_folder.write(_source(base, "llama-long"), tmp_path, double, skip)
    check_shared(ModelFolder.open(tmp_path))


def numbers(weight: BlockWeight) -> torch.Tensor:
    out = torch.empty(weight.num_outputs, weight.num_inputs)
    dequantize_rows(weight, slice(0, weight.num_outputs), out)
    return out


@pytest.mark.parametrize("world_size", [2, 4])
def test_nested_scales_are_those_of_the_whole_tensor(
    base: pathlib.Path, tmp_path: pathlib.Path, world_size: int
) -> None:
    exact = bitsandbytes_folder.write(_source(base, "llama-long"), tmp_path)
    folder = ModelFolder.open(tmp_path)
    parts = on_ranks(world_size, lambda shard: load(folder, shard).block_weights)
    for layer in range(3):
        down, query = f"model.layers.{layer}.mlp.down_proj", f"model.layers.{layer}.self_attn"
        found = torch.cat([numbers(part[f"{down}.weight"].blocks[0]) for part in parts], dim=1)
        torch.testing.assert_close(found, exact[f"{down}.weight"], rtol=1e-6, atol=1e-9)
        found = torch.cat([numbers(part[f"{query}.qkv_proj.weight"].blocks[0]) for part in parts])
        torch.testing.assert_close(found, exact[f"{query}.q_proj.weight"], rtol=1e-6, atol=1e-9)


def test_blocks_that_straddle_ranks_are_refused_with_what_works(base: pathlib.Path) -> None:
    folder = ModelFolder.open(_file(base, "Q4_K_M"))
    said = unsuitable_tp(EngineConfig(model=folder.path, device="cpu", tp=4), folder.config)
    assert said == (
        "tp is 4, which leaves each rank 128 of o_proj's 512 inputs, and a block of 256 does not divide those; tp "
        "1, 2 work"
    )
    folder = ModelFolder.open(_file(base, "Q8_0"))
    assert unsuitable_tp(EngineConfig(model=folder.path, device="cpu", tp=8), folder.config) is None


# NF4 on threads: `test_ranks_share_a_folder_of_nf4`.
# Ranks in threads do in the tests above, real ones over a folder in test_shared_folders.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K_M", "NF4"])
async def test_real_ranks_draw_the_tokens_of_one(base: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    if kind == "NF4":
        bitsandbytes_folder.write(_source(base, "llama-long"), tmp_path)
    path = tmp_path if kind == "NF4" else _file(base, kind)
    async with ranks(path, 2) as group:
        await group.group.wait_ready()
        found = await group.answered(plans())
    assert [token for result in found for token in result.tokens.tolist()] == run(ModelFolder.open(path)).tokens
