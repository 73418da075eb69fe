"""Tokens that must come are looked for as long as steps compute them."""

from __future__ import annotations

from headrace_backend.engine.scheduling.forced_search import ForcedSearch


def searched(search: ForcedSearch, num_calls: int, num_found: int, num_computed: int) -> list[bool]:
    """Which of so many calls search, if each search finds and each step computes so many."""
    calls = []
    for _ in range(num_calls):
        calls.append(search.begins())
        if calls[-1]:
            search.note_found(num_found)
            search.note_computed(num_computed)
    return calls


def pauses(calls: list[bool]) -> list[int]:
    """Lengths of the runs of calls that do not search."""
    runs = "".join("x" if call else " " for call in calls).split("x")
    return [len(run) for run in runs if run]


def test_a_search_goes_on_while_steps_compute_what_it_finds() -> None:
    assert all(searched(ForcedSearch(), 1000, 8, 8))
    assert all(searched(ForcedSearch(), 1000, 8, 3))


def test_a_search_that_finds_nothing_costs_nothing_and_goes_on() -> None:
    assert all(searched(ForcedSearch(), 1000, 0, 0))


def test_pauses_grow_where_nothing_of_it_is_computed_and_are_short_again_after_use() -> None:
    search = ForcedSearch()
    assert pauses(searched(search, 2000, 8, 0))[:6] == [16, 32, 64, 128, 256, 256]
    searched(search, 1000, 8, 8)
    assert pauses(searched(search, 60, 8, 0))[0] == 16


def test_what_plans_can_not_know_yet_counts_for_nothing() -> None:
    """All rows of a batch may begin with a name, which one call finds."""
    search = ForcedSearch()
    assert searched(search, 1, 500, 0) == [True]
    assert search.begins() and not search.is_paused
    search.note_computed(500)
    assert all(searched(search, 100, 0, 0))
