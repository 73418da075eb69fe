"""One pass through everything before the first request: libraries choose and compile on first use.

Owns the made-up plans. They use row 0 and block 0, which are as new afterwards.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace_backend.step_plan import ForwardPlan, Int32Column, RowAdmission, SamplePlan, StepPlan
from headrace_backend.worker.model_runner import ModelRunner

_NOTHING: Int32Column = np.empty(0, np.int32)


def _column(*values: int) -> Int32Column:
    return np.array(values, np.int32)


def _admission() -> RowAdmission:
    """A row that takes the longest way through the sampler."""
    return RowAdmission(
        row=0,
        temperature=1.0,
        top_p=0.9,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=0,
        output_index=0,
        num_logprobs=1,
        min_tokens=0,
        stop_token_ids=b"",
        logit_bias_ids=b"",
        logit_bias_values=b"",
        bad_words=[],
        needs_history=True,
        prompt_ids=b"",
        output_ids=b"",
    )


def warm_up(runner: ModelRunner, kv_caches: list[torch.Tensor], block_size: int) -> None:
    """Computes a short prompt and one more token, then empties what was written."""
    prompt = block_size - 1
    first = ForwardPlan(
        rows=_column(0),
        starts=_column(0),
        counts=_column(prompt),
        known_counts=_column(prompt),
        token_ids=np.zeros(prompt, np.int32),
        table_rows=_column(0),
        table_starts=_column(0),
        table_counts=_column(1),
        table_blocks=_column(0),
    )
    second = ForwardPlan(rows=_column(0), starts=_column(prompt), counts=_column(1), known_counts=_column(0))
    plans = (
        StepPlan(0, _NOTHING, [_admission()], first, SamplePlan(_column(0), _column(prompt - 1), _column(0))),
        StepPlan(0, _NOTHING, [], second, SamplePlan(_column(0), _column(0), _column(1))),
        StepPlan(0, _column(0), [], ForwardPlan(), SamplePlan()),
    )
    for plan in plans:
        sampled = runner.sample(plan, runner.forward(plan))
        if sampled is not None:
            sampled.tokens.cpu()
    for cache in kv_caches:
        cache[0].zero_()
