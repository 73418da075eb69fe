"""Which program of an attention kernel does what.

Columns of numbers are made on the host, once per step, for all layers.

Owns the cutting of a step into work of similar size: contexts of rows with few query tokens into
*splits*, rows with many into *tiles*, and the places of gathered contexts. Knows lengths only, no
tensors, and needs nothing but numpy. The columns are int32 and of sizes that a captured graph can
fix in advance; what is left over is -1. The caller brings them to the device and hands them on as
`attention.step.DecodeWork` and `PrefillWork`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from headrace_kernels.attention.shares import share_out

Int32Column = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]

# Sizes of entries, in query tokens, that the decode kernel is compiled for, and the largest that it
# takes of prompts; only drafts are more.
QUERY_LEN_CLASSES = (1, 2, 4, 8, 16)
MAX_DECODE_QUERY_LEN = 8
# Query rows (tokens times heads of a group) of a longer entry, at most: their sums are held in
# registers.
_MOST_QUERY_ROWS = 128
# Splits are multiples of this many tokens of context.
SPLIT_MULTIPLE = 64
# Programs (splits times key/value heads) that fill a GPU: near one full wave on 132
# multiprocessors. Fewer leave bandwidth unused, more only cost partial results
# (docs/experiments.md, "Launch rules of kernels").
TARGET_PROGRAMS = 512
# Decodes of a step up to which they are few: what each program computes for itself, such as norms
# of heads, is what takes the time.
FEW_DECODES = 8
# Programs of so few decodes where heads are normed and a key/value head has eight query heads or
# more: by their registers a multiprocessor holds three, where it otherwise holds four or more. Four
# rows of Qwen3-30B-A3B behind 8,000 tokens take an H200 5.90 ms a step so, and with 512 programs,
# of which the last ones wait for the first, 6.33 (docs/experiments.md, "splits that are merged at
# once").
_NORMED_PROGRAMS, _MANY_QUERY_ROWS = 384, 8
# Programs of splits over a quantized cache with few query rows, which are a warp each
# (`attention.transposed`): eight to a multiprocessor. 32 rows of 8,192 tokens in FP8 take 133 us on
# an H200, with 512 programs 149 (docs/experiments.md).
WARP_PROGRAMS = 1056
# Query rows (tokens times heads of a group) of such splits, at most.
TRANSPOSED_ROWS = 8
# Query rows of the smallest tile, and so of each of the programs that an entry's query tokens are
# dealt out to (`query_part`), which are at most as many as the second says.
_TILE_ROWS = 16
MOST_PARTS = 4
# Tokens of a step up to which they are: then programs are few, and the cache's bytes that several
# of them read are not what takes the time.
MOST_TOKENS_IN_PARTS = 64
# A row may be longer than its splits are meant to be by this share of one before it gets another,
# so that rows of nearly equal length get equally many.
_SLACK = 0.25
# Contexts are gathered to places that are multiples of this many tokens, the largest tile of keys.
GATHER_MULTIPLE = 128
# Query rows (tokens times query heads of a group) per row of context, and keys per query token,
# from which gathering pays: 512 tokens after 8,192 took 153 us gathered and 257 paged on an H200
# (docs/experiments.md). The thresholds are derived from that, not measured.
_MIN_GATHER_ROWS = 1536
_MIN_GATHER_KEYS = 2048


def query_len_class(query_lens: Int32Column) -> int:
    """The smallest size of decode kernel that takes all rows with up to 8 query tokens."""
    decodes = query_lens[query_lens <= MAX_DECODE_QUERY_LEN]
    longest = int(decodes.max(initial=1))
    return next(size for size in QUERY_LEN_CLASSES if size >= longest)


def drafted_query_len(tokens_per_row: int, group: int) -> int:
    """The size of decode kernel for entries of a row's last token and its drafts.

    With a large group it may be less than `tokens_per_row`; longer entries are left to
    `plan_prefill`.

    Args:
        tokens_per_row: Tokens of the longest entry.
        group: Query heads of a key/value head.
    """
    return max(
        size
        for size in QUERY_LEN_CLASSES
        if size == 1 or size < 2 * tokens_per_row and (size <= MAX_DECODE_QUERY_LEN or size * group <= _MOST_QUERY_ROWS)
    )


def filling_query_len(group: int) -> int:
    """The largest size of decode kernel whose query rows all lie in the smallest tile.

    Smaller ones would compute as much. `group` is as for `drafted_query_len`.
    """
    return max(size for size in QUERY_LEN_CLASSES if size == 1 or size * group <= _TILE_ROWS)


def query_part(query_len: int, group: int, num_tokens: int, is_quantized: bool) -> int:
    """Query tokens of an entry that a program of the decode kernel takes.

    In a step of few tokens the query rows of a row with drafts are dealt out to several programs,
    each of which reads the split's keys. A step of an 8B Llama with nine tokens behind 640 takes an
    H200 4.32 ms so, 4.54 with all query rows in one program; one of 72 tokens 5.65 and 5.48
    (docs/experiments.md, "one row with eight drafts, once more").

    Args:
        query_len: The kernel's class of query tokens.
        group: Query heads of a key/value head.
        num_tokens: Tokens of the step, padding included.
        is_quantized: Whether the cache is, whose numbers each program would convert for itself.
    """
    if query_len == 1 or num_tokens > MOST_TOKENS_IN_PARTS or is_quantized:
        return query_len
    return min(query_len, max(_TILE_ROWS // group, -(-query_len // MOST_PARTS), 1))


@dataclasses.dataclass(slots=True, frozen=True)
class DecodeSizes:
    """Sizes of a decode's columns and scratch, for any contexts of up to `num_entries` rows.

    What a graph fixes.
    """

    # Entries of `DecodeColumns.splits`.
    num_splits: int
    # Partial results kept until they are merged, each for all heads and query tokens of a row.
    num_partials: int


def decode_programs(is_quantized: bool, query_rows: int) -> int:
    """Programs that fill a card, for splits of a cache with so many query rows."""
    return WARP_PROGRAMS if is_quantized and query_rows <= TRANSPOSED_ROWS else TARGET_PROGRAMS


def few_decode_programs(programs: int, query_rows: int, norms_heads: bool) -> int:
    """Programs that fill a card in steps of up to `FEW_DECODES` decodes.

    Args:
        programs: `decode_programs` of the cache.
        query_rows: Query heads of a key/value head.
        norms_heads: Whether the kernel norms them.
    """
    if programs != TARGET_PROGRAMS or not norms_heads or query_rows < _MANY_QUERY_ROWS:
        return programs
    return min(programs, _NORMED_PROGRAMS)


def decode_sizes(num_entries: int, num_kv_heads: int, programs: int = TARGET_PROGRAMS) -> DecodeSizes:
    """Sizes of the decode columns for up to `num_entries` rows.

    `num_kv_heads` are those of one GPU's cache, `programs` as for `plan_decode`.
    """
    surplus = -(-programs // num_kv_heads)
    # Only rows longer than a split are cut, and fewer than `surplus` rows are.
    return DecodeSizes(num_entries + surplus, 2 * surplus)


@dataclasses.dataclass(slots=True, frozen=True)
class DecodeColumns:
    """How the contexts of rows with few query tokens are cut. All int32, -1 in what is not used."""

    # [num_splits, 4]: entry, number of the split within it, the entry's number of splits, place of
    # the partial result (-1 where the entry has one split, which writes the output itself). A split
    # sees its share of whatever context the row has when the kernel runs. Longest first.
    splits: Int32Column
    # Query tokens the kernel must take, one of `QUERY_LEN_CLASSES`.
    max_query_len: int


def plan_decode(
    query_lens: Int32Column,
    seq_lens: Int32Column,
    num_kv_heads: int,
    num_entries_padded: int,
    *,
    max_query_len: int | None = None,
    part_len: int | None = None,
    sliding_window: int | None = None,
    programs: int = TARGET_PROGRAMS,
) -> DecodeColumns:
    """Cuts the contexts of short entries into splits of similar length.

    Entries have 1 to `max_query_len` query tokens; there are about `programs` programs in all.

    Args:
        query_lens: [num_entries] tokens of this step; 0 for padding.
        seq_lens: [num_entries] tokens of context, those of this step included. Where the device
            knows better (drafts that were refused), an upper bound.
        num_kv_heads: Key/value heads of one card's cache.
        num_entries_padded: Entries that the columns have room for, see `decode_sizes`.
        max_query_len: One of `QUERY_LEN_CLASSES`; entries with more are left to `plan_prefill`.
            None: `query_len_class` of the step.
        part_len: `query_part` of the step, which decides how long merging splits takes. None: all
            of an entry's query tokens.
        sliding_window: The widest of the model's layers; None if any layer sees all.
        programs: `decode_programs` of the cache, or `few_decode_programs`; the work's sizes are
            made for as many, its scratch for as many or more.

    Raises:
        ValueError: More entries than there is room for.
    """
    size = query_len_class(query_lens) if max_query_len is None else max_query_len
    assert size in QUERY_LEN_CLASSES, size
    entries = np.flatnonzero((query_lens >= 1) & (query_lens <= size))
    if entries.size > num_entries_padded:
        raise ValueError(f"num_entries_padded is {num_entries_padded}, and {entries.size} entries decode")
    splits = np.full((decode_sizes(num_entries_padded, num_kv_heads, programs).num_splits, 4), -1, np.int32)
    if entries.size:
        visible = _visible_tokens(query_lens[entries], seq_lens[entries], sliding_window)
        counts = _split_counts(visible, num_kv_heads, programs, part_len or size)
        _fill_decode(splits, entries, visible, counts)
    return DecodeColumns(splits, size)


def _visible_tokens(query_lens: Int32Column, seq_lens: Int32Column, sliding_window: int | None) -> _Int64Array:
    """Tokens of context from the first that any query token sees, [num_entries].

    The first is rounded down to a multiple.
    """
    seq_len = seq_lens.astype(np.int64)
    if sliding_window is None:
        return seq_len
    first = np.maximum(seq_len - query_lens - sliding_window + 1, 0)
    visible: _Int64Array = seq_len - first // SPLIT_MULTIPLE * SPLIT_MULTIPLE
    return visible


def _split_counts(visible: _Int64Array, num_kv_heads: int, programs: int, part_len: int) -> _Int64Array:
    """[num_entries] splits of each, for programs of `part_len` query tokens."""
    share = -(-int(visible.sum()) * num_kv_heads // programs)
    tokens = max(-(-share // SPLIT_MULTIPLE), 1) * SPLIT_MULTIPLE
    counts = np.maximum(np.ceil(visible / tokens - _SLACK).astype(np.int64), 1)
    # Short splits have no room for the slack: the next multiple is much more.
    most = int(tokens * (1 + _SLACK)) // SPLIT_MULTIPLE * SPLIT_MULTIPLE
    counts += (_split_tokens(visible, counts) > most) & (visible > tokens * counts)
    counts = np.minimum(counts, _most_merged(visible, part_len))
    # Rounding a split up to its multiple may leave nothing for the last ones.
    return -(-visible // _split_tokens(visible, counts))


def _most_merged(visible: _Int64Array, part_len: int) -> _Int64Array:
    """[num_entries] splits of each with which reading and merging together take least.

    One program merges all of a row's partial results. For one of 16 query tokens that takes about
    as long as reading 64 tokens, and for one of fewer as much less. So the sum of tokens of a split
    / 64 and splits * part_len / 16 is to be small.
    """
    most: _Int64Array = np.ceil(np.sqrt(visible / SPLIT_MULTIPLE * (16 / part_len))).astype(np.int64)
    return most


def _split_tokens(visible: _Int64Array, counts: _Int64Array) -> _Int64Array:
    """[num_entries] tokens per split, as the kernel computes them."""
    tokens: _Int64Array = np.maximum(-(-visible // (counts * SPLIT_MULTIPLE)), 1) * SPLIT_MULTIPLE
    return tokens


def _fill_decode(splits: Int32Column, entries: _Int64Array, visible: _Int64Array, counts: _Int64Array) -> None:
    """Writes the column; `entries`, `visible` and `counts` are [num_entries]."""
    partials = np.where(counts > 1, counts, 0)
    first_partial = np.cumsum(partials) - partials
    of_item = np.repeat(np.arange(entries.size), counts)
    number = np.arange(of_item.size) - np.repeat(np.cumsum(counts) - counts, counts)
    place = np.where(counts[of_item] > 1, first_partial[of_item] + number, -1)
    items = np.stack((entries[of_item], number, counts[of_item], place), axis=1)
    longest_first = np.argsort(-_split_tokens(visible, counts)[of_item], kind="stable")
    splits[: of_item.size] = items[longest_first]


def prefill_tile_rows(head_dim: int, element_size: int) -> int:
    """Query rows (tokens times query heads of a group) of a tile.

    They depend on the size of a head and of its values in bytes.
    """
    if element_size > 2:
        return 32 if head_dim <= 128 else 16
    return 128 if head_dim <= 128 else 64


def prefill_tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int, element_size: int = 2) -> int:
    """Query tokens that one tile of prefill attention has.

    Raises:
        ValueError: A group of query heads is larger than a tile.
    """
    rows, group = prefill_tile_rows(head_dim, element_size), num_heads // num_kv_heads
    if group > rows:
        raise ValueError(f"num_heads / num_kv_heads is {group}, and attention takes at most {rows} with such heads")
    return rows // group


def max_prefill_tiles(num_tokens: int, num_entries: int, tile_tokens: int) -> int:
    """Tiles that `num_entries` entries with `num_tokens` query tokens in all can have at most.

    What a graph fixes.
    """
    return min(num_tokens, num_entries + num_tokens // tile_tokens)


@dataclasses.dataclass(slots=True, frozen=True)
class GatherColumns:
    """Places of contexts that are gathered before attention, all int32."""

    # [num_chunks, 2]: the entry and position that slot i * GATHER_MULTIPLE of the scratch holds.
    chunks: Int32Column
    # [num_entries]: position p of the entry goes to slot offsets[entry] + p. May be negative:
    # positions that no token sees are left out.
    offsets: Int32Column


@dataclasses.dataclass(slots=True, frozen=True)
class PrefillColumns:
    """How entries with many query tokens are cut. All int32, -1 in what is not used."""

    # [num_tiles, 2]: entry, its first query token in the tile. Most keys first.
    tiles: Int32Column
    # [num_tiles, 3]: number of the share of the tile's keys that the program sees, their number
    # (most often 1), place of its result.
    shares: Int32Column
    # None: keys and values are read from the cache.
    gather: GatherColumns | None


def plan_prefill(
    query_lens: Int32Column,
    seq_lens: Int32Column,
    num_heads: int,
    num_kv_heads: int,
    tile_tokens: int,
    *,
    max_query_len: int = MAX_DECODE_QUERY_LEN,
    num_tiles_padded: int | None = None,
    gather_capacity: int = 0,
    sliding_window: int | None = None,
    persistent: bool = False,
) -> PrefillColumns:
    """Cuts entries with more than `max_query_len` query tokens into tiles.

    Decides also whether their contexts are gathered first.

    Args:
        query_lens: [num_entries] tokens of this step.
        seq_lens: [num_entries] tokens of context, those of this step included.
        num_heads: Query heads of one card.
        num_kv_heads: Key/value heads of one card's cache.
        tile_tokens: `prefill_tile_tokens` of the model.
        max_query_len: What `plan_decode` took, at most.
        num_tiles_padded: Tiles that the columns have room for (`max_prefill_tiles`); room that is
            left goes to shares of long ones. None: as many as there are.
        gather_capacity: Tokens that the scratch for gathered contexts holds; 0: there is none
            (graphs, cards before sm_90).
        sliding_window: The widest of the model's layers; None if any layer sees all.
        persistent: Whether the kernel's programs take one tile after the other (`prefill_sm90`).

    Raises:
        ValueError: More tiles than there is room for.
    """
    entries = np.flatnonzero(query_lens > max_query_len)
    gather = None
    if gather_capacity and entries.size:
        group = num_heads // num_kv_heads
        gather = _gather_columns(entries, query_lens, seq_lens, group, gather_capacity, sliding_window)
    tiles, keys = _tiles(entries, query_lens[entries], seq_lens[entries], tile_tokens, sliding_window)
    room = tiles.shape[0] if num_tiles_padded is None else num_tiles_padded
    if tiles.shape[0] > room:
        raise ValueError(f"num_tiles_padded is {room}, and there are {tiles.shape[0]} tiles")
    columns = np.full((room, 2), -1, np.int32), np.full((room, 3), -1, np.int32)
    counts = np.ones_like(keys) if gather else share_out(keys, num_kv_heads, room, persistent)
    _fill_shares(*columns, tiles, keys, counts)
    return PrefillColumns(*columns, gather)


def _fill_shares(
    tiles: Int32Column, shares: Int32Column, whole: Int32Column, keys: _Int64Array, counts: _Int64Array
) -> None:
    """Writes the columns; `whole` are the tiles, of `keys` keys and for `counts` programs each."""
    of_item = np.repeat(np.arange(counts.size), counts)
    first = np.cumsum(counts) - counts
    number = np.arange(of_item.size) - first[of_item]
    # Tiles of one share have no result but the output.
    places = np.cumsum(np.where(counts > 1, counts, 0)) - counts
    items = np.stack((number, counts[of_item], places[of_item] + number), axis=1)
    most_first = np.argsort(-(keys // counts)[of_item], kind="stable")
    tiles[: of_item.size] = whole[of_item][most_first]
    shares[: of_item.size] = items[most_first]


def _tiles(
    entries: _Int64Array,
    query_lens: Int32Column,
    seq_lens: Int32Column,
    tile_tokens: int,
    sliding_window: int | None,
) -> tuple[Int32Column, _Int64Array]:
    """Tiles [num_tiles, 2] in order, and keys that each sees, at most; lengths are of `entries`."""
    counts = -(-query_lens.astype(np.int64) // tile_tokens)
    of_tile = np.repeat(np.arange(entries.size), counts)
    first = (np.arange(of_tile.size) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    computed = (seq_lens.astype(np.int64) - query_lens)[of_tile]
    last = np.minimum(computed + first + tile_tokens, seq_lens[of_tile])
    keys = last if sliding_window is None else np.minimum(last, sliding_window + tile_tokens)
    tiles: Int32Column = np.stack((entries[of_tile], first), axis=1).astype(np.int32)
    return tiles, keys


def gathered_tokens(seq_lens: Int32Column) -> int:
    """Tokens of scratch that contexts of such lengths take."""
    return int((-(-seq_lens.astype(np.int64) // GATHER_MULTIPLE)).sum()) * GATHER_MULTIPLE


def gathering_pays(
    query_lens: Int32Column | _Int64Array,
    seq_lens: Int32Column | _Int64Array,
    group: int,
    least_keys: int,
) -> bool:
    """Whether contexts should be gathered before attention, where they may be.

    Args:
        query_lens: [num_entries] tokens of this step, of the entries that the prefill kernel takes.
        seq_lens: [num_entries] tokens of context, those of this step included.
        group: Query heads per key/value head.
        least_keys: Keys that a query token sees on average, at least.
    """
    query_len, seq_len = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    if int((query_len * seq_len).sum()) * group < _MIN_GATHER_ROWS * int(seq_len.sum()):
        return False
    pairs = int((query_len * (2 * seq_len - query_len)).sum()) // 2
    return pairs >= least_keys * int(query_len.sum())


def _gather_columns(
    entries: _Int64Array,
    query_lens: Int32Column,
    seq_lens: Int32Column,
    group: int,
    capacity: int,
    sliding_window: int | None,
) -> GatherColumns | None:
    """Places for the contexts of `entries`, or None if they do not fit or gathering does not pay.

    Lengths are those of the whole step.
    """
    query_len, seq_len = query_lens[entries].astype(np.int64), seq_lens[entries].astype(np.int64)
    base = np.zeros_like(seq_len)
    if sliding_window is not None:
        base = np.maximum(seq_len - query_len - sliding_window + 1, 0) // GATHER_MULTIPLE * GATHER_MULTIPLE
    num_chunks = -(-(seq_len - base) // GATHER_MULTIPLE)
    if int(num_chunks.sum()) * GATHER_MULTIPLE > capacity:
        return None
    if not gathering_pays(query_len, seq_len - base, group, _MIN_GATHER_KEYS):
        return None
    first_chunk = np.cumsum(num_chunks) - num_chunks
    of_chunk = np.repeat(np.arange(entries.size), num_chunks)
    position = base[of_chunk] + (np.arange(of_chunk.size) - first_chunk[of_chunk]) * GATHER_MULTIPLE
    offsets = np.zeros(query_lens.size, np.int32)
    offsets[entries] = first_chunk * GATHER_MULTIPLE - base
    return GatherColumns(np.stack((entries[of_chunk], position), axis=1).astype(np.int32), offsets)
