"""The passes by which a drafting model on a GPU drafts: one over one token a row for each draft.

Owns their columns, and their inputs on the device. A pass is the same launches for each draft,
which find its number on the device (`headrace_kernels.speculation.draft_passes`), so one graph for
each size of the batch serves any number of drafts. When passes are launched, and from which graphs,
is `gpu_draft_model`'s.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace_backend.worker.device_copies import staging_memory
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_backend.worker.step.drafting_model import DraftingModel
from headrace_backend.worker.step.shape import AttentionSizes
from headrace_kernels.attention.plan import decode_sizes, plan_decode
from headrace_kernels.attention.step import DecodeScratch, DecodeWork, PagedAttentionStep
from headrace_kernels.speculation.acceptance import RowState
from headrace_kernels.speculation.draft_passes import (
    DraftsSoFar,
    PassColumns,
    PassInputs,
    build_pass_inputs,
    keep_drawn,
)

_PASS_QUERY_LEN = 1
# Of a pass: rows, drafts of each, planned positions and places in the output.
_NUM_ROW_COLUMNS = 4


class BlockTables(Protocol):
    """The rows' block tables on a GPU (`buffers.DeviceRows`)."""

    scratch_row: int
    # int32 [num_groups, num_rows + 1, max_blocks], and each group's: the first's are looked at.
    block_tables: torch.Tensor
    group_tables: tuple[torch.Tensor, ...]


class DraftPasses:
    """The passes over one token of each drafted row."""

    def __init__(
        self,
        model: DraftingModel,
        sampler: Sampler,
        rows: RowDrafts,
        tables: BlockTables,
        sizes: AttentionSizes,
        scratch: DecodeScratch,
    ) -> None:
        """Allocates what passes share.

        Args:
            model: The drafting model.
            sampler: The rows' parameters, which the model's own draw reads too.
            rows: Last tokens of rows and their positions.
            tables: The rows' blocks.
            sizes: Sizes of a layer's attention, of the drafting model.
            scratch: Attention's, of at least one query token.
        """
        self._model, self._sampler = model, sampler
        self._tables, self._sizes, self._scratch = tables, sizes, scratch
        self._state = RowState(rows.last_tokens, rows.next_positions)
        max_num_seqs = tables.scratch_row
        self._device = device = model.kv_caches[0].device
        self._block_size = model.kv_caches[0].shape[3]
        most_splits = self._num_splits(max_num_seqs)
        self._piece = torch.zeros(_NUM_ROW_COLUMNS * max_num_seqs + 4 * most_splits, dtype=torch.int32, device=device)
        self._numbers = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        wide = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device)
        self._inputs = PassInputs(*wide, *torch.zeros(2, max_num_seqs, dtype=torch.int32, device=device))
        # int32 [max_num_seqs, num_drafts] what is drafted for the rows of the step in the making.
        self.drafts = torch.zeros(max_num_seqs, rows.tokens_per_row - 1, dtype=torch.int32, device=device)
        self._so_far = DraftsSoFar(self.drafts, torch.zeros(1, dtype=torch.int64, device=device))

    def _num_splits(self, num_rows: int) -> int:
        return decode_sizes(num_rows, self._sizes.num_kv_heads, self._sizes.programs).num_splits

    def upload(self, drafted: DraftedRows, num_rows: int) -> None:
        """Sends the columns of a batch that is padded to `num_rows`, behind earlier work."""
        num_splits = self._num_splits(num_rows)
        host = staging_memory(_NUM_ROW_COLUMNS * num_rows + 4 * num_splits, torch.int32, self._device)
        columns = host.numpy()[: _NUM_ROW_COLUMNS * num_rows].reshape(_NUM_ROW_COLUMNS, num_rows)
        columns[0], columns[1:] = self._tables.scratch_row, 0
        columns[:, : drafted.rows.size] = drafted
        lengths = np.zeros(num_rows, np.int32)
        lengths[: drafted.rows.size] = drafted.bounds + drafted.counts
        decode = plan_decode(
            (lengths > 0).astype(np.int32),
            lengths,
            self._sizes.num_kv_heads,
            num_rows,
            max_query_len=_PASS_QUERY_LEN,
            programs=self._sizes.programs,
        )
        host.numpy()[_NUM_ROW_COLUMNS * num_rows :] = decode.splits.reshape(-1)
        self._piece[: host.numel()].copy_(host, non_blocking=True)

    def upload_padding(self, num_rows: int) -> None:
        """Sends columns of a pass in which nothing takes part."""
        self._piece.zero_()
        self._piece[:num_rows] = self._tables.scratch_row
        self._piece[_NUM_ROW_COLUMNS * num_rows :] = -1

    def begin(self, num_rows: int) -> None:
        """Launches what the first pass needs: no drafts yet, and what the model has of the rows."""
        rows = self._columns(num_rows).rows
        first = self._state.next_positions[rows.long()]
        self._so_far.place.zero_()
        self._model.begin(rows, first, self._attention_step(num_rows))

    def run(self, num_rows: int) -> None:
        """Launches one pass: computes a token of each row, and draws and notes the next."""
        columns, inputs = self._columns(num_rows), self._inputs_of(num_rows)
        table = self._tables.block_tables[0]
        build_pass_inputs(columns, self._state, self._so_far, table, self._block_size, inputs)
        hidden = self._model.compute(inputs.token_ids, inputs.positions, columns.rows, self._attention_step(num_rows))
        logits = self._model.logits(hidden).float()
        drawn, _ = self._sampler.draw_all(logits, columns.rows, inputs.draw_positions)
        keep_drawn(drawn, self._so_far)

    def _columns(self, num_rows: int) -> PassColumns:
        end = _NUM_ROW_COLUMNS * num_rows
        return PassColumns(*self._piece[:end].view(_NUM_ROW_COLUMNS, num_rows).unbind())

    def _inputs_of(self, num_rows: int) -> PassInputs:
        return PassInputs(*(column[:num_rows] for column in self._inputs))

    def _attention_step(self, num_rows: int) -> PagedAttentionStep:
        """The pass, whose slots and lengths `build_pass_inputs` fills."""
        first_split, inputs = _NUM_ROW_COLUMNS * num_rows, self._inputs_of(num_rows)
        splits = self._piece[first_split : first_split + 4 * self._num_splits(num_rows)]
        return PagedAttentionStep(
            query_start_loc=self._numbers[: num_rows + 1],
            seq_lens=inputs.seq_lens,
            rows=self._columns(num_rows).rows,
            block_tables=self._tables.group_tables[0],
            slot_mapping=inputs.slots,
            block_size=self._block_size,
            decode=DecodeWork(splits.view(-1, 4), _PASS_QUERY_LEN, self._scratch),
            prefill=None,
        )
