"""Pipeline stages of models with recurrent layers: engine and stages, against transformers.

Each stage keeps the states of its own layers, in lines that mean the same rows and prefixes in all
stages. States of rows that nobody has, or that somebody takes, are full of NaN, as are checkpoints
that nobody may find.
"""

from __future__ import annotations

import pathlib

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.engine.harness import config as engine_config
from tests.engine.harness import request
from tests.models.checkpoints import CONFIGS
from tests.support.engine_on_runner import EngineOnRunner, RunnerWorker, greedy
from tests.support.examples import examples
from tests.support.rank_threads import on_ranks
from tests.support.staged_runners import stage_models, staged
from tests.worker.step.test_cache_groups import Made, Schedule, check_schedule, prompt_of, schedules

from headrace_backend.cache_groups import CacheLayout
from headrace_backend.engine.scheduling import checkpoint_places
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import WeightMemory
from headrace_backend.pp_rules import stage_part, stages
from headrace_backend.state_rules import row_state_bytes
from headrace_backend.step.messages import MemoryPlan
from headrace_backend.weights.placement import Shard
from headrace_backend.worker.start_up.fitted_runner import LoadedModel, agreed_plan, make_runner
from headrace_backend.worker.start_up.memory_plan import Room, plan_estimate
from headrace_backend.worker.start_up.ranks import RankPlace
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.runner import Runner
from headrace_model_folder import ModelFolder
from headrace_request.beam_search import BeamSearch
from headrace_request.selection_rules import NO_SAMPLING


class StagedEngine(EngineOnRunner):
    """An engine whose plans all stages of a model compute, one after the other."""

    def __init__(self, stages: list[CausalLM], whole: CausalLM, num_blocks: int, **changes: object) -> None:
        self.stages = stages
        super().__init__(whole, CacheLayout(), num_blocks, pp=len(stages), **changes)

    def new_worker(self) -> RunnerWorker:
        sizes = WorkerSizes.of(self.config, self.model_len)
        caches: list[torch.Tensor] = []

        def make(model: CausalLM) -> Runner:
            loaded = LoadedModel(model, sizes, torch.float32, torch.device("cpu"))
            own = loaded.kv_caches(self.num_blocks, self.num_checkpoints)
            caches.extend(own)
            return make_runner(model, sizes, own)

        return RunnerWorker(staged(self.stages, make), caches)


class MadeStages(Made):
    """A random model of transformers, and stages of ours with the same weights."""

    def __init__(self, path: pathlib.Path, name: str, pp: int) -> None:
        super().__init__(path, CONFIGS[name]())
        self.stages = stage_models(ModelFolder.open(path), pp)

    def engine(self, num_blocks: int = 200, layout: CacheLayout | None = None, **changes: object) -> StagedEngine:
        values = {"block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 4} | changes
        return StagedEngine(self.stages, self.ours, num_blocks, **values)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeStages:
    return MadeStages(tmp_path_factory.mktemp("staged"), "qwen3.5-staged", 3)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept at the end of each block that a step ends with."""
    monkeypatch.setattr(checkpoint_places, "LEAST_STOP_TOKENS", 16)
    monkeypatch.setattr(checkpoint_places, "LEAST_MOVE_TOKENS", 16)


def test_stages_have_the_states_of_their_own_layers(made: MadeStages) -> None:
    """The last one has none."""
    kept = [[bool(size) for size in model.state_elements()] for model in made.stages]
    assert kept == [[True, False], [True, False], [False]]


def test_stages_agree_on_the_number_of_kept_states_though_one_has_none(made: MadeStages) -> None:
    config = engine_config(pp=3, state_checkpoints=5)

    def agreed(shard: Shard) -> MemoryPlan:
        stage = stages(config, made.config)[shard.rank]
        part, weights = stage_part(made.config.description, stage), WeightMemory(1 << 20)
        # The last stage has no recurrent layers, whatever is configured.
        sizes = WorkerSizes.of(config, 128, stage)
        _, plan = plan_estimate(sizes, part, weights, torch.float32, Room(torch.device("cpu"), 1 << 30))
        return agreed_plan(plan, RankPlace(shard))

    plans = on_ranks(3, agreed)
    row = row_state_bytes(made.config.description) // 2
    assert [plan.num_checkpoints for plan in plans] == [5, 5, 5]
    assert [plan.checkpoint_bytes for plan in plans] == [5 * row, 5 * row, 0]


@pytest.mark.usefixtures("often")
def test_prompts_begin_behind_states_that_all_stages_kept(made: MadeStages) -> None:
    engine, shared, found = made.engine(num_checkpoints=8, max_num_batched_tokens=64), prompt_of(100), []
    for own in ([1, 2], [3, 4, 5], [6]):
        before = engine.engine._scheduler.stats.num_prefix_hit_tokens
        prompt = (*shared, *own)
        assert engine.outputs([greedy(list(prompt), 20)]) == [[made.expected(prompt, 20)]]
        found.append(engine.engine._scheduler.stats.num_prefix_hit_tokens - before)
    assert found == [0, 96, 96]


@pytest.mark.slow  # Copies between rows of one stage are in tests/worker/step/test_recurrent_states.py.
def test_outputs_and_beams_go_on_from_states_of_all_stages(made: MadeStages) -> None:
    prompt, found = prompt_of(53), []
    for engine in (made.engine(max_num_seqs=8), Made.engine(made, max_num_seqs=8)):
        beams = {"beam_search": BeamSearch(3), "n": 2, "temperature": NO_SAMPLING.temperature}
        sampled = greedy(prompt, 20, n=3, temperature=0.9, seed=7)
        found.append(engine.outputs([sampled, request(prompt, 12, **beams)]))
    assert found[0] == found[1] and len(set(map(tuple, found[0][0]))) == 3


# Plans for several stages are in tests/engine/test_state_checkpoint_machine.py, every day.
@pytest.mark.slow
@pytest.mark.usefixtures("often")
@hypothesis.settings(max_examples=examples(10), deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    jobs=st.lists(schedules, min_size=1, max_size=6),
    num_blocks=st.integers(12, 40),
    budget=st.sampled_from([16, 23, 50]),
    rows=st.integers(1, 4),
    num_checkpoints=st.integers(0, 6),
)
def test_steps_of_several_stages_read_no_state_too_early_or_too_late(
    made: MadeStages, jobs: list[Schedule], num_blocks: int, budget: int, rows: int, num_checkpoints: int
) -> None:
    """More steps are in flight than of one stage, each with a part of the rows."""
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": rows, "num_checkpoints": num_checkpoints}
    check_schedule(made, jobs, num_blocks, **settings)
