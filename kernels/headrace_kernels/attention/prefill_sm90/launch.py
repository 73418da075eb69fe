"""Launches of prefill attention on sm_90, and which caches and heads take them.

Owns where keys and values lie for the kernel: in the blocks of the cache, or gathered in one piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.attention.prefill_sm90 import kernel
from headrace_kernels.attention.prefill_sm90.items import LONG_TILE, ROWS, SHORT_TILE
from headrace_kernels.attention.step import GatheredContext, PagedAttentionStep, PrefillWork
from headrace_kernels.attention.tiles import LOG2_E
from headrace_kernels.hopper.launch import tile_descriptor


class _Source(NamedTuple):
    """Keys and values of a launch, as rows of one head's numbers."""

    # [num_rows, head_dim] keys and values; these `half_rows` rows behind those.
    rows: Tensor
    half_rows: int
    num_kv_heads: int
    # Keys that lie behind one another, and rows from one head's keys in a block to the next head's;
    # 0: a context is in one piece.
    page: int
    head_rows: int
    # int32 [num_entries]: rows of the block tables, or slots of position 0.
    places: Tensor
    tables: Tensor | None
    # Rows of a head, where contexts are in one piece.
    capacity: int


def takes_prefill_sm90(device: torch.device, head_dim: int) -> bool:
    """Whether the kernel attends with such heads, of a 16-bit type, on this GPU."""
    return card.has_warpgroup_instructions(device) and head_dim in (64, 128)


def takes_blocks_sm90(num_heads: int, dtype: torch.dtype, kv_cache: Tensor, tile_tokens: int | None = None) -> bool:
    """Whether the kernel attends to keys and values of this cache, read from their blocks.

    Args:
        num_heads: Query heads.
        dtype: Their type.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim].
        tile_tokens: Query tokens of the step's tiles; None: as many as this layer's.
    """
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    if not takes_prefill_sm90(kv_cache.device, head_dim) or dtype.itemsize != 2 or kv_cache.dtype != dtype:
        return False
    are_tiles = tile_tokens is None or tile_tokens == ROWS // (num_heads // num_kv_heads)
    # A block is whole rows of a pattern in shared memory, and a tile whole blocks.
    return are_tiles and block_size % 8 == 0 and SHORT_TILE % block_size == 0 and kv_cache.stride(2) % head_dim == 0


def attend_blocks_sm90(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    work: PrefillWork,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    sinks: Tensor | None,
) -> None:
    """Fills the rows of `output` that belong to the tiles, keys and values read from their blocks.

    Arguments as `attention.prefill.prefill_attention`, a cache that `takes_blocks_sm90`.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    head_rows = kv_cache.stride(2) // head_dim
    num_rows = (2 * num_blocks * num_kv_heads - 1) * head_rows + block_size
    rows = kv_cache.as_strided((num_rows, head_dim), (head_dim, 1))
    half_rows = num_kv_heads * head_rows
    source = _Source(rows, half_rows, num_kv_heads, block_size, head_rows, step.rows, step.block_tables, 0)
    _launch(query, source, step, work, scale, sliding_window, output, sinks)


def attend_gathered_sm90(
    query: Tensor,
    step: PagedAttentionStep,
    tiles: Tensor,
    gathered: GatheredContext,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    sinks: Tensor | None,
) -> None:
    """Fills the rows of `output` that belong to the tiles; arguments as `gathered_attention`.

    The contexts have been gathered.
    """
    _, num_kv_heads, capacity, head_dim = gathered.scratch.context.shape
    rows, half_rows = gathered.scratch.context.view(-1, head_dim), num_kv_heads * capacity
    source = _Source(rows, half_rows, num_kv_heads, LONG_TILE, 0, gathered.offsets, None, capacity)
    _launch(query, source, step, PrefillWork(tiles, gathered), scale, sliding_window, output, sinks)


def _launch(
    query: Tensor,
    source: _Source,
    step: PagedAttentionStep,
    work: PrefillWork,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    sinks: Tensor | None,
) -> None:
    num_heads, head_dim = query.shape[1:]
    scratch, tables = work.scratch, source.tables
    shares = (None,) * 4 if scratch is None else (work.shares, scratch.partial, scratch.lse, scratch.done)
    num_items = work.tiles.shape[0] * source.num_kv_heads
    kernel.prefill_kernel_sm90[(min(num_items, card.multiprocessors(query.device)),)](
        query, tile_descriptor(source.rows, source.page, head_dim), output, work.tiles, *shares, source.places,
        step.query_start_loc, step.seq_lens, tables, query.stride(0), source.half_rows,
        0 if tables is None else tables.stride(0), source.capacity, scale * LOG2_E, sliding_window or 0, num_items,
        sinks, NUM_HEADS=num_heads, KV_HEADS=source.num_kv_heads, DIM=head_dim, PAGE=source.page,
        HEAD_ROWS=source.head_rows, WINDOWED=sliding_window is not None, num_warps=4,
    )  # fmt: skip
