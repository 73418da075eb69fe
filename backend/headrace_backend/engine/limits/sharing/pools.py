"""What is left of one quota of one tenant, over all engines that this one knows of.

Owns the arithmetic. Does not decide who may take what (`share`).
"""

from __future__ import annotations

from typing import Protocol

MINUTE_NS = 60 * 1_000_000_000


class Pool(Protocol):
    """Units that can be taken and given back. Taking more than there is leaves a debt."""

    limit: int

    def level(self, now_ns: int) -> int:
        """Whole units that are left; negative where more was taken than there is."""

    def charge(self, amount: int, now_ns: int) -> None:
        """Takes units, whether they are there or not."""

    def give_back(self, amount: int, now_ns: int) -> None:
        """Returns units that were taken and not used."""


class RateBucket:
    """So many units a minute: a minute's worth can be taken at once, and comes back evenly.

    Nothing is rounded: a unit weighs `MINUTE_NS`, and each nanosecond gives back a weight of
    `limit`.
    """

    __slots__ = ("_as_of_ns", "_spent", "limit")

    def __init__(self, limit: int, now_ns: int) -> None:
        """Full; `limit` is at least 1."""
        self.limit = limit
        self._as_of_ns = now_ns
        # The weight that is missing from a full bucket.
        self._spent = 0

    def wait_ns(self, amount: int, now_ns: int) -> int | None:
        """Nanoseconds until `amount` units can be taken if nobody else takes any.

        It is 0 if they can be taken at once, and None if they never can.
        """
        if amount > self.limit:
            return None
        self._refill(now_ns)
        missing = self._spent + (amount - self.limit) * MINUTE_NS
        return max(0, -(-missing // self.limit))

    def level(self, now_ns: int) -> int:
        """Whole units that are left; negative where more was taken than there is."""
        self._refill(now_ns)
        return self.limit - -(-self._spent // MINUTE_NS)

    def missing(self, now_ns: int) -> int:
        """Units that are missing from a full bucket, rounded up."""
        return self.limit - self.level(now_ns)

    def take(self, amount: int, now_ns: int) -> None:
        """Takes what `wait_ns` said is there."""
        self.charge(amount, now_ns)
        assert self._spent <= self.limit * MINUTE_NS, "only what is there is taken"

    def charge(self, amount: int, now_ns: int) -> None:
        """Takes units, whether they are there or not; a debt is paid before anything else."""
        self._refill(now_ns)
        self._spent += amount * MINUTE_NS

    def give_back(self, amount: int, now_ns: int) -> None:
        """Returns what was taken and not used, but nothing that time has given back since."""
        self._refill(now_ns)
        self._spent = max(0, self._spent - amount * MINUTE_NS)

    def at_least_missing(self, amount: int, now_ns: int) -> None:
        """Has at least so many units be missing, because others say that they were taken."""
        self._refill(now_ns)
        self._spent = max(self._spent, amount * MINUTE_NS)

    def change_limit(self, limit: int, now_ns: int) -> None:
        """Keeps what was taken, at most as much as the new limit gives back in a minute."""
        self._refill(now_ns)
        self.limit = limit
        self._spent = min(self._spent, limit * MINUTE_NS)

    def is_full(self, now_ns: int) -> bool:
        """Whether it is as if nothing had ever been taken."""
        self._refill(now_ns)
        return self._spent == 0

    def _refill(self, now_ns: int) -> None:
        self._spent = max(0, self._spent - (now_ns - self._as_of_ns) * self.limit)
        self._as_of_ns = now_ns


class StreamCount:
    """So many streams at one time."""

    __slots__ = ("limit", "num_taken")

    def __init__(self, limit: int) -> None:
        """No stream is taken; `limit` is at least 1."""
        self.limit = limit
        self.num_taken = 0

    def level(self, _now_ns: int) -> int:
        """Streams that are left; negative where the limit became smaller than what is open."""
        return self.limit - self.num_taken

    def charge(self, amount: int, _now_ns: int) -> None:
        """Takes streams, whether they are there or not."""
        self.num_taken += amount

    def give_back(self, amount: int, _now_ns: int) -> None:
        """Returns streams that were taken."""
        self.num_taken -= amount
