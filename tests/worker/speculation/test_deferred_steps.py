"""A draft model follows steps without drafts only when somebody drafts, and drafts the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import Entry, admission, step
from tests.worker.speculation.deferred_drafting import MAX_MODEL_LEN, NUM_DRAFTS, NUM_ROWS, Driven

from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import USUAL_STEPS_IN_FLIGHT
from headrace_backend.worker.plan_columns import Entries
from headrace_backend.worker.speculation.deferred_steps import (
    MOST_UNREAD,
    DeferredSteps,
    noted_bytes,
    window_tokens,
)
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.noted_tokens import padded_tokens
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import BlockPool
from headrace_backend.worker.start_up.warm_up import short_steps


def at_random(driven: Driven, draws: random.Random) -> None:
    """One step of some kind, of rows that have room for it."""
    alive = [row for row, each in driven.rows.items() if len(each.tokens) + 2 + 2 * NUM_DRAFTS < MAX_MODEL_LEN]
    taking_part = [row for row in alive if draws.random() < 0.9]
    most = NUM_DRAFTS if draws.random() < 0.25 else 0
    drafts = {row: draws.randint(0, most) for row in taking_part}
    kind = draws.random()
    if kind < 0.1 or not taking_part:
        driven.admit(draws.randrange(NUM_ROWS), draws.randint(1, 12), drafts)
    elif kind < 0.15:
        driven.force(draws.choice(taking_part), draws.randint(1, 3))
    elif kind < 0.18:
        driven.release(draws.choice(taking_part))
    else:
        copied = tuple(row for row in taking_part if draws.random() < 0.05)
        driven.decode(drafts, copied, is_read=draws.random() < 0.2)


@settings(max_examples=examples(60), deadline=None)
@given(
    window=st.sampled_from([1, 2, 5, 16, MAX_MODEL_LEN]),
    followed_sizes=st.sampled_from([(1,), (4,), (2, 3, 8), (16, 64)]),
    seed=st.integers(0, 1 << 16),
)
def test_drafts_are_those_of_following_every_step(window: int, followed_sizes: tuple[int, ...], seed: int) -> None:
    """So is all that the draft model keeps of a row's context when it drafts for it.

    Passes may be launched as they are, or be padded to sizes that are captured.
    """
    driven = Driven((None, window), seed, followed_sizes)
    for _ in range(60):
        at_random(driven, driven.random)
    rows = {row: 1 for row, each in driven.rows.items() if len(each.tokens) + 2 * NUM_DRAFTS < MAX_MODEL_LEN}
    if rows:
        driven.decode(rows)


def begun(window: int = 64, rows: int = 2) -> Driven:
    """Rows of short prompts, whose drafter defers."""
    driven = Driven((window,))
    for row in range(rows):
        driven.admit(row, 3 + row)
    driven.all[0].model.followed.clear()
    return driven


def test_steps_without_drafts_launch_no_pass() -> None:
    driven = begun()
    for _ in range(9):
        driven.decode({0: 0, 1: 0})
    model = driven.all[0].model
    assert (model.followed, model.num_passes) == ([], 0)
    # A row that is drafted for catches up alone: what was noted, and then the step is followed.
    driven.decode({0: 2, 1: 0})
    assert (model.followed, model.num_passes) == ([9, 4], 2)
    assert behind(driven) == [1]


def with_graphs(*followed_sizes: int) -> Driven:
    """Two rows of short prompts, whose one drafter replays passes of so many tokens."""
    driven = Driven((64,), followed_sizes=followed_sizes)
    driven.all = driven.all[1:]
    for row in range(2):
        driven.admit(row, 3 + row)
    driven.all[0].model.followed.clear()
    driven.all[0].replayed.clear()
    return driven


def test_what_catches_up_is_replayed_in_pieces_of_the_largest_graph() -> None:
    driven = with_graphs(4, 16)
    for _ in range(9):
        driven.decode({0: 0, 1: 0})
    only = driven.all[0]
    assert only.replayed == []
    driven.decode({0: 2, 1: 0})
    # Nine tokens of row 0, and the four of the step behind them.
    assert (only.model.followed, only.replayed) == ([9, 4], ["followed"] * 2)
    for _ in range(14):
        driven.decode({0: 0, 1: 0})
    driven.decode({0: 1, 1: 1})
    # One step had to be followed, 13 of row 0 and 24 of row 1 were noted.
    assert only.model.followed[2:] == [2, 16, 16, 5, 4]
    assert only.replayed == ["followed"] * 7


def test_steps_with_prompts_are_padded_to_the_graphs_that_catch_up() -> None:
    """Steps that are longer than the largest are launched kernel by kernel."""
    driven = with_graphs(4, 16)
    only = driven.all[0]
    driven.decode({0: 0, 1: 0})
    driven.admit(2, 10, {0: 0, 1: 2})
    # Row 1 catches up with a token first.
    assert (only.model.followed, only.replayed) == ([1, 14], ["followed"] * 2)
    driven.admit(3, 15, {0: 0, 1: 0, 2: 1})
    assert (only.model.followed[2:], only.replayed[2:]) == ([19], [])


def test_one_pass_catches_up_all_rows_that_are_drafted_for() -> None:
    driven = begun()
    for _ in range(4):
        driven.decode({0: 0, 1: 0})
    driven.decode({1: 0})
    driven.decode({0: 1, 1: 1})
    assert driven.all[0].model.followed == [4 + 5, 2 + 2]
    assert behind(driven) == []


def test_no_pass_that_catches_up_has_more_tokens_than_a_step() -> None:
    driven = begun()
    for _ in range(20):
        driven.decode({0: 0, 1: 0})
    driven.decode({0: 1, 1: 1})
    assert driven.all[0].model.followed == [16, 16, 8, 4]


def test_a_row_is_caught_up_before_what_it_needs_is_written_over() -> None:
    """Rows that began together are not caught up together."""
    driven = begun(window=8)
    model = driven.all[0].model
    caught_up = []
    for number in range(8):
        driven.decode({0: 0, 1: 0})
        if model.followed:
            caught_up.append((number, model.followed.pop()))
    # Row 0 may be 8 tokens behind and row 1 seven.
    assert caught_up == [(7, 7)]
    driven.decode({0: 0, 1: 0})
    assert model.followed == [8]
    driven.decode({0: 1, 1: 1})
    assert model.followed == [8, 1 + 2, 4]


def behind(driven: Driven) -> list[int]:
    deferred = driven.all[0].deferred
    assert deferred is not None
    return deferred.behind.tolist()


def test_a_step_whose_positions_may_be_bounds_is_followed() -> None:
    """The engine has not read what the step before settled of its drafts."""
    driven = begun()
    model = driven.all[0].model
    driven.decode({0: 2, 1: 0})
    assert model.followed == [4]
    driven.decode({0: 0, 1: 0})
    assert (model.followed, behind(driven)) == ([4, 2], [])
    driven.decode({0: 0, 1: 0})
    assert (model.followed, behind(driven)) == ([4, 2], [0, 1])
    # Rows that had no drafts may be deferred beside one that had and takes no part.
    driven.decode({0: 2})
    driven.decode({1: 0})
    assert (model.followed, behind(driven)) == ([4, 2, 1, 3], [1])


def test_rows_beside_drafts_and_prompts_stay_behind() -> None:
    driven = begun()
    driven.decode({0: 0, 1: 0})
    driven.admit(2, 5, {0: 0, 1: 0})
    driven.decode({0: 0, 1: 0, 2: 1})
    driven.force(1, 2)
    model = driven.all[0].model
    assert (model.followed, behind(driven)) == ([7, 4, 3], [0, 1])
    driven.decode({0: 1, 1: 1, 2: 0})
    # Three tokens of row 0, and six of row 1.
    assert model.followed == [7, 4, 3, 3 + 6, 5]


@pytest.mark.parametrize("is_released", [False, True])
def test_a_row_that_is_taken_anew_owes_nothing(is_released: bool) -> None:
    driven = begun()
    for _ in range(3):
        driven.decode({0: 0, 1: 0})
    if is_released:
        driven.release(0)
        assert behind(driven) == [1]
    driven.admit(0, 4)
    assert behind(driven) == [1]
    driven.all[0].model.followed.clear()
    driven.decode({0: 2, 1: 0})
    assert driven.all[0].model.followed == [4]


def test_a_row_whose_pass_failed_is_not_caught_up_again() -> None:
    """Its drafts get worse, as behind a step whose following failed."""
    deferred = DeferredSteps(NUM_ROWS, 8, 16)
    plans = [step([Entry(0, 5 + number, None, (0,), number)]) for number in range(3)]
    deferred.begin(step([Entry(0, 0, [1, 2, 3, 4, 5], (0,))], [admission(0)]))
    for plan in plans:
        deferred.begin(plan)
        assert deferred.noted(plan) is not None
    deferred.begin(step([]))
    assert (deferred.behind.tolist(), deferred.defers) == ([0], False)
    row, start, count = (np.array([number], np.int32) for number in (0, 5, 3))
    # Whoever is handed the pieces need not compute them.
    pieces = deferred.overdue(step([Entry(0, 8, list(range(7)), (0,), 9)]))
    assert deferred.behind.tolist() == []
    assert [tuple(map(int, (piece.rows[0], piece.starts[0], piece.counts[0]))) for piece in pieces] == [
        (int(row[0]), int(start[0]), int(count[0]))
    ]


def test_an_engine_reads_what_the_worker_takes_for_read() -> None:
    """Speculation has no pipeline stages, with which more steps would be in flight."""
    assert USUAL_STEPS_IN_FLIGHT - 1 == MOST_UNREAD


def test_warm_up_has_a_draft_model_catch_up() -> None:
    """The steps of a worker that is probed are among those that every worker takes at its start."""
    config = EngineConfig.model_validate(
        {"model": "model", "speculate": "draft", "draft_model": "draft", "max_num_seqs": 4, "block_size": 16}
    )
    sizes, pool = WorkerSizes.of(config, 64), BlockPool(8, 16)
    deferred, caught_up = DeferredSteps(4, 64, 64), list[Entries]()
    for plan in short_steps(sizes, pool):
        deferred.begin(plan)
        drafted = DraftedRows.of(plan)
        if drafted is not None:
            caught_up += deferred.drafted(drafted)
        if plan.forward.rows.size:
            deferred.noted(plan)
    assert [piece.num_tokens for piece in caught_up] == [1]
    assert deferred.behind.size == 0


def test_memory_is_that_of_the_window() -> None:
    assert window_tokens(100) == 100
    assert window_tokens(1 << 17) == 2048
    assert noted_bytes(8, 1 << 17) == 8 * 2048 * 4


@given(st.integers(1, 9000), st.integers(0, 9000))
def test_passes_have_few_sizes_and_hold_what_is_behind(count: int, spare: int) -> None:
    padded = padded_tokens(count, count + spare)
    assert count <= padded <= min(count + spare, max(2 * count - 1, count + 511))
    assert padded in (count + spare, 1 << (padded.bit_length() - 1)) or padded % 512 == 0
