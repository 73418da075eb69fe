"""A draft model on a CPU: it follows the model's steps, and drafts at the head of the next one.

Owns the draft model's caches and the order of its passes. Its blocks have the numbers of the
model's, and it computes every token that the model computes, so that prefix hits, copies of blocks
and preemption hold for both.

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
from headrace_backend.step.plan import ForwardPlan, Int32Column
from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.step.kv_caches import copy_planned_blocks
from headrace_backend.worker.step.runner import CausalModel
from headrace_kernels.attention.paged import AttentionMetadata


class StandingRows(Protocol):
    """What a CPU keeps of rows between steps (`cpu_runner.CpuBatch`)."""

    def metadata(self, entries: Entries) -> AttentionMetadata:
        """What attention needs of entries whose columns are exact."""


class CpuDraftModel:
    """A small model beside the one that is served."""

    def __init__(
        self,
        model: CausalModel,
        kv_caches: list[torch.Tensor],
        sampler: Sampler,
        together: Collectives | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            model: The draft model, whole on every rank.
            kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim], with the
                numbers of blocks of the model's.
            sampler: The rows' parameters, which the model's own draw reads too.
            together: The ranks' collectives, by which all take rank 0's drafts; None: one rank.
        """
        self._model = model
        self._kv_caches = kv_caches
        self._sampler = sampler
        self._together = together

    def copy_blocks(self, plan: ForwardPlan) -> None:
        """Copies the plan's blocks in the draft model's caches."""
        copy_planned_blocks(plan, self._kv_caches)

    def follow(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Computes keys and values of a step's tokens.

        Args:
            token_ids: int64 [num_tokens] as the model computed them.
            positions: int64 [num_tokens].
            metadata: The step.
        """
        self._model(token_ids, positions, self._kv_caches, metadata)

    def draft(
        self, drafted: DraftedRows, last_tokens: Int32Column, positions: Int32Column, standing: StandingRows
    ) -> torch.Tensor:
        """Drafts what follows the rows' last tokens.

        Args:
            drafted: The rows and how many drafts each is to have.
            last_tokens: [num_rows] their last sampled tokens, which are not computed yet.
            positions: [num_rows] exact positions of these.
            standing: The rows' block tables, with blocks for all drafts.

        Returns:
            int64 [num_rows, most drafts]; behind a row's own number of drafts stand zeros.
        """
        most = int(drafted.counts.max())
        drafts = torch.zeros(drafted.rows.size, most, dtype=torch.int64)
        tokens = torch.from_numpy(last_tokens.astype(np.int64))
        output_positions = drafted.output_positions - (drafted.bounds - positions)
        for place in range(most):
            is_active = drafted.counts > place
            if place:
                tokens = drafts[torch.from_numpy(is_active), place - 1]
            active = drafted.rows[is_active], positions[is_active] + place, output_positions[is_active] + place
            drafts[torch.from_numpy(is_active), place] = self._pass(tokens, *active, standing)
        return drafts if self._together is None else self._together.all_gather(drafts)[0]

    def _pass(
        self,
        tokens: torch.Tensor,
        rows: Int32Column,
        positions: Int32Column,
        output_positions: Int32Column,
        standing: StandingRows,
    ) -> torch.Tensor:
        """One token of each row, and what the draft model draws behind it, int64 [num_rows]."""
        entries = Entries(rows, positions, np.ones_like(rows))
        places = torch.from_numpy(positions.astype(np.int64))
        hidden = self._model(tokens, places, self._kv_caches, standing.metadata(entries))
        if self._sampler.are_greedy(rows):
            drawn, _ = self._model.most_likely(hidden)
            return drawn
        columns = (torch.from_numpy(column.astype(np.int32)) for column in (rows, output_positions))
        drawn, _ = self._sampler.draw_all(self._model.logits(hidden).float(), *columns)
        return drawn
