"""A plan as its rows really stand, where a host may look at them: on a CPU.

Owns the way from upper bounds and unknown ids to a plan that any worker computes. It takes the
operations that a GPU takes on its columns (`headrace_kernels.speculation.draft_inputs`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.plan_columns import flat_token_ids, last_sampled_bounds, ranges
from headrace_backend.worker.speculation.draws import Draws, widened
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_kernels.speculation.draft_inputs import PlannedEntries, lower_bounds, resolve_tokens


def resolved(plan: StepPlan, rows: RowDrafts) -> tuple[StepPlan, Draws]:
    """The plan with exact positions, all ids, and a sample for each draw.

    Args:
        plan: A plan with at least one row.
        rows: The rows as they stand.
    """
    wide, draws = widened(plan)
    forward, sample = wide.forward, wide.sample
    ends = np.cumsum(forward.counts, dtype=np.int64)
    token_ids = torch.from_numpy(flat_token_ids(forward, ends))
    token_entries = torch.from_numpy(np.repeat(np.arange(ends.size, dtype=np.int32), forward.counts))
    positions = torch.from_numpy(ranges(forward.starts, forward.counts).astype(np.int32))
    entries = PlannedEntries(
        torch.from_numpy(forward.rows.copy()), torch.from_numpy(last_sampled_bounds(forward)), rows.next_positions
    )
    resolve_tokens(token_ids, token_entries, positions, entries, rows.last_tokens, rows.drafts)
    output_positions = torch.from_numpy(sample.output_positions.copy())
    lower_bounds(output_positions, entries, torch.from_numpy(sample.token_indices.copy()), token_entries)
    exact = dataclasses.replace(
        wide,
        forward=dataclasses.replace(
            forward,
            starts=positions.numpy()[ends - forward.counts],
            known_counts=forward.counts,
            token_ids=token_ids.numpy(),
        ),
        sample=dataclasses.replace(sample, output_positions=output_positions.numpy()),
    )
    return exact, draws
