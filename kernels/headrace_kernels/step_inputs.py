"""A step's inputs, made on the device from int32 columns and from what the steps before left there.

Owns the three operations that keep a GPU's step ahead of its results: tokens, positions and slots
from the columns and the last sampled tokens, staged values into the state that lives longer than a
step, and sampled tokens into their rows. Does not own the columns nor the rows' meaning (the
worker). Nothing here waits for the device, and no number of tokens compiles anew.

Launch rule: 256 tokens a program, 4 warps; one program up to 256 rows. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

_BLOCK = 256


def build_step_inputs_reference(
    token_ids: Tensor,
    token_entries: Tensor,
    positions: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    out_token_ids: Tensor,
    out_positions: Tensor,
    out_slots: Tensor,
) -> None:
    """Specification of `build_step_inputs`, in plain PyTorch."""
    is_padding = token_entries < 0
    token_rows = rows[token_entries.clamp(min=0).long()].long()
    token_positions = positions.long().masked_fill(is_padding, 0)
    blocks = block_tables[:, token_rows, token_positions // block_size].long()
    ids = torch.where(token_ids < 0, last_tokens[token_rows], token_ids)
    out_token_ids.copy_(ids.masked_fill(is_padding, 0))
    out_positions.copy_(token_positions)
    slots = out_slots[:, : len(token_ids)]
    slots.copy_((blocks * block_size + token_positions % block_size).masked_fill(is_padding, -1))


@triton.jit(
    do_not_specialize=[
        "token_ids",
        "token_entries",
        "positions",
        "rows",
        "last_tokens",
        "block_tables",
        "out_token_ids",
        "out_positions",
        "out_slots",
        "num_tokens",
        "max_blocks",
        "group_stride",
        "slot_stride",
    ]
)
def _build_kernel(
    token_ids,
    token_entries,
    positions,
    rows,
    last_tokens,
    block_tables,
    out_token_ids,
    out_positions,
    out_slots,
    num_tokens,
    max_blocks,
    group_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program makes the slots of its tokens in one cache group; all make the same ids.
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    mask = offs < num_tokens
    entry = tl.load(token_entries + offs, mask=mask, other=-1)
    mask_used = entry >= 0
    row = tl.load(rows + entry, mask=mask_used, other=0)
    # The id: the plan's, or the row's last sampled one.
    token = tl.load(token_ids + offs, mask=mask_used, other=0)
    token = tl.where(token < 0, tl.load(last_tokens + row, mask=mask_used & (token < 0), other=0), token)
    # The slot: the position's block in the row's table, and the place in it.
    position = tl.load(positions + offs, mask=mask_used, other=0)
    table = block_tables + group * group_stride + row.to(tl.int64) * max_blocks
    block = tl.load(table + position // BLOCK_SIZE, mask=mask_used, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(out_token_ids + offs, token.to(tl.int64), mask=mask)
    tl.store(out_positions + offs, position.to(tl.int64), mask=mask)
    tl.store(out_slots + group * slot_stride + offs, tl.where(mask_used, slot, -1), mask=mask)


def build_step_inputs(
    token_ids: Tensor,
    token_entries: Tensor,
    positions: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    out_token_ids: Tensor,
    out_positions: Tensor,
    out_slots: Tensor,
) -> None:
    """Fills what the model reads of a step: ids, positions and cache slots of its tokens.

    Args:
        token_ids: [num_tokens] int32; -1: the last sampled token of the entry's row.
        token_entries: [num_tokens] int32, the entry that a token belongs to; -1: padding.
        positions: [num_tokens] int32, within the entry's block table.
        rows: [num_entries] int32, the row of each entry.
        last_tokens: [num_rows] int32.
        block_tables: [num_groups, num_rows, max_blocks] int32, contiguous.
        block_size: Tokens per block.
        out_token_ids: [num_tokens] int64, filled; 0 for padding.
        out_positions: [num_tokens] int64, filled; 0 for padding.
        out_slots: [num_groups, num_tokens or more] int64, of whose lines the first `num_tokens` are
            filled; -1 for padding. Each line is in one piece.
    """
    num_tokens, num_groups = token_ids.shape[0], block_tables.shape[0]
    strides = (block_tables.stride(1), block_tables.stride(0), out_slots.stride(0))
    columns = (token_ids, token_entries, positions, rows, last_tokens, block_tables)
    outputs = (out_token_ids, out_positions, out_slots)
    if not uses_triton(token_ids):
        build_step_inputs_reference(*columns, block_size, *outputs)
    elif num_tokens:
        grid = (triton.cdiv(num_tokens, _BLOCK), num_groups)
        _build_kernel[grid](*columns, *outputs, num_tokens, *strides, block_size, _BLOCK, num_warps=4)


def scatter_int32_reference(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Specification of `scatter_int32`, in plain PyTorch."""
    kept = places >= 0
    target.index_copy_(0, places[kept], values[kept].int())


@triton.jit(do_not_specialize=["target", "places", "values", "num_values"])
def _scatter_kernel(target, places, values, num_values, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_values
    place = tl.load(places + offs, mask=mask, other=-1).to(tl.int64)
    tl.store(target + place, tl.load(values + offs, mask=mask, other=0).to(tl.int32), mask=place >= 0)


def scatter_int32(target: Tensor, places: Tensor, values: Tensor) -> None:
    """`target[places[i]] = values[i]`: staged changes of the state that lives longer than a step.

    Args:
        target: [size] int32, changed in place.
        places: [num_values] int64, none twice; -1: nothing is written.
        values: [num_values] int32 or int64.
    """
    if not uses_triton(target):
        scatter_int32_reference(target, places, values)
    else:
        _scatter(target, places, values)


def store_last_tokens_reference(last_tokens: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Specification of `store_last_tokens`, in plain PyTorch."""
    scatter_int32_reference(last_tokens, rows.long(), tokens)


def store_last_tokens(last_tokens: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Notes the tokens just drawn as their rows' last.

    Args:
        last_tokens: [num_rows] int32, changed in place.
        rows: [num_samples] int32; -1: nothing is written. A row that stands there several times
            (the scratch row of padding) gets one of its tokens.
        tokens: [num_samples] int64.
    """
    if not uses_triton(last_tokens):
        store_last_tokens_reference(last_tokens, rows, tokens)
    else:
        _scatter(last_tokens, rows, tokens)


def _scatter(target: Tensor, places: Tensor, values: Tensor) -> None:
    num_values = places.shape[0]
    if num_values:
        _scatter_kernel[(triton.cdiv(num_values, _BLOCK),)](target, places, values, num_values, _BLOCK, num_warps=4)
