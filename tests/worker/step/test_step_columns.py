"""Columns of a step: a plan's, and padding behind it, in every shape that holds the plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.driver import Entry, step

from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.step.columns import StepColumns, columns_size, fill_columns, fill_padding, split_columns
from headrace_backend.worker.step.shape import (
    AttentionSizes,
    StepShape,
    captured_shapes,
    smallest_holding,
)

SIZES = AttentionSizes(num_heads=8, num_kv_heads=2, tile_tokens=32, few_programs=384)
SCRATCH = 99


def filled(entries: list[Entry], shape: StepShape | None = None) -> StepColumns:
    plan = step(entries)
    shape = shape or StepShape.of(plan, SIZES)
    piece = np.full(columns_size(shape), -77, np.int32)
    fill_columns(split_columns(piece, shape), plan, shape, SIZES, SCRATCH, 0)
    return split_columns(piece, shape)


def test_tokens_positions_and_entries_follow_the_plan() -> None:
    columns = filled([Entry(3, 10, [5, 6]), Entry(1, 7, None, (1,), 4), Entry(0, 0, [9, 8, 7], (0, 2))])
    assert columns.token_ids.tolist() == [5, 6, -1, 9, 8, 7]
    assert columns.token_entries.tolist() == [0, 0, 1, 2, 2, 2]
    assert columns.positions.tolist() == [10, 11, 7, 0, 1, 2]
    [attention] = columns.attention
    assert columns.rows.tolist() == attention.rows.tolist() == [3, 1, 0]
    assert attention.seq_lens.tolist() == [12, 8, 3]
    assert attention.query_start_loc.tolist() == [0, 2, 3, 6]
    # What is drawn, then the chunk that is only checked.
    assert columns.sample_rows.tolist() == [1, 0, 2, SCRATCH]
    assert columns.sample_tokens.tolist() == [2, 5, 5, 1]
    assert columns.output_positions.tolist() == [4, 0, 0, 0]


def test_padding_takes_part_in_nothing() -> None:
    columns = filled([Entry(3, 10, None, (3,), 5), Entry(1, 7, None, (1,), 4)], StepShape.decode(4, SIZES))
    assert columns.token_ids.tolist() == [-1, -1, 0, 0]
    assert columns.token_entries.tolist() == [0, 1, -1, -1]
    [attention] = columns.attention
    assert columns.rows.tolist() == attention.rows.tolist() == [3, 1, SCRATCH, SCRATCH]
    assert attention.seq_lens.tolist() == [11, 8, 0, 0]
    assert attention.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert columns.sample_rows.tolist() == [3, 1, SCRATCH, SCRATCH]
    assert attention.splits.reshape(-1, 4)[:, 0].tolist()[2:] == [-1] * (attention.splits.size // 4 - 2)


@pytest.mark.parametrize("first_piece", [None, 8])
def test_columns_without_a_plan_are_padding_only(first_piece: int | None) -> None:
    shape = StepShape.mixed(16, 8, SIZES, first_piece)
    columns = split_columns(np.full(columns_size(shape), -77, np.int32), shape)
    fill_padding(columns, SCRATCH)
    assert set(columns.rows.tolist()) == set(columns.sample_rows.tolist()) == {SCRATCH}
    assert set(columns.token_entries.tolist()) == {-1}
    assert len(columns.attention) == (1 if first_piece is None else 2)
    for attention in columns.attention:
        assert set(attention.rows.tolist()) == {SCRATCH}
        assert not attention.seq_lens.any() and not attention.query_start_loc.any()
        assert set(attention.splits.tolist()) == set(attention.tiles.tolist()) == {-1}


entries = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60), st.booleans()), min_size=1, max_size=8).map(
    lambda drawn: [
        Entry(row, start, list(range(3, 3 + count)), (row,))
        if count > 1 or known
        else Entry(row, start, None, (row,), 1)
        for row, (start, count, known) in enumerate(drawn)
    ]
)


@given(entries)
def test_a_captured_shape_says_the_same_as_the_exact_one(entries: list[Entry]) -> None:
    shapes = [*captured_shapes([1, 2, 4, 8], [16, 64, 256], 8, SIZES), StepShape.mixed(480, 8, SIZES)]
    shape = smallest_holding(shapes, StepShape.of(step(entries), SIZES))
    assert shape is not None
    exact, larger = filled(entries), filled(entries, shape)
    check_alike(exact, larger)
    [attention] = larger.attention
    decodes = {i for i, e in enumerate(entries) if e.ids is None or len(e.ids) == 1}
    assert set(attention.splits.reshape(-1, 4)[:, 0].tolist()) - {-1} == decodes
    assert set(attention.tiles.reshape(-1, 2)[:, 0].tolist()) - {-1} == set(range(len(entries))) - decodes


def check_alike(exact: StepColumns, larger: StepColumns) -> None:
    """The second says the same, and nothing of it was left out."""
    for one, other in ((exact, larger), *zip(exact.attention, larger.attention, strict=True)):
        for field in dataclasses.fields(one):
            if field.name not in ("splits", "tiles", "attention"):
                found, wanted = getattr(other, field.name), getattr(one, field.name)
                assert found[: wanted.size].tolist() == wanted.tolist(), field.name
    for attention in larger.attention:
        assert np.all(attention.splits != -77) and np.all(attention.tiles != -77)


@given(entries, st.integers(1, 479))
def test_pieces_have_the_steps_tokens_between_them(entries: list[Entry], first: int) -> None:
    plan = step(entries)
    whole = Entries.of(plan.forward)
    one, other = whole.cut(first)
    assert one.num_tokens == min(first, plan.num_tokens) and one.num_tokens + other.num_tokens == plan.num_tokens
    tokens = [
        (row, start + index)
        for piece in (one, other)
        for row, start, count in zip(*(column.tolist() for column in piece), strict=True)
        for index in range(count)
    ]
    assert tokens == [
        (row, start + index)
        for row, start, count in zip(*(column.tolist() for column in whole), strict=True)
        for index in range(count)
    ]
    # A row that is in both sees its first part as context.
    assert other.seq_lens.tolist() == whole.seq_lens[whole.counts.size - other.counts.size :].tolist()


@given(entries, st.integers(1, 479))
def test_a_captured_shape_in_pieces_holds_any_step_of_so_many_tokens(entries: list[Entry], first: int) -> None:
    plan = step(entries)
    larger = filled(entries, StepShape.mixed(480, 8, SIZES, first))
    if first >= plan.num_tokens:
        exact = filled(entries)
        check_alike(exact, dataclasses.replace(larger, attention=larger.attention[:1]))
        assert not larger.attention[1].seq_lens.any() and set(larger.attention[1].tiles.tolist()) == {-1}
    else:
        check_alike(filled(entries, StepShape.of(plan, SIZES).cut(plan, first, SIZES)), larger)


def test_shapes_are_tried_from_the_smallest() -> None:
    shapes = captured_shapes([1, 2, 8, 64], [16, 32, 64], 64, SIZES)
    assert [(s.num_tokens, bool(s.num_tiles)) for s in shapes] == [
        (1, False), (2, False), (8, False), (16, True), (32, True), (64, False), (64, True),
    ]  # fmt: skip
    assert captured_shapes([], [], 64, SIZES) == []


@pytest.mark.parametrize(
    ("start", "count", "capacity", "gathers"),
    [
        (100_000, 512, 1 << 17, True),
        (100_000, 128, 1 << 17, False),
        (1000, 512, 1 << 17, False),
        (100_000, 512, 1 << 16, False),
    ],
)
def test_a_chunk_deep_in_a_context_is_not_padded_where_gathering_pays(
    start: int, count: int, capacity: int, gathers: bool
) -> None:
    plan = step([Entry(0, 20, None, (0,), 1), Entry(1, start, [5] * count)])
    needed = StepShape.of(plan, SIZES, capacity)
    assert needed.gathers == gathers
    held = smallest_holding(captured_shapes([1, 2], [128, 640], 8, SIZES), needed)
    assert (held is None) == gathers
    # What the copy engine brings in graphs, too, is not worth leaving them for.
    assert not StepShape.of(plan, dataclasses.replace(SIZES, copies_blocks=True), capacity).gathers
