"""Attention of long chunks of prompts over contexts that were gathered first.

The copy engine then brings a whole tile of keys at a time, where blocks of the cache are small
copies, or need threads that find them.

Two kernels. The first copies what the chunks see out of the paged cache into one piece per
key/value head, each context at a multiple of 128 tokens and filled up with zeros; what is quantized
is dequantized to the model's type on the way, and rounded to it. The second is
`attention.prefill_sm90`'s, or `attention.prefill`'s with tiles of keys and values read by the copy
engine through descriptors (sm_90 and later). Gathering costs memory and time, so this is for steps
outside of graphs whose chunks are long enough (`attention.plan.plan_prefill` decides).
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.attention.plan import GATHER_MULTIPLE, prefill_tile_rows
from headrace_kernels.attention.prefill import key_ranges, sees
from headrace_kernels.attention.prefill_sm90.launch import attend_gathered_sm90, takes_prefill_sm90
from headrace_kernels.attention.quantized_kv import CacheMemory, memory_of, scale_offsets
from headrace_kernels.attention.step import GatheredContext, PagedAttentionStep
from headrace_kernels.attention.tiles import (
    LOG2_E,
    absorb,
    absorb_sinks,
    attention_shape,
    key_offsets,
    pipeline_stages,
)
from headrace_kernels.weight_formats.conversions import numbers_of

# Columns are views into one buffer, at addresses that change with their sizes: alignment must not
# decide what is compiled.
_COLUMNS = ["chunks", "tiles", "offsets", "query_start_loc", "seq_lens", "table_rows"]


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_COLUMNS)
def _gather_kernel(
    kv_cache,
    scales,
    context,
    chunks,
    query_start_loc,
    seq_lens,
    table_rows,
    block_tables,
    half_stride,
    head_stride,
    table_stride,
    window,
    SHAPE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    kv_head, half = tl.program_id(0), tl.program_id(1)
    chunk = tl.program_id(2)
    entry = tl.load(chunks + chunk * 2)
    if entry < 0:
        return
    positions = tl.load(chunks + chunk * 2 + 1) + tl.arange(0, CHUNK)
    seq_len = tl.load(seq_lens + entry)
    table = block_tables + tl.load(table_rows + entry).to(tl.int64) * table_stride
    mask = positions < seq_len
    if WINDOWED:
        num_tokens = tl.load(query_start_loc + entry + 1) - tl.load(query_start_loc + entry)
        mask = mask & (positions > seq_len - num_tokens - window)
    offs_dim = tl.arange(0, SHAPE.head_dim)
    offs_key = key_offsets(table, positions, mask, kv_head, SHAPE)
    offs_key += half * (SHAPE.num_kv_heads * SHAPE.tile_stride)
    # What no token sees becomes 0: the cache may hold NaN there, and tiles of values are read
    # whole.
    values = tl.load(kv_cache + offs_key[:, None] + offs_dim[None, :], mask=mask[:, None], other=0.0)
    if SHAPE.kind != "":
        offs_scale = scale_offsets(offs_key, positions, SHAPE.block_size, SHAPE.head_dim)
        scale = tl.load(scales + offs_scale, mask=mask, other=0.0)
        KIND: tl.constexpr = SHAPE.kind
        values = numbers_of(values, 0, KIND, tl.float32, SHAPE.fp32_dot) * scale[:, None]
        values = values.to(context.dtype.element_ty)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    target = context + half.to(tl.int64) * half_stride + kv_head.to(tl.int64) * head_stride
    tl.store(target + slots[:, None] * SHAPE.head_dim + offs_dim[None, :], values)


@triton.jit
def _gathered_tile(
    acc,
    largest,
    total,
    q,
    keys,
    values,
    first_slot,
    start,
    positions,
    end,
    window,
    score_scale,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    """Absorbs the keys from `start` on; `first_slot` is where position 0 lies or would lie."""
    k = keys.load([first_slot + start, 0])
    v = values.load([first_slot + start, 0])
    seen = positions[:, None]
    if MASKED:
        seen = sees(positions, start + tl.arange(0, TILE), 0, end, window, WINDOWED)
    return absorb(acc, largest, total, q, k, v, seen, score_scale, MASKED, FP32_DOT)


@triton.jit(do_not_specialize=["capacity", "window"], do_not_specialize_on_alignment=_COLUMNS)
def _gathered_kernel(
    query,
    keys,
    values,
    output,
    tiles,
    offsets,
    query_start_loc,
    seq_lens,
    query_stride,
    capacity,
    score_scale,
    window,
    sinks,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    GROUP: tl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    TILE_TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    entry = tl.load(tiles + tl.program_id(1) * 2)
    if entry < 0:
        return
    tile_first = tl.load(tiles + tl.program_id(1) * 2 + 1)
    first_token = tl.load(query_start_loc + entry)
    num_tokens = tl.load(query_start_loc + entry + 1) - first_token
    seq_len = tl.load(seq_lens + entry)
    first_slot = kv_head * capacity + tl.load(offsets + entry)

    # Q: row r is token r // GROUP of the tile, head r % GROUP of the group.
    offs_row = tl.arange(0, ROWS)
    offs_dim = tl.arange(0, SHAPE.head_dim)
    token, head = tile_first + offs_row // GROUP, kv_head * GROUP + offs_row % GROUP
    mask_row = (offs_row < TILE_TOKENS * GROUP) & (token < num_tokens)
    offs_query = (first_token + token).to(tl.int64) * query_stride + head * SHAPE.head_dim
    q = tl.load(query + offs_query[:, None] + offs_dim[None, :], mask=mask_row[:, None], other=0.0)

    computed = seq_len - num_tokens
    positions = computed + token
    begin, full_begin, full_end, end = key_ranges(computed + tile_first, TILE_TOKENS, seq_len, window, TILE, WINDOWED)
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.full([ROWS, SHAPE.head_dim], 0.0, tl.float32)
    if WINDOWED:
        for start in tl.range(begin, full_begin, TILE, num_stages=1):
            acc, largest, total = _gathered_tile(
                acc, largest, total, q, keys, values, first_slot, start, positions, end, window, score_scale,
                TILE, True, WINDOWED, SHAPE.fp32_dot,
            )  # fmt: skip
    for start in tl.range(full_begin, full_end, TILE, num_stages=STAGES):
        acc, largest, total = _gathered_tile(
            acc, largest, total, q, keys, values, first_slot, start, positions, end, window, score_scale,
            TILE, False, WINDOWED, SHAPE.fp32_dot,
        )  # fmt: skip
    for start in tl.range(full_end, end, TILE, num_stages=1):
        acc, largest, total = _gathered_tile(
            acc, largest, total, q, keys, values, first_slot, start, positions, end, window, score_scale,
            TILE, True, WINDOWED, SHAPE.fp32_dot,
        )  # fmt: skip

    if sinks is not None:
        acc, largest, total = absorb_sinks(acc, largest, total, sinks, head, mask_row, True)
    offs_out = ((first_token + token).to(tl.int64) * SHAPE.num_heads + head) * SHAPE.head_dim
    result = (acc / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + offs_out[:, None] + offs_dim[None, :], result, mask=mask_row[:, None])


def gathered_attention(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    tiles: Tensor,
    gathered: GatheredContext,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Gathers, then fills the rows of `output` that belong to the tiles, int32 [num_tiles, 2].

    Other arguments as `attention.paged.paged_attention`, except that query heads lie side by side.
    """
    memory = memory_of(kv_cache)
    gather_contexts(kv_cache, memory, step, gathered, sliding_window)
    num_heads, head_dim = query.shape[1:]
    if takes_prefill_sm90(query.device, head_dim):
        attend_gathered_sm90(query, step, tiles, gathered, scale, sliding_window, output, sinks)
        return
    scratch = gathered.scratch
    rows = prefill_tile_rows(head_dim, query.element_size())
    # 128 keys, 8 warps and 3 stages were best for 128 rows and heads of 128 on an H200 (549
    # TFLOP/s); other sizes are not measured yet.
    row_bytes = head_dim * query.element_size()
    stages = pipeline_stages(query.device, rows * row_bytes, 2 * scratch.tile_keys * row_bytes, 3)
    _gathered_kernel[(kv_cache.shape[2], tiles.shape[0])](
        query,
        scratch.keys,
        scratch.values,
        output,
        tiles,
        gathered.offsets,
        step.query_start_loc,
        step.seq_lens,
        query.stride(0),
        scratch.capacity,
        scale * LOG2_E,
        sliding_window or 0,
        sinks,
        SHAPE=attention_shape(num_heads, head_dim, kv_cache, memory),
        ROWS=rows,
        TILE=scratch.tile_keys,
        STAGES=stages,
        WINDOWED=sliding_window is not None,
        num_warps=8 if rows == 128 else 4,
    )


def gather_contexts(
    kv_cache: Tensor,
    memory: CacheMemory,
    step: PagedAttentionStep,
    gathered: GatheredContext,
    sliding_window: int | None,
) -> None:
    """Fills the scratch with what the chunks see of a layer's cache."""
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    context = gathered.scratch.context
    num_chunks = gathered.chunks.shape[0]
    assert num_chunks * GATHER_MULTIPLE <= gathered.scratch.capacity, "more contexts than the scratch holds"
    _gather_kernel[(num_kv_heads, 2, num_chunks)](
        memory.numbers,
        memory.scales,
        context,
        gathered.chunks,
        step.query_start_loc,
        step.seq_lens,
        step.rows,
        step.block_tables,
        context.stride(0),
        context.stride(1),
        step.block_tables.stride(0),
        sliding_window or 0,
        SHAPE=attention_shape(num_kv_heads, head_dim, kv_cache, memory),
        CHUNK=GATHER_MULTIPLE,
        WINDOWED=sliding_window is not None,
        num_warps=4 if head_dim <= 128 else 8,
    )
