"""The entries of a step, a row's part in it each, and the same of a step that goes through the
layers in two pieces of its tokens.

Owns where a row is cut that has tokens in both. Which steps are in pieces says the model
(`CausalLM.first_piece`), why `layers.cut_step`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace_backend.step.plan import ForwardPlan, Int32Column


class Entries(NamedTuple):
    """Columns of as many numbers as there are entries; maybe none."""

    rows: Int32Column
    # Tokens of context before the entry's own.
    starts: Int32Column
    counts: Int32Column

    @classmethod
    def of(cls, plan: ForwardPlan) -> Entries:
        """Those of a whole step."""
        return cls(plan.rows, plan.starts, plan.counts)

    @property
    def seq_lens(self) -> Int32Column:
        """Tokens of context, those of the step included."""
        return self.starts + self.counts

    @property
    def num_tokens(self) -> int:
        """Of all entries."""
        return int(self.counts.sum())

    def cut(self, first: int) -> tuple[Entries, Entries]:
        """Those of the step's first tokens, and those of the others, which see the first ones as
        context.

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
