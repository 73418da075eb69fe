"""Attention of chunks of prompts, read through the block table.

A row has many query tokens, causal, after a prefix of any length, with or without a sliding
window. On sm_90 heads of 64 and 128 over a cache of 16 bits take `attention.prefill_sm90`; the
kernel here takes all others.

A program takes one tile of query tokens for one key/value head; the query heads of the group stand
beside each other as rows of the tile, which fills it even for short chunks. Tiles of keys that
every row sees whole run without a mask; those at the diagonal and at the window's edge run in loops
of their own. Where tiles are few, several programs share the keys of one (`attention.shares`). The
grid depends on the number of tiles only, so that graphs can fix it. Long chunks outside of graphs
take `attention.gathered` instead.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.attention.merge import share_of, store_share
from headrace_kernels.attention.plan import prefill_tile_rows
from headrace_kernels.attention.prefill_sm90.launch import attend_blocks_sm90, takes_blocks_sm90
from headrace_kernels.attention.quantized import absorb_quantized, divided_query, first_unit
from headrace_kernels.attention.quantized_kv import memory_of
from headrace_kernels.attention.step import PagedAttentionStep, PrefillWork
from headrace_kernels.attention.tiles import (
    LOG2_E,
    Launch,
    absorb,
    absorb_sinks,
    attention_shape,
    key_offsets,
    pipeline_stages,
)


@triton.jit
def key_ranges(first_position, tile_tokens, seq_len, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Positions of keys for tokens from `first_position` on: (begin, full_begin, full_end, end).

    Between the inner two every token sees every key; all but `end` are multiples of TILE.
    """
    begin = 0
    full_begin = 0
    full_end = (first_position + 1) // TILE * TILE
    end = tl.minimum(first_position + tile_tokens, seq_len)
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        last_begin = tl.maximum(first_position + tile_tokens - window, 0)
        full_begin = tl.minimum((last_begin + TILE - 1) // TILE * TILE, full_end)
    return begin, full_begin, full_end, end


@triton.jit
def sees(positions, offs_key, first_seen, end, window, WINDOWED: tl.constexpr):
    """Whether tokens at `positions` see keys at `offs_key`, [M, N].

    None is seen before `first_seen` or from `end` on.
    """
    seen = (offs_key[None, :] <= positions[:, None]) & (offs_key < end)[None, :]
    if WINDOWED:
        seen = seen & (offs_key[None, :] > positions[:, None] - window)
    return seen


@triton.jit
def _paged_tile(
    acc,
    largest,
    total,
    unit,
    q,
    kv_cache,
    scales,
    table,
    kv_head,
    start,
    positions,
    first_seen,
    end,
    window,
    score_scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Absorbs the keys from `start` on.

    Of a quantized cache `score_scale` is that of each row, and `unit` acc's
    (`attention.quantized`); of others 1.
    """
    offs_key = start + tl.arange(0, TILE)
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    if MASKED:
        mask_key = (offs_key >= first_seen) & (offs_key < end)
    else:
        mask_key = tl.full([TILE], True, tl.int1)
    places = key_offsets(table, offs_key, mask_key, kv_head, SHAPE)
    key = kv_cache + places[:, None]
    key += offs_dim[None, :]
    if MASKED or SHAPE.padded_dim != SHAPE.head_dim:
        mask = mask_key[:, None] & (offs_dim < SHAPE.head_dim)[None, :]
        k = tl.load(key, mask=mask, other=0.0)
        v = tl.load(key + SHAPE.num_kv_heads * SHAPE.tile_stride, mask=mask, other=0.0)
    else:
        k = tl.load(key)
        v = tl.load(key + SHAPE.num_kv_heads * SHAPE.tile_stride)
    seen = mask_key[None, :]
    if MASKED:
        seen = sees(positions, offs_key, first_seen, end, window, WINDOWED)
    if SHAPE.kind != "":
        acc, largest, total, unit = absorb_quantized(
            acc, largest, total, unit, q, score_scale, k, v, scales, places, offs_key, mask_key, seen,
            SHAPE, MASKED,
        )  # fmt: skip
    else:
        acc, largest, total = absorb(acc, largest, total, q, k, v, seen, score_scale, MASKED, SHAPE.fp32_dot)
    return acc, largest, total, unit


# Columns are views into one buffer, at addresses that change with their sizes: alignment must not
# decide what is compiled.
@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tiles", "query_start_loc", "seq_lens", "table_rows", "shares"],
)
def _paged_kernel(
    query,
    kv_cache,
    scales,
    output,
    tiles,
    query_start_loc,
    seq_lens,
    table_rows,
    block_tables,
    query_stride,
    table_stride,
    score_scale,
    window,
    sinks,
    shares,
    partial,
    lse,
    done,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    CUTS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    GROUP: tl.constexpr = SHAPE.num_heads // SHAPE.num_kv_heads
    kv_head = tl.program_id(0)
    # A tile of the plan, or the part of one that the program takes.
    item = tiles + tl.program_id(1) // CUTS * 2
    entry = tl.load(item)
    if entry < 0:
        return
    tile_first = tl.load(item + 1) + tl.program_id(1) % CUTS * TILE_TOKENS
    number, planned, count, place = 0, 1, 1, -1
    if shares is not None:
        share = shares + tl.program_id(1) // CUTS * 3
        number, planned, place = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    first_token = tl.load(query_start_loc + entry)
    num_tokens = tl.load(query_start_loc + entry + 1) - first_token
    if CUTS > 1:
        if tile_first >= num_tokens:
            return
    seq_len = tl.load(seq_lens + entry)
    table = block_tables + tl.load(table_rows + entry).to(tl.int64) * table_stride

    # Q: row r is token r // GROUP of the tile, head r % GROUP of the group.
    offs_row = tl.arange(0, ROWS)
    offs_dim = tl.arange(0, SHAPE.padded_dim)
    token, head = tile_first + offs_row // GROUP, kv_head * GROUP + offs_row % GROUP
    mask_row = (offs_row < TILE_TOKENS * GROUP) & (token < num_tokens)
    mask = mask_row[:, None] & (offs_dim < SHAPE.head_dim)[None, :]
    offs_query = (first_token + token).to(tl.int64) * query_stride + head * SHAPE.head_dim
    q = tl.load(query + offs_query[:, None] + offs_dim[None, :], mask=mask, other=0.0)

    computed = seq_len - num_tokens
    positions = computed + token
    begin, full_begin, full_end, end = key_ranges(computed + tile_first, TILE_TOKENS, seq_len, window, TILE, WINDOWED)
    if shares is not None:
        begin, full_begin, full_end, end, count = share_of(begin, full_begin, full_end, end, number, planned, TILE)
        if number >= count:
            return
        place = (place - number) * CUTS + tl.program_id(1) % CUTS * planned + number
    first_seen = 0
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.full([ROWS, SHAPE.padded_dim], 0.0, tl.float32)
    unit = 1
    if SHAPE.kind != "":
        q, score_scale = divided_query(q, score_scale)
        unit = first_unit()
    if WINDOWED:
        first_seen = tl.maximum(computed + tile_first - window + 1, 0)
        for start in tl.range(begin, full_begin, TILE, num_stages=1):
            acc, largest, total, unit = _paged_tile(
                acc, largest, total, unit, q, kv_cache, scales, table, kv_head, start, positions,
                first_seen, end, window, score_scale, SHAPE, TILE, True, WINDOWED,
            )  # fmt: skip
    for start in tl.range(full_begin, full_end, TILE, num_stages=STAGES):
        acc, largest, total, unit = _paged_tile(
            acc, largest, total, unit, q, kv_cache, scales, table, kv_head, start, positions,
            first_seen, end, window, score_scale, SHAPE, TILE, False, WINDOWED,
        )  # fmt: skip
    for start in tl.range(full_end, end, TILE, num_stages=1):
        acc, largest, total, unit = _paged_tile(
            acc, largest, total, unit, q, kv_cache, scales, table, kv_head, start, positions,
            first_seen, end, window, score_scale, SHAPE, TILE, True, WINDOWED,
        )  # fmt: skip

    if sinks is not None:
        acc, largest, total = absorb_sinks(acc, largest, total, sinks, head, mask_row, number == 0)
    offs_out = ((first_token + token).to(tl.int64) * SHAPE.num_heads + head) * SHAPE.head_dim
    if SHAPE.kind != "":
        acc = acc * unit
    if shares is None or count == 1:
        result = (acc / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + offs_out[:, None] + offs_dim[None, :], result, mask=mask)
    else:
        store_share(
            acc, largest, total, partial, lse, done, output, offs_out, mask_row, place, kv_head, number, count,
            SHAPE, ROWS,
        )  # fmt: skip


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    step: PagedAttentionStep,
    work: PrefillWork,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    sinks: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Fills the rows of `output` that belong to the tiles of `work`.

    Other arguments as `attention.paged.paged_attention`, except that query heads lie side by side;
    `launch` replaces the rule, for measurements.
    """
    if launch is None and takes_blocks_sm90(query.shape[1], query.dtype, kv_cache, work.tile_tokens):
        attend_blocks_sm90(query, kv_cache, step, work, scale, sliding_window, output, sinks)
        return
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    rows = prefill_tile_rows(head_dim, query.element_size())
    tokens, cuts = _cut_tiles(rows // (num_heads // num_kv_heads), work.tile_tokens)
    scratch = work.scratch
    columns = (None,) * 4 if scratch is None else (work.shares, scratch.partial, scratch.lse, scratch.done)
    memory = memory_of(kv_cache)
    shape = attention_shape(num_heads, head_dim, kv_cache, memory)
    launch = launch or _launch_rule(rows, shape.padded_dim, query, memory.kind != "")
    _paged_kernel[(num_kv_heads, cuts * work.tiles.shape[0])](
        query,
        memory.numbers,
        memory.scales,
        output,
        work.tiles,
        step.query_start_loc,
        step.seq_lens,
        step.rows,
        step.block_tables,
        query.stride(0),
        step.block_tables.stride(0),
        scale * LOG2_E,
        sliding_window or 0,
        sinks,
        *columns,
        SHAPE=shape,
        ROWS=rows,
        TILE_TOKENS=tokens,
        CUTS=cuts,
        TILE=launch.tile,
        STAGES=launch.stages,
        WINDOWED=sliding_window is not None,
        num_warps=launch.warps,
    )


def _cut_tiles(own_tokens: int, tile_tokens: int | None) -> tuple[int, int]:
    """Query tokens of a program, at most `own_tokens`, and programs for each tile of the plan."""
    if tile_tokens is None:
        return own_tokens, 1
    cuts = -(-tile_tokens // own_tokens)
    return -(-tile_tokens // cuts), cuts


def _launch_rule(rows: int, dim: int, query: Tensor, is_quantized: bool) -> Launch:
    """Launch sizes of prefill attention: keys per tile, warps, stages.

    64, 4, 3 was best for 128 rows and heads of 128 on an H200 (450 TFLOP/s). The rest is not
    measured yet: it is what compiles with few registers spilled. A quantized cache has the launch
    of its model's type, with 8 warps: with 4 they spill, for the numbers pass through registers.
    Heads of 256 spill 160 bytes on sm_90 even so, but not in the loop of whole tiles; tiles of 16
    keys spill 64, and give products of half the size. Sums of heads of 512 have twice as many
    threads, and spill 288 bytes, over a quantized cache 1,032.
    """
    row_bytes = dim * query.element_size()
    tile, warps = 64 if row_bytes <= 256 else 32, 8 if is_quantized or dim > 256 else 4
    if query.element_size() > 2:
        tile = 32 if dim <= 128 else 16
    elif not card.has_warpgroup_products(query.device):
        tile, warps = 64 if row_bytes <= 128 else 32, 8
    return Launch(tile, warps, pipeline_stages(query.device, rows * row_bytes, 2 * tile * row_bytes, 3))
