"""Which beginnings of prompts are popular, and whose prompts begin like earlier ones at all.

Owns the counts of one service, which fade: they are halved after every `window` requests, and what
then counts for little is forgotten. So memory is bounded by the window, whatever callers send.
"""

from __future__ import annotations

from collections import OrderedDict

# At least this many requests count, at most twice as many: enough to see a thousandth.
LEAST_WINDOW = 4096
# Weight of a tenant's newest request, and tenants that are remembered.
_WEIGHT = 1 / 16
_MOST_OWNERS = 4096


class Popularity:
    """Counts keys of beginnings.

    Attributes:
        window: requests after which counts are halved.
        total: requests that count.
    """

    __slots__ = ("_counts", "_num_new", "total", "window")

    def __init__(self) -> None:
        """Nothing was counted."""
        self._counts: dict[int, int] = {}
        self.total = 0
        self._num_new = 0
        self.window = LEAST_WINDOW

    def __len__(self) -> int:
        return len(self._counts)

    def count_request(self) -> None:
        """Counts a request, whose keys are counted next."""
        self.total += 1
        self._num_new += 1
        if self._num_new >= self.window:
            self._num_new = 0
            self.total //= 2
            self._counts = {key: count >> 1 for key, count in self._counts.items() if count > 1}

    def count(self, key: int) -> int:
        """Counts one key of the newest request; returns its count."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return count


class Repeats:
    """How many of a tenant's prompts begin like one that this service saw before."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        """Nobody has asked."""
        self._shares: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    def share(self, owner: int, repeated: bool) -> float:
        """Returns the share of an owner's prompts before this one, and counts this one.

        1 at first: other services may have seen what this one has not.
        """
        share = self._shares.pop(owner, 1.0)
        self._shares[owner] = share + _WEIGHT * (repeated - share)
        if len(self._shares) > _MOST_OWNERS:
            self._shares.popitem(last=False)
        return share
