"""Parts of the suite hold each of its files once."""

from __future__ import annotations

import argparse
import pathlib

import pytest
from tests.support.suite_part import SuitePart

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("count", [1, 4])
def test_each_file_is_in_one_part_and_no_part_is_empty(count: int) -> None:
    parts = [SuitePart.parse(f"{number}/{count}") for number in range(1, count + 1)]
    owners = [[part.number for part in parts if part.has(path)] for path in TESTS.rglob("test_*.py")]
    assert all(len(found) == 1 for found in owners)
    assert {found[0] for found in owners} == set(range(1, count + 1))


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "/4", "a/4", "-1/4", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NUMBER/COUNT"):
        SuitePart.parse(text)
