"""The end of a step, as the device knows it."""

from __future__ import annotations

import pytest
import torch

from headrace_backend.worker.step.host_copy import FinishTimes, HostCopy

MS = 1_000_000


class Ended(HostCopy):
    """A step that ended at a time of the device's own clock, which started at another moment."""

    def __init__(self, at_ms: float) -> None:
        super().__init__(None, torch.device("cpu"))
        self.at_ms = at_ms

    def elapsed_ns_since(self, earlier: HostCopy) -> int | None:
        assert isinstance(earlier, Ended)
        return int((self.at_ms - earlier.at_ms) * MS)


def test_step_noticed_late_ended_when_the_device_says() -> None:
    times = FinishTimes()
    assert times.of(Ended(70), 1000 * MS) == 1000 * MS
    assert times.of(Ended(75), 1011 * MS) == pytest.approx(1005 * MS, abs=MS / 100)
    assert times.of(Ended(88), 1018 * MS + 1) == 1018 * MS + 1
    # While a short step is launched, too.
    assert times.of(Ended(93), 1023 * MS + MS // 4) == pytest.approx(1023 * MS, abs=MS / 100)


def test_clocks_that_drift_apart_are_set_right_whenever_the_end_was_looked_for() -> None:
    times = FinishTimes()
    times.of(Ended(0), 0)
    for index in range(1, 100_000):
        noticed = int(index * 5.0001 * MS)
        assert times.of(Ended(index * 5.0), noticed) == noticed
    late = int(100_000 * 5.0001 * MS) + 8 * MS
    assert abs(times.of(Ended(500_000.0), late) - (late - 8 * MS)) < MS


def test_no_step_ends_after_it_was_noticed_or_long_after_a_pause_by_the_device_alone() -> None:
    times = FinishTimes()
    times.of(Ended(0), 0)
    assert times.of(Ended(9), 5 * MS) == 5 * MS
    assert times.of(Ended(5_000), 6_000 * MS) == 6_000 * MS


def test_on_a_cpu_steps_end_when_they_are_noticed() -> None:
    times = FinishTimes()
    for at in (3, 9, 12):
        assert times.of(HostCopy(None, torch.device("cpu")), at * MS) == at * MS
