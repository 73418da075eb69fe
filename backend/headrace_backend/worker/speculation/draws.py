"""A plan's draws, one by one, where rows may draw several.

Owns the widening of a sample plan: a sample of a row that computes drafts becomes as many draws as
the entry has hidden states from its last sampled token on. Draws of a sample stand side by side. It
is numpy over the whole batch. Without drafts it is the plan itself.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from headrace_backend.step.plan import ForwardPlan, Int32Column, SamplePlan, StepPlan
from headrace_backend.worker.plan_columns import ranges


class Draws(NamedTuple):
    """The draws of each sample of a plan."""

    # [num_samples] number of each, and the first one's place among all.
    counts: Int32Column
    firsts: Int32Column
    # Whether any sample has more than one.
    are_several: bool


def num_drafts(plan: ForwardPlan) -> Int32Column:
    """[num_entries] drafted tokens that each entry computes."""
    drafts: Int32Column = np.maximum(plan.counts - plan.known_counts - 1, 0)
    return drafts


def widened(plan: StepPlan) -> tuple[StepPlan, Draws]:
    """The plan with a sample for each draw, and which of them belong together."""
    forward, sample = plan.forward, plan.sample
    size = sample.rows.size
    drafts = num_drafts(forward)
    if not size or not drafts.any():
        return plan, Draws(np.ones(size, np.int32), np.arange(size, dtype=np.int32), are_several=False)
    ends = np.cumsum(forward.counts, dtype=np.int64)
    entries = np.searchsorted(ends, sample.token_indices, side="right")
    # Other outputs of a request draw from an entry of another row, and from known tokens.
    is_last_token = sample.token_indices == (ends - forward.counts + forward.known_counts)[entries]
    counts = np.where(is_last_token, 1 + drafts[entries], 1).astype(np.int32)
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    wide = SamplePlan(
        rows=np.repeat(sample.rows, counts),
        token_indices=ranges(sample.token_indices, counts).astype(np.int32),
        output_positions=ranges(sample.output_positions, counts).astype(np.int32),
    )
    return dataclasses.replace(plan, sample=wide), Draws(counts, firsts, are_several=True)
