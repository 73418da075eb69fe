"""How often workers were lost or steps failed, and when that is too often to go on.

Owns the counts. A loss does not count any more once isolation has explained it: it said something
about a request, and nothing about the next life. All others count for a minute. Where every life
takes longer than that (a large model, a hang that the watchdog has to find), those in a row that
came to nothing count however long they took: nobody waits for ever for a worker that never gets
anywhere.
"""

from __future__ import annotations

import collections

WINDOW_S = 60.0


class WorkerLosses:
    """Counts the losses of workers of one backend; times are seconds of one clock."""

    def __init__(self) -> None:
        """None yet."""
        self._recent: collections.deque[float] = collections.deque()
        self._num_fruitless = 0

    def explained(self) -> None:
        """What was lost so far brought isolation closer to the request that caused it."""
        self._recent.clear()
        self._num_fruitless = 0

    def note_failure(self, now_s: float) -> bool:
        """A step failed, and its worker lives. Returns whether the worker may be kept.

        It may not if it, or the one before it, gave trouble within the last minute.
        """
        self._forget_old(now_s)
        if self._recent:
            return False
        self._recent.append(now_s)
        return True

    def note_death(self, now_s: float, fruitful: bool) -> None:
        """A worker was lost. `fruitful`: it had settled a step, or had none to compute."""
        self._forget_old(now_s)
        self._recent.append(now_s)
        self._num_fruitless = 0 if fruitful else self._num_fruitless + 1

    @property
    def count(self) -> int:
        """Number of losses that count."""
        return max(len(self._recent), self._num_fruitless)

    def __str__(self) -> str:
        """Says how many count, and why."""
        if len(self._recent) == self.count:
            return f"{self.count} worker deaths within {WINDOW_S:g} s"
        return f"{self.count} worker deaths in a row without a step in between"

    def _forget_old(self, now_s: float) -> None:
        while self._recent and now_s - self._recent[0] > WINDOW_S:
            self._recent.popleft()
