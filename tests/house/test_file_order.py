"""Files of the suite are spread over a run: neighbours go apart, a file's tests do not."""

from __future__ import annotations

import itertools

import hypothesis
from hypothesis import strategies
from tests.support.file_order import spread


@hypothesis.given(strategies.lists(strategies.integers(1, 4), max_size=40))
def test_a_files_tests_stay_together_and_in_their_order(sizes: list[int]) -> None:
    tests = [(f"test_{file}.py", (file, test)) for file, size in enumerate(sizes) for test in range(size)]
    found = spread(tests)
    groups = [list(group) for _, group in itertools.groupby(found, key=lambda test: test[0])]
    assert sorted(groups) == [[(file, test) for test in range(size)] for file, size in enumerate(sizes)]


def test_files_that_follow_each_other_are_no_neighbours() -> None:
    for count in (30, 284, 1000):
        order = spread([(f"test_{file}.py", file) for file in range(count)])
        assert all(abs(one - other) > count // 6 for one, other in itertools.pairwise(order))


def test_files_that_take_long_are_not_the_last() -> None:
    files = [f"tests/{room}/test_{file}.py" for room in ("e2e", "service", "worker") for file in range(100)]
    order = spread([(file, file) for file in files])
    assert all("/service/" in file for file in order[-25:])
    assert all(any(f"/{room}/" in file for file in order[:20]) for room in ("e2e", "service", "worker"))
