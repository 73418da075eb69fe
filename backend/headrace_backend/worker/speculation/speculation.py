"""A worker's part in speculation: the drafts of all rows, and who proposes them.

Owns the order around a step in both runners, and what lies on the device for it from one step to
the next (`RowDrafts`). Verification is drawing: each draw behind a draft is what the row would have
drawn there without drafts, so what is settled never depends on who proposed what. A drafter that
fails loses its drafts; that is counted, and its first failure is printed.

    head of a step      copies of blocks and row admissions go to the drafter; a `HeadDrafter`
                        proposes the drafts of this very step; drafts of rows with grammars go to
                        the engine (`reported_drafts`), whose masks the draws wait for
    behind the model    the drafter sees what was computed
    behind the draw     accepted drafts -> any other drafter's proposals -> drafts of the next step
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable, Mapping

import numpy as np
import torch

from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.plan import Int32Column, StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.device_copies import copy_to_device, indices_on_device
from headrace_backend.worker.sampling.sampler import SampledTokens
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.drafter import (
    CapturesPasses,
    ComputedTokens,
    Drafter,
    HeadDrafter,
    SettledTokens,
)
from headrace_backend.worker.speculation.draws import Draws
from headrace_backend.worker.speculation.reported_drafts import ReportedDrafts
from headrace_kernels.speculation.acceptance import Accepted, RowState
from headrace_kernels.speculation.draft_inputs import store_drafts


class RowDrafts:
    """What rows leave on the device for the next step. The last row is scratch, for padding."""

    def __init__(self, num_rows: int, tokens_per_row: int, device: torch.device, has_states: bool = False) -> None:
        """Allocates for `num_rows` rows and one more; `has_states`: of recurrent layers."""
        self.tokens_per_row = tokens_per_row
        # Whether a row may compute its last token once more: recurrent layers can't take that back.
        self.can_stay = not has_states
        # int32 [num_rows + 1] last tokens and their positions.
        self.last_tokens, self.next_positions = torch.zeros(2, num_rows + 1, dtype=torch.int32, device=device)
        # int32 [num_rows + 1, tokens_per_row - 1] what is drafted behind the last tokens.
        self.drafts = torch.zeros(num_rows + 1, tokens_per_row - 1, dtype=torch.int32, device=device)
        # int32 [1] drafts lost so far.
        self.num_lost = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def state(self) -> RowState:
        """What acceptance writes."""
        return RowState(self.last_tokens, self.next_positions)


class Speculation:
    """One worker's drafter, and the rows' drafts."""

    def __init__(
        self, drafter: Drafter | HeadDrafter, rows: RowDrafts, vocab_size: int, has_peers: bool = False
    ) -> None:
        """Joins its parts.

        Args:
            drafter: Proposes `rows.tokens_per_row - 1` tokens for each row.
            rows: What lies on the device.
            vocab_size: Ids from here on are none.
            has_peers: Whether other ranks draft the same. A failure of this rank alone would have
                the ranks compute different tokens, so it is raised.
        """
        assert drafter.num_drafts == rows.tokens_per_row - 1, "a draft for each token but one"
        self._drafter = drafter
        self.rows = rows
        self._vocab_size = vocab_size
        self._has_peers = has_peers
        self._has_failed = False
        # Most drafts of a row that the step after the one at hand verifies.
        self._num_wanted = 0
        # Reports drafts of rows with grammars to the engine; None: nobody listens.
        self._reported: ReportedDrafts | None = None

    def report_to(self, send: Callable[[StepDrafts], None]) -> ReportedDrafts:
        """Has drafts of rows with grammars reported from now on; no row is taken yet."""
        self._reported = ReportedDrafts(self.rows.drafts.shape[0], send)
        return self._reported

    @property
    def tokens_per_row(self) -> int:
        """Most tokens that a step settles for a row."""
        return self.rows.tokens_per_row

    @property
    def num_captured(self) -> int:
        """Graphs that the drafter has captured so far."""
        return self._drafter.num_captured if isinstance(self._drafter, CapturesPasses) else 0

    def capture(
        self, progress: Progress, steps: Mapping[Hashable, ComputedTokens], pad: Callable[[Hashable], None]
    ) -> None:
        """Captures the drafter's graphs, if it has any: see `CapturesPasses.capture`."""
        if isinstance(self._drafter, CapturesPasses):
            self._drafter.capture(progress, steps, pad)

    def begin(self, plan: StepPlan) -> None:
        """Shows the drafter a plan before it is computed; one that drafts then does so.

        Block tables are up to date, and the plan's blocks were copied in the model's own caches.
        """
        self._num_wanted = plan.num_proposed
        try:
            if isinstance(self._drafter, HeadDrafter):
                self._drafter.begin(plan)
            elif plan.admissions:
                self._drafter.admit(plan.admissions)
        except Exception as error:
            self._bear(error)
        drafted = DraftedRows.of(plan)
        if isinstance(self._drafter, HeadDrafter) and drafted is not None:
            rows = copy_to_device(drafted.rows, self.rows.drafts.device)
            self._store(rows, functools.partial(self._drafter.draft, drafted))
        if self._reported is not None:
            self._reported.admit(plan.admissions)
            self._reported.report(plan, self.rows.drafts)

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Shows the drafter what the forward pass computed; arguments as those of the drafter."""
        try:
            self._drafter.follow(plan, computed)
        except Exception as error:
            self._bear(error)

    def settle(
        self, sampled: SampledTokens, accepted: Accepted, draws: Draws, rows: Int32Column, hidden: torch.Tensor
    ) -> None:
        """Notes in a step's result what was settled, and has what follows it drafted.

        Args:
            sampled: The step's draws; completed here.
            accepted: What of them is settled, without padding.
            draws: Which of them belong together.
            rows: [num_samples] the row of each sample.
            hidden: [num_draws, hidden_size] what was drawn from.
        """
        if draws.are_several:
            sampled.counts, sampled.draw_counts = accepted.counts, draws.counts
        if not isinstance(self._drafter, HeadDrafter):
            wanted = self._by_sample(draws, hidden) if self._drafter.wants_hidden else None
            settled = _settled(accepted, rows, self._num_wanted, wanted)
            self._store(accepted.rows, functools.partial(self._drafter.propose, settled))
        sampled.num_lost_drafts = self.rows.num_lost.clone()

    def _by_sample(self, draws: Draws, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_samples, tokens_per_row, hidden_size], the last ones repeated."""
        order = np.minimum(np.arange(self.tokens_per_row), draws.counts[:, None] - 1)
        return hidden[indices_on_device(draws.firsts[:, None] + order, hidden.device)]

    def _store(self, rows: torch.Tensor, propose: Callable[[], torch.Tensor]) -> None:
        """Has drafts proposed, and keeps them for the step that computes them.

        Args:
            rows: int32 [num_rows] on the device.
            propose: Gives drafts [num_rows, tokens_per_row - 1].
        """
        shape = (rows.shape[0], self.rows.tokens_per_row - 1)
        try:
            drafts = propose()
            if tuple(drafts.shape) != shape or drafts.is_floating_point():
                raise ValueError(f"drafts are {drafts.dtype} of {tuple(drafts.shape)}, not integers of {shape}")
        except Exception as error:
            self._bear(error)
            # None of these is an id: all are lost.
            drafts = torch.full(shape, -1, dtype=torch.int32, device=rows.device)
        store_drafts(self.rows.drafts, rows, drafts, self._vocab_size, self.rows.num_lost)

    def reset(self) -> None:
        """Forgets all rows."""
        if not isinstance(self._drafter, HeadDrafter):
            self._drafter.reset()
        if self._reported is not None:
            self._reported.reset()

    def _bear(self, error: Exception) -> None:
        """Goes on without the drafts of a drafter that failed; its first failure is printed.

        Raises:
            Exception: The error, of several ranks.
        """
        if self._has_peers:
            raise error
        if not self._has_failed:
            self._has_failed = True
            traceback.print_exception(error)


def _settled(accepted: Accepted, rows: Int32Column, num_wanted: int, hidden: torch.Tensor | None) -> SettledTokens:
    return SettledTokens(
        rows=accepted.rows,
        rows_on_host=rows,
        positions=accepted.positions,
        tokens=accepted.tokens,
        counts=accepted.counts,
        output_positions=accepted.output_positions,
        num_wanted=num_wanted,
        hidden=hidden,
    )
