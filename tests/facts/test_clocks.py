"""A process's clock is taken to UNIX time without what a lost core adds."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_facts import clocks


class Machine:
    """Two clocks that go on together, in a process that may lose its core between two looks."""

    def __init__(self, offset_ns: int, pauses_ns: list[int]) -> None:
        self._now_ns, self._offset_ns, self._pauses_ns = 1_000_000, offset_ns, pauses_ns
        self._looks = 0

    def _look(self) -> int:
        self._now_ns += 40 + self._pauses_ns[self._looks % len(self._pauses_ns)]
        self._looks += 1
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._look()

    def time_ns(self) -> int:
        return self._look() + self._offset_ns


@given(
    offset_ns=st.integers(-(10**18), 10**18),
    pauses_ns=st.lists(st.integers(0, 10**7), min_size=47, max_size=47),
    quiet=st.integers(0, 15),
)
def test_one_undisturbed_comparison_is_enough(offset_ns: int, pauses_ns: list[int], quiet: int) -> None:
    pauses_ns[3 * quiet : 3 * quiet + 3] = [0, 0, 0]
    machine = Machine(offset_ns, pauses_ns)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time_ns", machine.time_ns)
        found = clocks.unix_offset_ns(machine.monotonic_ns)
    # The clock goes on by 80 ns in a comparison without a pause, in whose middle the time was
    # reported.
    assert abs(found - offset_ns) <= 80


def test_this_machine_s_clocks_agree_with_it() -> None:
    before = time.time_ns()
    reported = time.monotonic_ns() + clocks.unix_offset_ns()
    # Between the two lie some calls, however long the process waited for its core; a minute is a
    # clock that was set.
    assert abs(reported - before) < 60_000_000_000
