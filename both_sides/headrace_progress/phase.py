"""One stretch of long work in figures and words.

Owns the arithmetic (share, rate, seconds left) and the words. Time is given, in seconds of a clock
that does not go back.
"""

from __future__ import annotations

import dataclasses

# The unit of work that is counted in 2^20 bytes; it is shown in GiB where it is large, with a rate.
MIB = "MiB"
# The unit of work that ends with its time.
SECONDS = "s"
_MIB_A_GIB = 1024
# Before, a rate is chance.
_LEAST_PASSED_S = 1.0


@dataclasses.dataclass(slots=True)
class Phase:
    """How far a phase is.

    A phase of one unit has no figure but its time: nobody knows how much of it is done.
    """

    name: str
    total: float
    unit: str
    begun_s: float
    done: float = 0.0
    # What was done before it began, which counts for no rate.
    skipped: float = 0.0
    # More about what is done now.
    detail: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether all of it is done."""
        return self.done >= self.total

    @property
    def has_figure(self) -> bool:
        """Whether its parts are counted."""
        return self.total > 1

    def left_s(self, now: float) -> float | None:
        """Seconds that the rest takes at the mean rate so far; None: too little is done to say."""
        done, passed_s = self.done - self.skipped, now - self.begun_s
        return passed_s * (self.total - self.done) / done if done > 0 and passed_s >= _LEAST_PASSED_S else None

    def rate(self, now: float) -> str:
        """Bytes per second, as in "1.1 GiB/s"; empty for other units."""
        passed_s = now - self.begun_s
        if self.unit != MIB or self.done <= self.skipped or passed_s <= 0:
            return ""
        rate = (self.done - self.skipped) / passed_s
        return f"{rate / _MIB_A_GIB:.1f} GiB/s" if rate >= _MIB_A_GIB else f"{rate:.0f} MiB/s"

    def words(self, now: float) -> str:
        """How far it is, as in "1.2 of 14.9 GiB, 8%, 1.1 GiB/s, 12 s left"."""
        parts = self._finished(now) if self.is_finished else self._unfinished(now)
        return ", ".join(part for part in (*parts, self.detail) if part)

    def _finished(self, now: float) -> list[str]:
        seconds = f"{now - self.begun_s:.1f} s"
        counted = self.has_figure and self.unit != SECONDS
        return [f"{_amount(self.total, self.unit)} in {seconds}" if counted else seconds, self.rate(now)]

    def _unfinished(self, now: float) -> list[str]:
        left_s, passed = self.left_s(now), f"{duration(now - self.begun_s)} so far"
        if not self.has_figure:
            return [passed]
        share = f"{int(100 * self.done / self.total)}%"
        left = passed if left_s is None else f"{duration(left_s)} left"
        return [_part(self.done, self.total, self.unit), share, self.rate(now), left]


def duration(seconds: float) -> str:
    """Seconds for people: "41 s", "2 min 5 s", "1 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _amount(count: float, unit: str) -> str:
    return f"{count / _MIB_A_GIB:.1f} GiB" if _is_large(count, unit) else f"{count:,.0f} {unit}"


def _part(done: float, total: float, unit: str) -> str:
    if _is_large(total, unit):
        return f"{done / _MIB_A_GIB:.1f} of {_amount(total, unit)}"
    return f"{done:,.0f} of {_amount(total, unit)}"


def _is_large(count: float, unit: str) -> bool:
    return unit == MIB and count >= _MIB_A_GIB
