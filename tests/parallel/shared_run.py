"""One model on one rank or as one of several: the same steps, with their tokens and logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tests.models.checkpoints import ignore_progress
from tests.support.model_builds import load_model
from tests.worker.driver import Entry, admission, execute, make_runner, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.placement import ALONE, Shard
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
PROMPT = [17 * index % 89 + 3 for index in range(37)]
NUM_STEPS = 9


class SharedRun(NamedTuple):
    tokens: list[int]
    # Of the prompt's last token.
    logits: torch.Tensor
    model: CausalLM


def load(folder: ModelFolder, shard: Shard = ALONE) -> CausalLM:
    return load_model(folder, folder.config, torch.float32, CPU, "folder", 0, ignore_progress, shard=shard)


def plans() -> list[StepPlan]:
    """A prompt, and the tokens after it."""
    first = step([Entry(0, 0, PROMPT, (0,))], [admission(0)], {0: list(range(6))})
    return [first] + [step([Entry(0, len(PROMPT) + i, None, (0,), i + 1)], step_id=i + 2) for i in range(NUM_STEPS - 1)]


def run(folder: ModelFolder, shard: Shard = ALONE) -> SharedRun:
    """Loads and runs."""
    model = load(folder, shard)
    runner = make_runner(model, model.num_layers, model.num_kv_heads, model.head_dim)
    hidden = runner.forward(step([Entry(7, 0, PROMPT, (7,))], [admission(7)], {7: list(range(20, 26))}))
    with torch.inference_mode():
        logits = model.logits(hidden)
    tokens = [token for plan in plans() for token in execute(runner, plan).tokens.tolist()]
    return SharedRun(tokens, logits, model)
