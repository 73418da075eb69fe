"""Merging the partial results of rows whose context several programs shared.

Each program of `attention.decode` leaves a result and its logarithmic sum, by which they are
weighted.

Owns the arithmetic (`store_merged`), which the last program of a row to finish does, and how many
results it has in flight. Partial results lie as [place, key/value head, query row, head_dim] in
fp32, query row r being token r // group of head r % group; a row's places follow each other. They
are merged in the order of the splits, so a result's bits do not depend on who was last.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# fp32 numbers of partial results that a thread of the split kernel has in flight: half its
# registers, for the tiles of keys are done with by then. Longer queries and wider heads, whose
# tiles need all registers, would spill with as many.
_THREAD_NUMBERS, _THREAD_NUMBERS_OF_LARGE = 128, 64
# One row of 128k takes 129.9 us with 16 on an H200, 134.4 with 8 (docs/experiments.md).
_MOST_AT_ONCE = 16


def merged_at_once(query_rows: int, dim: int, warps: int) -> int:
    """Partial results that are loaded at a time, a power of two.

    Splits have `query_rows` query rows, heads of `dim` numbers in registers and `warps` warps.

    It knows no batch: a model has one way for each class of query lengths.
    """
    numbers = _THREAD_NUMBERS if query_rows <= 16 and dim <= 128 else _THREAD_NUMBERS_OF_LARGE
    room: int = numbers * 32 * warps // (triton.next_power_of_2(query_rows) * dim)
    return max(1, min(room, _MOST_AT_ONCE))


@triton.jit
def _merged(
    partial,
    lse,
    first,
    count,
    offs_row,
    mask_row,
    SHAPE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Adds up `count` splits from place `first` on, for the rows `offs_row` [merged_rows].

    Returns [merged_rows, padded_dim] in fp32.
    """
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    mask_dim = offs_dim < SHAPE.head_dim
    largest = tl.full([SPLIT.merged_rows], -1.0e30, tl.float32)
    total = tl.full([SPLIT.merged_rows], 0.0, tl.float32)
    acc = tl.full([SPLIT.merged_rows, SHAPE.padded_dim], 0.0, tl.float32)
    # Splits in the middle: a thread holds all of them for the same numbers and adds them up for
    # itself.
    for start in tl.range(0, count, SPLIT.at_once):
        number = start + tl.arange(0, SPLIT.at_once)
        mask = mask_row[:, None] & (number < count)[None, :]
        offs = (first + number)[None, :] * (SPLIT.query_len * SHAPE.num_heads) + offs_row[:, None]
        # From L2: other multiprocessors wrote them while this one's L1 may have been filled.
        log_sum = tl.load(lse + offs, mask=mask, other=-1.0e30, cache_modifier=".cg")
        part = tl.load(
            partial + offs[:, :, None] * SHAPE.head_dim + offs_dim[None, None, :],
            mask=mask[:, :, None] & mask_dim[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(log_sum, 1))
        shrink = tl.exp2(largest - new_largest)
        # Splits that do not exist must not count even where all that do are hidden.
        weights = tl.where(mask, tl.exp2(log_sum - new_largest[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], 1)
        largest = new_largest
    return acc / tl.where(mask_row, total, 1.0)[:, None]


@triton.jit
def store_merged(
    output,
    partial,
    lse,
    first,
    count,
    first_token,
    num_tokens,
    first_query,
    kv_head,
    SHAPE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Writes the merged results of a key/value head's query rows to the output.

    The rows are those of the entry's query tokens from `first_query` on that a program takes; rows
    beyond the entry's tokens are left out.
    """
    GROUP: tl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    rows = tl.arange(0, SPLIT.merged_rows)
    token = first_query + rows // GROUP
    mask_row = (token < tl.minimum(num_tokens, SPLIT.query_len)) & (rows < SPLIT.part_len * GROUP)
    offs_row = (kv_head * SPLIT.query_len + first_query) * GROUP + rows
    result = _merged(partial, lse, first, count, offs_row, mask_row, SHAPE, SPLIT)
    head = kv_head * GROUP + rows % GROUP
    offs_out = ((first_token + token).to(tl.int64) * SHAPE.num_heads + head) * SHAPE.head_dim
    offs_dim = tl.arange(0, SHAPE.padded_dim)[None, :]
    mask = mask_row[:, None] & (offs_dim < SHAPE.head_dim)
    tl.store(output + offs_out[:, None] + offs_dim, result.to(output.dtype.element_ty), mask=mask)
