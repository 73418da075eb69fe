"""Which cases of a test with many are tried every time.

Owns the marker `one_in(n)`: of the cases of such a test, which compute the same over many formats
or shapes, each n-th runs in everyday runs, and the others in the slow part. Beside a card, where
`make test-gpu` leaves out what is slow, none is left out so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

MARKER = "one_in"


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Marks the cases slow that are not tried every time.

    Of a test's cases that are neither slow anyway nor for a card, the first is tried every time.
    The choice is equal in every process.
    """
    seen: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker(MARKER)
        if marker is None or item.get_closest_marker("slow") or item.get_closest_marker("gpu"):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % marker.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
