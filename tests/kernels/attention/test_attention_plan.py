"""How a step's attention is cut.

Every visible token is covered once, sizes stay within what graphs fix, and programs get similar
shares.
"""

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies

from headrace_kernels.attention.plan import (
    GATHER_MULTIPLE,
    SPLIT_MULTIPLE,
    TARGET_PROGRAMS,
    WARP_PROGRAMS,
    DecodeColumns,
    decode_sizes,
    drafted_query_len,
    few_decode_programs,
    max_prefill_tiles,
    plan_decode,
    plan_prefill,
    prefill_tile_tokens,
    query_len_class,
    query_part,
)
from headrace_kernels.attention.shares import most_places


def column(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def split_lengths(columns: DecodeColumns, seq_lens: npt.NDArray[np.int32]) -> list[int]:
    """Tokens of each split in launch order, without windows, by the kernel's rule."""
    lengths = []
    for entry, number, count, _ in columns.splits[columns.splits[:, 0] >= 0].tolist():
        seq_len = int(seq_lens[entry])
        tokens = -(-seq_len // (count * SPLIT_MULTIPLE)) * SPLIT_MULTIPLE
        lengths.append(min(tokens, seq_len - number * tokens))
    return lengths


_STEP = strategies.lists(
    strategies.tuples(strategies.integers(0, 150_000), strategies.sampled_from([0, 1, 1, 1, 2, 5, 8, 9, 300])),
    min_size=1,
    max_size=40,
)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    step=_STEP,
    num_kv_heads=strategies.sampled_from([1, 2, 3, 8, 32]),
    window=strategies.sampled_from([None, 1, 4096]),
    programs=strategies.sampled_from([TARGET_PROGRAMS, WARP_PROGRAMS]),
)
def test_any_decode_is_covered_once_within_the_fixed_sizes(
    step: list[tuple[int, int]], num_kv_heads: int, window: int | None, programs: int
) -> None:
    query_lens = column(*(count for _, count in step))
    seq_lens = column(*(computed + count for computed, count in step))
    columns = plan_decode(query_lens, seq_lens, num_kv_heads, len(step) + 3, sliding_window=window, programs=programs)
    sizes = decode_sizes(len(step) + 3, num_kv_heads, programs)
    assert columns.splits.shape == (sizes.num_splits, 4)
    used = columns.splits[columns.splits[:, 0] >= 0]
    decodes = set(np.flatnonzero((query_lens >= 1) & (query_lens <= 8)).tolist())
    assert set(used[:, 0].tolist()) == decodes
    places = used[used[:, 3] >= 0, 3]
    assert np.unique(places).size == places.size and (places.size == 0 or places.max() < sizes.num_partials)
    for entry in decodes:
        numbers = sorted(used[used[:, 0] == entry][:, 1].tolist())
        assert numbers == list(range(len(numbers)))
        # The last to finish finds the others' results beside its own.
        first = {place - number for _, number, _, place in used[used[:, 0] == entry].tolist()}
        assert first == {-1} if len(numbers) == 1 else len(first) == 1 and min(first) >= 0
        assert set(used[used[:, 0] == entry][:, 2].tolist()) == {len(numbers)}


@pytest.mark.parametrize(
    ("num_rows", "seq_len", "splits_per_row"),
    [(256, 640, 1), (32, 8192, 2), (1, 131_072, 64), (1, 60, 1), (8, 32_768, 8)],
)
def test_splits_are_those_that_filled_the_card(num_rows: int, seq_len: int, splits_per_row: int) -> None:
    columns = plan_decode(np.ones(num_rows, np.int32), np.full(num_rows, seq_len, np.int32), 8, num_rows)
    assert (columns.splits[:, 0] >= 0).sum() == num_rows * splits_per_row


@pytest.mark.parametrize(
    ("num_kv_heads", "seq_len", "splits"), [(8, 640, 10), (8, 4000, 32), (4, 8000, 42), (4, 15_000, 59), (1, 8000, 42)]
)
def test_one_row_has_no_more_splits_than_are_merged_as_quickly_as_read(
    num_kv_heads: int, seq_len: int, splits: int
) -> None:
    assert plan_decode(column(1), column(seq_len), num_kv_heads, 1).splits[0, 2] == splits


def test_few_normed_heads_of_large_groups_have_fewer_programs() -> None:
    assert [few_decode_programs(TARGET_PROGRAMS, rows, True) for rows in (4, 8, 16)] == [512, 384, 384]
    assert few_decode_programs(TARGET_PROGRAMS, 8, False) == 512
    assert few_decode_programs(WARP_PROGRAMS, 8, True) == WARP_PROGRAMS


def test_rows_of_nearly_equal_length_get_equally_many_splits() -> None:
    seq_lens = np.arange(8000, 8128, 4, dtype=np.int32)
    columns = plan_decode(np.ones(32, np.int32), seq_lens, 8, 32)
    assert set(columns.splits[columns.splits[:, 0] >= 0, 2].tolist()) == {2}


def test_a_short_row_is_not_cut_into_half_as_many_splits_for_a_token_more() -> None:
    columns = plan_decode(column(1), column(1030), 8, 1)
    assert columns.splits[0, 2] == 17


def test_one_long_row_among_short_ones_does_not_keep_the_card_waiting() -> None:
    seq_lens = column(100_000, *([500] * 63))
    lengths = split_lengths(plan_decode(np.ones(64, np.int32), seq_lens, 8, 64), seq_lens)
    assert sum(lengths) == int(seq_lens.sum()) and lengths == sorted(lengths, reverse=True)
    assert max(lengths) < 1.3 * int(seq_lens.sum()) * 8 / 512 + SPLIT_MULTIPLE


def test_a_windowed_decode_counts_what_is_seen() -> None:
    columns = plan_decode(column(1), column(1_000_000), 8, 1, sliding_window=4096)
    # 32 splits of 128 tokens are merged as quickly as read, and one more where the window does not
    # begin at a multiple.
    assert columns.splits[0, 2] in (32, 33)


def test_the_class_holds_all_rows_that_decode() -> None:
    assert query_len_class(column(1, 1, 9, 700)) == 1
    assert query_len_class(column(1, 3)) == 4
    assert query_len_class(column(5)) == 8
    assert query_len_class(column(20)) == 1


def test_entries_with_drafts_have_a_class_of_their_own_as_far_as_registers_go() -> None:
    assert [drafted_query_len(tokens, 4) for tokens in (1, 2, 3, 5, 9)] == [1, 2, 4, 8, 16]
    assert [drafted_query_len(9, group) for group in (8, 9)] == [16, 8]


def test_a_class_given_by_the_caller_leaves_longer_rows_to_prefill() -> None:
    query_lens, seq_lens = column(1, 2, 1), column(5, 6, 7)
    columns = plan_decode(query_lens, seq_lens, 2, 3, max_query_len=1)
    assert set(columns.splits[:, 0].tolist()) == {0, 2, -1}
    assert plan_prefill(query_lens, seq_lens, 4, 2, 64, max_query_len=1).tiles.tolist() == [[1, 0]]


def test_a_decode_larger_than_its_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="num_entries_padded is 2, and 3 entries decode"):
        plan_decode(np.ones(3, np.int32), np.ones(3, np.int32), 8, 2)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    step=_STEP, tile_tokens=strategies.sampled_from([1, 18, 32, 128]), window=strategies.sampled_from([None, 1, 4096])
)
def test_any_prefill_is_covered_once_longest_first(
    step: list[tuple[int, int]], tile_tokens: int, window: int | None
) -> None:
    query_lens = column(*(count for _, count in step))
    seq_lens = column(*(computed + count for computed, count in step))
    room = max_prefill_tiles(int(query_lens.sum()), len(step), tile_tokens)
    columns = plan_prefill(query_lens, seq_lens, 8, 2, tile_tokens, num_tiles_padded=room, sliding_window=window)
    assert columns.tiles.shape == (room, 2) and columns.shares.shape == (room, 3)
    used = columns.tiles[columns.shares[:, 0] == 0]
    expected = {
        (e, t) for e, count in enumerate(query_lens.tolist()) if count > 8 for t in range(0, count, tile_tokens)
    }
    assert {(e, t) for e, t in used.tolist()} == expected and len(used) == len(expected)
    ends = np.minimum(seq_lens[used[:, 0]] - query_lens[used[:, 0]] + used[:, 1] + tile_tokens, seq_lens[used[:, 0]])
    work = np.minimum(ends, (window or 10**9) + tile_tokens) // columns.shares[columns.shares[:, 0] == 0, 1]
    assert (np.diff(work) <= 0).all()


@hypothesis.settings(deadline=None)
@hypothesis.given(
    step=_STEP,
    num_kv_heads=strategies.sampled_from([1, 8]),
    spare=strategies.integers(0, 300),
    persistent=strategies.booleans(),
)
def test_any_shares_of_a_tile_are_numbered_and_have_places_of_their_own(
    step: list[tuple[int, int]], num_kv_heads: int, spare: int, persistent: bool
) -> None:
    query_lens = column(*(count for _, count in step))
    seq_lens = column(*(computed + count for computed, count in step))
    room = max_prefill_tiles(int(query_lens.sum()), len(step), 32) + spare
    heads = (4 * num_kv_heads, num_kv_heads, 32)
    columns = plan_prefill(query_lens, seq_lens, *heads, num_tiles_padded=room, persistent=persistent)
    used = columns.tiles[:, 0] >= 0
    assert (columns.shares[~used] == -1).all()
    places: list[int] = []
    for tile in np.unique(columns.tiles[used], axis=0):
        shares = columns.shares[(columns.tiles == tile).all(axis=1)]
        shares = shares[np.argsort(shares[:, 0])]
        count = int(shares[0, 1])
        assert shares[:, 0].tolist() == list(range(count)) and (shares[:, 1] == count).all()
        if count > 1:
            assert np.ptp(shares[:, 2] - shares[:, 0]) == 0
            places += shares[:, 2].tolist()
    assert len(set(places)) == len(places) and max(places, default=0) < most_places(num_kv_heads)


@pytest.mark.parametrize(
    ("query_len", "computed", "room", "shares"),
    [
        # Few tiles deep in a context fill a card, as far as there is room.
        (64, 100_000, 256, {16}),
        (128, 100_000, 256, {8}),
        (128, 100_000, 16, {4}),
        (128, 100_000, 4, {1}),
        # Many do so without.
        (2048, 100_000, 2048, {1}),
        # A share has at least 512 keys.
        (64, 1000, 256, {2}),
        (64, 0, 256, {1}),
    ],
)
def test_tiles_are_shared_where_they_are_few(query_len: int, computed: int, room: int, shares: set[int]) -> None:
    columns = plan_prefill(column(query_len), column(computed + query_len), 32, 8, 32, num_tiles_padded=room)
    assert set(columns.shares[columns.tiles[:, 0] >= 0, 1].tolist()) == shares


@pytest.mark.parametrize(
    ("query_len", "computed", "room", "shares"),
    [
        # As many as take one turn together.
        (64, 100_000, 256, {8}),
        (128, 100_000, 256, {4}),
        (128, 100_000, 16, {4}),
        (512, 2000, 512, {1}),
        # Of 80 programs for tiles 52 would have nothing to do, of 240 for thirds of them 24.
        (300, 100_000, 512, {3}),
        # Two short turns take longer than a longer one in which some have nothing to do.
        (300, 1000, 512, {1}),
        (64, 1000, 256, {2}),
        (64, 0, 256, {1}),
    ],
)
def test_persistent_programs_have_tiles_shared_for_as_few_turns_as_pay(
    query_len: int, computed: int, room: int, shares: set[int]
) -> None:
    lengths = column(query_len), column(computed + query_len)
    columns = plan_prefill(*lengths, 32, 8, 32, num_tiles_padded=room, persistent=True)
    assert set(columns.shares[columns.tiles[:, 0] >= 0, 1].tolist()) == shares


def test_a_deep_chunk_is_shared_beside_short_prompts() -> None:
    query_lens, seq_lens = column(64, *[300] * 6), column(100_064, *[300] * 6)
    columns = plan_prefill(query_lens, seq_lens, 32, 8, 32, num_tiles_padded=512)
    assert set(columns.shares[columns.tiles[:, 0] == 0, 1].tolist()) == {15}
    assert (columns.shares[columns.tiles[:, 0] > 0, 1] == 1).all()


def test_gathered_tiles_have_a_program_each() -> None:
    columns = plan_prefill(
        column(512), column(60_512), 32, 8, 32, num_tiles_padded=512, gather_capacity=1 << 16
    )  # fmt: skip
    assert columns.gather is not None
    assert (columns.shares[columns.tiles[:, 0] >= 0, 1] == 1).all()


def test_tiles_hold_whole_tokens_of_a_group() -> None:
    assert prefill_tile_tokens(32, 8, 128) == 32
    assert prefill_tile_tokens(28, 4, 128) == 18
    assert prefill_tile_tokens(8, 8, 64) == 128
    assert prefill_tile_tokens(8, 4, 256) == 32
    with pytest.raises(ValueError, match="num_heads / num_kv_heads is 71, and attention takes at most 64"):
        prefill_tile_tokens(71, 1, 256)


def test_gathered_contexts_lie_side_by_side_at_multiples() -> None:
    query_lens, seq_lens = column(1, 1000, 1, 700), column(400, 3000, 9, 2800)
    gather = plan_prefill(query_lens, seq_lens, 32, 8, 32, gather_capacity=1 << 16).gather
    assert gather is not None
    # 3,000 tokens take 24 chunks, 2,800 take 22.
    assert gather.chunks.shape == (46, 2)
    slots = np.arange(46) * GATHER_MULTIPLE
    assert (gather.offsets[gather.chunks[:, 0]] + gather.chunks[:, 1] == slots).all()


def test_a_window_gathers_what_is_seen() -> None:
    gather = plan_prefill(column(2048), column(100_000), 32, 8, 32, gather_capacity=1 << 13, sliding_window=4096).gather
    assert gather is not None
    first = int(gather.chunks[0, 1])
    assert first <= 100_000 - 2048 - 4096 + 1 < first + GATHER_MULTIPLE and gather.offsets[0] == -first


@pytest.mark.parametrize(
    ("query_len", "seq_len", "capacity"),
    [(2048, 9000, 0), (2048, 9000, 8960), (100, 9000, 1 << 16), (1000, 1000, 1 << 16)],
)
def test_contexts_are_not_gathered_where_they_do_not_fit_or_it_does_not_pay(
    query_len: int, seq_len: int, capacity: int
) -> None:
    assert plan_prefill(column(query_len), column(seq_len), 32, 8, 32, gather_capacity=capacity).gather is None


def test_a_prefill_larger_than_its_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tiles_padded is 1, and there are 2 tiles"):
        plan_prefill(column(40), column(40), 32, 8, 32, num_tiles_padded=1)


def test_query_tokens_in_parts_are_merged_faster_and_split_further() -> None:
    ways = [plan_decode(column(9), column(640), 8, 9, max_query_len=16, part_len=part) for part in (None, 16, 4)]
    whole, same, parts = (int((columns.splits[:, 0] >= 0).sum()) for columns in ways)
    assert whole == same < parts <= 10
    assert [query_part(16, 4, tokens, False) for tokens in (9, 64, 65)] == [4, 4, 16]
    # A group of 8 heads has no more than four programs; what converts numbers does so once.
    assert (query_part(16, 8, 9, False), query_part(8, 4, 9, True), query_part(1, 4, 1, False)) == (4, 8, 1)
