"""Attention of prompts' chunks over the paged cache by warps of three trades, for sm_90.

The tensor cores are fed from shared memory and wait neither for softmax nor for copies.

A program has a tile of 128 query rows of one key/value head. One warp has the copy engine bring
keys and another one values, a block of the cache at a time, some tiles ahead. Two groups of four
warps have 64 of the rows each: while one group's products run, the other is at its softmax (a
barrier that makes them take turns gained nothing). Within a group, too, the softmax of one tile of
keys runs beside the product with the values of the tile before. Tiles of keys are taken from the
diagonal back to the first, so that masks come first and the loop of whole tiles has none.

Programs stay: each takes one item after the other (`prefill_sm90.items`), and an item's query rows
are copied while the one before is computed. What a launch depends on is in descriptors of memory
that stays and in columns, so that graphs can hold it: the kernel itself sees whether contexts are
long, and takes larger tiles of keys then.

Contexts that were gathered (`attention.gathered`), whose tiles are in one piece, are read likewise.

Measured on an H200: docs/experiments.md, "prefill attention by warps of three trades" and "chunks
attend to blocks by the copy engine".
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

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

from headrace_kernels.attention.prefill_sm90.items import (
    is_item,
    item_of,
    page_rows,
    sees_many,
    shapes_of,
    work_of,
)
from headrace_kernels.attention.prefill_sm90.results import (
    lines_of,
    places_of_rows,
    store_rows,
    store_share,
    sums_of,
    with_sinks,
)
from headrace_kernels.hopper.ring import begin_product


@gluon.jit
def _copy(
    columns, shares, cache, first_row, ring, tables, table_stride, capacity, num_items, window, SHAPE: gl.constexpr
):  # fmt: skip
    """A copying warp: all tiles of keys, or of values, that the groups ask for, in their order.

    Keys lie in the cache from row 0 on, values from the first row of its second half.
    """
    tiles, here, free = ring
    TILE_BYTES: gl.constexpr = SHAPE.tile * SHAPE.head_dim * 2
    PAGES: gl.constexpr = SHAPE.tile // SHAPE.page
    count = 0
    turn = 0
    item = item_of(columns, shares, 0, num_items, SHAPE)
    while is_item(item):
        kv_head = item[0]
        work = work_of(columns, item, window, SHAPE)
        keys = work[1]
        tile = keys[3]
        at_diagonal, whole, at_window = work[2]
        turn += 1
        item = item_of(columns, shares, turn, num_items, SHAPE)
        for _ in range(at_diagonal + whole + at_window):
            rows = page_rows(tables, table_stride, capacity, kv_head, keys, tile, SHAPE)
            place = count % SHAPE.stages
            # The first time, nothing is waited for: the phase before the first counts as over.
            mbarrier.wait(free.index(place), (count // SHAPE.stages & 1) ^ 1)
            mbarrier.expect(here.index(place), TILE_BYTES)
            for page in gl.static_range(PAGES):
                part = tiles.index(place).slice(page * SHAPE.page, SHAPE.page, 0)
                tma.async_copy_global_to_shared(cache, [rows[page] + first_row, 0], here.index(place), part)
            tile -= 1
            count += 1


@gluon.jit
def _copy_queries(query, ring, item, work, turn, query_stride, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Begins to copy this group's query rows of a tile; rows that the tile lacks become 0."""
    LINES: gl.constexpr = lines_of(SHAPE.head_dim)
    begins, is_row = places_of_rows(item[0], work[0], query_stride, gl.SliceLayout(1, LINES), SHAPE, HALF)
    dims = gl.expand_dims(gl.arange(0, SHAPE.head_dim, layout=gl.SliceLayout(0, LINES)), 0)
    places = query + (gl.expand_dims(begins, 1) + dims)
    async_copy.async_copy_global_to_shared(ring.index(turn % 2 * 2 + HALF), places, mask=gl.expand_dims(is_row, 1))
    async_copy.commit_group()


@gluon.jit
def _clear_hidden(rings, count, keys, start, cleared, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Clears values of tile `count`, from position `start` on, that nobody sees; counts such tiles.

    These are behind the context's end and before the first position that the window shows. What
    another context left there may be NaN, which a weight of 0 does not take away.
    """
    _, first_seen, seq_len, _ = keys
    if SHAPE.head_rows > 0:
        if (start < first_seen) | (start + SHAPE.tile > seq_len):
            _clear_half(rings, count, first_seen - start, seq_len - start, cleared, SHAPE, HALF)
            cleared += 1
    return cleared


@gluon.jit
def _clear_half(rings, count, first, end, cleared, SHAPE: gl.constexpr, HALF: gl.constexpr):
    """Clears this group's half of a tile of values but for rows `first` to `end`.

    Waits for the other group to have cleared its own.
    """
    _, value_ring, _, _, values_here, _, values_clear = rings
    LINES: gl.constexpr = lines_of(SHAPE.head_dim)
    PART: gl.constexpr = SHAPE.tile // 2
    place = count % SHAPE.stages
    mbarrier.wait(values_here.index(place), count // SHAPE.stages & 1)
    part = value_ring.index(place).slice(HALF * PART, PART, 0)
    row = HALF * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LINES))
    is_seen = gl.expand_dims((row >= first) & (row < end), 1)
    part.store(gl.where(is_seen, part.load(LINES), 0.0).to(value_ring.dtype))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(values_clear.index(0), count=1)
    mbarrier.wait(values_clear.index(0), cleared & 1)


@gluon.jit
def _scores(query, rings, count, SHAPE: gl.constexpr):
    """Begins to multiply the queries by the keys of tile `count`."""
    TILE: gl.constexpr = SHAPE.tile
    SCORES: gl.constexpr = sums_of(TILE)
    key_ring, _, _, _, _, _, _ = rings
    keys = key_ring.index(count % SHAPE.stages).permute((1, 0))
    return begin_product(query, keys, 64, TILE, SCORES)


@gluon.jit
def _add_values(acc, weights, rings, count, SHAPE: gl.constexpr):
    """Waits for the values of tile `count` and begins to add them, each times its weight."""
    SUMS: gl.constexpr = sums_of(SHAPE.head_dim)
    _, value_ring, _, _, values_here, _, _ = rings
    place = count % SHAPE.stages
    mbarrier.wait(values_here.index(place), count // SHAPE.stages & 1)
    operand = gl.convert_layout(weights.to(value_ring.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(operand, value_ring.index(place), acc, is_async=True)


@gluon.jit
def _softmax(scores, largest, total, positions, start, window, score_scale, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """The online softmax over the keys from `start` on, for tokens at `positions`.

    Returns weights, by how much what was before shrinks, and the new largest score and total.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(0, sums_of(SHAPE.tile))
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
    SUMS: gl.constexpr = sums_of(SHAPE.head_dim)
    acc, weights, largest, total = state
    _, _, keys_here, keys_free, _, values_free, _ = rings
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
    query, output, columns, shares, partial, lse, done, query_ring, rings, all_totals, num_items, query_stride,
    score_scale, window, sinks,
    SHAPE: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A group of four warps: the products and softmax of its half of the rows."""
    DIM: gl.constexpr = SHAPE.head_dim
    SUMS: gl.constexpr = sums_of(DIM)
    ROW: gl.constexpr = gl.SliceLayout(1, sums_of(SHAPE.tile))
    key_ring, value_ring, keys_here, keys_free, values_here, values_free, values_clear = rings
    totals = all_totals.index(HALF)
    offs_row = HALF * 64 + gl.arange(0, 64, layout=ROW)
    # Tiles of keys that this group has been at, and tiles of values that it has cleared.
    count = 0
    cleared = 0
    turn = 0
    item = item_of(columns, shares, 0, num_items, SHAPE)
    work = work_of(columns, item, window, SHAPE)
    _copy_queries(query, query_ring, item, work, 0, query_stride, SHAPE, HALF)
    # Which tile of rows comes is asked for two turns ahead, and waited for where it is used.
    following = item_of(columns, shares, 1, num_items, SHAPE)
    while is_item(item):
        tokens, keys, counts, share = work
        at_diagonal, whole, at_window = counts
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mine = query_ring.index(turn % 2 * 2 + HALF)
        # Computed tokens, the tile's first and each row's.
        positions = tokens[2] + tokens[3] + offs_row // SHAPE.group
        # The first tile of keys, most often cut by the diagonal: nothing is multiplied beside.
        mbarrier.wait(keys_here.index(count % SHAPE.stages), count // SHAPE.stages & 1)
        scores = _scores(mine, rings, count, SHAPE)
        next_work = work_of(columns, following, window, SHAPE)
        later = item_of(columns, shares, turn + 2, num_items, SHAPE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys_free.index(count % SHAPE.stages), count=1)
        largest = gl.full([64], -1.0e30, gl.float32, layout=ROW)
        total = gl.zeros([64], gl.float32, layout=ROW)
        start = keys[3] * SHAPE.tile
        weights, _, largest, total = _softmax(
            scores, largest, total, positions, start, window, score_scale, SHAPE, True
        )
        _copy_queries(query, query_ring, following, next_work, turn + 1, query_stride, SHAPE, HALF)
        cleared = _clear_hidden(rings, count, keys, start, cleared, SHAPE, HALF)
        state = (gl.zeros([64, DIM], gl.float32, layout=SUMS), weights, largest, total)
        count += 1
        # The loops' first tiles are where the one before ended.
        for _ in range(1, at_diagonal):
            start -= SHAPE.tile
            state = _absorb(
                state, mine, rings, totals, count, positions, start, window, score_scale, SHAPE, True,
            )  # fmt: skip
            if SHAPE.is_windowed:
                cleared = _clear_hidden(rings, count, keys, start, cleared, SHAPE, HALF)
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
                cleared = _clear_hidden(rings, count, keys, start, cleared, SHAPE, HALF)
                count += 1
        acc, weights, largest, total = state
        acc = warpgroup_mma_wait(0, deps=[_add_values(acc, weights, rings, count - 1, SHAPE)])
        mbarrier.arrive(values_free.index((count - 1) % SHAPE.stages), count=1)
        kv_head = item[0]
        shrink, largest, total = with_sinks(sinks, kv_head, share[0], largest, total, SHAPE, HALF)
        result = acc * gl.expand_dims(gl.convert_layout(shrink / total, gl.SliceLayout(1, SUMS)), 1)
        num_shares = share[1]
        if num_shares == 1:
            store_rows(output, result, kv_head, tokens, SHAPE, HALF)
        elif shares is not None:
            if num_shares > 1:
                store_share((partial, lse, done), output, result, largest, total, kv_head, tokens, share, SHAPE, HALF)
        turn += 1
        item = following
        following = later
        work = next_work
    async_copy.wait_group(0)


@gluon.jit
def _attend_either(
    is_long, query, output, columns, shares, partial, lse, done, query_ring, rings, all_totals, num_items,
    query_stride, score_scale, window, sinks, SHAPES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """`_attend` in tiles of the size that suits the step."""
    long_rings, short_rings = rings
    LONG: gl.constexpr = SHAPES.long
    SHORT: gl.constexpr = SHAPES.short
    if is_long:
        _attend(
            query, output, columns, shares, partial, lse, done, query_ring, long_rings, all_totals, num_items,
            query_stride, score_scale, window, sinks, LONG, HALF,
        )  # fmt: skip
    elif SHORT is not None:
        _attend(
            query, output, columns, shares, partial, lse, done, query_ring, short_rings, all_totals, num_items,
            query_stride, score_scale, window, sinks, SHORT, HALF,
        )  # fmt: skip


@gluon.jit
def _copy_either(
    is_long, columns, shares, cache, first_row, rings, tables, table_stride, capacity, num_items, window,
    SHAPES: gl.constexpr, OF_VALUES: gl.constexpr,
):  # fmt: skip
    """`_copy` in tiles of the size that suits the step."""
    LONG: gl.constexpr = SHAPES.long
    SHORT: gl.constexpr = SHAPES.short
    if is_long:
        long_ring = _ring(rings[0], OF_VALUES)
        _copy(columns, shares, cache, first_row, long_ring, tables, table_stride, capacity, num_items, window, LONG)
    elif SHORT is not None:
        short_ring = _ring(rings[1], OF_VALUES)
        _copy(columns, shares, cache, first_row, short_ring, tables, table_stride, capacity, num_items, window, SHORT)


@gluon.jit
def _ring(rings, OF_VALUES: gl.constexpr):
    """The tiles of keys, or of values, and their barriers."""
    key_ring, value_ring, keys_here, keys_free, values_here, values_free, values_clear = rings
    if OF_VALUES:
        ring = (value_ring, values_here, values_free)
    else:
        ring = (key_ring, keys_here, keys_free)
    return ring


# Columns are views into one buffer, at addresses that change with their sizes: alignment must not
# decide what is compiled.
@gluon.jit(
    do_not_specialize=["half_rows", "table_stride", "capacity", "window", "num_items"],
    do_not_specialize_on_alignment=["tiles", "shares", "places", "query_start_loc", "seq_lens"],
)
def prefill_kernel_sm90(
    query, cache, output, tiles, shares, partial, lse, done, places, query_start_loc, seq_lens, tables,
    query_stride, half_rows, table_stride, capacity, score_scale, window, num_items, sinks,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, HEAD_ROWS: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Attends for all tiles; keys and values are rows of `cache`, which a descriptor describes."""
    SHAPES: gl.constexpr = shapes_of(NUM_HEADS, KV_HEADS, DIM, PAGE, HEAD_ROWS, WINDOWED)
    LONG: gl.constexpr = SHAPES.long
    SHORT: gl.constexpr = SHAPES.short
    # Each group has two tiles here: its rows of this one and of the next.
    query_ring = gl.allocate_shared_memory(cache.dtype, [4, 64, DIM], cache.layout)
    key_ring = gl.allocate_shared_memory(cache.dtype, [LONG.stages, LONG.tile, DIM], cache.layout)
    value_ring = gl.allocate_shared_memory(cache.dtype, [LONG.stages, LONG.tile, DIM], cache.layout)
    # As many as the short tiles need.
    BARRIERS: gl.constexpr = SHAPES.most_stages
    keys_here = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    values_here = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    values_clear = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Both groups read them.
    mbarrier.init(values_clear.index(0), count=2)
    for place in gl.static_range(BARRIERS):
        mbarrier.init(keys_here.index(place), count=1)
        mbarrier.init(values_here.index(place), count=1)
        mbarrier.init(keys_free.index(place), count=2)
        mbarrier.init(values_free.index(place), count=2)
    fence_async_shared()
    columns = (tiles, places, query_start_loc, seq_lens)
    long_rings = (key_ring, value_ring, keys_here, keys_free, values_here, values_free, values_clear)
    short_rings = long_rings
    is_long = True
    if SHORT is not None:
        SHORT_RING: gl.constexpr = [SHORT.stages, SHORT.tile, DIM]
        short_keys = key_ring._reinterpret(cache.dtype, SHORT_RING, cache.layout)
        short_values = value_ring._reinterpret(cache.dtype, SHORT_RING, cache.layout)
        short_rings = (short_keys, short_values, keys_here, keys_free, values_here, values_free, values_clear)
        LONG_KEYS: gl.constexpr = SHAPES.long_keys
        is_long = sees_many(columns, window, LONG_KEYS, LONG)
    rings = (long_rings, short_rings)
    gl.warp_specialize(
        [
            (_attend_either, (is_long, query, output, columns, shares, partial, lse, done, query_ring, rings, totals,
                              num_items, query_stride, score_scale, window, sinks, SHAPES, 0)),
            (_attend_either, (is_long, query, output, columns, shares, partial, lse, done, query_ring, rings, totals,
                              num_items, query_stride, score_scale, window, sinks, SHAPES, 1)),
            (_copy_either, (is_long, columns, shares, cache, 0, rings, tables, table_stride, capacity, num_items,
                            window, SHAPES, False)),
            (_copy_either, (is_long, columns, shares, cache, half_rows, rings, tables, table_stride, capacity,
                            num_items, window, SHAPES, True)),
        ],
        # Warps of the other three, and registers of a thread; the first group has as many.
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
