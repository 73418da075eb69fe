"""Attention of rows with few query tokens over long contexts, bound by reading the cache once.

A program reads one *split* of one row's context for one key/value head; all query heads of the
group and all query tokens stand as rows of one tile, so that every key is read once. A row with one
split is finished then. Where several programs share a row, each leaves a partial result, and the
last one to finish merges them (`attention.merge`). Which program does what comes from
`attention.plan.plan_decode`; grids depend on the sizes of the columns only, so that all of it runs
in captured graphs.

Who is last: `DecodeScratch.done` has a counter for each row and key/value head. A program stores
its partial result, then adds 1, and the one that finds the others' count merges and sets the
counter back to 0, as the next layer and the next replay expect it. The addition releases what the
program's threads stored and acquires what the others' released. Nothing can leave a counter behind:
a launch that is refused runs no program, and a kernel that dies on the way (a bad address, a reset)
takes the CUDA context with it, scratch included; the worker's process ends and a new one allocates
zeros.

In a step of decodes alone the kernel also norms and turns the new tokens' heads and writes their
keys and values (`raw`): no kernel before it then. Every split of a row turns the row's query for
itself. The new token's key belongs to the last split that has any context: that program turns it,
stores it, and takes it into its softmax from registers, so that nobody reads what this launch
writes.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.attention.merge import merged_at_once, store_merged
from headrace_kernels.attention.plan import FEW_ROWS
from headrace_kernels.attention.quantized import absorb_quantized, divided_query, first_unit
from headrace_kernels.attention.quantized_kv import bits_of, head_scale, memory_of, rounded
from headrace_kernels.attention.rope_kv import RawHeads, heads_for_norm, mean_squares, rotation_rows, turned_heads
from headrace_kernels.attention.step import DecodeWork, PagedAttentionStep
from headrace_kernels.attention.tiles import (
    LOG2_E,
    Launch,
    absorb,
    key_offsets,
    padded_dim,
    pipeline_stages,
)
from headrace_kernels.attention.transposed import absorb_context, takes_turned, turned_rule
from headrace_kernels.triton_runtime import INTERPRETED

# Columns are views into one buffer, at addresses that change with their sizes: alignment must not
# decide what is compiled.
_COLUMNS = ["splits", "query_start_loc", "seq_lens", "table_rows", "slot_mapping"]


@triton.jit
def _mean_square_as_written(
    place, is_newest, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM_HEADS: tl.constexpr
):
    """The mean square of one head to the bit as `rope_kv` has it: as one of many heads in a tile
    like its own, whose squares are added up in the same order.
    """
    copies = tl.arange(0, NORM_HEADS) * 0
    return tl.max(mean_squares(place + copies, (copies == 0) & is_newest, HEAD_DIM // 2, ROTARY_DIM // 2), 0)


@triton.jit
def _quantized(heads, KIND: tl.constexpr):
    """Heads [n, D] as the cache's bytes, as numbers in fp32, and their scales [n]."""
    wide = heads.to(tl.float32)
    scale = head_scale(tl.max(tl.abs(wide), 1), tl.sum(wide * 0.0, 1), KIND)
    numbers = rounded(wide, scale[:, None], KIND)
    return bits_of(numbers, KIND), numbers, scale


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_COLUMNS)
def _split_kernel(
    query,
    rotations,
    query_norm,
    key_norm,
    slot_mapping,
    kv_cache,
    scales,
    output,
    partial,
    lse,
    done,
    splits,
    query_start_loc,
    seq_lens,
    table_rows,
    block_tables,
    query_stride,
    table_stride,
    score_scale,
    window,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    TURNED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    RAW: tl.constexpr,
    NORMED: tl.constexpr,
    NORM_HEADS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(0)
    item = splits + tl.program_id(1) * 4
    entry = tl.load(item)
    if entry < 0:
        return
    number, count, place = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_token = tl.load(query_start_loc + entry)
    num_tokens = tl.load(query_start_loc + entry + 1) - first_token
    seq_len = tl.load(seq_lens + entry)
    table = block_tables + tl.load(table_rows + entry).to(tl.int64) * table_stride

    # What any query token sees, shared out in multiples of 64 (`plan.SPLIT_MULTIPLE`).
    first_seen = 0
    if WINDOWED:
        first_seen = tl.maximum(seq_len - num_tokens - window + 1, 0)
    begin = first_seen // 64 * 64
    tokens_per_split = tl.cdiv(seq_len - begin, count * 64) * 64
    begin += number * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, seq_len)

    # Q: row r is query token r // GROUP of head r % GROUP within the group.
    offs_row = tl.arange(0, ROWS)
    offs_dim = tl.arange(0, PADDED_DIM)
    token, head = offs_row // GROUP, kv_head * GROUP + offs_row % GROUP
    mask_row = token < tl.minimum(num_tokens, QUERY_LEN)
    mask_dim = offs_dim < HEAD_DIM
    position = seq_len - num_tokens + token
    places = query + (first_token + token).to(tl.int64) * query_stride + head * HEAD_DIM

    largest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if KIND != "":
        unit = first_unit()
    if RAW:
        # One token a row: its key and value are nobody else's, and only the split that the context
        # ends in takes them.
        is_newest = (begin < seq_len) & (end == seq_len)
        end = tl.minimum(end, seq_len - 1)
        rotation = rotations + first_token.to(tl.int64) * (3 * ROTARY_DIM // 2)
        new_key = query + first_token.to(tl.int64) * query_stride + (NUM_HEADS + kv_head) * HEAD_DIM
        mask_new = mask_dim[None, :] & is_newest
        v_new = tl.load(new_key + NUM_KV_HEADS * HEAD_DIM + offs_dim[None, :], mask=mask_new, other=0.0)
        slot = tl.load(slot_mapping + first_token)
        # Every row of k_new is the one key, in the layout of q.
        key_places, mask_key_row = new_key + offs_row * 0, mask_row & is_newest
        query_square, key_square = 0.0, 0.0
        if NORMED:
            query_square = mean_squares(places, mask_row, HEAD_DIM // 2, ROTARY_DIM // 2)
            key_square = _mean_square_as_written(new_key, is_newest, HEAD_DIM, ROTARY_DIM, NORM_HEADS) + tl.zeros(
                [ROWS], tl.float32
            )
        cosine, sine = rotation_rows(rotation, offs_row, mask_row, ROTARY_DIM, PADDED_DIM)
        q = turned_heads(
            places, mask_row, cosine, sine, query_norm, query_square, eps, NORMED, HEAD_DIM, ROTARY_DIM, PADDED_DIM
        )
        k_new = turned_heads(
            key_places, mask_key_row, cosine, sine, key_norm, key_square, eps, NORMED, HEAD_DIM, ROTARY_DIM, PADDED_DIM
        )
        new_tile = slot // BLOCK_SIZE * (2 * NUM_KV_HEADS) + kv_head
        target = kv_cache + new_tile * TILE_STRIDE
        target += slot % BLOCK_SIZE * HEAD_DIM + offs_dim[None, :]
        mask_stored = mask_new & (slot >= 0)
        first_row = (offs_row == 0)[:, None]
        if KIND == "":
            tl.store(target + offs_row[:, None] * 0, k_new.to(kv_cache.dtype.element_ty), mask=mask_stored & first_row)
            target += NUM_KV_HEADS * TILE_STRIDE
            tl.store(target, v_new.to(kv_cache.dtype.element_ty), mask=mask_stored)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * score_scale
            largest = tl.where(is_newest, score, largest)
            total = tl.where(is_newest, 1.0, total)
            acc += v_new.to(tl.float32)
        elif is_newest:
            # What is seen of the new token now is what the cache will hold: numbers and scales.
            k_bits, k_numbers, k_scale = _quantized(k_new, KIND)
            v_bits, v_numbers, v_scale = _quantized(v_new, KIND)
            tl.store(target + offs_row[:, None] * 0, k_bits, mask=mask_stored & first_row)
            tl.store(target + NUM_KV_HEADS * TILE_STRIDE, v_bits, mask=mask_stored)
            of_scale = scales + new_tile * (TILE_STRIDE // 4) + BLOCK_SIZE * HEAD_DIM // 4 + slot % BLOCK_SIZE
            tl.store(of_scale + offs_row * 0, k_scale, mask=(offs_row == 0) & (slot >= 0))
            tl.store(of_scale + NUM_KV_HEADS * TILE_STRIDE // 4 + tl.arange(0, 1), v_scale, mask=slot >= 0)
            largest = tl.sum(q.to(tl.float32) * k_numbers, 1) * k_scale * score_scale
            total += 1.0
            unit = tl.maximum(unit, tl.max(v_scale, 0))
            acc += v_numbers * (v_scale / unit)[:, None]
    else:
        q = tl.load(places[:, None] + offs_dim[None, :], mask=mask_row[:, None] & mask_dim[None, :], other=0.0)

    if KIND != "":
        q, row_scales = divided_query(q, score_scale)
    if TURNED:
        acc, largest, total, unit = absorb_context(
            acc, largest, total, unit, q, row_scales, position, begin, end, first_seen, window, table, kv_head,
            kv_cache, scales, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_STRIDE, KIND, QUERY_LEN, TILE, STAGES, WINDOWED,
            HAS_FP8, FP32_DOT,
        )  # fmt: skip
    else:
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            positions = start + tl.arange(0, TILE)
            mask_key = positions < end
            if WINDOWED:
                mask_key = mask_key & (positions >= first_seen)
            offs_key = key_offsets(table, positions, mask_key, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE_STRIDE)
            key = kv_cache + offs_key[:, None] + offs_dim[None, :]
            # Slots that were never written may hold NaN: they are not loaded, for 0 times NaN is
            # NaN.
            mask_load = mask_key[:, None] & mask_dim[None, :]
            k = tl.load(key, mask=mask_load, other=0.0)
            v = tl.load(key + NUM_KV_HEADS * TILE_STRIDE, mask=mask_load, other=0.0)
            seen = mask_key[None, :]
            if QUERY_LEN > 1:
                seen = seen & (positions[None, :] <= position[:, None])
                if WINDOWED:
                    seen = seen & (positions[None, :] > position[:, None] - window)
            if KIND != "":
                acc, largest, total, unit = absorb_quantized(
                    acc, largest, total, unit, q, row_scales, k, v, scales, offs_key, positions, mask_key, seen,
                    NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE_STRIDE, KIND, HAS_FP8, True, FP32_DOT,
                )  # fmt: skip
            else:
                acc, largest, total = absorb(acc, largest, total, q, k, v, seen, score_scale, True, FP32_DOT)

    # A split may be empty (a layer with a narrower window than the plan's): acc and total are 0
    # then.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    if KIND != "":
        acc = acc * unit
    result = acc / total[:, None]
    mask_store = mask_row[:, None] & mask_dim[None, :]
    if place < 0:
        offs_out = ((first_token + token).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(output + offs_out[:, None] + offs_dim[None, :], result.to(output.dtype.element_ty), mask=mask_store)
        return
    offs_part = (place * NUM_KV_HEADS + kv_head) * (QUERY_LEN * GROUP) + offs_row
    tl.store(partial + offs_part[:, None] * HEAD_DIM + offs_dim[None, :], result, mask=mask_store)
    tl.store(lse + offs_part, tl.where(is_empty, -1.0e30, largest + tl.log2(total)), mask=mask_row)
    first = place - number
    counter = done + first * NUM_KV_HEADS + kv_head
    # All warps have stored; then one thread releases it for the card.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.store(counter, 0)
        store_merged(
            output,
            partial,
            lse,
            first,
            count,
            first_token,
            num_tokens,
            kv_head,
            tl.arange(0, MERGED_ROWS),
            NUM_HEADS,
            GROUP,
            QUERY_LEN,
            MERGED_ROWS,
            HEAD_DIM,
            PADDED_DIM,
            AT_ONCE,
        )


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    work: DecodeWork,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    *,
    raw: RawHeads | None = None,
    launch: Launch | None = None,
    at_once: int | None = None,
) -> None:
    """Fills the rows of `output` that belong to the work's entries.

    Arguments as `attention.paged.paged_attention`, except that query heads lie side by side.

    Args:
        query: Of other entries than the work's nothing is read. With `raw`, its `qkv`.
        kv_cache: Changed with `raw`, see there.
        step: The step.
        work: Its entries with few query tokens.
        scale: Multiplies the scores.
        sliding_window: Tokens that a token sees.
        output: [num_tokens, num_heads, head_dim] contiguous.
        raw: Heads as the projection gave them. They are normed and turned here, and keys and values
            are written to `step.slot_mapping`; the work must be of one query token an entry.
        launch: Replaces the rule, for measurements.
        at_once: Partial results that are merged at a time; replaces the rule, for measurements.
    """
    num_heads, head_dim = output.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    query_len, scratch, memory = work.max_query_len, work.scratch, memory_of(kv_cache)
    assert raw is None or query_len == 1, query_len
    query_rows = query_len * (num_heads // num_kv_heads)
    dim = padded_dim(head_dim)
    turned = takes_turned(memory.kind, query_rows, dim, query.dtype)
    rows = FEW_ROWS if turned else max(16, triton.next_power_of_2(query_rows))
    launch = launch or (turned_rule(dim, output.device) if turned else _launch_rule(rows, dim, output))
    _split_kernel[(num_kv_heads, work.splits.shape[0])](
        query,
        raw.rotations if raw else None,
        raw.query_norm if raw else None,
        raw.key_norm if raw else None,
        step.slot_mapping if raw else None,
        memory.numbers,
        memory.scales,
        output,
        scratch.partial,
        scratch.lse,
        scratch.done,
        work.splits,
        step.query_start_loc,
        step.seq_lens,
        step.rows,
        step.block_tables,
        query.stride(0),
        step.block_tables.stride(0),
        scale * LOG2_E,
        sliding_window or 0,
        raw.eps if raw else 0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=2 * raw.rotations.shape[2] if raw else head_dim,
        PADDED_DIM=dim,
        BLOCK_SIZE=step.block_size,
        TILE_STRIDE=memory.tile_stride,
        KIND=memory.kind,
        QUERY_LEN=query_len,
        ROWS=rows,
        TURNED=turned,
        TILE=launch.tile,
        STAGES=launch.stages,
        WINDOWED=sliding_window is not None,
        RAW=raw is not None,
        NORMED=raw is not None and raw.query_norm is not None,
        NORM_HEADS=heads_for_norm(head_dim // 2, launch.warps),
        MERGED_ROWS=triton.next_power_of_2(query_rows),
        AT_ONCE=at_once or merged_at_once(query_rows, dim, launch.warps),
        HAS_FP8=memory.kind == "fp8" and card.has_fp8_products(output.device),
        FP32_DOT=INTERPRETED,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )


def _launch_rule(rows: int, dim: int, output: Tensor) -> Launch:
    """64 keys, 2 warps and 3 stages were best for 16 rows and heads of 128 on an H200; the rest
    keeps registers and shared memory within bounds, and is not measured yet.

    A quantized cache has the launch of its model's type: registers hold its numbers in that type.
    """
    row_bytes = dim * output.element_size()
    tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    warps = 2 if rows <= 32 and rows * row_bytes <= 8192 else 4 if rows * row_bytes <= 16384 else 8
    return Launch(tile, warps, pipeline_stages(output.device, 0, 2 * tile * row_bytes, 3))
