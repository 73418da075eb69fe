"""Quotas of tenants, over all services.

They limit requests and tokens per minute, concurrent streams, and the share of the KV cache.

Owns the accounts, their limits, charges and refusals. Does not hold a tenant to its share of the
cache step by step (`scheduler`). No clock of its own.

    requests_per_minute   one for each accepted request. A minute's worth can come at once
                          (`RateBucket`)
    tokens_per_minute     prompt + n * max_tokens when a request is accepted; at its end, whatever
                          the reason, what it did not use is given back. A prompt counts as used
                          from the first step that was planned of it
    concurrent_streams    requests that wait or run, whether or not somebody reads them, and readers
                          beside the first of each. A reader of an ended request needs a free stream
                          too, and is done with it at once
    kv_cache_share        blocks that running sequences hold; what could not fit even alone is
                          refused

The newest limits of a tenant hold. A refused request costs nothing, and neither does one whose
idempotency key is known. An account is forgotten when nothing of its tenant is active and its
buckets are full: at most a minute after the last end, since no bucket takes longer to fill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace_backend.engine.errors import RefusalCode, RefusalReason, RequestRefused
from headrace_backend.engine.limits.tenant_account import (
    MINUTE_NS,
    UNLIMITED,
    Claim,
    RateBucket,
    TenantAccount,
    TokenCharge,
)
from headrace_backend.engine.request import EngineRequest, TenantLimits

# When a stream ends is not known.
_STREAM_RETRY_NS = 1_000_000_000


class _Wait(NamedTuple):
    """A limit that is reached, and when it will not be."""

    reason: str
    wait_ns: int


class Quotas:
    """The accounts of all tenants that are active or were within the last minute."""

    def __init__(self, block_size: int) -> None:
        """Nobody has taken anything, and there is no cache yet."""
        self._block_size = block_size
        self._num_blocks: int | None = None
        self._accounts: dict[str, TenantAccount] = {}
        # Accounts without streams whose buckets fill up, and since when; the oldest first.
        self._idle: OrderedDict[TenantAccount, int] = OrderedDict()

    def __len__(self) -> int:
        """Accounts that are kept."""
        return len(self._accounts)

    def __iter__(self) -> Iterator[TenantAccount]:
        """The accounts that are kept."""
        return iter(self._accounts.values())

    # Limits.

    def set_num_blocks(self, num_blocks: int) -> None:
        """Sets the number of blocks that shares are taken of."""
        self._num_blocks = num_blocks
        for account in self._accounts.values():
            account.max_blocks = self._max_blocks(account.limits)

    def account(self, tenant: str, limits: TenantLimits, now_ns: int) -> TenantAccount:
        """The tenant's account under its newest limits.

        It is kept from its first accepted request on.
        """
        account = self._accounts.get(tenant) or TenantAccount(tenant)
        if account.limits != limits:
            account.limits = limits
            account.max_streams = limits.concurrent_streams or UNLIMITED
            account.max_blocks = self._max_blocks(limits)
            account.request_bucket = _changed(account.request_bucket, limits.requests_per_minute, now_ns)
            account.token_bucket = _changed(account.token_bucket, limits.tokens_per_minute, now_ns)
            if account in self._idle:
                self._idle[account] = now_ns
                self._idle.move_to_end(account)
        return account

    def find(self, tenant: str) -> TenantAccount | None:
        """The tenant's account, if it is kept."""
        return self._accounts.get(tenant)

    # Requests and readers.

    def check_fits(self, account: TenantAccount, request: EngineRequest) -> str | None:
        """Explains why one output can never be computed within its tenant's share of the cache.

        It returns None if the output fits when its tenant has nothing else in the cache.
        """
        # The last token's KV is never needed.
        num_tokens = len(request.prompt_ids) + request.asked.stop.max_tokens - 1
        num_blocks = -(-num_tokens // self._block_size)
        if num_blocks <= account.max_blocks:
            return None
        return (
            f"kv_cache_share: prompt and max_tokens need {num_tokens} tokens of KV cache, {num_blocks} blocks of "
            f"{self._block_size}; the share of this key is"
            f" {account.max_blocks} of {self._num_blocks} blocks"
        )

    def admit(self, account: TenantAccount, request: EngineRequest, now_ns: int) -> TokenCharge | None:
        """Charges a request that nothing else speaks against.

        Returns what `ended` settles; None where tokens are not limited.

        Raises:
            RequestRefused: RESOURCE_EXHAUSTED, with the moment at which the request passes unless
                others come before it; without one if it never can.
        """
        num_tokens = len(request.prompt_ids) + request.asked.n * request.asked.stop.max_tokens
        reason = self.check_fits(account, request) or _never_reason(account, request, num_tokens)
        if reason is not None:
            raise RequestRefused(RefusalCode.RESOURCE_EXHAUSTED, reason, reason=RefusalReason.QUOTA)
        _refuse([*_stream_waits(account), *_rate_waits(account, num_tokens, now_ns)])
        self._accounts[account.tenant] = account
        self._idle.pop(account, None)
        account.num_streams += 1
        if account.request_bucket is not None:
            account.request_bucket.take(1, now_ns)
        if account.token_bucket is None:
            return None
        account.token_bucket.take(num_tokens, now_ns)
        account.num_charged_tokens += num_tokens
        return TokenCharge(account.token_bucket, num_tokens)

    def check_stream(self, account: TenantAccount) -> None:
        """Checks that a reader may attach which takes a stream of its own.

        Every reader does, except the first reader of an active request.

        Raises:
            RequestRefused: RESOURCE_EXHAUSTED, the tenant's streams are in use.
        """
        _refuse(_stream_waits(account))

    def reader_came(self, account: TenantAccount, num_readers: int) -> None:
        """Counts a new reader of an active request, which has `num_readers` now."""
        if num_readers > 1:
            account.num_streams += 1

    def reader_left(self, account: TenantAccount, num_readers: int) -> None:
        """Uncounts a reader of an active request, which has `num_readers` now."""
        if num_readers:
            account.num_streams -= 1

    def ended(self, claim: Claim, num_used: int, now_ns: int) -> None:
        """A request ended, with the readers that it still has.

        Args:
            claim: What the request took until now.
            num_used: Tokens of prompt and outputs that were computed for it; 0 if none was.
            now_ns: Time on the engine's clock.
        """
        account, charge = claim.account, claim.charge
        account.num_streams -= claim.num_streams
        if charge is not None:
            assert 0 <= num_used <= charge.num_tokens, "no request uses more than it was charged"
            charge.bucket.give_back(charge.num_tokens - num_used, now_ns)
            account.num_charged_tokens -= charge.num_tokens
        if account.num_streams == 0:
            self._leave_idle(account, now_ns)

    # Time.

    def next_expiry_ns(self) -> int | None:
        """The time at which the next idle account has nothing left to remember."""
        return next(iter(self._idle.values())) + MINUTE_NS if self._idle else None

    def expire(self, now_ns: int) -> None:
        """Forgets idle accounts that are as if new."""
        expiry_ns = self.next_expiry_ns()
        while expiry_ns is not None and expiry_ns <= now_ns:
            account, _ = self._idle.popitem(last=False)
            del self._accounts[account.tenant]
            expiry_ns = self.next_expiry_ns()

    def check_integrity(self, claims: list[Claim], num_used_blocks: int) -> None:
        """Asserts that accounts add up to the claims of active requests and to the used blocks."""
        assert sum(account.num_blocks for account in self) == num_used_blocks, (
            "a used block is in no account, or in two"
        )
        for account in self:
            held = [claim for claim in claims if claim.account is account]
            assert account.num_streams == sum(claim.num_streams for claim in held), "streams are counted"
            charges = [claim.charge.num_tokens for claim in held if claim.charge is not None]
            assert account.num_charged_tokens == sum(charges), "charges are settled with the end"
            assert account.num_running == sum(claim.num_rows for claim in held), "rows are counted"
            assert bool(held) != (account in self._idle), "an account without requests is idle"
        assert all(self._accounts[claim.account.tenant] is claim.account for claim in claims), "an account is lost"

    def _leave_idle(self, account: TenantAccount, now_ns: int) -> None:
        buckets = [bucket for bucket in (account.request_bucket, account.token_bucket) if bucket is not None]
        if all(bucket.is_full(now_ns) for bucket in buckets):
            del self._accounts[account.tenant]
        else:
            self._idle[account] = now_ns

    def _max_blocks(self, limits: TenantLimits) -> int:
        if not limits.kv_cache_share or self._num_blocks is None:
            return UNLIMITED
        # A share of 0.29 of 100 blocks is 29 of them, whatever binary fractions make of it.
        return int(round(limits.kv_cache_share * self._num_blocks, 6))


def _changed(bucket: RateBucket | None, limit: int, now_ns: int) -> RateBucket | None:
    """The bucket of a limit that was set, changed or lifted.

    A lifted one is forgotten with its charges; what they give back later reaches nobody.
    """
    if not limit:
        return None
    if bucket is None:
        return RateBucket(limit, now_ns)
    bucket.change_limit(limit, now_ns)
    return bucket


def _never_reason(account: TenantAccount, request: EngineRequest, num_tokens: int) -> str | None:
    bucket = account.token_bucket
    if bucket is None or num_tokens <= bucket.limit:
        return None
    return (
        f"tokens_per_minute: prompt ({len(request.prompt_ids)}) and n * max_tokens ({request.asked.n} * "
        f"{request.asked.stop.max_tokens}) are {num_tokens} tokens; the limit of this key is"
        f" {bucket.limit}, so this request can never pass"
    )


def _stream_waits(account: TenantAccount) -> Iterator[_Wait]:
    if account.num_streams >= account.max_streams:
        reason = (
            f"concurrent_streams: {account.num_streams} requests and readers of this key are open; its limit is "
            f"{account.max_streams}"
        )
        yield _Wait(reason, _STREAM_RETRY_NS)


def _rate_waits(account: TenantAccount, num_tokens: int, now_ns: int) -> Iterator[_Wait]:
    for name, bucket, amount in (
        ("requests_per_minute", account.request_bucket, 1),
        ("tokens_per_minute", account.token_bucket, num_tokens),
    ):
        wait_ns = bucket.wait_ns(amount, now_ns) if bucket is not None else 0
        if bucket is not None and wait_ns:
            reason = f"{name}: the limit of this key is {bucket.limit}; {amount} more pass in {wait_ns / 1e9:.3f} s"
            yield _Wait(reason, wait_ns)


def _refuse(waits: Iterable[_Wait]) -> None:
    """Raises RequestRefused if any limit is reached.

    The message names all limits that are reached; the hint to retry is that of the last one to
    pass.
    """
    reached = list(waits)
    if reached:
        message = "; ".join(wait.reason for wait in reached)
        retry_ns = max(wait.wait_ns for wait in reached)
        raise RequestRefused(
            RefusalCode.RESOURCE_EXHAUSTED, message, retry_after_ns=retry_ns, reason=RefusalReason.QUOTA
        )
