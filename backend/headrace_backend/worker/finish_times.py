"""When steps were really done, where the loop notices it late.

Owns the reckoning. While the loop launches a step kernel by kernel it cannot look whether the one before is done; counted from when that is noticed, the one before would seem longer and the one
after it shorter than they are, by milliseconds, and the engine would plan by it. The device's own clock tells the time between the ends of two steps; the host's clock is right
whenever the loop was looking.
"""

from __future__ import annotations

from headrace_backend.worker.host_copy import HostCopy

# What is noticed with so little delay was looked for: the host's clock holds, so that the two clocks cannot drift apart.
_NOTICED_AT_ONCE_NS = 300_000
# The device's clock counts in single-precision milliseconds; over longer pauses the host's is better.
_LONGEST_GAP_NS = 1_000_000_000


class FinishTimes:
    """Of one step after the other, in nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        """No step yet."""
        self._last: HostCopy | None = None
        self._last_at_ns = 0

    def of(self, samples: HostCopy, noticed_at_ns: int) -> int:
        """When a step was done whose samples were found there at `noticed_at_ns`."""
        at_ns = noticed_at_ns
        elapsed_ns = None if self._last is None else samples.elapsed_ns_since(self._last)
        if elapsed_ns is not None and elapsed_ns < _LONGEST_GAP_NS:
            told_ns = self._last_at_ns + elapsed_ns
            if told_ns + _NOTICED_AT_ONCE_NS < noticed_at_ns:
                at_ns = told_ns
        self._last, self._last_at_ns = samples, at_ns
        return at_ns
