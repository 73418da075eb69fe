"""Attention of long chunks over gathered contexts by warps of three trades, for sm_90.

The tensor cores are fed from shared memory and wait neither for softmax nor for copies.

A program has a tile of 128 query rows of one key/value head. One warp has the copy engine bring
keys and values, some tiles ahead. Two groups of four warps have 64 of the rows each: while one
group's products run, the other is at its softmax (a barrier that makes them take turns gained
nothing). Within a group, too, the softmax of one tile of keys runs beside the product with the
values of the tile before. Tiles of keys are taken from the diagonal back to the first, so that
masks come first and the loop of whole tiles has none.

Programs stay: each takes one tile of rows after the other, in an order that goes back and forth
over the line of tiles, which are sorted by their keys, so that all end at about the same time. A
tile's query rows are copied while the tile before is computed.

Measured on an H200: docs/experiments.md, "prefill attention by warps of three trades".
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import dataclasses

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

from headrace_kernels import card
from headrace_kernels.attention.step import GatheredContext, PagedAttentionStep
from headrace_kernels.attention.tiles import LOG2_E
from headrace_kernels.hopper.launch import tile_descriptor
from headrace_kernels.hopper.ring import begin_product

# Query rows of a tile: two groups of four warps with 64 each, as many as an instruction has.
_ROWS = 128
# Keys of a tile, and bytes of shared memory for tiles of keys and values: two of each where heads
# are 128 wide, four where they are 64.
_TILE = 128
_RING_BYTES = 128 << 10


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a kernel is compiled for.

    The kernel makes it itself: the language would take a tuple apart, and knows no other argument.
    """

    num_heads: int
    num_kv_heads: int
    # Query heads of a key/value head, and query tokens of a tile.
    group: int
    tile_tokens: int
    head_dim: int
    # Keys of a tile, and tiles of keys, and of values, in shared memory.
    tile: int
    stages: int
    is_windowed: bool


@gluon.constexpr_function
def _shape(num_heads, num_kv_heads, head_dim, tile, stages, is_windowed):
    group = num_heads // num_kv_heads
    return _Shape(num_heads, num_kv_heads, group, _ROWS // group, head_dim, tile, stages, is_windowed)


@gluon.jit
def _item(columns, turn, num_items, SHAPE: gl.constexpr):
    """What this program has in its `turn`: key/value head, entry, its first token in the tile.

    The entry is -1 for padding and beyond the end of the line, behind which nothing follows.
    """
    tiles, _, _, _ = columns
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    tile = gl.minimum(item, num_items - 1) // SHAPE.num_kv_heads
    entry = gl.where(item < num_items, gl.load(tiles + tile * 2), -1)
    return item % SHAPE.num_kv_heads, entry, gl.load(tiles + tile * 2 + 1)


@gluon.jit
def _work(columns, item, window, SHAPE: gl.constexpr):
    """What there is to do for an item.

    Returns its key/value head, the entry's first token, number of tokens and computed tokens, the
    tile's first token within the entry, the slot of position 0, the last tile of keys, and how many
    tiles of keys are cut by the diagonal, seen whole, and cut by the window; none for padding.
    """
    _, offsets, query_start_loc, seq_lens = columns
    kv_head, entry, tile_first = item
    is_work = entry >= 0
    entry = gl.maximum(entry, 0)
    tile_first = gl.maximum(tile_first, 0)
    first_token = gl.load(query_start_loc + entry)
    num_tokens = gl.load(query_start_loc + entry + 1) - first_token
    seq_len = gl.load(seq_lens + entry)
    slot = gl.load(offsets + entry)
    computed = seq_len - num_tokens
    first = computed + tile_first
    full_end = (first + 1) // SHAPE.tile
    cut_end = (gl.minimum(first + SHAPE.tile_tokens, seq_len) + (SHAPE.tile - 1)) // SHAPE.tile
    begin = 0
    full_begin = 0
    if SHAPE.is_windowed:
        begin = gl.maximum(first - window + 1, 0) // SHAPE.tile
        last_begin = gl.maximum(first + SHAPE.tile_tokens - window, 0)
        full_begin = gl.minimum((last_begin + (SHAPE.tile - 1)) // SHAPE.tile, full_end)
    at_diagonal = gl.where(is_work, cut_end - full_end, 0)
    whole = gl.where(is_work, full_end - full_begin, 0)
    at_window = gl.where(is_work, full_begin - begin, 0)
    # No row is copied.
    num_tokens = gl.where(is_work, num_tokens, 0)
    return kv_head, first_token, num_tokens, computed, tile_first, slot, cut_end - 1, at_diagonal, whole, at_window


@gluon.jit
def _num_tiles(work):
    """Tiles of keys of an item."""
    _, _, _, _, _, _, _, at_diagonal, whole, at_window = work
    return at_diagonal + whole + at_window


@gluon.jit
def _copy(columns, keys, values, rings, capacity, num_items, window, SHAPE: gl.constexpr):
    """The copying warp: all tiles of keys and values that the groups ask for, in their order."""
    key_ring, value_ring, keys_here, keys_free, values_here, values_free = rings
    TILE_BYTES: gl.constexpr = SHAPE.tile * SHAPE.head_dim * 2
    count = 0
    turn = 0
    work = _work(columns, _item(columns, 0, num_items, SHAPE), window, SHAPE)
    while _num_tiles(work) > 0:
        kv_head, _, _, _, _, slot, last, _, _, _ = work
        row = kv_head * capacity + slot + last * SHAPE.tile
        for _ in range(_num_tiles(work)):
            place = count % SHAPE.stages
            # The first time, nothing is waited for: the phase before the first counts as over.
            used = (count // SHAPE.stages & 1) ^ 1
            mbarrier.wait(keys_free.index(place), used)
            mbarrier.expect(keys_here.index(place), TILE_BYTES)
            tma.async_copy_global_to_shared(keys, [row, 0], keys_here.index(place), key_ring.index(place))
            mbarrier.wait(values_free.index(place), used)
            mbarrier.expect(values_here.index(place), TILE_BYTES)
            tma.async_copy_global_to_shared(values, [row, 0], values_here.index(place), value_ring.index(place))
            row -= SHAPE.tile
            count += 1
        turn += 1
        work = _work(columns, _item(columns, turn, num_items, SHAPE), window, SHAPE)


@gluon.jit
def _query_rows(work, query_stride, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Places of this group's rows of a tile, whose tokens are `query_stride` apart, [64, head_dim].

    Row r is token r // group of the tile, head r % group of the group. Returns also whether each is
    one, [64, 1].
    """
    # Sixteen bytes a thread.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SHAPE.head_dim, SHAPE.head_dim // 8], [4, 1], [1, 0])
    kv_head, first_token, num_tokens, _, tile_first, _, _, _, _, _ = work
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    token = tile_first + row // SHAPE.group
    is_row = (row < SHAPE.tile_tokens * SHAPE.group) & (token < num_tokens)
    head = kv_head * SHAPE.group + row % SHAPE.group
    begins = (first_token + token).to(gl.int64) * query_stride + head * SHAPE.head_dim
    offs_dim = gl.expand_dims(gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(0, LINES)), 0)
    return gl.expand_dims(begins, 1) + offs_dim, gl.expand_dims(is_row, 1)


@gluon.jit
def _copy_queries(query, ring, work, turn, query_stride, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Begins to copy this group's query rows of a tile; rows that the tile lacks become 0."""
    places, is_row = _query_rows(work, query_stride, SHAPE, HALF)
    async_copy.async_copy_global_to_shared(ring.index(turn % 2 * 2 + HALF), query + places, mask=is_row)
    async_copy.commit_group()


@gluon.jit
def _store(output, acc, factor, work, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Writes this group's rows of a tile, each times its factor."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.head_dim, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SHAPE.head_dim, SHAPE.head_dim // 8], [4, 1], [1, 0])
    result = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, SUMS)), 1)
    places, is_row = _query_rows(work, SHAPE.num_heads * SHAPE.head_dim, SHAPE, HALF)
    gl.store(output + places, gl.convert_layout(result.to(output.dtype.element_ty), LINES), mask=is_row)


@gluon.jit
def _scores(query, rings, count, SHAPE: gl.constexpr):
    """Begins to multiply the queries by the keys of tile `count`."""
    TILE: gl.constexpr = SHAPE.tile
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    key_ring, _, _, _, _, _ = rings
    keys = key_ring.index(count % SHAPE.stages).permute((1, 0))
    return begin_product(query, keys, 64, TILE, SCORES)


@gluon.jit
def _add_values(acc, weights, rings, count, SHAPE: gl.constexpr):
    """Waits for the values of tile `count` and begins to add them, each times its weight."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.head_dim, 16])
    _, value_ring, _, _, values_here, _ = rings
    place = count % SHAPE.stages
    mbarrier.wait(values_here.index(place), count // SHAPE.stages & 1)
    operand = gl.convert_layout(weights.to(value_ring.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(operand, value_ring.index(place), acc, is_async=True)


@gluon.jit
def _softmax(scores, largest, total, positions, start, window, score_scale, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """The online softmax over the keys from `start` on, for tokens at `positions`.

    Returns weights, by how much what was before shrinks, and the new largest score and total.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.tile, 16]))
    if MASKED:
        at = gl.expand_dims(start + gl.arange(0, SHAPE.tile, layout=COLUMN), 0)
        seen = at <= gl.expand_dims(positions, 1)
        if SHAPE.is_windowed:
            seen = seen & (at > gl.expand_dims(positions, 1) - window)
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
    state, query, rings, totals, count, positions, start, window, score_scale,
    SHAPE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the values of tile `count - 1`, beside the softmax of tile `count`."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.head_dim, 16])
    acc, weights, largest, total = state
    _, _, keys_here, keys_free, _, values_free = rings
    place = count % SHAPE.stages
    mbarrier.wait(keys_here.index(place), count // SHAPE.stages & 1)
    scores = _scores(query, rings, count, SHAPE)
    acc = _add_values(acc, weights, rings, count - 1, SHAPE)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys_free.index(place), count=1)
    weights, shrink, largest, total = _softmax(
        scores, largest, total, positions, start, window, score_scale, SHAPE, MASKED
    )
    # Nobody reads it. The store needs all weights, and the compiler leaves it before the wait: else
    # it would compute them behind it, and nothing would run beside the values' product.
    totals.store(total)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values_free.index((count - 1) % SHAPE.stages), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, SUMS)), 1)
    return acc, weights, largest, total


@gluon.jit
def _attend(
    query, output, columns, query_ring, rings, all_totals, num_items, query_stride, score_scale, window, sinks,
    SHAPE: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A group of four warps: the products and softmax of its half of the rows."""
    DIM: gl.constexpr = SHAPE.head_dim
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.tile, 16]))
    key_ring, value_ring, keys_here, keys_free, values_here, values_free = rings
    totals = all_totals.index(HALF)
    offs_row = HALF * 64 + gl.arange(0, 64, layout=ROW)
    # Tiles of keys that this group has been at.
    count = 0
    work = _work(columns, _item(columns, 0, num_items, SHAPE), window, SHAPE)
    _copy_queries(query, query_ring, work, 0, query_stride, SHAPE, HALF)
    turn = 0
    # Loads of what comes are two tiles of rows ahead, each waited for where its results are used.
    item = _item(columns, 1, num_items, SHAPE)
    while _num_tiles(work) > 0:
        kv_head, _, _, computed, tile_first, _, last, at_diagonal, whole, at_window = work
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mine = query_ring.index(turn % 2 * 2 + HALF)
        positions = computed + tile_first + offs_row // SHAPE.group
        # The first tile of keys, most often cut by the diagonal: nothing is multiplied beside.
        mbarrier.wait(keys_here.index(count % SHAPE.stages), count // SHAPE.stages & 1)
        scores = _scores(mine, rings, count, SHAPE)
        after = _work(columns, item, window, SHAPE)
        item = _item(columns, turn + 2, num_items, SHAPE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys_free.index(count % SHAPE.stages), count=1)
        largest = gl.full([64], -1.0e30, gl.float32, layout=ROW)
        total = gl.zeros([64], gl.float32, layout=ROW)
        start = last * SHAPE.tile
        weights, _, largest, total = _softmax(
            scores, largest, total, positions, start, window, score_scale, SHAPE, True
        )
        _copy_queries(query, query_ring, after, turn + 1, query_stride, SHAPE, HALF)
        state = (gl.zeros([64, DIM], gl.float32, layout=SUMS), weights, largest, total)
        count += 1
        # The loops' first tiles are where the one before ended.
        for _ in range(1, at_diagonal):
            start -= SHAPE.tile
            state = _absorb(
                state, mine, rings, totals, count, positions, start, window, score_scale, SHAPE, True,
            )  # fmt: skip
            count += 1
        for _ in range(gl.where(at_diagonal > 0, 0, 1), whole):
            start -= SHAPE.tile
            state = _absorb(
                state, mine, rings, totals, count, positions, start, window, score_scale, SHAPE, False,
            )  # fmt: skip
            count += 1
        if SHAPE.is_windowed:
            for _ in range(gl.where(at_diagonal + whole > 0, 0, 1), at_window):
                start -= SHAPE.tile
                state = _absorb(
                    state, mine, rings, totals, count, positions, start, window, score_scale, SHAPE, True,
                )  # fmt: skip
                count += 1
        acc, weights, largest, total = state
        acc = warpgroup_mma_wait(0, deps=[_add_values(acc, weights, rings, count - 1, SHAPE)])
        mbarrier.arrive(values_free.index((count - 1) % SHAPE.stages), count=1)
        factor = 1.0 / total
        if sinks is not None:
            # log2(e): exp(x) is 2^(x * log2(e)).
            logit = gl.load(sinks + kv_head * SHAPE.group + offs_row % SHAPE.group).to(gl.float32)
            new_largest = gl.maximum(largest, logit * 1.4426950408889634)
            shrink = gl.exp2(largest - new_largest)
            factor = shrink / (total * shrink + gl.exp2(logit * 1.4426950408889634 - new_largest))
        _store(output, acc, factor, work, SHAPE, HALF)
        turn += 1
        work = after
    async_copy.wait_group(0)


@gluon.jit(
    do_not_specialize=["capacity", "window", "num_items"],
    do_not_specialize_on_alignment=["tiles", "offsets", "query_start_loc", "seq_lens"],
)
def _gathered_kernel_sm90(
    query, keys, values, output, tiles, offsets, query_start_loc, seq_lens,
    query_stride, capacity, score_scale, window, num_items, sinks,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    SHAPE: gl.constexpr = _shape(NUM_HEADS, KV_HEADS, DIM, TILE, STAGES, WINDOWED)
    # Each group has two tiles here: its rows of this one and of the next.
    query_ring = gl.allocate_shared_memory(keys.dtype, [4, 64, DIM], keys.layout)
    key_ring = gl.allocate_shared_memory(keys.dtype, [STAGES, TILE, DIM], keys.layout)
    value_ring = gl.allocate_shared_memory(values.dtype, [STAGES, TILE, DIM], values.layout)
    keys_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for place in gl.static_range(STAGES):
        mbarrier.init(keys_here.index(place), count=1)
        mbarrier.init(values_here.index(place), count=1)
        # Both groups read them.
        mbarrier.init(keys_free.index(place), count=2)
        mbarrier.init(values_free.index(place), count=2)
    fence_async_shared()
    columns = (tiles, offsets, query_start_loc, seq_lens)
    rings = (key_ring, value_ring, keys_here, keys_free, values_here, values_free)
    gl.warp_specialize(
        [
            (_attend, (query, output, columns, query_ring, rings, totals, num_items, query_stride, score_scale, window,
                       sinks, SHAPE, 0)),
            (_attend, (query, output, columns, query_ring, rings, totals, num_items, query_stride, score_scale, window,
                       sinks, SHAPE, 1)),
            (_copy, (columns, keys, values, rings, capacity, num_items, window, SHAPE)),
        ],
        # Warps of the other two, and registers of a thread; the first group has as many.
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
    keys, values = (tile_descriptor(half.view(-1, head_dim), _TILE, head_dim) for half in context)
    stages = _RING_BYTES // (2 * _TILE * head_dim * query.element_size())
    num_items = tiles.shape[0] * num_kv_heads
    _gathered_kernel_sm90[(min(num_items, card.multiprocessors(query.device)),)](
        query, keys, values, output, tiles, gathered.offsets, step.query_start_loc, step.seq_lens,
        query.stride(0), capacity, scale * LOG2_E, sliding_window or 0, num_items, sinks,
        NUM_HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, TILE=_TILE, STAGES=stages,
        WINDOWED=sliding_window is not None, num_warps=4,
    )  # fmt: skip
