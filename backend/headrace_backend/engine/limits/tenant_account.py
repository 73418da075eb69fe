"""The counts and limits of one tenant, kept for admission, scheduler and cache.

Owns the counts, and their sums over tenants that somebody passes. Does not decide when an account
is opened, charged or forgotten (`quotas`), how much of a quota this engine has (`sharing`), who is
admitted for a step or preempted (`scheduler`), nor which blocks are whose (`kv_cache_manager`).

    quotas              limits, shares, max_blocks; num_streams, num_charged_tokens
    admission           num_waiting_outputs, num_waiting_tokens
    scheduler           num_running
    kv_cache_manager    num_blocks
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from headrace_backend.engine.limits.sharing.share import Share
from headrace_backend.engine.limits.sharing.tenant_shares import TenantShares
from headrace_backend.engine.request import NO_LIMITS, TenantLimits

# Above every count.
UNLIMITED = sys.maxsize


class TenantAccount:
    """One tenant. Identity counts: sequences, buckets and queues refer to the object."""

    __slots__ = (
        "limits",
        "max_blocks",
        "num_blocks",
        "num_charged_tokens",
        "num_running",
        "num_streams",
        "num_waiting_outputs",
        "num_waiting_tokens",
        "shares",
        "tenant",
    )

    def __init__(self, tenant: str, shares: TenantShares | None = None) -> None:
        """Holds nothing, and may do what is left of its quotas."""
        self.tenant = tenant
        self.limits: TenantLimits = NO_LIMITS
        # Of the quotas that engines hold together: streams, and requests and tokens a minute.
        self.shares = shares or TenantShares(tenant)
        # Blocks of the KV cache that its running sequences may hold.
        self.max_blocks = UNLIMITED
        # Active requests, with one reader each, and what further readers they have.
        self.num_streams = 0
        # Outputs and prompt tokens of requests that have not started.
        self.num_waiting_outputs = 0
        self.num_waiting_tokens = 0
        # Of active requests, in whatever share.
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
    """What a request was charged when it was accepted, and to which share."""

    share: Share
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


class Passed(NamedTuple):
    """Prompt tokens and outputs of waiting requests that another one does not wait for."""

    num_tokens: int = 0
    num_outputs: int = 0

    @classmethod
    def of(cls, accounts: Iterable[TenantAccount]) -> Passed:
        """All that waits of these tenants."""
        waiting = [(account.num_waiting_tokens, account.num_waiting_outputs) for account in accounts]
        return cls(sum(tokens for tokens, _ in waiting), sum(outputs for _, outputs in waiting))
