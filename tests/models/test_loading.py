"""Loading: every tensor lands once and exactly, sharded or cast.

Broken files end as InvalidModelFolder; files may vanish afterwards.
"""

import math
import os
import pathlib

import pytest
import safetensors.torch
import torch
from tests.models.checkpoints import ignore_progress, load, write_checkpoint
from tests.models.paged_driver import PagedDriver, Row
from tests.support.model_builds import load_model

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement, Shard
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    write_checkpoint(tmp_path, "qwen3-tied-bias", max_shard_size="40KB")
    return tmp_path


def damage(path: pathlib.Path, name: str, value: float) -> str:
    """Puts a value in the middle of a tensor. Returns the file's name."""
    file = ModelFolder.open(path).tensors[name].file
    tensors = safetensors.torch.load_file(path / file)
    tensors[name].view(-1)[tensors[name].numel() // 2] = value
    safetensors.torch.save_file(tensors, path / file, metadata={"format": "pt"})
    return file


def test_files_may_be_truncated_or_removed_after_loading(folder: pathlib.Path) -> None:
    model = load(folder)
    before = PagedDriver(model).step([Row([1, 2, 3])], [3])[0].clone()
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 10)
        file.unlink()
    assert torch.equal(PagedDriver(model).step([Row([1, 2, 3])], [3])[0], before)
    # Of this folder: other tests' models may still be there.
    assert not [link for link in pathlib.Path("/proc/self/fd").iterdir() if str(folder) in str(link.resolve())]
    assert str(folder) not in pathlib.Path("/proc/self/maps").read_text()


def test_a_file_truncated_between_opening_and_loading_is_named(folder: pathlib.Path) -> None:
    opened = ModelFolder.open(folder)
    # The last tensor of a file, so that no other one is hit.
    name, record = max(opened.tensors.items(), key=lambda item: item[1].offset)
    os.truncate(folder / record.file, record.offset + record.num_bytes - 1)
    with pytest.raises(InvalidModelFolder, match=rf"{record.file}: is truncated: tensor '{name}'"):
        load_model(opened, opened.config, torch.float32, CPU, "folder", 0, ignore_progress)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(folder: pathlib.Path, value: float) -> None:
    name = "model.layers.2.self_attn.k_norm.weight"
    file = damage(folder, name, value)
    with pytest.raises(InvalidModelFolder, match=rf"{file}: tensor '{name}'"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_cast_while_they_are_read(tmp_path: pathlib.Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    write_checkpoint(tmp_path, "llama").to(stored).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    attention = load(tmp_path, wanted).model.layers[1].self_attn
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
    assert torch.equal(attention.qkv_proj.weight.tensor, torch.cat(parts).to(wanted))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "llama-group-8"])
def test_the_parts_of_all_ranks_make_the_whole(tmp_path: pathlib.Path, name: str, world_size: int) -> None:
    write_checkpoint(tmp_path, name)
    opened = ModelFolder.open(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    rebuilt = {tensor: torch.full_like(value, math.nan) for tensor, value in stored.items()}
    for rank in range(world_size):
        placement = Placement(torch.float32, CPU, Shard(rank, world_size))
        targets = CausalLM(opened.config.description, placement, 16).weight_targets()
        load_weights(opened, targets, ignore_progress)
        for tensor, target in targets.items():
            columns = slice(None) if target.columns is None else slice(target.columns.start, target.columns.stop)
            rows = rebuilt[tensor][target.rows.start : target.rows.stop]
            (rows if target.columns is None else rows[:, columns]).copy_(target.tensor)
    for tensor, value in stored.items():
        torch.testing.assert_close(rebuilt[tensor], value, atol=0, rtol=0)


def test_sizes_that_ranks_can_not_share_are_refused() -> None:
    with pytest.raises(ValueError, match="3"):
        Shard(0, 3).split(8 * 16, 16)
    with pytest.raises(ValueError, match="2 key/value heads"):
        Shard(0, 3).split_kv_heads(2, 16)


def test_progress_grows_to_its_total(folder: pathlib.Path) -> None:
    opened, seen = ModelFolder.open(folder), []
    load_model(opened, opened.config, torch.float32, CPU, "folder", 0, lambda *report: seen.append(report))
    assert [report[1] for report in seen] == sorted(report[1] for report in seen)
    assert seen[-1][1] == seen[-1][2] and {(report[0], report[3]) for report in seen} == {("weights", "MiB")}


def test_dummy_weights_are_seeded_gaussian(folder: pathlib.Path) -> None:
    config = ModelFolder.open(folder, require_weights=False).config

    def dummy(seed: int) -> dict[str, torch.Tensor]:
        model = load_model(None, config, torch.float32, CPU, "dummy", seed, ignore_progress)
        return {name: target.tensor for name, target in model.weight_targets().items()}

    first, again, other = dummy(7), dummy(7), dummy(8)
    assert first.keys() == expected_tensors(config).keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    embedding = first["model.embed_tokens.weight"]
    assert not torch.equal(embedding, other["model.embed_tokens.weight"])
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
    assert abs(embedding.std().item() - 0.02) < 0.002 and abs(embedding.mean().item()) < 0.002
    assert torch.equal(first["model.norm.weight"], torch.ones(config.description.hidden_size))


def test_the_model_states_its_sizes_and_limits(folder: pathlib.Path) -> None:
    opened = ModelFolder.open(folder)
    model = load(folder)
    assert (model.num_layers, model.num_kv_heads, model.head_dim, model.vocab_size) == (3, 4, 8, 96)
    assert model.parameter_count == opened.parameter_count and model.max_position == 256
    for limit in (0, 257):
        with pytest.raises(ValueError, match="from 1 to 256"):
            load_model(opened, opened.config, torch.float32, CPU, "dummy", 0, ignore_progress, max_position=limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_runs_on_a_cpu_and_stays_close(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, "llama")
    logits = []
    for wanted in (torch.float32, dtype):
        driver = PagedDriver(load(tmp_path, wanted))
        driver.kv_caches = [kv_cache.to(wanted) for kv_cache in driver.kv_caches]
        logits.append(torch.cat(driver.step([Row([1, 2, 3, 4, 5]), Row([6])], [5, 1])))
    assert logits[1].dtype == torch.float32
    # bfloat16 keeps 8 bits; three layers of rounding stay within a tenth of the logits' spread.
    assert (logits[0] - logits[1]).abs().max() < 0.1 * (logits[0].max() - logits[0].min())


def test_dummy_factors_of_norms_and_of_the_stream_are_one(tmp_path: pathlib.Path) -> None:
    """Activations keep their size in models with numbers of their own, as in others."""
    write_checkpoint(tmp_path, "gemma4-moe")
    folder = ModelFolder.open(tmp_path)
    made = load_model(folder, folder.config, torch.float32, CPU, "dummy", 0, ignore_progress)
    factors = [value for name, value in made.state_dict().items() if value.dim() == 1 and not name.endswith("bias")]
    assert len(factors) > 30 and all(bool((value == 1).all()) for value in factors)
