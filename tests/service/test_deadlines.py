"""Whether callers who left did so for their deadlines."""

from __future__ import annotations

import pytest

from headrace_service.deadlines import left_for_deadline

MS = 1_000_000


@pytest.mark.parametrize(
    ("deadline_ms", "now_ms", "is_deadline"),
    [
        (500, 500, True),
        (500, 900, True),
        # A tenth of the time.
        (500, 450, True),
        (500, 449, False),
        (20, 18, True),
        (20, 17, False),
        # 100 ms at most.
        (60_000, 59_900, True),
        (60_000, 59_899, False),
        # It had passed when the call arrived.
        (-5, 0, True),
        (None, 10**9, False),
    ],
)
def test_the_last_tenth_belongs_to_the_deadline(deadline_ms: int | None, now_ms: int, is_deadline: bool) -> None:
    arrival_ns = 7 * 10**15
    deadline_ns = None if deadline_ms is None else arrival_ns + deadline_ms * MS
    assert left_for_deadline(arrival_ns, deadline_ns, arrival_ns + now_ms * MS) is is_deadline
