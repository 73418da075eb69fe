"""Attention of rows with few query tokens over long contexts, bound by reading the cache once.

Two kernels. A program of the first reads one split of one row's context for one key/value head; all query heads of the group and all query tokens stand as rows of one tile, so that every
key is read once. A row with one split is finished then. Where several programs shared a row, the second kernel merges their partial results by their logarithmic sums. Which program does what
comes from `attention_plan.plan_decode`; grids depend on the sizes of the columns only, so that both kernels run in captured graphs.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.attention_step import DecodeWork, PagedAttentionStep
from headrace_kernels.attention_tiles import LOG2_E, Launch, absorb, key_offsets, padded_dim, pipeline_stages
from headrace_kernels.triton_runtime import INTERPRETED

# Columns are views into one buffer, at addresses that change with their sizes: alignment must not decide what is compiled.
_COLUMNS = ["splits", "merges", "query_start_loc", "seq_lens", "table_rows"]


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_COLUMNS)
def _split_kernel(
    query,
    kv_cache,
    output,
    partial,
    lse,
    splits,
    query_start_loc,
    seq_lens,
    table_rows,
    block_tables,
    query_stride,
    table_stride,
    score_scale,
    window,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
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

    # What any query token sees, shared out in multiples of 64 (attention_plan.SPLIT_MULTIPLE).
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
    offs_query = (first_token + token).to(tl.int64) * query_stride + head * HEAD_DIM
    q = tl.load(query + offs_query[:, None] + offs_dim[None, :], mask=mask_row[:, None] & mask_dim[None, :], other=0.0)

    largest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = start + tl.arange(0, TILE)
        mask_key = positions < end
        if WINDOWED:
            mask_key = mask_key & (positions >= first_seen)
        offs_key = key_offsets(table, positions, mask_key, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        key = kv_cache + offs_key[:, None] + offs_dim[None, :]
        # Slots that were never written may hold NaN: they are not loaded, for 0 times NaN is NaN.
        mask_load = mask_key[:, None] & mask_dim[None, :]
        k = tl.load(key, mask=mask_load, other=0.0)
        v = tl.load(key + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=mask_load, other=0.0)
        seen = mask_key[None, :]
        if QUERY_LEN > 1:
            seen = seen & (positions[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (positions[None, :] > position[:, None] - window)
        acc, largest, total = absorb(acc, largest, total, q, k, v, seen, score_scale, True, FP32_DOT)

    # A split may be empty (a layer with a narrower window than the plan's): acc and total are 0 then.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    result = acc / total[:, None]
    mask_store = mask_row[:, None] & mask_dim[None, :]
    if place < 0:
        offs_out = ((first_token + token).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(output + offs_out[:, None] + offs_dim[None, :], result.to(output.dtype.element_ty), mask=mask_store)
    else:
        offs_part = (place * QUERY_LEN + token) * NUM_HEADS + head
        tl.store(partial + offs_part[:, None] * HEAD_DIM + offs_dim[None, :], result, mask=mask_store)
        log_sum = tl.where(is_empty, -1.0e30, largest + tl.log2(total))
        tl.store(lse + offs_part, log_sum, mask=mask_row)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _merge_kernel(
    output,
    partial,
    lse,
    merges,
    query_start_loc,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    merge = merges + tl.program_id(1) * 3
    entry = tl.load(merge)
    if entry < 0:
        return
    place, count = tl.load(merge + 1), tl.load(merge + 2)
    first_token = tl.load(query_start_loc + entry)
    token = row // NUM_HEADS
    if token >= tl.load(query_start_loc + entry + 1) - first_token:
        return
    offs_dim = tl.arange(0, PADDED_DIM)
    mask_dim = offs_dim < HEAD_DIM
    largest = -1.0e30
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in tl.range(0, count, SPLITS):
        number = start + tl.arange(0, SPLITS)
        mask = number < count
        offs_part = (place + number) * (QUERY_LEN * NUM_HEADS) + row
        log_sum = tl.load(lse + offs_part, mask=mask, other=-1.0e30)
        part = tl.load(
            partial + offs_part[:, None] * HEAD_DIM + offs_dim[None, :],
            mask=mask[:, None] & mask_dim[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(log_sum, 0))
        shrink = tl.exp2(largest - new_largest)
        # Splits that do not exist must not count even where all that do are hidden.
        weights = tl.where(mask, tl.exp2(log_sum - new_largest), 0.0)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        largest = new_largest
    offs_out = (first_token.to(tl.int64) * NUM_HEADS + row) * HEAD_DIM
    tl.store(output + offs_out + offs_dim, (acc / total).to(output.dtype.element_ty), mask=mask_dim)


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    work: DecodeWork,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    launch: Launch | None = None,
) -> None:
    """Fills the rows of `output` that belong to the work's entries.

    Arguments as `attention.paged_attention`, except that query heads lie side by side; `launch` replaces the rule, for measurements.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    query_len, scratch = work.max_query_len, work.scratch
    rows = max(16, triton.next_power_of_2(query_len * (num_heads // num_kv_heads)))
    launch = launch or _launch_rule(rows, padded_dim(head_dim), kv_cache)
    _split_kernel[(num_kv_heads, work.splits.shape[0])](
        query,
        kv_cache,
        output,
        scratch.partial,
        scratch.lse,
        work.splits,
        step.query_start_loc,
        step.seq_lens,
        step.rows,
        step.block_tables,
        query.stride(0),
        step.block_tables.stride(0),
        scale * LOG2_E,
        sliding_window or 0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_SIZE=step.block_size,
        QUERY_LEN=query_len,
        ROWS=rows,
        TILE=launch.tile,
        STAGES=launch.stages,
        WINDOWED=sliding_window is not None,
        FP32_DOT=INTERPRETED,
        num_warps=launch.warps,
    )
    if work.needs_merge:
        _merge_kernel[(query_len * num_heads, work.merges.shape[0])](
            output,
            scratch.partial,
            scratch.lse,
            work.merges,
            step.query_start_loc,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            QUERY_LEN=query_len,
            SPLITS=_splits_at_once(work.merges.shape[0], padded_dim(head_dim)),
            num_warps=4,
        )


def _splits_at_once(num_merges: int, dim: int) -> int:
    """Partial results that are merged at a time. Many rows have few splits each: 32 rows with 2 splits took 7 us with room for 64. A row with more takes several rounds."""
    most = 64 if dim <= 128 else 32
    return most if num_merges <= 2 else 16 if num_merges <= 8 else 4


def _launch_rule(rows: int, dim: int, kv_cache: Tensor) -> Launch:
    """64 keys, 2 warps and 3 stages were best for 16 rows and heads of 128 on an H200; the rest keeps registers and shared memory within bounds, and is not measured yet."""
    row_bytes = dim * kv_cache.element_size()
    tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    warps = 2 if rows <= 32 and rows * row_bytes <= 8192 else 4 if rows * row_bytes <= 16384 else 8
    return Launch(tile, warps, pipeline_stages(kv_cache.device, 0, 2 * tile * row_bytes, 3))
