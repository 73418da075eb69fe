"""States that lie beside the keys of a cache, and which of them stands before a token.

A head that drafts reads a token with the state of the one before it, which lies in that token's
slot, wherever it was computed. Owns the lookup: entry, row, block and line of each token, and the
copy of the line.

Launch rule: a program copies a token's state, in pieces of 1,024 elements, 4 warps. Not measured.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

_PIECE = 1024


class TokenBlocks(NamedTuple):
    """The blocks of a step's tokens, by entry."""

    # int32 [num_entries + 1] the first token of each entry; those behind the last entry's are
    # padding, which has any entry's blocks.
    query_start_loc: Tensor
    # int32 [num_entries] whose line of the table an entry has; None: its own number's.
    rows: Tensor | None
    # int32 [rows or entries, max_blocks] contiguous.
    block_table: Tensor


def gather_states_before_reference(
    states: Tensor, positions: Tensor, tokens: TokenBlocks, out: Tensor, places: Tensor | None = None
) -> None:
    """Specification of `gather_states_before`, in plain PyTorch."""
    starts, block_size = tokens.query_start_loc, states.shape[1]
    numbers = torch.arange(len(positions), dtype=starts.dtype, device=starts.device)
    entries = (torch.searchsorted(starts, numbers, right=True) - 1).clamp_(max=len(starts) - 2)
    lines = entries if tokens.rows is None else tokens.rows[entries].long()
    before = (positions - 1).clamp_(min=0).long()
    blocks = tokens.block_table[lines, before // block_size].long()
    found = states.flatten(0, 1)[blocks * block_size + before % block_size]
    found.masked_fill_((positions == 0)[:, None], 0)
    if places is None:
        out.copy_(found)
    else:
        out.index_copy_(0, places.long(), found)


_COLUMNS = ["positions", "query_start_loc", "rows", "places"]


@triton.jit(
    do_not_specialize=[*_COLUMNS, "block_table", "num_entries", "max_blocks"],
    do_not_specialize_on_alignment=_COLUMNS,
)
def gather_states_before_kernel(
    states,
    positions,
    query_start_loc,
    rows,
    block_table,
    out,
    places,
    num_entries,
    max_blocks,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Program (token). Arguments as those of `gather_states_before`."""
    token = tl.program_id(0)
    # The last entry that begins at the token or before it.
    low = token * 0
    high = low + num_entries
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(query_start_loc + middle) <= token
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    line = tl.load(rows + low).to(tl.int64)
    position = tl.load(positions + token)
    before = tl.maximum(position - 1, 0).to(tl.int32)
    block = tl.load(block_table + line * max_blocks + before // BLOCK_SIZE).to(tl.int64)
    source = states + (block * BLOCK_SIZE + before % BLOCK_SIZE) * SIZE
    place = token.to(tl.int64)
    if places is not None:
        place = tl.load(places + token).to(tl.int64)
    for start in tl.static_range(0, SIZE, PIECE):
        offs = start + tl.arange(0, PIECE)
        state = tl.load(source + offs, mask=(offs < SIZE) & (position > 0), other=0.0)
        tl.store(out + place * SIZE + offs, state, mask=offs < SIZE)


def gather_states_before(
    states: Tensor, positions: Tensor, tokens: TokenBlocks, out: Tensor, places: Tensor | None = None
) -> None:
    """Copies the state of the token before each of a step's; zeros before a sequence's first.

    Args:
        states: [num_blocks, block_size, size] contiguous.
        positions: int32 or int64 [num_tokens].
        tokens: The tokens' blocks, with rows on a GPU.
        out: [num_tokens, size] contiguous, of the states' type, filled; with `places` its lines.
        places: int32 [num_tokens] which line of `out` a token's state becomes; one that stands
            there several times (the scratch row of padding) gets one of its tokens' states.
    """
    if not uses_triton(states):
        gather_states_before_reference(states, positions, tokens, out, places)
    elif num_tokens := positions.shape[0]:
        assert tokens.rows is not None, "a GPU's block table has a line for each row"
        _, block_size, size = states.shape
        columns = (states, positions, *tokens, out, places)
        sizes = (tokens.rows.shape[0], tokens.block_table.stride(0), size, block_size)
        piece = min(_PIECE, triton.next_power_of_2(size))
        gather_states_before_kernel[(num_tokens,)](*columns, *sizes, piece, num_warps=4)
