"""gpt-oss folders with experts in MXFP4, against transformers with the same numbers."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import VOCAB_SIZE, Pair, load, write_checkpoint
from tests.models.gpt_oss_folders import quantize_folder
from tests.models.paged_driver import PagedDriver, Row
from tests.support.model_builds import load_model, weight_memory
from tests.support.rank_threads import on_ranks

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.summaries import StoredSummary
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % VOCAB_SIZE for index in range(60)]
# fp32 with sums in another order; see test_against_transformers.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("mxfp4")
    theirs = write_checkpoint(path, "gpt-oss-wide")
    theirs.load_state_dict(theirs.state_dict() | quantize_folder(path))
    return Pair("mxfp4", path, theirs, load(path))


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat(PagedDriver(model).step([Row(PROMPT)], [len(PROMPT)]))


def test_a_published_folder_equals_transformers_with_its_numbers(pair: Pair) -> None:
    with torch.inference_mode():
        expected = pair.theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(pair.ours), expected, atol=TOLERANCE, rtol=0)


def test_weights_stay_in_4_bits_and_are_reported(pair: Pair) -> None:
    summary = pair.ours.quantization
    assert isinstance(summary, StoredSummary)
    assert (summary.scheme, summary.group_size, summary.num_weights) == ("mxfp4", 32, 2 * 3)
    # Inputs of 64 fill half of a tile.
    assert 4.25 < summary.bits_per_weight <= 2 * 4.25
    planned = weight_memory(ModelFolder.open(pair.path).config, torch.float32, None, CPU).weights
    assert pair.ours.weight_bytes == planned


@pytest.mark.parametrize("shard", [ALONE, Shard(1, 2), Shard(1, 2, whole_experts=True)])
def test_the_planned_memory_counts_the_experts_in_4_bits(pair: Pair, shard: Shard) -> None:
    config = ModelFolder.open(pair.path).config
    plain = dataclasses.replace(config, quantization=None)
    planned, whole = (weight_memory(each, torch.bfloat16, None, CPU, shard).weights for each in (config, plain))
    # Three layers of 4 experts with 3 x 64 x 128 numbers of 16 bits; tiles that are not full
    # double the 4.25.
    saved = (whole - planned) * 8 / (3 * 4 * 3 * 64 * 128 / shard.world_size)
    assert 16 - 2 * 4.25 <= saved < 16 - 4.25


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("name", ["gpt-oss-wide", "mxfp4"])
def test_two_ranks_add_up_to_the_whole(pair: Pair, tmp_path: pathlib.Path, name: str, whole_experts: bool) -> None:
    """Each bias counts once, and each head has its own sink."""
    if name != "mxfp4":
        write_checkpoint(tmp_path, name)
    path = pair.path if name == "mxfp4" else tmp_path
    folder = ModelFolder.open(path)

    def of_rank(shard: Shard) -> torch.Tensor:
        arguments = (folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None)
        return logits(load_model(*arguments, shard=dataclasses.replace(shard, whole_experts=whole_experts)))

    for found in on_ranks(2, of_rank):
        torch.testing.assert_close(found, logits(load(path)), atol=TOLERANCE, rtol=0)


def test_ranks_have_slices_of_the_whole_s_numbers(pair: Pair) -> None:
    folder = ModelFolder.open(pair.path)

    def of_rank(shard: Shard) -> dict[str, torch.Tensor]:
        model = load_model(folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None, shard=shard)
        return {path: _numbers(weight.experts) for path, weight in model.mxfp4_weights.items()}

    ranks, whole = on_ranks(2, of_rank), of_rank(ALONE)
    for path, numbers in whole.items():
        parts = [rank[path] for rank in ranks]
        if path.endswith("down_proj.weight"):
            found = torch.cat(parts, dim=2)
        else:
            gates, ups = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
            found = torch.cat((*gates, *ups), dim=1)
        torch.testing.assert_close(found, numbers, rtol=0, atol=0)


def test_ranks_with_whole_experts_have_theirs_as_one_rank_has_them(pair: Pair) -> None:
    folder = ModelFolder.open(pair.path)
    for rank in range(2):
        shard = Shard(rank, 2, whole_experts=True)
        arguments = (folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None)
        model = load_model(*arguments, shard=shard)
        assert model.weight_bytes == weight_memory(folder.config, torch.float32, None, CPU, shard).weights
        for path, whole in pair.ours.mxfp4_weights.items():
            own = _numbers(model.mxfp4_weights[path].experts)
            torch.testing.assert_close(own, _numbers(whole.experts)[2 * rank : 2 * rank + 2], rtol=0, atol=0)


def _numbers(weights: ExpertWeights) -> torch.Tensor:
    return torch.stack([weights.expert(index) for index in range(weights.num_experts)])


def test_dummy_weights_are_rounded_noise(pair: Pair) -> None:
    folder = ModelFolder.open(pair.path, require_weights=False)
    model = load_model(folder, folder.config, torch.float32, CPU, "dummy", 0, lambda *_: None)
    assert set(model.mxfp4_weights) == set(pair.ours.mxfp4_weights)
    for weight in model.mxfp4_weights.values():
        numbers = _numbers(weight.experts)
        assert 0.015 < float(numbers.std()) < 0.025 and abs(float(numbers.mean())) < 1e-3
    assert bool(logits(model).isfinite().all())


def test_a_scale_above_2_is_refused_by_layer(pair: Pair, tmp_path: pathlib.Path) -> None:
    for file in pair.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizationRefused, match="model.layers.1.mlp.down_proj.*an MXFP4 scale above 2"):
        load(tmp_path)
