"""Steps that a draft model does not follow before somebody drafts: which, and what it owes to whom.

Where nobody is drafted for, keys and values of the draft model are read by nobody. So a step of
plain decodes is *deferred*: its tokens are noted (`noted_tokens`), and each of its rows is *behind*
from the first position that was deferred. What is behind is computed in one pass when the row is
drafted for, in pieces of no more tokens than a pass may have.

Owns who is behind from where, on the host, and decides by the plans alone, so that all ranks do the
same. Decodes are deferred whose positions are exact in the plan. An engine plans a step while one
result at most is unread (`MOST_UNREAD`), and only drafts make positions upper bounds, so those of a
row are exact unless the step just before had drafts of it. Any other step is followed whole: rows
in it that are behind stay behind, their tokens are noted too, and what the step computes for them
is computed again. Rows that are taken anew owe nothing, whoever had them.

A row can't be behind by more than the tokens that are noted of it, the *window*; it is caught up
before. Rows that began together would all be so in one step, so each has a limit of its own between
half of the window and all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headrace_backend.step.plan import Int32Column, StepPlan
from headrace_backend.worker.plan_columns import Entries, Int64Column, ranges
from headrace_backend.worker.speculation.drafted_rows import DraftedRows

# Results that an engine has not read at most when it plans a step, if it drafts.
MOST_UNREAD = 1
# Most tokens that a row is behind. Catching up costs a token less than following it in a step of
# its own, but all at once and in others' time: 2,048 are some 10 ms of 1B on an H200, by its
# arithmetic. Reckoned, not measured.
_MOST_BEHIND = 2048
_NOT_BEHIND = -1
_NOBODY = np.empty(0, np.int32)


def window_tokens(max_model_len: int) -> int:
    """Tokens that are noted of each row, where the longest sequence has so many."""
    return min(_MOST_BEHIND, max_model_len)


def noted_bytes(num_rows: int, max_model_len: int) -> int:
    """Memory of the noted tokens of so many rows."""
    return 4 * num_rows * window_tokens(max_model_len)


class Noted(NamedTuple):
    """Tokens of a step that are noted, in columns of at least one."""

    # Places in the step's flattened tokens.
    indices: Int64Column
    # Places in int32 [num_rows, window] read as one line.
    places: Int64Column


class DeferredSteps:
    """What rows are behind."""

    def __init__(self, num_rows: int, window: int, max_tokens: int) -> None:
        """Begins with no row behind.

        Args:
            num_rows: Rows of the batch.
            window: Tokens that are noted of each row, at least 1.
            max_tokens: Most tokens that are caught up in one pass.
        """
        self.num_rows, self.window = num_rows, window
        self.max_tokens = max_tokens
        # int32 [num_rows] first position that is not computed; _NOT_BEHIND: all are.
        self._firsts = np.full(num_rows, _NOT_BEHIND, np.int32)
        self._limits = (window - np.arange(num_rows) * (window // 2) // num_rows).astype(np.int32)
        # Rows that the last plans had drafts of, the latest first.
        self._drafted = [_NOBODY] * MOST_UNREAD
        self._defers = False

    @property
    def defers(self) -> bool:
        """Whether the step at hand is deferred."""
        return self._defers

    @property
    def behind(self) -> Int32Column:
        """The rows that are behind, ascending."""
        return np.flatnonzero(self._firsts >= 0).astype(np.int32)

    def begin(self, plan: StepPlan) -> None:
        """Takes the next step's plan, with or without tokens: whether it is deferred follows."""
        self._firsts[plan.released_rows] = _NOT_BEHIND
        self._firsts[[admission.row for admission in plan.admissions]] = _NOT_BEHIND
        forward, drafted = plan.forward, DraftedRows.of(plan)
        is_plain = forward.rows.size > 0 and not forward.known_counts.any() and bool((forward.counts == 1).all())
        self._defers = is_plain and not np.isin(forward.rows, np.concatenate(self._drafted)).any()
        self._drafted = [_NOBODY if drafted is None else drafted.rows, *self._drafted[:-1]]

    def drafted(self, drafted: DraftedRows) -> Iterator[Entries]:
        """Takes drafted rows for caught up, and yields what is to be computed for that, in order.

        What is not computed after all is wrong in the cache from then on.
        """
        return self._caught_up(drafted.rows, drafted.bounds)

    def overdue(self, plan: StepPlan) -> Iterator[Entries]:
        """Does what `drafted` does for rows of which the step has more than can be noted."""
        entries = Entries.of(plan.forward)
        firsts = self._firsts[entries.rows]
        is_over = (firsts >= 0) & (entries.seq_lens - firsts > self._limits[entries.rows])
        return self._caught_up(entries.rows[is_over], entries.starts[is_over])

    def _caught_up(self, rows: Int32Column, positions: Int32Column) -> Iterator[Entries]:
        firsts = self._firsts[rows]
        is_behind = firsts >= 0
        self._firsts[rows] = _NOT_BEHIND
        starts = firsts[is_behind]
        return _pieces(Entries(rows[is_behind], starts, positions[is_behind] - starts), self.max_tokens)

    def noted(self, plan: StepPlan) -> Noted | None:
        """Which tokens of the step at hand are to be noted; None: none are.

        Where it is deferred, all its rows are behind from then on.
        """
        entries = Entries.of(plan.forward)
        if self._defers:
            firsts = self._firsts[entries.rows]
            self._firsts[entries.rows] = np.where(firsts < 0, entries.starts, firsts)
        is_behind = self._firsts[entries.rows] >= 0
        if not is_behind.any():
            return None
        begins = np.cumsum(entries.counts, dtype=np.int64) - entries.counts
        counts = entries.counts[is_behind]
        positions = ranges(entries.starts[is_behind], counts)
        rows = np.repeat(entries.rows[is_behind], counts)
        return Noted(ranges(begins[is_behind], counts), self.places(rows, positions))

    def places(self, rows: Int32Column, positions: Int64Column) -> Int64Column:
        """Places of tokens of rows in their memory, int32 [num_rows, window] read as one line."""
        return rows.astype(np.int64) * self.window + positions % self.window


def _pieces(entries: Entries, max_tokens: int) -> Iterator[Entries]:
    """Cuts entries into steps of so many tokens; a row of several has one after the other."""
    while entries.rows.size:
        piece, entries = entries.cut(max_tokens)
        yield piece
