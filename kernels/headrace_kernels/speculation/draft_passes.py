"""What passes over one token of each drafted row read, and what they leave for the next.

A drafting model computes a row's last token, draws the first draft, computes that, and so on: a
pass for each draft. All passes of a step are the same launches, which find on the device how many
there were (the *place*), so that one graph serves any number of drafts. Owns the two operations
around such a pass: its inputs from the step's columns and from where rows stand, and the drawn
tokens, which become the next pass's inputs.

Both are one launch, because a pass of a head or a small model is short: what PyTorch does in a
dozen small ones takes as long as a layer.

Launch rule: 256 rows a program, and of drawn tokens one program, 4 warps. Not measured.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.speculation.acceptance import RowState
from headrace_kernels.triton_runtime import uses_triton

_BLOCK = 256


class PassColumns(NamedTuple):
    """A step's drafted rows, int32 [num_rows] each, padding included."""

    rows: Tensor
    # Drafts of each row; 0: padding.
    counts: Tensor
    # Planned positions of the rows' last tokens, which are as large as the real ones or larger.
    bounds: Tensor
    # Planned places in the outputs of what is drawn first.
    output_positions: Tensor


class DraftsSoFar(NamedTuple):
    """What the passes of a step have drawn."""

    # int32 [num_rows or more, num_drafts] contiguous.
    drafts: Tensor
    # int64 [1] drafts that each row has.
    place: Tensor


class PassInputs(NamedTuple):
    """What a pass reads, [num_rows] each.

    A row that has all its drafts stays where its last one is, and takes no part: its id is 0, its
    position 0 and its slot -1.
    """

    # int64
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    # int32: lengths of the rows' contexts, this token included, and the places in their outputs
    # that their draws stand for.
    seq_lens: Tensor
    draw_positions: Tensor


def build_pass_inputs_reference(
    columns: PassColumns,
    state: RowState,
    so_far: DraftsSoFar,
    block_table: Tensor,
    block_size: int,
    inputs: PassInputs,
) -> None:
    """Specification of `build_pass_inputs`, in plain PyTorch."""
    rows, place = columns.rows.long(), so_far.place.int()
    first = state.next_positions[rows]
    is_over = columns.counts <= place
    position = first + torch.minimum(place, columns.counts - 1).clamp(min=0)
    drafted = so_far.drafts[: len(rows), (so_far.place - 1).clamp(min=0)][:, 0]
    token = torch.where(place == 0, state.last_tokens[rows], drafted)
    taken = position.masked_fill(is_over, 0).long()
    slot = block_table[rows, taken // block_size].long() * block_size + taken % block_size
    inputs.token_ids.copy_(token.masked_fill(is_over, 0))
    inputs.positions.copy_(taken)
    inputs.slots.copy_(slot.masked_fill(is_over, -1))
    inputs.seq_lens.copy_(position + 1)
    inputs.draw_positions.copy_(columns.output_positions - (columns.bounds - first) + place)


_COLUMNS = ["rows", "counts", "bounds", "output_positions"]
_OUTPUTS = ["token_ids", "positions", "slots", "seq_lens", "draw_positions"]


@triton.jit(
    do_not_specialize=[*_COLUMNS, *_OUTPUTS, "block_table", "num_rows", "max_blocks"],
    do_not_specialize_on_alignment=[*_COLUMNS, *_OUTPUTS],
)
def build_pass_inputs_kernel(
    rows,
    counts,
    bounds,
    output_positions,
    last_tokens,
    next_positions,
    drafts,
    place,
    block_table,
    token_ids,
    positions,
    slots,
    seq_lens,
    draw_positions,
    num_rows,
    max_blocks,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of rows). Arguments as those of `build_pass_inputs`."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_rows
    depth = tl.load(place).to(tl.int32)
    row = tl.load(rows + offs, mask=mask, other=0).to(tl.int64)
    count = tl.load(counts + offs, mask=mask, other=0)
    first = tl.load(next_positions + row, mask=mask, other=0)
    is_active = mask & (count > depth)
    is_first = depth == 0
    last = tl.load(last_tokens + row, mask=is_active & is_first, other=0)
    drafted = tl.load(drafts + offs * NUM_DRAFTS + depth - 1, mask=is_active & (is_first == 0), other=0)
    position = first + tl.maximum(tl.minimum(depth, count - 1), 0)
    block = tl.load(block_table + row * max_blocks + position // BLOCK_SIZE, mask=is_active, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    # Of rows that take no part zeros were loaded.
    tl.store(token_ids + offs, (last + drafted).to(tl.int64), mask=mask)
    tl.store(positions + offs, tl.where(is_active, position, 0).to(tl.int64), mask=mask)
    tl.store(slots + offs, tl.where(is_active, slot, -1), mask=mask)
    tl.store(seq_lens + offs, position + 1, mask=mask)
    planned = tl.load(output_positions + offs, mask=mask, other=0) - tl.load(bounds + offs, mask=mask, other=0)
    tl.store(draw_positions + offs, planned + first + depth, mask=mask)


def build_pass_inputs(
    columns: PassColumns,
    state: RowState,
    so_far: DraftsSoFar,
    block_table: Tensor,
    block_size: int,
    inputs: PassInputs,
) -> None:
    """Fills what a pass reads: of each row the token behind those that were computed.

    In a step's first pass that is the row's last token, and then the draft drawn before.

    Args:
        columns: The drafted rows.
        state: Last tokens of all rows and their positions, as they stand.
        so_far: What the step's passes have drawn.
        block_table: int32 [rows, max_blocks] contiguous.
        block_size: Tokens of a block.
        inputs: Filled.
    """
    if not uses_triton(columns.rows):
        build_pass_inputs_reference(columns, state, so_far, block_table, block_size, inputs)
        return
    num_rows = columns.rows.shape[0]
    if num_rows:
        arguments = (*columns, *state, *so_far, block_table, *inputs, num_rows, block_table.stride(0))
        constants = (so_far.drafts.shape[1], block_size, _BLOCK)
        build_pass_inputs_kernel[(triton.cdiv(num_rows, _BLOCK),)](*arguments, *constants, num_warps=4)


def keep_drawn_reference(drawn: Tensor, so_far: DraftsSoFar) -> None:
    """Specification of `keep_drawn`, in plain PyTorch."""
    so_far.drafts[: len(drawn)].index_copy_(1, so_far.place, drawn.int()[:, None])
    so_far.place.add_(1)


@triton.jit(do_not_specialize=["num_rows"])
def keep_drawn_kernel(drawn, drafts, place, num_rows, NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program. Arguments as those of `keep_drawn`."""
    depth = tl.load(place)
    for start in range(0, num_rows, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_rows
        token = tl.load(drawn + offs, mask=mask, other=0).to(tl.int32)
        tl.store(drafts + offs * NUM_DRAFTS + depth, token, mask=mask)
    # All threads have read before one writes.
    tl.debug_barrier()
    tl.store(place, depth + 1)


def keep_drawn(drawn: Tensor, so_far: DraftsSoFar) -> None:
    """Keeps what a pass drew as the rows' next draft, and counts the pass.

    Args:
        drawn: int64 [num_rows].
        so_far: What the passes before drew, at most num_drafts - 1 of each row; changed in place.
    """
    if not uses_triton(drawn):
        keep_drawn_reference(drawn, so_far)
    elif num_rows := drawn.shape[0]:
        keep_drawn_kernel[(1,)](drawn, *so_far, num_rows, so_far.drafts.shape[1], _BLOCK, num_warps=4)
