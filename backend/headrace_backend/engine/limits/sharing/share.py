"""What one engine claimed of one quota of a tenant, and when it may claim more.

Owns the two rules by which the sum of all engines' claims stays within the quota, whatever reports
are on their way, as long as all of them know of each other:

    by share    once every other engine has heard of the last claim: as much as is left beside what
                others wait for, divided by the number of engines. No waiting.
    by want     where that is too little for a request: the engine first says what it waits for,
                and the others give back what they hold in reserve. Once all of them have heard, it
                may claim all that is left beside what those wait for who come before it.

Why that suffices: an engine knows all claims of the others except at most one of each, and none of
these is larger than its equal part of what was left. A want counts as taken for claims by share,
and of two that want, only one comes first.
"""

from __future__ import annotations

import enum
import sys
from typing import NamedTuple

from headrace_backend.engine.limits.sharing.pools import Pool
from headrace_backend.engine.limits.sharing.reports import ShareReport

# A claim by share is enough for so many requests of the kind that made it.
_MOST_REQUESTS = 64
# Numbers of reports: one that everybody has heard, and one that was not sent yet.
HEARD = 0
UNSENT = sys.maxsize


class Standing(NamedTuple):
    """How the other engines stand towards one quota of a tenant."""

    # Engines that share the quota, this one among them.
    num_engines: int
    # The newest own report that all others have heard; -1: somebody does not know this engine yet.
    heard: int
    # What others wait for, and of it what those wait for who come first.
    wanted: int
    wanted_before: int
    # Whether somebody asks that nothing be held in reserve, and whether all others have heard that
    # this engine does.
    pressed: bool
    pressing: bool


ALONE = Standing(1, 0, 0, 0, False, False)


class Answer(enum.Enum):
    """Whether a request may have its units."""

    YES = enum.auto()
    # The others are asked.
    WAIT = enum.auto()
    NO = enum.auto()


class Share:
    """One engine's share of one quota. `spend` what `obtain` said yes to."""

    __slots__ = ("_claim_number", "_want_number", "claimed_ns", "pool", "taken", "unspent", "want", "wanted_ns")

    def __init__(self, pool: Pool, taken: int = 0) -> None:
        """Nothing is claimed beside what is `taken` from the pool and spent already."""
        self.pool = pool
        self.taken = taken
        # Units that were claimed and not spent.
        self.unspent = 0
        self.want = 0
        # When units were claimed last, and when a request asked last that waits.
        self.claimed_ns = 0
        self.wanted_ns = 0
        self._claim_number = HEARD
        self._want_number = HEARD

    def obtain(self, amount: int, standing: Standing, now_ns: int) -> Answer:
        """Claims what is missing of `amount` units, as far as the rules allow it now."""
        needed = amount - self.unspent
        level = self.pool.level(now_ns)
        if needed <= 0 or (standing.num_engines == 1 and needed <= level):
            return Answer.YES
        if standing.num_engines == 1:
            return Answer.NO
        part = (level - standing.wanted) // standing.num_engines
        if self._claim_number <= standing.heard and needed <= part:
            self._claim(needed if standing.pressed else min(part, needed + _MOST_REQUESTS * amount), now_ns)
            return Answer.YES
        return self._obtain_by_want(needed, level, standing, now_ns)

    def spend(self, amount: int, now_ns: int) -> None:
        """Spends units that were obtained; what was not is claimed all the same."""
        if self.unspent < amount:
            self._claim(amount - self.unspent, now_ns)
        self.unspent -= amount

    def settle(self, amount: int) -> None:
        """Takes back units that were spent, to be spent again or given back."""
        self.unspent += amount

    def give_back(self, now_ns: int) -> bool:
        """Gives what is not spent back to the pool. Returns whether that was anything."""
        amount, self.unspent = self.unspent, 0
        if amount:
            self.taken -= amount
            self.pool.give_back(amount, now_ns)
        return amount > 0

    def withdraw(self) -> bool:
        """Waits for nothing any more. Returns whether it did."""
        waited, self.want = self.want > 0, 0
        return waited

    def sent(self, number: int) -> None:
        """Notes the number of the report that says what was claimed and wanted since the last."""
        if self._claim_number == UNSENT:
            self._claim_number = number
        if self._want_number == UNSENT:
            self._want_number = number

    def report(self, missing: int = 0) -> ShareReport:
        """Returns what is reported to the others."""
        return ShareReport(self.taken, self.want, missing)

    def _obtain_by_want(self, needed: int, level: int, standing: Standing, now_ns: int) -> Answer:
        if standing.pressing and level < needed:
            # Nobody holds anything in reserve: what is missing is spent.
            return Answer.NO
        self.wanted_ns = now_ns
        if self.want < needed:
            self.want, self._want_number = needed, UNSENT
        if max(self._want_number, self._claim_number) > standing.heard:
            return Answer.WAIT
        if needed > level - standing.wanted_before:
            self.want = 0
            return Answer.NO
        self._claim(needed, now_ns)
        return Answer.YES

    def _claim(self, amount: int, now_ns: int) -> None:
        self.pool.charge(amount, now_ns)
        self.taken += amount
        self.unspent += amount
        self.claimed_ns = now_ns
        self.want = 0
        self._claim_number = UNSENT
