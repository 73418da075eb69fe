"""Tokens of steps that a draft model has not followed yet, on the device, and a pass over them.

Owns their memory: of each row as many of its last tokens as it may be behind, each at its position
modulo that number. Which are noted and when they are computed is `deferred_steps`'.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace_backend.worker.device_copies import copy_to_device, indices_on_device
from headrace_backend.worker.plan_columns import Entries, Int64Column, ranges
from headrace_backend.worker.speculation.deferred_steps import DeferredSteps, Noted
from headrace_backend.worker.speculation.followed_passes import FollowedTokens
from headrace_kernels.attention.step import PagedAttentionStep
from headrace_kernels.step_inputs import scatter_int32

# A pass is padded to a power of two of tokens up to this, beyond to a multiple of its half.
_COARSE_FROM = 1024


def padded_tokens(count: int, most: int) -> int:
    """Tokens of a pass over `count` of at most `most`, padding included.

    They are sizes that warm-up runs, for which libraries have loaded their kernels; a pass of any
    other size may load one while a token is waited for.
    """
    padded = 1 << (count - 1).bit_length()
    if padded > _COARSE_FROM:
        padded = -(-count // (_COARSE_FROM // 2)) * (_COARSE_FROM // 2)
    return min(padded, most)


class BlockTables(Protocol):
    """The rows' block tables on a GPU (`step.buffers.DeviceRows`)."""

    # int32 [num_rows + 1, max_blocks] of each cache group: the first's are looked at.
    group_tables: tuple[torch.Tensor, ...]


class NotedTokens:
    """The rows' noted tokens."""

    def __init__(self, deferred: DeferredSteps, tables: BlockTables, block_size: int) -> None:
        """Allocates for all rows.

        Args:
            deferred: Whose tokens are noted, and how many.
            tables: The rows' blocks.
            block_size: Tokens of a block.
        """
        self._deferred, self._block_table, self._block_size = deferred, tables.group_tables[0], block_size
        self._device = self._block_table.device
        size = deferred.num_rows * deferred.window
        self._tokens = torch.zeros(size, dtype=torch.int32, device=self._device)

    def note(self, noted: Noted, token_ids: torch.Tensor) -> None:
        """Notes tokens of a step of which `token_ids`, int64 [num_tokens or more], are computed."""
        size = noted.indices.size
        # Of a step that is deferred all are noted, and what is behind them is padding.
        is_whole = bool(noted.indices[-1] == size - 1)
        chosen = token_ids[:size] if is_whole else token_ids[indices_on_device(noted.indices, self._device)]
        scatter_int32(self._tokens, copy_to_device(noted.places, self._device), chosen)

    def tokens_of(self, entries: Entries, num_padded: int) -> FollowedTokens:
        """Noted tokens of some entries, padded to `num_padded`.

        Their slots are in the blocks that the rows have now.
        """
        rows, positions = np.repeat(entries.rows, entries.counts), ranges(entries.starts, entries.counts)
        places, count = self._deferred.places(rows, positions), rows.size
        columns: Int64Column = np.zeros((4, num_padded), np.int64)
        columns[:, :count] = places, rows, positions, positions // self._block_size
        noted, table_rows, where, table_places = copy_to_device(columns, self._device).unbind()
        slots = self._block_table[table_rows, table_places].long() * self._block_size + where % self._block_size
        slots[count:] = -1
        return FollowedTokens(self._tokens[noted].long(), where, slots)

    def step_of(self, entries: Entries) -> tuple[torch.Tensor, torch.Tensor, PagedAttentionStep]:
        """Ids and positions of noted tokens, int64 [num_tokens], and the pass over them.

        Padding stands behind them, as `padded_tokens` says. How attention is divided is left open.
        """
        num_padded = padded_tokens(entries.num_tokens, self._deferred.max_tokens)
        token_ids, positions, slots = self.tokens_of(entries, num_padded)
        ends = np.cumsum(entries.counts, dtype=np.int32)
        starts = np.concatenate((np.zeros(1, np.int32), ends))
        step = PagedAttentionStep(
            query_start_loc=copy_to_device(starts, self._device),
            seq_lens=copy_to_device(entries.seq_lens, self._device),
            rows=copy_to_device(entries.rows, self._device),
            block_tables=self._block_table,
            slot_mapping=slots,
            block_size=self._block_size,
            decode=None,
            prefill=None,
        )
        # Kernels know the alignment of a step's own positions, and each column here has another.
        return token_ids, positions.clone(), step
