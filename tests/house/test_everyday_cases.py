"""Some cases of a test that has many are tried every time, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.everyday_cases import MARKER, mark_others_slow


class Case:
    """Stands for an item of pytest, as far as the choice looks at it."""

    def __init__(self, nodeid: str, *marks: Any) -> None:
        self.nodeid = nodeid
        self.marks = {mark.name: mark for mark in (mark.mark for mark in marks)}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, marker: Any) -> None:
        self.marks[marker.name] = marker.mark


def everyday(cases: list[Case]) -> list[str]:
    mark_others_slow(cases)  # type: ignore[arg-type]  # as far as it looks
    return [case.nodeid for case in cases if "slow" not in case.marks]


def test_each_nth_case_of_a_test_is_tried_every_time() -> None:
    one_in = getattr(pytest.mark, MARKER)
    cases = [Case(f"file::{test}[{place}]", one_in(3)) for test in ("one", "other") for place in range(4)]
    assert everyday(cases) == ["file::one[0]", "file::one[3]", "file::other[0]", "file::other[3]"]


def test_what_is_slow_anyway_or_for_a_card_takes_no_turn() -> None:
    one_in = getattr(pytest.mark, MARKER)(2)
    marks = {"slow": [pytest.mark.slow], "card": [pytest.mark.gpu], "first": [], "second": [], "third": []}
    cases = [Case(f"file::test[{name}]", one_in, *more) for name, more in marks.items()]
    assert everyday(cases) == ["file::test[card]", "file::test[first]", "file::test[third]"]


def test_other_tests_keep_all_their_cases() -> None:
    assert len(everyday([Case(f"file::test[{place}]") for place in range(5)])) == 5
