"""The rows of a plan whose drafts a draft model has to make before the step is computed.

Owns the columns of those rows, numpy over the whole batch. Where a row stands only the device may
know; these columns are as planned, and too large by the same number each (`acceptance`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace_backend.step.plan import Int32Column, StepPlan


class DraftedRows(NamedTuple):
    """Columns of at least one row, int32 [num_rows]."""

    rows: Int32Column
    # Drafts that the step computes for each, at least 1.
    counts: Int32Column
    # Planned position of the row's last sampled token, which the first draft follows.
    bounds: Int32Column
    # Planned position, in the row's output, of the token that is drawn in the first draft's place.
    output_positions: Int32Column

    @classmethod
    def of(cls, plan: StepPlan) -> DraftedRows | None:
        """The rows of a plan; None where it computes no drafts."""
        forward, sample = plan.forward, plan.sample
        counts = forward.counts - forward.known_counts - 1
        is_drafted = counts > 0
        if not is_drafted.any():
            return None
        rows = forward.rows[is_drafted]
        places = np.zeros(int(max(rows.max(), sample.rows.max())) + 1, np.int32)
        places[sample.rows] = sample.output_positions
        bounds = (forward.starts + forward.known_counts)[is_drafted]
        return cls(rows, counts[is_drafted], bounds, places[rows])
