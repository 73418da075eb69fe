"""Pipeline stages compute to the bit what the whole model does, whatever its weights are.

As parts of one process, and as processes of which the last stage answers.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pathlib
import signal

import numpy as np
import psutil
import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.models.test_gguf_models import MIXES, kind_of
from tests.models.test_quantized_folders import RECIPES
from tests.parallel.rank_group import ranks
from tests.parallel.test_rank_processes import plans as step_plans
from tests.parallel.test_rank_processes import stepping, tokens_of_one
from tests.parallel.test_sharded_models import EVERY_OPTION, SCHEMES, plans
from tests.support.gguf_writer import from_folder
from tests.support.model_builds import load_model
from tests.support.quantized_folders import quantize_folder
from tests.support.rank_threads import on_ranks
from tests.support.staged_runners import stage_models, staged
from tests.worker.driver import execute, make_model_runner

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepResult
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.step.cpu_runner import CpuRunner
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
# Three or four layers each: one model per thing that the first or the last stage has by itself, or
# that differs between families, over two stages or over as many as there are layers.
FAMILIES = {
    "llama-biases": 3, "qwen3-tied-bias": 2, "qwen2-window-tied": 3, "mistral-window": 2, "phi3-partial": 2,
    "smollm3-window-tied": 3, "olmo3": 2, "glm4": 2, "gemma3-part": 3, "gemma4": 2,
    # Tied, and its logits are capped.
    "gemma4-moe": 2,
    "qwen3.5-staged": 3, "qwen3.5-moe-staged": 2,
}  # fmt: skip
# The others that are served, whose layers have nothing that those above lack.
FURTHER = (
    "olmo2", "gemma3", "seed-oss", "exaone4", "ministral3-part", "qwen3-vl-part", "qwen3-moe", "mixtral", "glm4-moe",
    "gpt-oss",
)  # fmt: skip


@functools.cache
def _checkpoint(base: pathlib.Path, name: str) -> ModelFolder:
    write_checkpoint(base / name, name)
    return ModelFolder.open(base / name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[ModelFolder]:
    torch.set_num_threads(1)
    return functools.partial(_checkpoint, tmp_path_factory.mktemp("stages"))


def runner(model: CausalLM) -> CpuRunner:
    return make_model_runner(model)


def whole(folder: ModelFolder, schemes: Schemes, shard: Shard = ALONE) -> CausalLM:
    about = (folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None)
    return load_model(*about, scheme=schemes.layers, shard=shard, head=schemes.head)  # type: ignore[arg-type]


def check_stages(folder: ModelFolder, pp: int, schemes: Schemes | None = None) -> None:
    """Tokens and log probabilities are those of one stage."""
    models = stage_models(folder, pp, schemes)
    assert sum(model.num_layers for model in models) == len(folder.config.description.layers)
    alone, stages = runner(whole(folder, schemes or Schemes())), staged(models, runner)
    for plan in plans(**EVERY_OPTION):
        check_alike(execute(stages, plan), execute(alone, plan))


def check_alike(found: StepResult, expected: StepResult) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(found.logprob_sampled, expected.logprob_sampled)
    np.testing.assert_array_equal(found.top_logprobs, expected.top_logprobs)
    assert found.checked_ok.tolist() == expected.checked_ok.tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "pp"), [*FAMILIES.items(), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in FURTHER)]
)
def test_stages_of_every_family(checkpoint: functools.partial[ModelFolder], name: str, pp: int) -> None:
    check_stages(checkpoint(name), pp)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stages_that_quantize(checkpoint: functools.partial[ModelFolder], scheme: str) -> None:
    check_stages(checkpoint("llama-wide-heads"), 2, Schemes(SCHEMES[scheme]))


@pytest.mark.parametrize("name", ["llama-tied", "llama-mha"])
def test_an_output_layer_of_8_bits_is_the_last_stages(checkpoint: functools.partial[ModelFolder], name: str) -> None:
    schemes = Schemes(None, SCHEMES["int8"])
    check_stages(checkpoint(name), 2, schemes)
    first, last = stage_models(checkpoint(name), 2, schemes)
    assert first.head_weight is None and last.head_quantization is not None


@pytest.mark.parametrize("recipe", ["gptq", "awq"])
def test_stages_of_a_folder_that_another_tool_quantized(
    checkpoint: functools.partial[ModelFolder], tmp_path: pathlib.Path, recipe: str
) -> None:
    name = next(name for name in RECIPES if name.startswith(recipe))
    quantized = quantize_folder(checkpoint("llama-wide").path, tmp_path, RECIPES[name])
    check_stages(ModelFolder.open(quantized.path), 2)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_stages_of_a_gguf_file(checkpoint: functools.partial[ModelFolder], tmp_path: pathlib.Path, kind: str) -> None:
    source = checkpoint("llama-long").path
    made, _ = from_folder(source, (lambda name, _: kind_of(kind, name)) if kind in MIXES else kind)
    made.write(tmp_path / "model.gguf")
    check_stages(ModelFolder.open(tmp_path / "model.gguf"), 3)


@pytest.mark.parametrize("name", ["llama-biases", "olmo3"])
def test_ranks_of_stages_add_up_what_goes_on(checkpoint: functools.partial[ModelFolder], name: str) -> None:
    """Behind a stage its ranks have parts of a sum, or the whole; the next stage is given it."""
    folder = checkpoint(name)

    def answered(shard: Shard) -> list[StepResult]:
        stages = staged(stage_models(folder, 2, shard=shard), runner)
        return [execute(stages, plan) for plan in plans(**EVERY_OPTION)]

    def answered_alone(shard: Shard) -> list[StepResult]:
        alone = runner(whole(folder, Schemes(), shard))
        return [execute(alone, plan) for plan in plans(**EVERY_OPTION)]

    for found, expected in zip(on_ranks(2, answered), on_ranks(2, answered_alone), strict=True):
        for one, other in zip(found, expected, strict=True):
            check_alike(one, other)


# Stages in processes of their own answer in tests/e2e/test_pipeline_parallel, ranks that are
# asked to end in test_rank_processes.
@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(3, 1), (2, 2)])
async def test_the_last_stage_answers_and_all_end_when_asked_to(
    checkpoint: functools.partial[ModelFolder], pp: int, tp: int
) -> None:
    path = checkpoint("qwen3-tied-bias").path
    async with ranks(path, tp, pp=pp) as group:
        ready = await group.group.wait_ready()
        assert len(ready) == tp * pp and len({message.num_blocks for message in ready}) == 1
        sockets = [socket for pid in group.processes for socket in psutil.Process(pid).net_connections("inet")]
        assert {socket.laddr.ip for socket in sockets} == {"127.0.0.1"}
        steps = step_plans(6)
        found = await group.answered(steps)
        assert await group.end() == [0] * tp * pp
    assert [result.tokens.tolist() for result in found] == tokens_of_one(path, steps)
    assert [result.step_id for result in found] == list(range(1, 7))


# Ranks that are killed are in test_rank_processes, under the same group.
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_stage_is_named_and_takes_the_others_along(
    checkpoint: functools.partial[ModelFolder], victim: int
) -> None:
    async with ranks(checkpoint("qwen3-tied-bias").path, 1, pp=2) as group:
        await group.group.wait_ready()
        load = await stepping(group)
        os.kill(group.processes[victim], signal.SIGKILL)
        lost = await group.loss()
        assert str(lost).startswith(f"worker {victim} ended with signal 9, ")
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
