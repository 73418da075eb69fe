"""A plan's columns, one value per row, made flat: one value per token or per block.

Owns the arithmetic that both runners need on the host: numpy operations over the whole batch, never
a loop over rows. Does not own where the results go (`cpu_batch` computes with them at once,
`columns` and `device_rows` send them to a GPU).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_backend.step.plan import ForwardPlan, Int32Column

Int64Column = npt.NDArray[np.int64]

# Stands for a token id that the plan does not know: the row's last sampled token.
LAST_SAMPLED = -1


def ranges(starts: npt.NDArray[np.integer], counts: Int32Column) -> Int64Column:
    """[starts[0], starts[0] + 1, ... counts[0] of them, then starts[1] ...] as int64 [sum(counts)];
    at least one range.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    values: Int64Column = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    return values


def flat_token_ids(plan: ForwardPlan, ends: Int64Column) -> Int32Column:
    """Ids of all tokens, int32 [num_tokens], with LAST_SAMPLED where the plan does not know one.

    Args:
        plan: A plan with at least one row.
        ends: Of its rows' tokens: the running sum of `plan.counts`.
    """
    is_known = np.ones(int(ends[-1]), bool)
    is_known[ends[plan.known_counts < plan.counts] - 1] = False
    ids = np.full(is_known.size, LAST_SAMPLED, np.int32)
    ids[is_known] = plan.token_ids
    return ids


def table_places(plan: ForwardPlan, max_blocks: int, num_blocks: int) -> Int64Column:
    """Where `plan.table_blocks` belong in block tables [num_rows, max_blocks] read as one line; the
    plan has at least one update.

    Args:
        plan: Its updates are checked against the two limits.
        max_blocks: Blocks that a table holds.
        num_blocks: Blocks of the cache.
    """
    assert int((plan.table_starts + plan.table_counts).max()) <= max_blocks, "a block table is longer than the context"
    assert 0 <= plan.table_blocks.min() and plan.table_blocks.max() < num_blocks, "block number out of range"
    return ranges(plan.table_rows.astype(np.int64) * max_blocks + plan.table_starts, plan.table_counts)
