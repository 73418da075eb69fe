"""A plan's columns as both runners need them on the host, one value per token or per block.

An entry is a row's part in a step. Owns where a row is cut whose tokens lie in both pieces of a
step (which steps are in pieces says `CausalLM.first_piece`, why `layers.cut_step`), and numpy
operations over the whole batch, never a loop over rows. Does not own where the results go: on a CPU
they are computed with at once (`cpu_runner`), for a GPU they are uploaded (`columns`, `buffers`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_backend.step.plan import ForwardPlan, Int32Column


class Entries(NamedTuple):
    """Columns of as many numbers as there are entries; maybe none."""

    rows: Int32Column
    # Tokens of context before the entry's own.
    starts: Int32Column
    counts: Int32Column

    @classmethod
    def of(cls, plan: ForwardPlan) -> Entries:
        """Makes the entries of a whole step."""
        return cls(plan.rows, plan.starts, plan.counts)

    @property
    def seq_lens(self) -> Int32Column:
        """Tokens of context, those of the step included."""
        return self.starts + self.counts

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all entries."""
        return int(self.counts.sum())

    def cut(self, first: int) -> tuple[Entries, Entries]:
        """Cuts the entries behind the step's first tokens, which the others see as context.

        A row may have an entry in both.
        """
        ends = np.cumsum(self.counts, dtype=np.int64)
        in_first = np.clip(first - (ends - self.counts), 0, self.counts).astype(np.int32)
        in_second = self.counts - in_first
        before, after = in_first > 0, in_second > 0
        return (
            Entries(self.rows[before], self.starts[before], in_first[before]),
            Entries(self.rows[after], (self.starts + in_first)[after], in_second[after]),
        )


Int64Column = npt.NDArray[np.int64]

# Stands for a token id that the plan does not know: the row's last sampled token. Below are its
# drafts, in order.
LAST_SAMPLED = -1


def ranges(starts: npt.NDArray[np.integer], counts: Int32Column) -> Int64Column:
    """Returns starts[0], starts[0] + 1, ... (counts[0] values), then starts[1], ... in one array.

    It is int64 [sum(counts)]; there is at least one range.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    values: Int64Column = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    return values


def flat_token_ids(plan: ForwardPlan, ends: Int64Column) -> Int32Column:
    """Ids of all tokens, int32 [num_tokens], below 0 where the plan does not know one.

    That is LAST_SAMPLED for the row's last sampled token, and one less for each draft behind it.

    Args:
        plan: A plan with at least one row.
        ends: Ends of the rows' tokens: the running sum of `plan.counts`.
    """
    unknown = plan.counts - plan.known_counts
    is_known = np.ones(int(ends[-1]), bool)
    ids = np.full(is_known.size, LAST_SAMPLED, np.int32)
    if unknown.max() > 1:
        drafted = np.flatnonzero(unknown)
        counts = unknown[drafted]
        places = ranges(ends[drafted] - counts, counts)
        is_known[places] = False
        ids[places] -= ranges(np.zeros_like(counts), counts).astype(np.int32)
    else:
        is_known[ends[unknown > 0] - 1] = False
    ids[is_known] = plan.token_ids
    return ids


def last_sampled_bounds(plan: ForwardPlan) -> Int32Column:
    """Planned positions of the last sampled tokens that entries compute, int32 [num_entries].

    -1 where an entry computes known tokens alone.
    """
    return np.where(plan.known_counts < plan.counts, plan.starts + plan.known_counts, np.int32(-1))


def table_places(plan: ForwardPlan, shape: tuple[int, ...], num_rows: int, num_blocks: int) -> Int64Column:
    """Indices of `plan.table_blocks` in the block tables of all cache groups read as one line.

    The plan has at least one update.

    Args:
        plan: Its updates are checked against the limits.
        shape: Shape of the tables, [num_groups, lines, max_blocks]; the first `num_rows` lines of
            each group are those of rows.
        num_rows: Rows of the batch, by which the plan counts the lines of groups.
        num_blocks: Blocks of the cache.
    """
    num_groups, lines, max_blocks = shape
    assert int((plan.table_starts + plan.table_counts).max()) <= max_blocks, "a block table is longer than the context"
    assert 0 <= plan.table_blocks.min() and plan.table_blocks.max() < num_blocks, "block number out of range"
    rows = plan.table_rows.astype(np.int64)
    if num_groups > 1:
        assert rows.max() < num_groups * num_rows, "a block table of a group that there is not"
        rows += rows // num_rows * (lines - num_rows)
    return ranges(rows * max_blocks + plan.table_starts, plan.table_counts)
