"""Ranks and pipeline stages of a model with several cache groups draw the tokens of one worker.

They are given the plans that an engine has made for one worker, block by block.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from tests.support.engine_on_runner import EngineOnRunner, RunnerWorker, greedy, layout_of, worker_runner
from tests.support.model_builds import load_model
from tests.support.rank_threads import on_ranks
from tests.support.staged_runners import StagedRunners, stage_models
from tests.worker.driver import execute
from tests.worker.step.test_cache_groups import Made, prompt_of, qwen2

from headrace_backend.cache_groups import cache_layout
from headrace_backend.config import EngineConfig
from headrace_backend.pp_rules import stages
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.placement import Shard
from headrace_backend.worker.step.runner import Runner
from headrace_model_folder import ModelFolder

SETTINGS = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
NUM_BLOCKS = 30


class Recorded:
    """A model's folder, and the plans and tokens of a run of one worker."""

    def __init__(self, path: pathlib.Path) -> None:
        torch.set_num_threads(1)
        self.made = Made(path, qwen2(4))
        self.folder = ModelFolder.open(path)
        engine = EngineOnRunner(self.made.ours, layout_of(self.folder.config), NUM_BLOCKS, poison=False, **SETTINGS)
        prompts = [prompt_of(length, length) for length in (70, 40, 100)]
        engine.outputs([greedy(prompt, 30) for prompt in prompts])
        assert isinstance(engine.worker, RunnerWorker)
        self.plans = [StepPlan.decode(plan) for plan in engine.worker.computed]
        again = worker_runner(self.made.ours, layout_of(self.folder.config), NUM_BLOCKS, **SETTINGS)
        self.tokens = self.drawn(again)

    def drawn(self, runner: Runner) -> list[list[int]]:
        """What a runner draws, plan by plan."""
        return [execute(runner, plan).tokens.tolist() for plan in self.plans]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("grouped"))


@pytest.mark.slow
def test_ranks_draw_the_tokens_of_one(recorded: Recorded) -> None:
    config = recorded.folder.config

    def run(shard: Shard) -> list[list[int]]:
        about = (recorded.folder, config, torch.float32, torch.device("cpu"), "folder", 0, lambda *_: None)
        model = load_model(*about, shard=shard)  # type: ignore[arg-type]
        return recorded.drawn(worker_runner(model, layout_of(config), NUM_BLOCKS, **SETTINGS))

    assert np.concatenate(recorded.tokens).size > 60
    assert on_ranks(2, run) == [recorded.tokens] * 2


@pytest.mark.slow
def test_stages_draw_the_tokens_of_one(recorded: Recorded) -> None:
    """Each stage has its own layers of each group, under the same tables."""
    config = EngineConfig(model=recorded.folder.path, device="cpu", pp=2)
    layouts = [cache_layout(config, recorded.folder.config, stage) for stage in stages(config, recorded.folder.config)]
    assert {layout.groups for layout in layouts} == {layout_of(recorded.folder.config).groups}
    models = stage_models(recorded.folder, 2)
    runners = [
        worker_runner(model, layout, NUM_BLOCKS, **SETTINGS) for model, layout in zip(models, layouts, strict=True)
    ]
    assert recorded.drawn(StagedRunners(runners, models)) == recorded.tokens
