"""The counts and limits of one tenant, kept for admission, scheduler and cache.

Owns the counts and the arithmetic of a rate. Does not decide when an account is opened, charged or
forgotten (`quotas`), who is admitted for a step or preempted (`scheduler`), nor which blocks are
whose (`kv_cache_manager`).

    limits ──quotas──> buckets, max_streams, max_blocks requests and readers ──quotas──>
    num_streams, num_charged_tokens requests that have not started ──admission──>
    num_waiting_outputs, num_waiting_tokens sequences and blocks ──scheduler, kv_cache_manager──>
    num_running, num_blocks
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from headrace_backend.engine.request import NO_LIMITS, TenantLimits

# Above every count.
UNLIMITED = sys.maxsize
MINUTE_NS = 60 * 1_000_000_000


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

    def take(self, amount: int, now_ns: int) -> None:
        """Takes what `wait_ns` said is there."""
        self._refill(now_ns)
        self._spent += amount * MINUTE_NS
        assert self._spent <= self.limit * MINUTE_NS, "only what is there is taken"

    def give_back(self, amount: int, now_ns: int) -> None:
        """Returns what was taken and not used, but nothing that time has given back since."""
        self._refill(now_ns)
        self._spent = max(0, self._spent - amount * MINUTE_NS)

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


class TenantAccount:
    """One tenant. Identity counts: sequences, buckets and queues refer to the object."""

    __slots__ = (
        "limits",
        "max_blocks",
        "max_streams",
        "num_blocks",
        "num_charged_tokens",
        "num_running",
        "num_streams",
        "num_waiting_outputs",
        "num_waiting_tokens",
        "request_bucket",
        "tenant",
        "token_bucket",
    )

    def __init__(self, tenant: str) -> None:
        """Holds nothing, and may do anything."""
        self.tenant = tenant
        self.limits: TenantLimits = NO_LIMITS
        # None: no such limit.
        self.request_bucket: RateBucket | None = None
        self.token_bucket: RateBucket | None = None
        self.max_streams = UNLIMITED
        # Blocks of the KV cache that its running sequences may hold.
        self.max_blocks = UNLIMITED
        # Active requests, with one reader each, and what further readers they have.
        self.num_streams = 0
        # Outputs and prompt tokens of requests that have not started.
        self.num_waiting_outputs = 0
        self.num_waiting_tokens = 0
        # Of active requests, in whatever bucket.
        self.num_charged_tokens = 0
        # Sequences that have a row.
        self.num_running = 0
        # Blocks that they hold, each counted once however many of them share it. No other tenant
        # ever shares one (`prefix_keys`), and what is merely cached is nobody's: so the accounts'
        # blocks add up to the pool's used ones.
        self.num_blocks = 0

    @property
    def num_blocks_left(self) -> int:
        """Blocks that the tenant's sequences may still take.

        It is 0 if the tenant's share became smaller than what its sequences hold.
        """
        return max(0, self.max_blocks - self.num_blocks)


class TokenCharge(NamedTuple):
    """What a request was charged when it was accepted, and where."""

    bucket: RateBucket
    num_tokens: int


class Claim(NamedTuple):
    """What an active request takes of its tenant's limits."""

    account: TenantAccount
    # None where the tenant's tokens were not limited when it came.
    charge: TokenCharge | None
    num_readers: int
    # Sequences that have a row.
    num_rows: int

    @property
    def num_streams(self) -> int:
        """Streams that it counts for: one for each reader, and one while nobody reads."""
        return max(1, self.num_readers)
