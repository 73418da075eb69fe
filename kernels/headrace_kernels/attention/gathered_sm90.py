"""Attention of long chunks over gathered contexts by warps of three trades, for sm_90.

The tensor cores are fed from shared memory without waiting for softmax or copies.

A program has a tile of 128 query rows of one key/value head. One warp has the copy engine bring
keys and values, some tiles ahead. Two groups of four warps have 64 of the rows each: while one
multiplies, the other is at its softmax, and they hand the tensor cores to each other. Within a
group, too, the scores of one tile of keys are multiplied beside the softmax of the one before.
Tiles of keys are taken from the diagonal back to the first, so that masks come first and the loop
of whole tiles has none.

Programs stay: each takes one tile of rows after the other, in an order that goes back and forth
over the line of tiles, which are sorted by their contexts, so that all end at about the same time.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace_kernels import card
from headrace_kernels.attention.step import GatheredContext, PagedAttentionStep
from headrace_kernels.attention.tiles import LOG2_E

# Query rows of a tile: two groups of four warps with 64 each, as many as an instruction has.
_ROWS = 128
# Keys of a tile, and the bytes of such tiles in shared memory: two of keys and two of values where
# heads are 128 wide, four where they are 64.
_TILE = 128
_RING_BYTES = 128 << 10

@gluon.jit
def _item_of(turn):
    """The place in the line of tiles and heads that this program takes in its `turn`."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def _work(
    columns, item, num_items, window,
    KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, TILE: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """What the item of the line is.

    Returns its key/value head, the entry's first token, number of tokens and computed tokens, the
    tile's first token within the entry, the slot of position 0, the last tile of keys, and how many
    tiles of keys are cut by the diagonal, seen whole, and cut by the window; none for padding and beyond the end of the line.
    """
    tiles, offsets, query_start_loc, seq_lens = columns
    kv_head = item % KV_HEADS
    tile = gl.minimum(item, num_items - 1) // KV_HEADS
    entry = gl.load(tiles + tile * 2)
    tile_first = gl.maximum(gl.load(tiles + tile * 2 + 1), 0)
    is_work = (entry >= 0) & (item < num_items)
    entry = gl.maximum(entry, 0)
    first_token = gl.load(query_start_loc + entry)
    num_tokens = gl.load(query_start_loc + entry + 1) - first_token
    seq_len = gl.load(seq_lens + entry)
    slot = gl.load(offsets + entry)
    computed = seq_len - num_tokens
    first = computed + tile_first
    end = gl.minimum(first + TILE_TOKENS, seq_len)
    full_end = (first + 1) // TILE
    cut_end = (end + (TILE - 1)) // TILE
    begin = 0
    full_begin = 0
    if WINDOWED:
        begin = gl.maximum(first - window + 1, 0) // TILE
        full_begin = gl.minimum((gl.maximum(first + TILE_TOKENS - window, 0) + (TILE - 1)) // TILE, full_end)
    at_diagonal = gl.where(is_work, cut_end - full_end, 0)
    whole = gl.where(is_work, full_end - full_begin, 0)
    at_window = gl.where(is_work, full_begin - begin, 0)
    # No row is copied.
    num_tokens = gl.where(is_work, num_tokens, 0)
    return kv_head, first_token, num_tokens, computed, tile_first, slot, cut_end - 1, at_diagonal, whole, at_window


@gluon.jit
def _copy(
    columns, keys, values, rings, capacity, num_items, window,
    KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """The copying warp: every tile of keys and values that the groups will ask for, in their order."""
    key_ring, value_ring, keys_here, keys_free, values_here, values_free = rings
    count = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        kv_head, _, _, _, _, slot, last, at_diagonal, whole, at_window = _work(
            columns, _item_of(turn), num_items, window, KV_HEADS, TILE_TOKENS, TILE, WINDOWED
        )
        row = kv_head * capacity + slot + last * TILE
        for _ in range(at_diagonal + whole + at_window):
            place = count % STAGES
            used = count // STAGES & 1
            mbarrier.wait(keys_free.index(place), used ^ 1)
            mbarrier.expect(keys_here.index(place), TILE * DIM * 2)
            tma.async_copy_global_to_shared(keys, [row, 0], keys_here.index(place), key_ring.index(place))
            mbarrier.wait(values_free.index(place), used ^ 1)
            mbarrier.expect(values_here.index(place), TILE * DIM * 2)
            tma.async_copy_global_to_shared(values, [row, 0], values_here.index(place), value_ring.index(place))
            row -= TILE
            count += 1


@gluon.jit
def _sees(positions, start, window, TILE: gl.constexpr, WINDOWED: gl.constexpr):
    """Whether tokens at `positions` see keys from `start` on, [64, TILE]."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    at = gl.expand_dims(start + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES)), 0)
    seen = at <= gl.expand_dims(positions, 1)
    if WINDOWED:
        seen = seen & (at > gl.expand_dims(positions, 1) - window)
    return seen


@gluon.jit
def _softmax(scores, largest, total, seen, score_scale, MASKED: gl.constexpr):
    """One tile of the online softmax: returns weights, the shrinking of what was, largest, total."""
    if MASKED:
        scores = gl.where(seen, scores * score_scale, -1.0e30)
        new_largest = gl.maximum(largest, gl.max(scores, 1))
        weights = gl.exp2(scores - gl.expand_dims(new_largest, 1))
    else:
        new_largest = gl.maximum(largest, gl.max(scores, 1) * score_scale)
        weights = gl.exp2(scores * score_scale - gl.expand_dims(new_largest, 1))
    shrink = gl.exp2(largest - new_largest)
    return weights, shrink, new_largest, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _absorb(
    acc, weights, largest, total, query, rings, turns, count, handed, positions, start, window, score_scale,
    TILE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr,
    HALF: gl.constexpr, TAKES_TURNS: gl.constexpr,
):  # fmt: skip
    """Multiplies the values of tile `count - 1`, beside scores and softmax of tile `count`."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    key_ring, value_ring, keys_here, keys_free, values_here, values_free = rings
    place = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(keys_here.index(place), count // STAGES & 1)
    if TAKES_TURNS:
        mbarrier.wait(turns.index(HALF), (handed + (1 - HALF)) & 1)
    nothing = gl.zeros([64, TILE], gl.float32, layout=SCORES)
    scores = warpgroup_mma(query, key_ring.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(values_here.index(before), (count - 1) // STAGES & 1)
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
    acc = warpgroup_mma(operand, value_ring.index(before), acc, is_async=True)
    if TAKES_TURNS:
        mbarrier.arrive(turns.index(1 - HALF), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys_free.index(place), count=1)
    seen = True
    if MASKED:
        seen = _sees(positions, start, window, TILE, WINDOWED)
    new_weights, shrink, largest, total = _softmax(scores, largest, total, seen, score_scale, MASKED)
    weights = new_weights.to(value_ring.dtype)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values_free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, SUMS)), 1)
    return acc, weights, largest, total


@gluon.jit
def _copy_queries(
    query, query_ring, work, turn, query_stride,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, DIM: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Begins to copy this group's query rows of a tile; rows that the tile lacks become 0."""
    GROUP: gl.constexpr = NUM_HEADS // KV_HEADS
    # Sixteen bytes a thread.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    kv_head, first_token, num_tokens, _, tile_first, _, _, _, _, _ = work
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    token = tile_first + row // GROUP
    is_row = gl.expand_dims((row < TILE_TOKENS * GROUP) & (token < num_tokens), 1)
    offs_query = (first_token + token).to(gl.int64) * query_stride + (kv_head * GROUP + row % GROUP) * DIM
    offs_dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES)), 0)
    mine = query_ring.index(turn % 2 * 2 + HALF)
    async_copy.async_copy_global_to_shared(mine, query + (gl.expand_dims(offs_query, 1) + offs_dim), mask=is_row)
    async_copy.commit_group()


@gluon.jit
def _store(
    output, acc, factor, work,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, DIM: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Writes this group's rows of a tile, each times its factor."""
    GROUP: gl.constexpr = NUM_HEADS // KV_HEADS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    kv_head, first_token, num_tokens, _, tile_first, _, _, _, _, _ = work
    result = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, SUMS)), 1)
    result = gl.convert_layout(result.to(output.dtype.element_ty), LINES)
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    token = tile_first + row // GROUP
    is_row = gl.expand_dims((row < TILE_TOKENS * GROUP) & (token < num_tokens), 1)
    offs_out = ((first_token + token).to(gl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP) * DIM
    offs_dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES)), 0)
    gl.store(output + (gl.expand_dims(offs_out, 1) + offs_dim), result, mask=is_row)


@gluon.jit
def _attend(
    query, output, columns, query_ring, rings, turns, num_items, query_stride, score_scale, window, sinks,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, TILE: gl.constexpr,
    DIM: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, HALF: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
):  # fmt: skip
    """A group of four warps: the products and softmax of its half of the rows."""
    GROUP: gl.constexpr = NUM_HEADS // KV_HEADS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    key_ring, value_ring, keys_here, keys_free, values_here, values_free = rings
    offs_row = HALF * 64 + gl.arange(0, 64, layout=ROW)
    # Tiles of keys that this group has been at, and how often it has had the tensor cores.
    count = 0
    handed = 0
    work = _work(columns, _item_of(0), num_items, window, KV_HEADS, TILE_TOKENS, TILE, WINDOWED)
    _copy_queries(query, query_ring, work, 0, query_stride, NUM_HEADS, KV_HEADS, TILE_TOKENS, DIM, HALF)
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        kv_head, _, _, computed, tile_first, _, last, at_diagonal, whole, at_window = work
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        after = _work(columns, _item_of(turn + 1), num_items, window, KV_HEADS, TILE_TOKENS, TILE, WINDOWED)
        _copy_queries(query, query_ring, after, turn + 1, query_stride, NUM_HEADS, KV_HEADS, TILE_TOKENS, DIM, HALF)
        if at_diagonal + whole + at_window > 0:
            mine = query_ring.index(turn % 2 * 2 + HALF)
            positions = computed + tile_first + offs_row // GROUP
            # The first tile of keys, cut by the diagonal: nothing is multiplied beside it.
            place = count % STAGES
            mbarrier.wait(keys_here.index(place), count // STAGES & 1)
            nothing = gl.zeros([64, TILE], gl.float32, layout=SCORES)
            scores = warpgroup_mma(mine, key_ring.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(keys_free.index(place), count=1)
            largest = gl.full([64], -1.0e30, gl.float32, layout=ROW)
            total = gl.zeros([64], gl.float32, layout=ROW)
            seen = _sees(positions, last * TILE, window, TILE, WINDOWED)
            new_weights, _, largest, total = _softmax(scores, largest, total, seen, score_scale, True)
            weights = new_weights.to(value_ring.dtype)
            acc = gl.zeros([64, DIM], gl.float32, layout=SUMS)
            count += 1

            start = (last - 1) * TILE
            for _ in range(1, at_diagonal):
                acc, weights, largest, total = _absorb(
                    acc, weights, largest, total, mine, rings, turns, count, handed, positions, start, window,
                    score_scale, TILE, DIM, STAGES, True, WINDOWED, HALF, TAKES_TURNS,
                )  # fmt: skip
                start -= TILE
                count += 1
                handed += 1
            for _ in range(gl.where(at_diagonal > 0, 0, 1), whole):
                acc, weights, largest, total = _absorb(
                    acc, weights, largest, total, mine, rings, turns, count, handed, positions, start, window,
                    score_scale, TILE, DIM, STAGES, False, WINDOWED, HALF, TAKES_TURNS,
                )  # fmt: skip
                start -= TILE
                count += 1
                handed += 1
            if WINDOWED:
                for _ in range(gl.where(at_diagonal + whole > 0, 0, 1), at_window):
                    acc, weights, largest, total = _absorb(
                        acc, weights, largest, total, mine, rings, turns, count, handed, positions, start, window,
                        score_scale, TILE, DIM, STAGES, True, WINDOWED, HALF, TAKES_TURNS,
                    )  # fmt: skip
                    start -= TILE
                    count += 1
                    handed += 1

            before = (count - 1) % STAGES
            mbarrier.wait(values_here.index(before), (count - 1) // STAGES & 1)
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
            acc = warpgroup_mma(operand, value_ring.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(values_free.index(before), count=1)

            factor = 1.0 / total
            if sinks is not None:
                # log2(e): exp(x) is 2^(x * log2(e)).
                logit = gl.load(sinks + kv_head * GROUP + offs_row % GROUP).to(gl.float32) * 1.4426950408889634
                new_largest = gl.maximum(largest, logit)
                shrink = gl.exp2(largest - new_largest)
                factor = shrink / (total * shrink + gl.exp2(logit - new_largest))
            _store(output, acc, factor, work, NUM_HEADS, KV_HEADS, TILE_TOKENS, DIM, HALF)
        work = after
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["capacity", "window", "num_items"],
           do_not_specialize_on_alignment=["tiles", "offsets", "query_start_loc", "seq_lens"])  # fmt: skip
def _gathered_kernel_sm90(
    query, keys, values, output, tiles, offsets, query_start_loc, seq_lens,
    query_stride, capacity, score_scale, window, num_items, sinks,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, TAKES_TURNS: gl.constexpr,
):  # fmt: skip
    TILE_TOKENS: gl.constexpr = 128 // (NUM_HEADS // KV_HEADS)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    query_ring = gl.allocate_shared_memory(keys.dtype, [4, 64, DIM], QUERIES)
    key_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, TILE, DIM], keys.layout)
    value_ring = gl.allocate_shared_memory(values.dtype, [STAGES, TILE, DIM], values.layout)
    keys_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(keys_here.index(place), count=1)
        mbarrier.init(values_here.index(place), count=1)
        # Both groups read them.
        mbarrier.init(keys_free.index(place), count=2)
        mbarrier.init(values_free.index(place), count=2)
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    fence_async_shared()
    columns = (tiles, offsets, query_start_loc, seq_lens)
    rings = (key_ring, value_ring, keys_here, keys_free, values_here, values_free)
    gl.warp_specialize(
        [
            (_attend, (query, output, columns, query_ring, rings, turns, num_items, query_stride, score_scale, window,
                       sinks, NUM_HEADS, KV_HEADS, TILE_TOKENS, TILE, DIM, STAGES, WINDOWED, 0, TAKES_TURNS)),
            (_attend, (query, output, columns, query_ring, rings, turns, num_items, query_stride, score_scale, window,
                       sinks, NUM_HEADS, KV_HEADS, TILE_TOKENS, TILE, DIM, STAGES, WINDOWED, 1, TAKES_TURNS)),
            (_copy, (columns, keys, values, rings, capacity, num_items, window, KV_HEADS, TILE_TOKENS, TILE, DIM,
                     STAGES, WINDOWED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes_gathered_sm90(device: torch.device, head_dim: int) -> bool:
    """Whether the kernel attends with such heads, of a 16-bit type, on this GPU."""
    return card.has_warpgroup_instructions(device) and head_dim in (64, 128)


def attend_gathered_sm90(
    query: Tensor,
    step: PagedAttentionStep,
    tiles: Tensor,
    gathered: GatheredContext,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
    sinks: Tensor | None,
) -> None:
    """Fills the rows of `output` that belong to the tiles; arguments as `gathered_attention`.

    The contexts have been gathered.
    """
    num_heads, head_dim = query.shape[1:]
    context = gathered.scratch.context
    num_kv_heads, capacity = context.shape[1:3]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys, values = (TensorDescriptor.from_tensor(half.view(-1, head_dim), [_TILE, head_dim], layout) for half in context)
    num_items = tiles.shape[0] * num_kv_heads
    _gathered_kernel_sm90[(min(num_items, card.multiprocessors(query.device)),)](
        query, keys, values, output, tiles, gathered.offsets, step.query_start_loc, step.seq_lens,
        query.stride(0), capacity, scale * LOG2_E, sliding_window or 0, num_items, sinks,
        NUM_HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, TILE=_TILE,
        STAGES=_RING_BYTES // (2 * _TILE * head_dim * 2), WINDOWED=sliding_window is not None, TAKES_TURNS=True,
        num_warps=4,
    )  # fmt: skip
