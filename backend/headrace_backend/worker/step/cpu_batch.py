"""What a CPU keeps of each request row between steps, and the model's inputs made from it and a
plan.

Owns block tables and last sampled tokens, one entry per row. Does not own sampling parameters
(`row_parameters`) nor the cache itself (`kv_caches`). On a GPU the same state is `device_rows`, and
inputs are made by kernels (`buffers`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace_backend.layers.step_metadata import StepPieces
from headrace_backend.step.plan import ForwardPlan, Int32Column
from headrace_backend.worker.flattening import LAST_SAMPLED, Int64Column, flat_token_ids, ranges, table_places
from headrace_backend.worker.step_entries import Entries
from headrace_kernels.attention.paged import AttentionMetadata


@dataclasses.dataclass(slots=True)
class ModelInput:
    """What the model computes in one step."""

    # int64 [num_tokens]
    token_ids: torch.Tensor
    # int64 [num_tokens]
    positions: torch.Tensor
    metadata: AttentionMetadata | StepPieces


class CpuBatch:
    """Turns plans into model inputs."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        # [num_rows, max_blocks] block numbers. Past a row's own blocks stand old, valid ones.
        self._block_tables: Int32Column = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        # [num_rows]
        self._last_tokens: Int64Column = np.zeros(num_rows, np.int64)

    def update_tables(self, plan: ForwardPlan) -> None:
        """Applies the plan's block table updates; before `build`, and before blocks are copied."""
        if plan.table_rows.size:
            places = table_places(plan, self._block_tables.shape[1], self._num_blocks)
            self._block_tables.reshape(-1)[places] = plan.table_blocks

    def build(self, plan: ForwardPlan, first_piece: int | None = None) -> ModelInput:
        """The inputs of a plan with at least one row; of the step in two pieces, if the first is to
        have so many tokens.
        """
        ends = np.cumsum(plan.counts, dtype=np.int64)
        return ModelInput(
            token_ids=torch.from_numpy(self._token_ids(plan, ends)),
            positions=torch.from_numpy(ranges(plan.starts, plan.counts)),
            metadata=self._metadata(Entries.of(plan)) if first_piece is None else self._pieces(plan, first_piece),
        )

    def remember(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Notes the tokens just drawn, int64 [num_samples], as their rows' last."""
        self._last_tokens[rows] = tokens.numpy()

    def _token_ids(self, plan: ForwardPlan, ends: Int64Column) -> Int64Column:
        """Ids from the plan, and the last sampled token where the plan does not know it."""
        ids = flat_token_ids(plan, ends).astype(np.int64)
        ids[ids == LAST_SAMPLED] = self._last_tokens[plan.rows[plan.known_counts < plan.counts]]
        return ids

    def _pieces(self, plan: ForwardPlan, first: int) -> StepPieces:
        one, other = Entries.of(plan).cut(first)
        return StepPieces(first, (self._metadata(one), self._metadata(other)))

    def _metadata(self, entries: Entries) -> AttentionMetadata:
        block_size = self._block_size
        query_start_loc = np.zeros(entries.counts.size + 1, np.int32)
        np.cumsum(entries.counts, out=query_start_loc[1:])
        positions = ranges(entries.starts, entries.counts)
        seq_lens = entries.seq_lens
        max_seq_len = int(seq_lens.max())
        token_rows = np.repeat(entries.rows, entries.counts)
        blocks = self._block_tables[token_rows, positions // block_size].astype(np.int64)
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(self._block_tables[entries.rows, : -(-max_seq_len // block_size)]),
            slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
            block_size=block_size,
            max_query_len=int(entries.counts.max()),
            max_seq_len=max_seq_len,
            query_lens_cpu=entries.counts,
            seq_lens_cpu=seq_lens,
        )
