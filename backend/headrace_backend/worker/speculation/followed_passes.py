"""A draft model's passes over tokens that the target computed, at sizes that are captured.

Owns which sizes those are, and the memory of their inputs, at addresses that graphs hold: tokens,
and the columns that attention reads. A pass of fewer tokens is padded to one of them. All entries
are the prefill kernel's, however short they are: a row is mostly some dozens of tokens behind, and
one kernel a layer is less than two. When passes are launched, and from which graphs, is
`gpu_draft_model`'s.

    tokens on the device   (noted, or of the step at hand) -> token_ids, positions, slots
    entries on the host    -> columns of int32, one copy   -> PagedAttentionStep
"""

from __future__ import annotations

import itertools
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from headrace_backend.worker.device_copies import staging_memory
from headrace_backend.worker.plan_columns import Entries
from headrace_kernels.attention.plan import Int32Column, max_prefill_tiles, plan_prefill
from headrace_kernels.attention.step import PagedAttentionStep, PrefillWork, ShareScratch

# Tokens of the passes that are captured. Up to some 128 a pass takes what its weights take to read,
# and beyond 1,024 its arithmetic takes longer than the host takes to launch it in several graphs.
# Reckoned for 1B in bf16 on an H200, not measured.
_SIZES = (64, 128, 256, 512, 1024)
# Columns start at multiples of this many entries (16 bytes), so that kernels may read them in wide
# words.
_ALIGNMENT = 4
_NO_SLOT = -1


def followed_sizes(max_tokens: int) -> tuple[int, ...]:
    """Tokens of the passes to capture where a step has at most so many, ascending."""
    return tuple(size for size in _SIZES if size <= max_tokens)


class FollowedTokens(NamedTuple):
    """Tokens on the device, with padding behind them that has no slot."""

    # int64 [num_tokens], all three.
    token_ids: torch.Tensor
    positions: torch.Tensor
    # Where each token's key and value go; -1: nowhere.
    slots: torch.Tensor


class FollowedHeads(NamedTuple):
    """The draft model's attention, and its scratch."""

    num_heads: int
    num_kv_heads: int
    # Query tokens of a prefill tile.
    tile_tokens: int
    scratch: ShareScratch
    # Whether the prefill kernel's programs take one tile after the other.
    persistent: bool = False


Column = TypeVar("Column", Int32Column, torch.Tensor)


class _Columns(NamedTuple, Generic[Column]):
    """What attention reads of a pass beside slots, int32, on the host or on the card."""

    # [num_entries + 1], and [num_entries] the next two.
    query_start_loc: Column
    seq_lens: Column
    rows: Column
    # See `attention.plan.PrefillColumns`: [num_tiles * 2] and [num_tiles * 3].
    tiles: Column
    shares: Column


class FollowedPasses:
    """Inputs of the passes of all sizes, which share their memory."""

    def __init__(
        self, sizes: tuple[int, ...], heads: FollowedHeads, scratch_row: int, block_table: torch.Tensor, block_size: int
    ) -> None:
        """Allocates for the largest.

        Args:
            sizes: Tokens of passes, ascending; none: nothing is padded.
            heads: The draft model's attention.
            scratch_row: The row that padding uses, behind all others.
            block_table: int32 [num_rows + 1 or more, max_blocks].
            block_size: Tokens of a block.
        """
        self.sizes = sizes
        self._heads, self._scratch_row = heads, scratch_row
        self._block_table, self._block_size = block_table, block_size
        self._device = block_table.device
        most = max(sizes, default=0)
        self._tokens = FollowedTokens(*torch.zeros(3, most, dtype=torch.int64, device=self._device))
        piece_size = self._starts(most)[-1] if sizes else 0
        self._piece = torch.zeros(piece_size, dtype=torch.int32, device=self._device)

    def size_of(self, num_tokens: int) -> int | None:
        """Tokens of the smallest pass that holds so many; None: there is no such pass."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def fill(self, size: int, entries: Entries, tokens: FollowedTokens, seq_lens: torch.Tensor | None = None) -> None:
        """Makes the pass of a size that of some entries, behind earlier work.

        Args:
            size: One of the sizes, which holds the entries.
            entries: At least one. Where the device knows better, their starts are upper bounds.
            tokens: Their tokens, and as much padding as there is.
            seq_lens: int32 [num_entries or more] lengths of context as the device knows them; None:
                those of the entries are exact.
        """
        for own, given, padding in zip(self._tokens, tokens, (0, 0, _NO_SLOT), strict=True):
            count = min(len(given), size)
            own[:count].copy_(given[:count])
            if count < size:
                own[count:size].fill_(padding)
        self._upload(size, entries)
        if seq_lens is not None:
            count = entries.rows.size
            self._split(self._piece, size).seq_lens[:count].copy_(seq_lens[:count])

    def fill_padding(self, size: int) -> None:
        """Makes the pass of a size one in which nothing takes part."""
        self._tokens.slots[:size].fill_(_NO_SLOT)
        nobody = np.empty(0, np.int32)
        self._upload(size, Entries(nobody, nobody, nobody))

    def inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor, PagedAttentionStep]:
        """Ids and positions of a pass's tokens, int64 [size], and the pass, as it was filled."""
        columns, heads = self._split(self._piece, size), self._heads
        tiles, shares = columns.tiles.view(-1, 2), columns.shares.view(-1, 3)
        step = PagedAttentionStep(
            query_start_loc=columns.query_start_loc,
            seq_lens=columns.seq_lens,
            rows=columns.rows,
            block_tables=self._block_table,
            slot_mapping=self._tokens.slots[:size],
            block_size=self._block_size,
            decode=None,
            prefill=PrefillWork(tiles, None, heads.tile_tokens, shares, heads.scratch),
        )
        return self._tokens.token_ids[:size], self._tokens.positions[:size], step

    def _lengths(self, size: int) -> tuple[int, ...]:
        num_entries = min(size, self._scratch_row)
        num_tiles = max_prefill_tiles(size, num_entries, self._heads.tile_tokens)
        return num_entries + 1, num_entries, num_entries, 2 * num_tiles, 3 * num_tiles

    def _starts(self, size: int) -> list[int]:
        aligned = (-(-length // _ALIGNMENT) * _ALIGNMENT for length in self._lengths(size))
        return [0, *itertools.accumulate(aligned)]

    def _split(self, piece: Column, size: int) -> _Columns[Column]:
        """The columns of a pass of a size, as views of a piece of memory."""
        pairs = zip(self._starts(size), self._lengths(size), strict=False)
        return _Columns(*(piece[start : start + length] for start, length in pairs))

    def _upload(self, size: int, entries: Entries) -> None:
        """Sends the columns of a pass, padding included."""
        host = staging_memory(self._starts(size)[-1], torch.int32, self._device)
        columns, count = self._split(host.numpy(), size), entries.rows.size
        columns.query_start_loc[0] = 0
        columns.query_start_loc[1 : count + 1] = np.cumsum(entries.counts)
        columns.query_start_loc[count + 1 :] = entries.num_tokens
        columns.seq_lens[:count], columns.seq_lens[count:] = entries.seq_lens, 0
        columns.rows[:count], columns.rows[count:] = entries.rows, self._scratch_row
        work = plan_prefill(
            entries.counts,
            entries.seq_lens,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.tile_tokens,
            max_query_len=0,
            num_tiles_padded=columns.tiles.size // 2,
            persistent=self._heads.persistent,
        )
        columns.tiles[:], columns.shares[:] = work.tiles.reshape(-1), work.shares.reshape(-1)
        self._piece[: host.numel()].copy_(host, non_blocking=True)
