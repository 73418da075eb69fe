"""What takes a process's own clock to UNIX time, so that times of several processes can be held
against each other.

Owns the measurement, which each process makes once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_READINGS = 16


def unix_offset_ns(clock: Callable[[], int] = time.monotonic_ns) -> int:
    """Nanoseconds from the zero of UNIX time to that of a clock.

    Of some readings the one counts during which the clock went on least: a process that loses its
    core between two clocks would be milliseconds off for the rest of its life.

    Args:
        clock: Nanoseconds that never go back.
    """
    readings = []
    for _ in range(_READINGS):
        before, now, after = clock(), time.time_ns(), clock()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]
