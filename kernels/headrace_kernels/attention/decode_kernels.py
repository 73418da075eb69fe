"""The Triton kernels behind `attention.decode`, and the steps that both share.

Owns one program's work: which part of a row's context it reads, Q and the new token's key and
value, the softmax over the cache, and who merges. `decode_kernel` takes rotated queries, whose keys
and values the cache holds already; `raw_decode_kernel` takes the heads of a projection, which it
norms, rotates and writes.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.attention.merge import store_merged
from headrace_kernels.attention.quantized import absorb_quantized, divided_query, first_unit
from headrace_kernels.attention.quantized_kv import quantized_heads
from headrace_kernels.attention.rope_kv import (
    head_planes,
    mean_squares,
    numbers_with_partners,
    rotated_heads,
    rotation_rows,
)
from headrace_kernels.attention.tiles import absorb, absorb_sinks, key_offsets
from headrace_kernels.attention.transposed import absorb_context
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start

# Columns are views into one buffer, at addresses that change with their sizes: alignment must not
# decide what is compiled.
_COLUMNS = ["splits", "query_start_loc", "seq_lens", "table_rows", "slot_mapping"]


@triton.jit
def _split_columns(splits, query_start_loc, seq_lens, table_rows, block_tables, table_stride):
    """A program's split: (entry, number, count, place, first token, tokens, context, block table).

    The first four are the split's columns, the rest is its entry's. Entry -1: there is none, and
    the rest means nothing.

    A kernel that starts early reads them before it waits: they are written before the model's pass,
    whose first kernel (the embedding's) starts only when all before it have ended.
    """
    item = splits + tl.program_id(1) * 4
    entry = tl.load(item)
    safe = tl.maximum(entry, 0)
    first_token = tl.load(query_start_loc + safe)
    num_tokens = tl.load(query_start_loc + safe + 1) - first_token
    seq_len = tl.load(seq_lens + safe)
    table = block_tables + tl.load(table_rows + safe).to(tl.int64) * table_stride
    return entry, tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), first_token, num_tokens, seq_len, table


@triton.jit
def _bounds(seq_len, num_tokens, index, count, window, WINDOWED: tl.constexpr):
    """Positions that split `index` of `count` reads: (first that any query token sees, begin, end).

    Splits are multiples of 64 tokens (`plan.SPLIT_MULTIPLE`).
    """
    first_seen = 0
    if WINDOWED:
        first_seen = tl.maximum(seq_len - num_tokens - window + 1, 0)
    begin = first_seen // 64 * 64
    tokens_per_split = tl.cdiv(seq_len - begin, count * 64) * 64
    begin += index * tokens_per_split
    return first_seen, begin, tl.minimum(begin + tokens_per_split, seq_len)


@triton.jit
def _query_rows(
    query, query_stride, first_token, num_tokens, first_query, kv_head, SHAPE: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """The rows of Q and where they begin: (token, head, mask, pointer), each [rows].

    Row r is query token `first_query` + r // group of head r % group within the group.
    """
    GROUP: tl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    offs_row = tl.arange(0, SPLIT.rows)
    token, head = first_query + offs_row // GROUP, kv_head * GROUP + offs_row % GROUP
    mask_row = (token < tl.minimum(num_tokens, SPLIT.query_len)) & (offs_row < SPLIT.part_len * GROUP)
    places = query + (first_token + token).to(tl.int64) * query_stride + head * SHAPE.head_dim
    return token, head, mask_row, places


@triton.jit
def _absorb_cached(
    acc, largest, total, unit, q, position, first_seen, begin, end, window, table, kv_head, kv_cache, scales,
    score_scale,
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attends to the cached positions `begin` to `end`.

    Q [rows, padded_dim] belongs to tokens at `position` [rows]. Returns acc, largest, total, unit;
    unit counts in a quantized cache only (`attention.quantized`).
    """
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    mask_dim = offs_dim < SHAPE.head_dim
    if SHAPE.kind != "":
        q, row_scales = divided_query(q, score_scale)
    if SPLIT.is_transposed:
        acc, largest, total, unit = absorb_context(
            acc, largest, total, unit, q, row_scales, position, begin, end, first_seen, window, table, kv_head,
            kv_cache, scales, SHAPE, SPLIT,
        )  # fmt: skip
    else:
        for start in tl.range(begin, end, SPLIT.tile, num_stages=SPLIT.stages):
            positions = start + tl.arange(0, SPLIT.tile)
            mask_key = positions < end
            if SPLIT.is_windowed:
                mask_key = mask_key & (positions >= first_seen)
            offs_key = key_offsets(table, positions, mask_key, kv_head, SHAPE)
            key = kv_cache + offs_key[:, None] + offs_dim[None, :]
            # Slots that were never written may hold NaN: they are not loaded, for 0 times NaN is
            # NaN.
            mask_load = mask_key[:, None] & mask_dim[None, :]
            k = tl.load(key, mask=mask_load, other=0.0)
            v = tl.load(key + SHAPE.num_kv_heads * SHAPE.tile_stride, mask=mask_load, other=0.0)
            seen = mask_key[None, :]
            if SPLIT.query_len > 1:
                seen = seen & (positions[None, :] <= position[:, None])
                if SPLIT.is_windowed:
                    seen = seen & (positions[None, :] > position[:, None] - window)
            if SHAPE.kind != "":
                acc, largest, total, unit = absorb_quantized(
                    acc, largest, total, unit, q, row_scales, k, v, scales, offs_key, positions, mask_key, seen,
                    SHAPE, True,
                )  # fmt: skip
            else:
                acc, largest, total = absorb(acc, largest, total, q, k, v, seen, score_scale, True, SHAPE.fp32_dot)
    return acc, largest, total, unit


@triton.jit
def _store_result(
    output, partial, lse, done, acc, largest, total, unit, first_token, num_tokens, first_query, token, head,
    mask_row, kv_head, index, count, place,
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Stores the result of an entry's only split (place < 0), or a partial one.

    Of the programs that have the same query tokens the last one to finish merges them.
    """
    GROUP: tl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    PARTS: tl.constexpr = (SPLIT.query_len + SPLIT.part_len - 1) // SPLIT.part_len
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    # A split may be empty (a layer with a narrower window than the plan's): acc and total are 0
    # then.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    if SHAPE.kind != "":
        acc = acc * unit
    result = acc / total[:, None]
    mask_store = mask_row[:, None] & (offs_dim < SHAPE.head_dim)[None, :]
    if place < 0:
        offs_out = ((first_token + token).to(tl.int64) * SHAPE.num_heads + head) * SHAPE.head_dim
        tl.store(output + offs_out[:, None] + offs_dim[None, :], result.to(output.dtype.element_ty), mask=mask_store)
    else:
        offs_row = tl.arange(0, SPLIT.rows)
        offs_part = (place * SHAPE.num_kv_heads + kv_head) * (SPLIT.query_len * GROUP) + first_query * GROUP + offs_row
        tl.store(partial + offs_part[:, None] * SHAPE.head_dim + offs_dim[None, :], result, mask=mask_store)
        tl.store(lse + offs_part, tl.where(is_empty, -1.0e30, largest + tl.log2(total)), mask=mask_row)
        first = place - index
        counter = done + (first * SHAPE.num_kv_heads + kv_head) * PARTS + first_query // SPLIT.part_len
        # All warps have stored; then one thread releases it for the card.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.store(counter, 0)
            store_merged(
                output, partial, lse, first, count, first_token, num_tokens, first_query, kv_head, SHAPE, SPLIT
            )


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_COLUMNS)
def decode_kernel(
    query, kv_cache, scales, output, partial, lse, done, splits, query_start_loc, seq_lens, table_rows, block_tables,
    query_stride, table_stride, score_scale, window, sinks,
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of one split for one key/value head and part of an entry's query tokens.

    The grid is (num_kv_heads * parts, splits): parts that read the same keys run together.
    """
    if SPLIT.is_early:
        grid_behind_may_start()
    PARTS: tl.constexpr = (SPLIT.query_len + SPLIT.part_len - 1) // SPLIT.part_len
    kv_head, first_query = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * SPLIT.part_len
    entry, index, count, place, first_token, num_tokens, seq_len, table = _split_columns(
        splits, query_start_loc, seq_lens, table_rows, block_tables, table_stride
    )
    if SPLIT.is_early:
        grid_before_is_done()
    if (entry < 0) | (first_query >= num_tokens):
        return
    first_seen, begin, end = _bounds(seq_len, num_tokens, index, count, window, SPLIT.is_windowed)

    token, head, mask_row, places = _query_rows(
        query, query_stride, first_token, num_tokens, first_query, kv_head, SHAPE, SPLIT
    )
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    mask_query = mask_row[:, None] & (offs_dim < SHAPE.head_dim)[None, :]
    q = tl.load(places[:, None] + offs_dim[None, :], mask=mask_query, other=0.0)
    largest = tl.full([SPLIT.rows], -1.0e30, tl.float32)
    total = tl.full([SPLIT.rows], 0.0, tl.float32)
    acc = tl.full([SPLIT.rows, SHAPE.padded_dim], 0.0, tl.float32)
    acc, largest, total, unit = _absorb_cached(
        acc, largest, total, first_unit(), q, seq_len - num_tokens + token, first_seen, begin, end, window, table,
        kv_head, kv_cache, scales, score_scale, SHAPE, SPLIT,
    )  # fmt: skip
    if sinks is not None:
        acc, largest, total = absorb_sinks(acc, largest, total, sinks, head, mask_row, index == 0)
    _store_result(
        output, partial, lse, done, acc, largest, total, unit, first_token, num_tokens, first_query, token, head,
        mask_row, kv_head, index, count, place, SHAPE, SPLIT,
    )  # fmt: skip


@triton.jit
def _norm_factors(norm, mask_row, SHAPE: tl.constexpr, SPLIT: tl.constexpr):
    """A norm's weights and those of the dimensions that theirs rotate with, in every row.

    [rows, padded_dim] each; numbers that nobody reads where nothing is normed.
    """
    factors, partner_factors = 0.0, 0.0
    if SPLIT.norm_heads > 0:
        factors, partner_factors = numbers_with_partners(
            norm + tl.arange(0, SPLIT.rows) * 0, mask_row, SHAPE.head_dim, SPLIT.rotary_dim, SHAPE.padded_dim,
            SPLIT.interleaved,
        )  # fmt: skip
    return factors, partner_factors


@triton.jit
def _rotated_rows(
    places, new_key, is_newest, mask_row, rotation, query_factors, key_norm, eps,
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Q and the new token's key, normed and rotated, [rows, padded_dim] each.

    Every row of the key is the one key, in the layout of Q, and 0 in splits that it does not belong
    to. All that is read of the token is asked for before the first sum, behind which warps meet.
    """
    offs_row = tl.arange(0, SPLIT.rows)
    NORMED: tl.constexpr = SPLIT.norm_heads > 0
    HALF: tl.constexpr = SHAPE.head_dim // 2
    ROTARY_HALF: tl.constexpr = SPLIT.rotary_dim // 2
    mask_key_row = mask_row & is_newest
    if NORMED:
        query_a, query_b = head_planes(places, mask_row, HALF, ROTARY_HALF, SPLIT.interleaved)
        # The key is one of many heads in a tile like that of `rope_kv`, whose squares are added up
        # in the same order, so that what the cache holds does not depend on who wrote it.
        copies = tl.arange(0, SPLIT.norm_heads) * 0
        is_first = (copies == 0) & is_newest
        key_a, key_b = head_planes(new_key + copies, is_first, HALF, ROTARY_HALF, SPLIT.interleaved)
    q, q_partner = numbers_with_partners(
        places, mask_row, SHAPE.head_dim, SPLIT.rotary_dim, SHAPE.padded_dim, SPLIT.interleaved
    )
    k, k_partner = numbers_with_partners(
        new_key + offs_row * 0, mask_key_row, SHAPE.head_dim, SPLIT.rotary_dim, SHAPE.padded_dim, SPLIT.interleaved
    )
    cosine, sine = rotation_rows(rotation, offs_row, mask_row, SPLIT.rotary_dim, SHAPE.padded_dim, SPLIT.interleaved)
    query_square, key_square = 0.0, 0.0
    if NORMED:
        query_square = mean_squares(query_a, query_b, HALF)
        key_square = tl.max(mean_squares(key_a, key_b, HALF), 0) + tl.full([SPLIT.rows], 0.0, tl.float32)
    q = rotated_heads(q, q_partner, cosine, sine, query_factors[0], query_factors[1], query_square, eps, NORMED)
    # Here, for registers; they are another's in all splits but one.
    key_factors = _norm_factors(key_norm, mask_key_row, SHAPE, SPLIT)
    k = rotated_heads(k, k_partner, cosine, sine, key_factors[0], key_factors[1], key_square, eps, NORMED)
    return q, k


@triton.jit
def _absorb_new(
    acc, largest, total, unit, q, k_new, v_new, mask_new, is_newest, slot, kv_head, kv_cache, scales, score_scale,
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Writes the new token's key [rows, padded_dim] and value [1, padded_dim] and attends to them.

    What is seen of the token is what the cache holds from now on. Returns acc, largest, total,
    unit.
    """
    offs_row = tl.arange(0, SPLIT.rows)
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    new_tile = slot // SHAPE.block_size * (2 * SHAPE.num_kv_heads) + kv_head
    target = kv_cache + new_tile * SHAPE.tile_stride
    target += slot % SHAPE.block_size * SHAPE.head_dim + offs_dim[None, :]
    mask_stored = mask_new & (slot >= 0)
    first_row = (offs_row == 0)[:, None]
    if SHAPE.kind == "":
        tl.store(target + offs_row[:, None] * 0, k_new.to(kv_cache.dtype.element_ty), mask=mask_stored & first_row)
        target += SHAPE.num_kv_heads * SHAPE.tile_stride
        tl.store(target, v_new.to(kv_cache.dtype.element_ty), mask=mask_stored)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * score_scale
        largest = tl.where(is_newest, score, largest)
        total = tl.where(is_newest, 1.0, total)
        acc += v_new.to(tl.float32)
    elif is_newest:
        KIND: tl.constexpr = SHAPE.kind
        k_bits, k_numbers, k_scale = quantized_heads(k_new, KIND)
        v_bits, v_numbers, v_scale = quantized_heads(v_new, KIND)
        tl.store(target + offs_row[:, None] * 0, k_bits, mask=mask_stored & first_row)
        tl.store(target + SHAPE.num_kv_heads * SHAPE.tile_stride, v_bits, mask=mask_stored)
        of_scale = scales + new_tile * (SHAPE.tile_stride // 4) + SHAPE.block_size * SHAPE.head_dim // 4
        of_scale += slot % SHAPE.block_size
        tl.store(of_scale + offs_row * 0, k_scale, mask=(offs_row == 0) & (slot >= 0))
        of_value_scale = of_scale + SHAPE.num_kv_heads * SHAPE.tile_stride // 4
        tl.store(of_value_scale + tl.arange(0, 1), v_scale, mask=slot >= 0)
        largest = tl.sum(q.to(tl.float32) * k_numbers, 1) * k_scale * score_scale
        total += 1.0
        unit = tl.maximum(unit, tl.max(v_scale, 0))
        acc += v_numbers * (v_scale / unit)[:, None]
    return acc, largest, total, unit


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_COLUMNS)
def raw_decode_kernel(
    qkv, rotations, query_norm, key_norm, slot_mapping, kv_cache, scales, output, partial, lse, done, splits,
    query_start_loc, seq_lens, table_rows, block_tables, qkv_stride, table_stride, score_scale, window, sinks, eps,
    SHAPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The work of `decode_kernel` on a projection's heads, for entries of one query token.

    The kernel behind is let go when the token's heads have arrived: before, its requests for
    weights would be ahead of theirs, and its programs would take the room of programs that have not
    begun. Of rows with drafts, which `decode_kernel` takes, that won nothing.
    """
    kv_head = tl.program_id(0)
    entry, index, count, place, first_token, num_tokens, seq_len, table = _split_columns(
        splits, query_start_loc, seq_lens, table_rows, block_tables, table_stride
    )
    # Programs that start early ask for all that they may before they wait.
    if not SPLIT.is_early:
        if entry < 0:
            return
    slot = tl.load(slot_mapping + first_token)
    first_seen, begin, end = _bounds(seq_len, num_tokens, index, count, window, SPLIT.is_windowed)
    # One token an entry: its key and value are nobody else's, and only the split that the context
    # ends in takes them.
    is_newest = (begin < seq_len) & (end == seq_len)
    end = tl.minimum(end, seq_len - 1)
    token, head, mask_row, places = _query_rows(qkv, qkv_stride, first_token, num_tokens, 0, kv_head, SHAPE, SPLIT)
    mask_row = mask_row & (entry >= 0)
    # Before the wait: no kernel writes a norm's weights.
    query_factors = _norm_factors(query_norm, mask_row, SHAPE, SPLIT)
    if SPLIT.is_early:
        grid_before_is_done()
        if entry < 0:
            return

    offs_dim = tl.arange(0, SHAPE.padded_dim)
    mask_new = (offs_dim < SHAPE.head_dim)[None, :] & is_newest
    new_key = qkv + first_token.to(tl.int64) * qkv_stride + (SHAPE.num_heads + kv_head) * SHAPE.head_dim
    new_value = new_key + SHAPE.num_kv_heads * SHAPE.head_dim
    v_new = tl.load(new_value + offs_dim[None, :], mask=mask_new, other=0.0)
    rotation = rotations + first_token.to(tl.int64) * (3 * SPLIT.rotary_dim // 2)
    q, k_new = _rotated_rows(places, new_key, is_newest, mask_row, rotation, query_factors, key_norm, eps, SHAPE, SPLIT)
    if SPLIT.is_early:
        grid_behind_may_start()

    largest = tl.full([SPLIT.rows], -1.0e30, tl.float32)
    total = tl.full([SPLIT.rows], 0.0, tl.float32)
    acc = tl.full([SPLIT.rows, SHAPE.padded_dim], 0.0, tl.float32)
    acc, largest, total, unit = _absorb_new(
        acc, largest, total, first_unit(), q, k_new, v_new, mask_new, is_newest, slot, kv_head, kv_cache, scales,
        score_scale, SHAPE, SPLIT,
    )  # fmt: skip
    acc, largest, total, unit = _absorb_cached(
        acc, largest, total, unit, q, seq_len - num_tokens + token, first_seen, begin, end, window, table, kv_head,
        kv_cache, scales, score_scale, SHAPE, SPLIT,
    )  # fmt: skip
    if sinks is not None:
        acc, largest, total = absorb_sinks(acc, largest, total, sinks, head, mask_row, index == 0)
    _store_result(
        output, partial, lse, done, acc, largest, total, unit, first_token, num_tokens, 0, token, head, mask_row,
        kv_head, index, count, place, SHAPE, SPLIT,
    )  # fmt: skip
