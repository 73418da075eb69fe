"""Which draft models ranks share, and what each rank then has of them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from benchmarks.shapes import write_model_folder

from headrace_backend.config import EngineConfig
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.load import weight_memory
from headrace_backend.weights.placement import Shard
from headrace_backend.worker.start_up.draft_model import DraftBuild, draft_build
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_model_folder import ModelConfig, ModelFolder

CARD = torch.device("cuda")
RANKS = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A Llama of 1B, as config.json says it: 2.5 GB of weights in bf16."""
    return config_of("llama-3.2-1b", tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of("demo", tmp_path_factory.mktemp("small"))


def config_of(shape: str, path: pathlib.Path) -> ModelConfig:
    return ModelFolder.open(write_model_folder(shape, path), require_weights=False).config


def built(draft: ModelConfig, device: torch.device = CARD, ranks: int = RANKS, **engine: Any) -> ModelBuild:
    """The second rank's draft model."""
    drafts: dict[str, Any] = {"speculate": "draft", "draft_model": pathlib.Path("d")}
    config = EngineConfig(model=pathlib.Path("m"), tp=ranks, device=str(device), **drafts, **engine)
    shard = Shard(min(1, ranks - 1), ranks)
    return draft_build(config, draft, torch.bfloat16, device, shard, WorkerSizes.of(config, 128), {})


def is_shared(build: ModelBuild) -> bool:
    return build.shard.world_size > 1


def test_large_ones_are_shared_on_cards_alone(large: ModelConfig, small: ModelConfig) -> None:
    assert is_shared(built(large))
    assert not is_shared(built(large, torch.device("cpu")))
    assert not is_shared(built(large, ranks=1))
    assert not is_shared(built(small))


def test_what_is_asked_for_holds(large: ModelConfig, small: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert not is_shared(built(large, draft_sharing="whole"))
    assert is_shared(built(small, cpu, ranks=2, draft_sharing="shared"))
    assert not is_shared(built(small, cpu, ranks=1, draft_sharing="shared"))


def test_experts_of_a_target_that_are_whole_leave_its_draft_model_cut(large: ModelConfig) -> None:
    assert is_shared(built(large, expert_parallel=True)) and not built(large, expert_parallel=True).shard.whole_experts


def test_one_that_ranks_do_not_divide_stays_whole(tmp_path: pathlib.Path) -> None:
    folder = write_model_folder("llama-3.2-1b", tmp_path)
    changed = (folder / "config.json").read_text().replace('"intermediate_size": 8192', '"intermediate_size": 8190')
    (folder / "config.json").write_text(changed)
    assert not is_shared(built(ModelFolder.open(folder, require_weights=False).config))


def test_the_memory_plan_counts_a_ranks_part(large: ModelConfig) -> None:
    whole, part = (DraftBuild(built(large, draft_sharing=kind), None).memory() for kind in ("whole", "shared"))
    assert (whole.num_ranks, part.num_ranks) == (1, RANKS)
    assert part.weights == weight_memory(built(large, draft_sharing="shared"))
    # Norms are whole on every rank.
    assert part.weights.weights == pytest.approx(whole.weights.weights / RANKS, rel=0.01)
    heads = [layer.attention.num_kv_heads for layer in part.description.layers]  # type: ignore[union-attr]
    assert set(heads) == {large.description.layers[0].attention.num_kv_heads // RANKS}  # type: ignore[union-attr]
