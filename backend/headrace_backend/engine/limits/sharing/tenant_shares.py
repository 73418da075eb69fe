"""The shares that this engine has of one tenant's quotas, and what the others have of them.

Owns which limits hold (the lowest that any service said within a minute), and that the pools are
charged with what the other engines report. Does not own which engines there are (`peers`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from headrace_backend.engine.limits.sharing.pools import MINUTE_NS, RateBucket, StreamCount
from headrace_backend.engine.limits.sharing.reports import ShareReport, TenantReport
from headrace_backend.engine.limits.sharing.share import HEARD, UNSENT, Share, Standing
from headrace_backend.engine.request import NO_LIMITS, TenantLimits

# What services say of a tenant's limits holds for so long beside what others say.
_WORD_NS = MINUTE_NS
# What is claimed and not spent is given back after so long.
RESERVE_NS = 100_000_000
# A request that waits asks again much sooner; one that does not has gone.
WANT_NS = 250_000_000
# After a refusal the others hold nothing in reserve for so long.
PRESS_NS = 1_000_000_000
_NOTHING = ShareReport()


class TenantShares:
    """One tenant's quotas, as this engine knows them.

    Attributes:
        tenant: The tenant.
        limits: The limits that hold.
        streams: This engine's share of the concurrent streams; None: they are not limited.
        requests: This engine's share of the requests a minute, or None.
        tokens: This engine's share of the tokens a minute, or None.
        owned: Whether the tenant has an account at this engine.
        elsewhere: What other engines reported last, by their names.
        pressing_until_ns: Until when the others shall hold nothing in reserve.
        differ_since_ns: Since when services say different limits; None: they do not.
    """

    __slots__ = (
        "_heard_ns",
        "_press_number",
        "_words",
        "differ_since_ns",
        "elsewhere",
        "limits",
        "owned",
        "pressing_until_ns",
        "requests",
        "streams",
        "tenant",
        "tokens",
    )

    def __init__(self, tenant: str) -> None:
        """Nothing is limited, and nobody has anything."""
        self.tenant = tenant
        self.limits: TenantLimits = NO_LIMITS
        self.streams: Share | None = None
        self.requests: Share | None = None
        self.tokens: Share | None = None
        self.owned = False
        self.elsewhere: dict[str, TenantReport] = {}
        self.pressing_until_ns = 0
        self.differ_since_ns: int | None = None
        self._press_number = HEARD
        # By the stream of the service that said them: limits, and when.
        self._words: dict[int, tuple[TenantLimits, int]] = {}
        # When another engine was heard of last, by its name.
        self._heard_ns: dict[str, int] = {}

    def __iter__(self) -> Iterator[Share]:
        """The shares of what is limited."""
        return (share for share in (self.streams, self.requests, self.tokens) if share is not None)

    # Limits.

    def say(self, source: int, limits: TenantLimits, num_streams: int, now_ns: int) -> None:
        """Takes a service's word on the limits: its newest counts, and of several the lowest.

        `num_streams` of the tenant's are open at this engine.
        """
        self._words[source] = (limits, now_ns)
        if len(self._words) > 1 or self.elsewhere:
            self._words = {source: word for source, word in self._words.items() if now_ns - word[1] <= _WORD_NS}
            limits = self._agree(now_ns)
        self._set_limits(limits, num_streams, now_ns)

    def said(self, now_ns: int) -> list[TenantLimits]:
        """Returns the limits that services said within the last minute, at any engine."""
        words = self._own_words(now_ns)
        for engine, report in self.elsewhere.items():
            if report.limits is not None and now_ns - self._heard_ns[engine] <= _WORD_NS:
                words.append(report.limits)
        return words

    # The other engines.

    def heard(self, engine: str, report: TenantReport, is_known: bool, num_streams: int, now_ns: int) -> None:
        """Takes another engine's report in.

        Args:
            engine: Its name.
            report: What it has of this tenant's quotas.
            is_known: Whether all that it took before was heard; otherwise its pools and this
                engine's were separate ones until now, and the one from which more is missing
                counts.
            num_streams: Streams of the tenant that are open at this engine.
            now_ns: Time on the engine's clock.
        """
        before = self.elsewhere.get(engine)
        self.elsewhere[engine] = report
        if report.limits is not None:
            self._heard_ns[engine] = now_ns
        limits, had_streams = self._agree(now_ns, unsaid=self.limits), self.streams is not None
        self._set_limits(limits, num_streams, now_ns)
        if self.streams is not None and had_streams:
            self.streams.pool.charge(report.streams.taken - (before.streams.taken if before else 0), now_ns)
        self._charge(self.requests, report.requests, before and before.requests, is_known, now_ns)
        self._charge(self.tokens, report.tokens, before and before.tokens, is_known, now_ns)

    def lost(self, engine: str, now_ns: int) -> None:
        """Another engine has nothing of this tenant any more: its streams are free.

        What it took of rates comes back with time.
        """
        report = self.elsewhere.pop(engine, None)
        self._heard_ns.pop(engine, None)
        if report is not None and self.streams is not None:
            self.streams.pool.give_back(report.streams.taken, now_ns)

    @property
    def is_pressed(self) -> bool:
        """Whether another engine asks that nothing be held in reserve."""
        return any(report.pressed for report in self.elsewhere.values())

    def standing(self, quota: str, engine: str, num_engines: int, heard: int) -> Standing:
        """Returns how the others stand towards a quota: "streams", "requests" or "tokens".

        Args:
            quota: Its name.
            engine: This engine's name.
            num_engines: Engines that there are.
            heard: The newest own report that all others have heard.
        """
        wanted = before = 0
        for other, report in self.elsewhere.items():
            want = getattr(report, quota).want
            wanted += want
            before += want * (self._rank(other) < self._rank(engine))
        pressing = HEARD < self._press_number <= heard
        return Standing(num_engines, heard, wanted, before, self.is_pressed, pressing)

    # What is reported.

    def press(self, now_ns: int) -> bool:
        """Asks the others to hold nothing in reserve, for a while from now on.

        Returns whether that is to be reported.
        """
        is_new = not self.pressing_until_ns
        if is_new:
            self._press_number = UNSENT
        self.pressing_until_ns = now_ns + PRESS_NS
        return is_new

    def report(self, now_ns: int) -> TenantReport:
        """Returns what is reported to the others."""
        words = self._own_words(now_ns)
        return TenantReport(
            self.tenant,
            lowest(words) if words else None,
            self.streams.report() if self.streams is not None else _NOTHING,
            _of_rate(self.requests, now_ns),
            _of_rate(self.tokens, now_ns),
            self.pressing_until_ns > 0,
        )

    def sent(self, number: int) -> None:
        """Notes the number of the report that said all this."""
        for share in self:
            share.sent(number)
        if self._press_number == UNSENT:
            self._press_number = number

    def tidy(self, now_ns: int, at_once: bool = False) -> bool:
        """Gives back what lay in reserve for too long, and forgets requests that do not wait.

        `at_once` nothing is kept in reserve. Returns whether that is to be reported.
        """
        changed = False
        if self.pressing_until_ns and self.pressing_until_ns <= now_ns:
            self.pressing_until_ns, self._press_number, changed = 0, HEARD, True
        at_once = at_once or self.is_pressed
        for share in self:
            if at_once or share.claimed_ns + RESERVE_NS <= now_ns:
                changed |= share.give_back(now_ns)
            if share.wanted_ns + WANT_NS <= now_ns:
                changed |= share.withdraw()
        return changed

    @property
    def is_restless(self) -> bool:
        """Whether `tidy` has something to do, now or later."""
        return self.pressing_until_ns > 0 or any(share.unspent or share.want for share in self)

    def is_full(self, now_ns: int) -> bool:
        """Whether nothing is missing from any pool that refills."""
        return all(share.pool.is_full(now_ns) for share in self if isinstance(share.pool, RateBucket))

    def begin_anew(self) -> None:
        """Counts what is taken of rates from nothing again: it is reported as gone."""
        for share in (self.requests, self.tokens):
            if share is not None:
                share.taken = 0

    # Inside.

    def _own_words(self, now_ns: int) -> list[TenantLimits]:
        return [limits for limits, said_ns in self._words.values() if now_ns - said_ns <= _WORD_NS]

    def _agree(self, now_ns: int, unsaid: TenantLimits = NO_LIMITS) -> TenantLimits:
        """The lowest of what all services said; `unsaid` where none did."""
        words = self.said(now_ns)
        if all(limits == words[0] for limits in words):
            self.differ_since_ns = None
        elif self.differ_since_ns is None:
            self.differ_since_ns = now_ns
        return lowest(words) if words else unsaid

    def _set_limits(self, limits: TenantLimits, num_streams: int, now_ns: int) -> None:
        if limits == self.limits:
            return
        self.limits = limits
        self.requests = _changed(self.requests, limits.requests_per_minute, now_ns)
        self.tokens = _changed(self.tokens, limits.tokens_per_minute, now_ns)
        if not limits.concurrent_streams:
            self.streams = None
        elif self.streams is not None:
            self.streams.pool.limit = limits.concurrent_streams
        else:
            self.streams = Share(StreamCount(limits.concurrent_streams), num_streams)
            elsewhere = sum(report.streams.taken for report in self.elsewhere.values())
            self.streams.pool.charge(num_streams + elsewhere, now_ns)

    def _charge(
        self, share: Share | None, report: ShareReport, before: ShareReport | None, is_known: bool, now_ns: int
    ) -> None:
        if share is None or not isinstance(share.pool, RateBucket):
            return
        if not is_known:
            share.pool.at_least_missing(report.missing, now_ns)
            return
        taken = report.taken - (before.taken if before is not None else 0)
        if taken >= 0:
            share.pool.charge(taken, now_ns)
        else:
            share.pool.give_back(-taken, now_ns)

    def _rank(self, engine: str) -> tuple[int, str]:
        """Orders engines, differently for each tenant, alike at each engine."""
        return zlib.crc32(f"{self.tenant}/{engine}".encode()), engine


def lowest(words: Iterable[TenantLimits]) -> TenantLimits:
    """Returns the lowest of each limit, where 0 is none."""
    return TenantLimits(*(min((value for value in values if value), default=0) for values in zip(*words, strict=True)))


def _changed(share: Share | None, limit: int, now_ns: int) -> Share | None:
    """The share of a rate whose limit was set, changed or lifted.

    A lifted one is forgotten with its charges; what they give back later reaches nobody.
    """
    if not limit:
        return None
    if share is None:
        return Share(RateBucket(limit, now_ns))
    assert isinstance(share.pool, RateBucket), "only rates refill"
    share.pool.change_limit(limit, now_ns)
    return share


def _of_rate(share: Share | None, now_ns: int) -> ShareReport:
    if share is None or not isinstance(share.pool, RateBucket):
        return _NOTHING
    return share.report(max(0, share.pool.missing(now_ns)))
