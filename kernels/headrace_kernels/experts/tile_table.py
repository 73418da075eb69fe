"""Which expert each tile of sorted pairs is of, written down once for all programs.

A program that multiplies many tiles one after the other reads its tiles' experts ahead here, where
it would else find each among the starts of all (`mixture_kernels.expert_of_tile`).
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.routing import SortedPairs
from headrace_kernels.triton_runtime import uses_triton

# Tiles that a program writes at a time.
_WRITTEN = 64


class TileTable(NamedTuple):
    """The tiles of all experts, in their order; an expert has as many as hold its pairs."""

    # [1] int32.
    num_tiles: Tensor
    # [most tiles] int32: a tile's expert, and the place of its first pair. Behind the last tile
    # they mean nothing.
    experts: Tensor
    firsts: Tensor


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Tiles of `block_m` pairs that there can be, however the pairs fall to the experts.

    Each expert that has pairs has one tile that is not full at most.
    """
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // block_m


def tile_table_reference(pairs: SortedPairs, block_m: int) -> TileTable:
    """Specification of `tile_table`, in plain PyTorch."""
    starts = pairs.starts.tolist()
    found = [
        (expert, first)
        for expert, (begin, end) in enumerate(zip(starts, starts[1:], strict=False))
        for first in range(begin, end, block_m)
    ]
    room = most_tiles(len(pairs.order), len(starts) - 1, block_m)
    filled = [*found, *[(0, 0)] * (room - len(found))]
    experts, firsts = torch.tensor(filled, dtype=torch.int32, device=pairs.starts.device).view(-1, 2).unbind(1)
    return TileTable(experts.new_tensor([len(found)]), experts.contiguous(), firsts.contiguous())


@triton.jit
def _table_kernel(
    starts_ptr, count_ptr, experts_ptr, firsts_ptr,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (expert): counts the tiles of the experts before it, then writes its own."""
    if EARLY:
        # What is behind finds the sort's results behind its own wait then.
        grid_before_is_done()
        grid_behind_may_start()
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_EXPERTS)
    begins = tl.load(starts_ptr + e, mask=e < NUM_EXPERTS, other=0)
    ends = tl.load(starts_ptr + e + 1, mask=e < NUM_EXPERTS, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    own = tl.sum(tl.where(e == expert, tiles, 0), 0)
    begin = tl.sum(tl.where(e == expert, begins, 0), 0)
    if expert == NUM_EXPERTS - 1:
        tl.store(count_ptr, before + own)
    for first in tl.range(0, own, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        tl.store(experts_ptr + before + tile, tl.zeros_like(tile) + expert, mask=tile < own)
        tl.store(firsts_ptr + before + tile, begin + tile * BLOCK_M, mask=tile < own)


def tile_table(pairs: SortedPairs, block_m: int) -> TileTable:
    """Writes down the tiles of sorted pairs.

    Args:
        pairs: Pairs sorted by expert.
        block_m: Pairs of a tile.
    """
    if not uses_triton(pairs.starts):
        return tile_table_reference(pairs, block_m)
    num_experts, starts = len(pairs.starts) - 1, pairs.starts
    room, early = most_tiles(len(pairs.order), num_experts, block_m), card.launches_early(starts.device)
    table = TileTable(starts.new_empty(1), starts.new_empty(room), starts.new_empty(room))
    _table_kernel[(num_experts,)](
        starts, *table,
        NUM_EXPERTS=num_experts, BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_M=block_m, BLOCK=_WRITTEN,
        EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return table
