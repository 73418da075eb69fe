"""When steps were really done, where the loop notices it late.

Owns the reckoning. While the loop launches a step, above all kernel by kernel, it cannot look
whether the one before is done; counted from when that is noticed, the one before would seem longer
and the one after it shorter than they are, and the engine would plan by it. The device's own clock
tells the time between the ends of two steps; the host's clock is right whenever the loop was
looking, and no step ended after it was noticed.
"""

from __future__ import annotations

from headrace_backend.worker.step.host_copy import HostCopy

# The device's clock is taken to be slow by the most that two clocks drift: what it tells is then
# too late rather than too early, and set right by the host's whenever the loop was looking.
_DRIFT = 1.0002
# The device's clock counts in single-precision milliseconds; over longer pauses the host's is
# better.
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
            at_ns = min(noticed_at_ns, self._last_at_ns + int(elapsed_ns * _DRIFT))
        self._last, self._last_at_ns = samples, at_ns
        return at_ns
