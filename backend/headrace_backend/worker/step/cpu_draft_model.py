"""A drafting model on a CPU: it follows the model's steps, and drafts at the head of the next one.

Owns the order of its passes. Its blocks have the numbers of the model's, and it computes every
token that the model computes, so that prefix hits, copies of blocks and preemption hold for both.
It does so at once, where a GPU's puts steps without drafts off.

    head of a step      the row's last token, then each draft behind it: a pass and a draw each
    behind the model    all tokens of the step, the last draft among them, for their keys and values

Drafts are drawn with the row's own parameters and noise, at the places of the output that they
stand for, as the model will draw there: where both models are as sure of a token, both draw it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace_backend.parallel.collectives import Collectives
from headrace_backend.step.plan import Int32Column, StepPlan
from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.drafter import ComputedTokens
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_backend.worker.step.drafting_model import DraftingModel
from headrace_kernels.attention.paged import AttentionMetadata


class BlockTables(Protocol):
    """The rows' block tables on a CPU (`cpu_runner.CpuBatch`)."""

    def metadata(self, entries: Entries) -> AttentionMetadata:
        """What attention needs of entries whose columns are exact."""


class CpuDraftModel:
    """Implements `HeadDrafter` with a small model or a head beside the model that is served."""

    def __init__(
        self,
        model: DraftingModel,
        sampler: Sampler,
        rows: RowDrafts,
        tables: BlockTables,
        together: Collectives | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            model: The drafting model over caches with the numbers of blocks of the model's.
            sampler: The rows' parameters, which the model's own draw reads too.
            rows: Last tokens of rows and their positions.
            tables: The rows' blocks.
            together: The ranks' collectives, by which all take rank 0's drafts; None: one rank.
        """
        self.num_drafts = rows.tokens_per_row - 1
        self._model = model
        self._sampler = sampler
        self._rows = rows
        self._tables = tables
        self._together = together

    def begin(self, plan: StepPlan) -> None:
        """Implements `HeadDrafter.begin`: the plan's blocks are copied."""
        self._model.copy_blocks(plan.forward)

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Implements `HeadDrafter.follow`: computes keys and values of the same tokens."""
        assert isinstance(computed.metadata, AttentionMetadata), "a CPU takes a step whole"
        self._model.follow(computed.token_ids, computed.positions, computed.metadata, first=0)

    def draft(self, drafted: DraftedRows) -> torch.Tensor:
        """Implements `HeadDrafter.draft`."""
        rows = torch.from_numpy(drafted.rows.astype(np.int64))
        positions = self._rows.next_positions[rows].numpy()
        output_positions = drafted.output_positions - (drafted.bounds - positions)
        drafts = torch.zeros(drafted.rows.size, self.num_drafts, dtype=torch.int64)
        tokens = self._rows.last_tokens[rows].long()
        self._model.begin(rows, torch.from_numpy(positions), self._step(drafted.rows, positions))
        for place in range(int(drafted.counts.max())):
            is_active = drafted.counts > place
            chosen = torch.from_numpy(is_active)
            if place:
                tokens = drafts[chosen, place - 1]
            active = drafted.rows[is_active], positions[is_active] + place, output_positions[is_active] + place
            drafts[chosen, place] = self._pass(tokens, *active)
        return drafts if self._together is None else self._together.all_gather(drafts)[0]

    def _pass(
        self, tokens: torch.Tensor, rows: Int32Column, positions: Int32Column, output_positions: Int32Column
    ) -> torch.Tensor:
        """One token of each row, and what the draft model draws behind it, int64 [num_rows]."""
        places = torch.from_numpy(positions.astype(np.int64))
        hidden = self._model.compute(tokens, places, torch.from_numpy(rows), self._step(rows, positions))
        if self._sampler.are_greedy(rows):
            drawn, _ = self._model.most_likely(hidden)
            return drawn
        columns = (torch.from_numpy(column.astype(np.int32)) for column in (rows, output_positions))
        drawn, _ = self._sampler.draw_all(self._model.logits(hidden).float(), *columns)
        return drawn

    def _step(self, rows: Int32Column, positions: Int32Column) -> AttentionMetadata:
        """A pass over one token of each row."""
        return self._tables.metadata(Entries(rows, positions, np.ones_like(rows)))
