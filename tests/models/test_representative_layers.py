"""Which layers launch all that a model's layers launch.

That they do is shown in `tests/worker/start_up/test_warm_up_launches.py`.
"""

from __future__ import annotations

import pytest
from tests.support.rank_threads import on_ranks

from headrace_backend.models.representative_layers import representative_places


@pytest.mark.parametrize(
    ("kinds", "places"),
    [("a", [0]), ("aa", [0, 1]), ("aaa", [0, 1, 2]), ("abbba", [0, 1, 4]), ("abcbcba", [0, 1, 2, 6])],
)
def test_first_and_last_are_taken_and_one_of_each_kind_between(kinds: str, places: list[int]) -> None:
    assert representative_places(kinds, None) == places


def test_ranks_take_the_layers_that_any_of_them_needs() -> None:
    kinds = ("aaabaaa", "aacaaaa")
    found = on_ranks(2, lambda shard: representative_places(kinds[shard.rank], shard.collectives))
    assert found == [[0, 1, 2, 3, 6]] * 2
