"""Tokens that must come are looked for as long as steps compute them."""

from __future__ import annotations

from headrace_backend.engine.scheduling.forced_search import ForcedSearch


def searched(search: ForcedSearch, num_calls: int, num_computed: int, num_draws: int = 64) -> list[bool]:
    """Which of so many calls search, if steps compute so many tokens behind each that does."""
    calls = []
    for _ in range(num_calls):
        calls.append(search.begins(num_draws))
        search.note_computed(num_computed if calls[-1] else 0)
    return calls


def pauses(calls: list[bool]) -> list[int]:
    """Lengths of the runs of calls that do not search."""
    runs = "".join("x" if call else " " for call in calls).split("x")
    return [len(run) for run in runs if run]


def test_a_search_goes_on_while_steps_compute_what_it_finds() -> None:
    assert all(searched(ForcedSearch(), 1000, num_computed=2))
    assert all(searched(ForcedSearch(), 1000, num_computed=1, num_draws=1))


def test_pauses_grow_where_nothing_of_it_is_computed_and_are_short_again_after_use() -> None:
    search = ForcedSearch()
    assert pauses(searched(search, 2000, num_computed=0))[:6] == [16, 32, 64, 128, 256, 256]
    searched(search, 1000, num_computed=8)
    assert pauses(searched(search, 60, num_computed=0))[0] == 16


def test_a_few_calls_or_draws_say_nothing() -> None:
    """What is found reaches a plan only later, and a form may begin with a choice."""
    assert all(searched(ForcedSearch(), 16, num_computed=0, num_draws=1000))
    assert all(searched(ForcedSearch(), 100, num_computed=0, num_draws=10))


def test_calls_of_few_draws_search_whatever_came_of_it() -> None:
    search = ForcedSearch()
    assert all(searched(search, 5000, num_computed=0, num_draws=7))
    searched(search, 17, num_computed=0, num_draws=100)
    assert search.is_paused(8) and not search.is_paused(7) and search.begins(7)
