"""Which tile of rows a program of prefill attention on sm_90 has in its turn, and its keys.

Owns a kernel's constants (`Shape`), the order in which programs take items, and what there is to
know of an item: an item is a tile of query rows of one key/value head, or a share of its keys.

Functions return tuples, because the language has no classes:

    item    key/value head, entry, the entry's first token in the tile; number of the share of the
            tile's keys, how many are planned, place of the share's result
    tokens  the entry's first token, its number of tokens in this step and of computed ones; the
            tile's first token within the entry
    keys    where the entry's keys are found (a row of the block tables, or the slot of position 0),
            the first position that any of the tile's tokens sees, the end of the entry's context,
            the last tile of keys
    counts  how many tiles of keys are cut by the diagonal, seen whole, and cut by the window
    share   its number, how many shares see any keys (0: this one does not), place of its result
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import dataclasses

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Query rows of a tile: two groups of four warps with 64 each, as many as an instruction has.
ROWS = 128
# Keys of a tile, and how many the first tile of rows sees where tiles are long. Short ones
# compute less of what nobody sees, long ones are waited for less often: compiled for one of them
# alone, 16 prompts of 512 tokens of Qwen3-30B-A3B take an H200 103 us a layer in short tiles and
# 127 in long ones, one of 8,192 tokens 925 and 846 (docs/experiments.md, "chunks attend to blocks
# by the copy engine").
LONG_TILE, SHORT_TILE = 128, 64
_LONG_KEYS = 2048
# Bytes of shared memory for tiles of keys and values: two long ones of each where heads are 128
# wide, four where they are 64.
_RING_BYTES = 128 << 10


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    The kernel makes it itself: the language would take a tuple apart, and knows no other argument.
    """

    num_heads: int
    num_kv_heads: int
    # Query rows of a tile; query heads of a key/value head, and query tokens of a tile.
    rows: int
    group: int
    tile_tokens: int
    head_dim: int
    # Keys of a tile, and tiles of keys, and of values, in shared memory.
    tile: int
    stages: int
    # Keys that are copied at a time: a block of the cache, or a whole tile of a gathered context.
    page: int
    # Rows of the cache from one head's keys in a block to the next head's; 0: a context is in one
    # piece.
    head_rows: int
    is_windowed: bool


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that a kernel is compiled for, of which a launch takes one."""

    # Tiles of many keys, and of few where a diagonal wastes less of them.
    long: Shape
    # None: all steps see many keys.
    short: Shape | None
    # Keys that the first tile of rows sees, at least, where tiles are long.
    long_keys: int

    @property
    def most_stages(self) -> int:
        """Tiles of keys in shared memory at most."""
        return max(self.long.stages, 0 if self.short is None else self.short.stages)


@gluon.constexpr_function
def shapes_of(num_heads, num_kv_heads, head_dim, page, head_rows, is_windowed):
    """The constants that follow from a launch's; gathered contexts are long."""
    group = num_heads // num_kv_heads

    def shape(tile):
        stages = _RING_BYTES // (4 * tile * head_dim)
        kept = page if head_rows else tile
        return Shape(
            num_heads, num_kv_heads, ROWS, group, ROWS // group, head_dim, tile, stages, kept, head_rows, is_windowed
        )

    return Shapes(shape(LONG_TILE), shape(SHORT_TILE) if head_rows else None, _LONG_KEYS)


@gluon.jit
def item_of(columns, shares, turn, num_items, SHAPE: gl.constexpr):
    """What this program has in its `turn`.

    The entry is -1 for padding and beyond the end of the line, behind which nothing follows. The
    order goes back and forth over the line of tiles, which are sorted by their keys, so that all
    programs end at about the same time.
    """
    tiles, _, _, _ = columns
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    tile = gl.minimum(item, num_items - 1) // SHAPE.num_kv_heads
    entry = gl.where(item < num_items, gl.load(tiles + tile * 2), -1)
    number = 0
    planned = 1
    result = 0
    if shares is not None:
        number = gl.load(shares + tile * 3)
        planned = gl.load(shares + tile * 3 + 1)
        result = gl.load(shares + tile * 3 + 2)
    return item % SHAPE.num_kv_heads, entry, gl.load(tiles + tile * 2 + 1), number, planned, result


@gluon.jit
def sees_many(columns, window, KEYS: gl.constexpr, SHAPE: gl.constexpr):
    """Whether the first tile of rows sees as many as KEYS.

    Tiles are in the order of the keys that a program has of them, so that the first is of a long
    context where long ones take the most time.
    """
    tiles, _, query_start_loc, seq_lens = columns
    entry = gl.maximum(gl.load(tiles), 0)
    seq_len = gl.load(seq_lens + entry)
    num_tokens = gl.load(query_start_loc + entry + 1) - gl.load(query_start_loc + entry)
    seen = gl.minimum(seq_len - num_tokens + gl.load(tiles + 1) + SHAPE.tile_tokens, seq_len)
    if SHAPE.is_windowed:
        seen = gl.minimum(seen, window + SHAPE.tile_tokens)
    return seen >= KEYS


@gluon.jit
def is_item(item):
    """Whether it is an item at all."""
    _, entry, _, _, _, _ = item
    return entry >= 0


@gluon.jit
def work_of(columns, item, window, SHAPE: gl.constexpr):
    """What there is to do for an item; none of its rows is a token's if it is none."""
    _, places, query_start_loc, seq_lens = columns
    _, entry, tile_first, number, planned, result = item
    is_work = entry >= 0
    entry = gl.maximum(entry, 0)
    tile_first = gl.maximum(tile_first, 0)
    first_token = gl.load(query_start_loc + entry)
    num_tokens = gl.load(query_start_loc + entry + 1) - first_token
    seq_len = gl.load(seq_lens + entry)
    place = gl.load(places + entry)
    computed = seq_len - num_tokens
    first = computed + tile_first
    full_end = (first + 1) // SHAPE.tile
    end = (gl.minimum(first + SHAPE.tile_tokens, seq_len) + (SHAPE.tile - 1)) // SHAPE.tile
    first_seen = 0
    full_begin = 0
    if SHAPE.is_windowed:
        first_seen = gl.maximum(first - window + 1, 0)
        last_begin = gl.maximum(first + SHAPE.tile_tokens - window, 0)
        full_begin = gl.minimum((last_begin + (SHAPE.tile - 1)) // SHAPE.tile, full_end)
    begin = first_seen // SHAPE.tile
    count = 1
    if planned > 1:
        # Of a layer that sees less than the plan's some shares see nothing. They attend to the last
        # share's keys and store nothing.
        each = (end - begin + planned - 1) // planned
        count = (end - begin + each - 1) // each
        begin += gl.minimum(number, count - 1) * each
        end = gl.minimum(begin + each, end)
        count = gl.where(number < count, count, 0)
    full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    full_end = gl.minimum(gl.maximum(full_end, begin), end)
    # No row of padding is copied or stored.
    num_tokens = gl.where(is_work, num_tokens, 0)
    tokens = (first_token, num_tokens, computed, tile_first)
    counts = (end - full_end, full_end - full_begin, full_begin - begin)
    keys = (place, first_seen, seq_len, end - 1)
    return tokens, keys, counts, (number, count, result)


@gluon.jit
def page_rows(tables, table_stride, capacity, kv_head, keys, tile, SHAPE: gl.constexpr):
    """Rows of the cache, or of gathered contexts, at which the pages of a tile of keys begin.

    Returns as many as a tile has pages. In place of pages that nobody sees, whose entries of the
    block table may be anything, the nearest one that somebody does is read once more.
    """
    place, first_seen, seq_len, _ = keys
    PAGES: gl.constexpr = SHAPE.tile // SHAPE.page
    rows = ()
    if SHAPE.head_rows == 0:
        rows = rows + (kv_head * capacity + place + tile * SHAPE.tile,)
    else:
        first_block = first_seen // SHAPE.page
        last_block = (seq_len - 1) // SHAPE.page
        table = tables + place.to(gl.int64) * table_stride
        for page in gl.static_range(PAGES):
            block = gl.load(table + gl.minimum(gl.maximum(tile * PAGES + page, first_block), last_block))
            rows = rows + ((block * (2 * SHAPE.num_kv_heads) + kv_head) * SHAPE.head_rows,)
    return rows
