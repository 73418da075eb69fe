"""Quotas of tenants, over all services and over the engines that they name to each other.

They limit requests and tokens per minute, concurrent streams, and the share of the KV cache.

Owns the accounts, their limits, charges and refusals. Does not hold a tenant to its share of the
cache step by step (`scheduler`), nor know how much of a quota is this engine's (`sharing`). It has
no clock of its own.

    requests_per_minute   one for each accepted request. A minute's worth can come at once
                          (`RateBucket`)
    tokens_per_minute     prompt + n * max_tokens when a request is accepted (n counts all
                          sequences: the width of a search, best_of); at its end, whatever
                          the reason, what it did not use is given back. A prompt counts as used
                          from the first step that was planned of it
    concurrent_streams    requests that wait or run, whether or not somebody reads them, and readers
                          beside the first of each. A reader of an ended request needs a free stream
                          too, and is done with it at once
    kv_cache_share        blocks that running sequences hold; what could not fit even alone is
                          refused. Each engine has a cache of its own, and the share is one of each

The newest limits that a service says hold, and of several services' the lowest. A refused request
costs nothing, and neither does one whose idempotency key is known. A continuation of what a lost
engine admitted is never refused, and charged no second time. An account is forgotten when nothing
of its tenant is active and its buckets are full: at most a minute after the last end, since no
bucket takes longer to fill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace_backend.cache_groups import SequenceBlocks
from headrace_backend.engine.errors import RefusalCode, RefusalReason, RequestRefused
from headrace_backend.engine.limits.sharing.pools import MINUTE_NS, RateBucket
from headrace_backend.engine.limits.sharing.reports import QuotaReport
from headrace_backend.engine.limits.sharing.share import Answer, Share
from headrace_backend.engine.limits.sharing.shared_quotas import SharedQuotas
from headrace_backend.engine.limits.tenant_account import UNLIMITED, Claim, TenantAccount, TokenCharge
from headrace_backend.engine.request import EngineRequest, TenantLimits

# When a stream ends is not known.
_STREAM_RETRY_NS = 1_000_000_000
# The other engines answer about as soon.
_ASK_AGAIN_NS = 5_000_000


class _Wait(NamedTuple):
    """A limit that is reached, and when it will not be."""

    reason: str
    wait_ns: int
    # Whether it may not be reached: the other engines are asked.
    is_asked: bool = False


class Quotas:
    """The accounts of all tenants that are active or were within the last minute."""

    def __init__(self, blocks: SequenceBlocks, engine: str) -> None:
        """Nobody has taken anything, and there is no cache yet; `engine` is the engine's name."""
        self.shared = SharedQuotas(engine)
        self._blocks = blocks
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

    def account(self, tenant: str, limits: TenantLimits, now_ns: int, source: int = 0) -> TenantAccount:
        """The tenant's account, after a service's newest word on its limits.

        `source` is the service's stream. The account is kept from its first accepted request on.
        """
        account = self._accounts.get(tenant) or TenantAccount(tenant, self.shared.of(tenant))
        account.shares.say(source, limits, account.num_streams, now_ns)
        limits = account.shares.limits
        if account.limits != limits:
            account.limits = limits
            account.max_blocks = self._max_blocks(limits)
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
        num_tokens = len(request.prompt_ids) + request.asked.stop.max_tokens - 1
        num_blocks = request.most_blocks(self._blocks)
        if num_blocks <= account.max_blocks:
            return None
        return (
            f"kv_cache_share: prompt and max_tokens need {num_tokens} tokens of KV cache, {num_blocks} blocks of "
            f"{self._blocks.block_size}; the share of this key is"
            f" {account.max_blocks} of {self._num_blocks} blocks"
        )

    def admit(self, account: TenantAccount, request: EngineRequest, now_ns: int) -> TokenCharge | None:
        """Charges a request that nothing else speaks against.

        Returns what `ended` settles; None where tokens are not limited.

        Raises:
            RequestRefused: RESOURCE_EXHAUSTED, with the moment at which the request passes unless
                others come before it; without one if it never can.
        """
        num_tokens = len(request.prompt_ids) + request.asked.num_sequences * request.asked.stop.max_tokens
        if not request.admitted:
            self._check(account, request, num_tokens, now_ns)
        self._accounts[account.tenant] = account
        self._idle.pop(account, None)
        shares = account.shares
        self.shared.own(shares)
        account.num_streams += 1
        if shares.streams is not None:
            shares.streams.spend(1, now_ns)
        if not request.admitted and shares.requests is not None:
            shares.requests.spend(1, now_ns)
        if not request.admitted and shares.tokens is not None:
            shares.tokens.spend(num_tokens, now_ns)
        self.shared.spent(shares)
        if shares.tokens is None:
            return None
        account.num_charged_tokens += num_tokens
        return TokenCharge(shares.tokens, num_tokens)

    def check_stream(self, account: TenantAccount, now_ns: int) -> None:
        """Checks that a reader may attach which takes a stream of its own.

        Every reader does, except the first reader of an active request.

        Raises:
            RequestRefused: RESOURCE_EXHAUSTED, the tenant's streams are in use.
        """
        _refuse(self._stream_waits(account, now_ns))

    def reader_came(self, account: TenantAccount, num_readers: int, now_ns: int) -> None:
        """Counts a new reader of an active request, which has `num_readers` now."""
        if num_readers > 1:
            account.num_streams += 1
            if account.shares.streams is not None:
                account.shares.streams.spend(1, now_ns)
                self.shared.spent(account.shares)

    def reader_left(self, account: TenantAccount, num_readers: int, now_ns: int) -> None:
        """Uncounts a reader of an active request, which has `num_readers` now."""
        if num_readers:
            self._end_streams(account, 1, now_ns)

    def ended(self, claim: Claim, num_used: int, now_ns: int) -> None:
        """A request ended, with the readers that it still has.

        Args:
            claim: What the request took until now.
            num_used: Tokens of prompt and outputs that were computed for it; 0 if none was.
            now_ns: Time on the engine's clock.
        """
        account, charge = claim.account, claim.charge
        if charge is not None:
            assert 0 <= num_used <= charge.num_tokens, "no request uses more than it was charged"
            charge.share.settle(charge.num_tokens - num_used)
            account.num_charged_tokens -= charge.num_tokens
        self._end_streams(account, claim.num_streams, now_ns)
        if account.num_streams == 0:
            self._leave_idle(account, now_ns)

    # Other engines.

    def read_report(self, report: QuotaReport, now_ns: int) -> None:
        """Takes in what another engine has of tenants' quotas."""
        self.shared.read(report, self._num_streams, now_ns)

    # Time.

    def next_expiry_ns(self) -> int | None:
        """The time at which the next idle account has nothing left to remember."""
        return next(iter(self._idle.values())) + MINUTE_NS if self._idle else None

    def expire(self, now_ns: int) -> None:
        """Forgets idle accounts that are as if new, and gives reserves back."""
        self.shared.expire(now_ns)
        expiry_ns = self.next_expiry_ns()
        while expiry_ns is not None and expiry_ns <= now_ns:
            account, _ = self._idle.popitem(last=False)
            self._forget(account, now_ns)
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
            streams = account.shares.streams
            assert streams is None or streams.taken == account.num_streams + streams.unspent, "streams are claimed"
            assert account.num_running == sum(claim.num_rows for claim in held), "rows are counted"
            assert bool(held) != (account in self._idle), "an account without requests is idle"
        assert all(self._accounts[claim.account.tenant] is claim.account for claim in claims), "an account is lost"

    # Inside.

    def _check(self, account: TenantAccount, request: EngineRequest, num_tokens: int, now_ns: int) -> None:
        reason = self.check_fits(account, request) or _never_reason(account, request, num_tokens)
        if reason is not None:
            raise RequestRefused(RefusalCode.RESOURCE_EXHAUSTED, reason, reason=RefusalReason.QUOTA)
        _refuse([*self._stream_waits(account, now_ns), *self._rate_waits(account, num_tokens, now_ns)])

    def _stream_waits(self, account: TenantAccount, now_ns: int) -> Iterator[_Wait]:
        share = account.shares.streams
        answer = self.shared.obtain(account.shares, "streams", 1, now_ns)
        if share is None or answer is Answer.YES:
            return
        limit = share.pool.limit
        if answer is Answer.WAIT:
            yield _asked("concurrent_streams", limit)
            return
        num_open = limit - share.pool.level(now_ns)
        # Where some are left, they belong to requests that wait at other engines and come first.
        rest = " and more asked before, at other engines" if num_open < limit else ""
        reason = f"concurrent_streams: {num_open} requests and readers of this key are open{rest}; its limit is {limit}"
        yield _Wait(reason, _STREAM_RETRY_NS)

    def _rate_waits(self, account: TenantAccount, num_tokens: int, now_ns: int) -> Iterator[_Wait]:
        shares = account.shares
        for name, quota, share, amount in (
            ("requests_per_minute", "requests", shares.requests, 1),
            ("tokens_per_minute", "tokens", shares.tokens, num_tokens),
        ):
            answer = self.shared.obtain(shares, quota, amount, now_ns)
            if share is None or answer is Answer.YES:
                continue
            if answer is Answer.WAIT:
                yield _asked(name, share.pool.limit)
                continue
            wait_ns = _wait_ns(share, amount, now_ns)
            yield _Wait(
                f"{name}: the limit of this key is {share.pool.limit}; {amount} more pass in {wait_ns / 1e9:.3f} s",
                wait_ns,
            )

    def _num_streams(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return account.num_streams if account is not None else 0

    def _end_streams(self, account: TenantAccount, number: int, now_ns: int) -> None:
        account.num_streams -= number
        if account.shares.streams is not None:
            account.shares.streams.settle(number)
        self.shared.settled(account.shares, now_ns)

    def _leave_idle(self, account: TenantAccount, now_ns: int) -> None:
        if account.shares.is_full(now_ns):
            self._forget(account, now_ns)
        else:
            self._idle[account] = now_ns

    def _forget(self, account: TenantAccount, now_ns: int) -> None:
        del self._accounts[account.tenant]
        self.shared.disown(account.shares, now_ns)

    def _max_blocks(self, limits: TenantLimits) -> int:
        if not limits.kv_cache_share or self._num_blocks is None:
            return UNLIMITED
        # A share of 0.29 of 100 blocks is 29 of them, whatever binary fractions make of it.
        return int(round(limits.kv_cache_share * self._num_blocks, 6))


def _never_reason(account: TenantAccount, request: EngineRequest, num_tokens: int) -> str | None:
    share = account.shares.tokens
    if share is None or num_tokens <= share.pool.limit:
        return None
    return (
        f"tokens_per_minute: prompt ({len(request.prompt_ids)}) and n * max_tokens ({request.asked.num_sequences} * "
        f"{request.asked.stop.max_tokens}) are {num_tokens} tokens; the limit of this key is"
        f" {share.pool.limit}, so this request can never pass"
    )


def _asked(name: str, limit: int) -> _Wait:
    return _Wait(f"{name}: the other engines are asked what is left of this key's {limit}", _ASK_AGAIN_NS, True)


def _wait_ns(share: Share, amount: int, now_ns: int) -> int:
    """Nanoseconds until a rate has so many units beside those that are in reserve."""
    assert isinstance(share.pool, RateBucket), "only rates come back with time"
    wait_ns = share.pool.wait_ns(max(0, amount - share.unspent), now_ns)
    # Others may wait for what is there.
    return wait_ns or _STREAM_RETRY_NS


def _refuse(waits: Iterable[_Wait]) -> None:
    """Raises RequestRefused if any limit is reached.

    The message names all limits that are reached; the hint to retry is that of the last one to
    pass. Limits that may be reached are named where no other is.
    """
    reached = list(waits)
    certain = [wait for wait in reached if not wait.is_asked]
    if reached:
        message = "; ".join(wait.reason for wait in certain or reached)
        retry_ns = max(wait.wait_ns for wait in certain or reached)
        raise RequestRefused(
            RefusalCode.RESOURCE_EXHAUSTED,
            message,
            retry_after_ns=retry_ns,
            reason=RefusalReason.QUOTA,
            asks_others=not certain,
        )
