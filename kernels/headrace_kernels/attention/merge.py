"""Merging the partial results of rows whose context several programs shared.

Each program of `attention.decode`, and of a tile that `attention.prefill` has several for, leaves a
result and its logarithmic sum to base 2, by which they are weighted.

Owns the arithmetic (`store_merged`, `store_share`), which the last program of a row or tile to
finish does, and how many results it has in flight. Partial results lie as [place, key/value head,
query row, head_dim] in fp32, query row r being token r // group of head r % group; a row's or
tile's places follow each other. They are merged in the order of the splits, so a result's bits do
not depend on who was last.
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
# Numbers of a head that a tile's results are merged by at a time, for registers.
_DIMS_AT_ONCE = tl.constexpr(32)


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


@triton.jit
def share_of(begin, full_begin, full_end, end, number, count, TILE: tl.constexpr):
    """The part of a tile's ranges of keys (`prefill.key_ranges`) that its share `number` sees.

    Returns the ranges, and how many of the `count` shares see any keys: the others, of a layer that
    sees less than the plan's, have nothing to do.
    """
    num_tiles = (end - begin + TILE - 1) // TILE
    each = (num_tiles + count - 1) // count
    first = begin + number * each * TILE
    last = tl.minimum(first + each * TILE, end)
    full_begin = tl.minimum(tl.maximum(full_begin, first), last)
    full_end = tl.minimum(tl.maximum(full_end, first), last)
    return first, full_begin, full_end, last, (num_tiles + each - 1) // each


@triton.jit
def store_share(
    acc, largest, total, partial, lse, done, output, offs_out, mask_row, place, kv_head, number, count,
    SHAPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the result of a share; the last one of its tile merges all `count` of them.

    `place` is that of the share's result; places of a tile's shares follow each other. acc is
    [ROWS, padded_dim], largest and total are [ROWS], offs_out [ROWS] is where rows of the output
    begin.
    """
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    mask = mask_row[:, None] & (offs_dim < SHAPE.head_dim)[None, :]
    # A row may have seen nothing of the share: what its keys left in the sums is nothing then.
    saw = largest > -1.0e29
    offs_part = (place * SHAPE.num_kv_heads + kv_head).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(partial + offs_part[:, None] * SHAPE.head_dim + offs_dim[None, :], acc / total[:, None], mask=mask)
    tl.store(lse + offs_part, tl.where(saw, largest + tl.log2(total), -1.0e30), mask=mask_row)
    counter = done + (place - number) * SHAPE.num_kv_heads + kv_head
    # All warps have stored; then one thread releases it for the card.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.store(counter, 0)
        _merge_shares(partial, lse, output, offs_out, mask_row, place - number, kv_head, count, SHAPE, ROWS)


@triton.jit
def _merge_shares(
    partial, lse, output, offs_out, mask_row, first, kv_head, count, SHAPE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    offs_row = tl.arange(0, ROWS)
    stride = SHAPE.num_kv_heads * ROWS
    log_sums = lse + (first * SHAPE.num_kv_heads + kv_head) * ROWS + offs_row
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    # From L2: other multiprocessors wrote them while this one's L1 may have been filled.
    for number in tl.range(0, count):
        log_sum = tl.load(log_sums + number * stride, mask=mask_row, other=-1.0e30, cache_modifier=".cg")
        largest = tl.maximum(largest, log_sum)
    for start in tl.range(0, SHAPE.padded_dim, _DIMS_AT_ONCE, num_stages=1):
        offs_dim = start + tl.arange(0, _DIMS_AT_ONCE)
        mask = mask_row[:, None] & (offs_dim < SHAPE.head_dim)[None, :]
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, _DIMS_AT_ONCE], tl.float32)
        for number in tl.range(0, count):
            log_sum = tl.load(log_sums + number * stride, mask=mask_row, other=-1.0e30, cache_modifier=".cg")
            place = ((first + number) * SHAPE.num_kv_heads + kv_head).to(tl.int64) * ROWS
            offs_part = (place + offs_row)[:, None] * SHAPE.head_dim + offs_dim[None, :]
            part = tl.load(partial + offs_part, mask=mask, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(log_sum - largest)
            total += weight
            acc += part * weight[:, None]
        result = (acc / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + offs_out[:, None] + offs_dim[None, :], result, mask=mask)
