"""The quotas of all tenants, as far as several engines hold them together.

Owns which tenants there are, what of them is still to be reported, and the order of that.
Does not own accounts (`quotas`) nor how reports travel (`server.streams.quota_reports`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from headrace_backend.engine.limits.sharing.peers import PATIENCE_NS, Peers
from headrace_backend.engine.limits.sharing.reports import QuotaReport
from headrace_backend.engine.limits.sharing.share import ALONE, Answer, Share
from headrace_backend.engine.limits.sharing.tenant_shares import TenantShares
from headrace_backend.engine.request import TenantLimits

# Services read a changed key file within seconds of each other.
_DIFFER_NS = 10_000_000_000
_TIDY_NS = 20_000_000
# Returns how many streams of a tenant are open at this engine.
NumStreams = Callable[[str], int]


class Dispute(NamedTuple):
    """Services have been saying different limits of one tenant for a while."""

    tenant: str
    said: list[TenantLimits]
    held: TenantLimits


class SharedQuotas:
    """This engine's shares, and what the other engines say of theirs."""

    def __init__(self, engine: str) -> None:
        """There is no other engine; this one's name is `engine`."""
        self._peers = Peers(engine)
        # Tenants with an account here, a share, or something at another engine.
        self._tenants: dict[str, TenantShares] = {}
        # Those of which the others know, those that changed since, and those of which they must
        # forget what they know.
        self._reported: set[str] = set()
        self._changed: set[str] = set()
        self._gone: set[str] = set()
        self._tells_all = False
        self._reported_heard: tuple[tuple[str, int], ...] = ()
        # Those that have something in reserve, or wait for something.
        self._restless: set[str] = set()
        self._next_tidy_ns = 0
        self._next_reminder_ns = 0
        # Those whose dispute was named.
        self._disputes: set[str] = set()

    def __len__(self) -> int:
        """Tenants of which anything is known."""
        return len(self._tenants)

    # Tenants of this engine.

    def of(self, tenant: str) -> TenantShares:
        """The shares of a tenant. They are kept once something is taken of them."""
        return self._tenants.get(tenant) or TenantShares(tenant)

    def own(self, shares: TenantShares) -> None:
        """Keeps the shares of a tenant that has an account here."""
        shares.owned = True
        self._tenants[shares.tenant] = shares

    def disown(self, shares: TenantShares, now_ns: int) -> None:
        """The tenant's account is forgotten."""
        shares.owned = False
        self._restless.add(shares.tenant)
        if not self._peers:
            self._forget(shares, now_ns)

    def obtain(self, shares: TenantShares, quota: str, amount: int, now_ns: int) -> Answer:
        """Claims what is missing of a share of "streams", "requests" or "tokens"."""
        share: Share | None = getattr(shares, quota)
        if share is None or share.unspent >= amount:
            return Answer.YES
        if not self._peers:
            return share.obtain(amount, ALONE, now_ns)
        peers = self._peers
        standing = shares.standing(quota, peers.engine, len(peers) + 1, peers.heard(now_ns))
        before = share.taken, share.want
        answer = share.obtain(amount, standing, now_ns)
        presses = answer is not Answer.YES and shares.press(now_ns)
        if presses or before != (share.taken, share.want):
            self._note_change(shares)
        return answer

    def spent(self, shares: TenantShares) -> None:
        """Notes that something was spent of a tenant's shares, or taken back."""
        if self._peers:
            self._note_change(shares)

    def settled(self, shares: TenantShares, now_ns: int) -> None:
        """Notes that spent units came back: they wait for the next request for a moment."""
        if not self._peers:
            shares.tidy(now_ns, at_once=True)
        elif shares.is_pressed and shares.tidy(now_ns):
            self._note_change(shares)
        else:
            self._restless.add(shares.tenant)

    # The other engines.

    def name_peers(self, stream_id: int, engines: Collection[str], now_ns: int) -> None:
        """A service names all engines that it carries reports between; this one reports all."""
        self._lose(self._peers.name(stream_id, engines), now_ns)
        self._tells_all = True

    def stream_lost(self, stream_id: int, now_ns: int) -> None:
        """A service is gone, and says nothing of a tenant's limits any more."""
        self._lose(self._peers.stream_lost(stream_id), now_ns)
        if not self._peers:
            for shares in list(self._tenants.values()):
                shares.tidy(now_ns, at_once=True)

    def read(self, report: QuotaReport, num_streams: NumStreams, now_ns: int) -> None:
        """Takes another engine's report in."""
        if not self._peers.accept(report, now_ns):
            return
        peer = self._peers.find(report.engine)
        assert peer is not None, "only what a peer says is accepted"
        present = {each.tenant for each in report.tenants}
        for tenant in [*report.gone, *(peer.tenants - present if report.complete else ())]:
            self._lost(report.engine, tenant, now_ns)
            peer.tenants.discard(tenant)
        for each in report.tenants:
            shares = self._tenants.setdefault(each.tenant, TenantShares(each.tenant))
            shares.heard(report.engine, each, peer.is_known, num_streams(each.tenant), now_ns)
            if each.pressed and shares.tidy(now_ns):
                self._note_change(shares)
        peer.tenants |= present
        peer.number, peer.is_known = report.number, True

    @property
    def has_news(self) -> bool:
        """Whether there is something to report, and somebody to report it to."""
        return self._peers.has_readers and (self._tells_all or bool(self._changed) or self._hears_more)

    def take_report(self, now_ns: int) -> QuotaReport | None:
        """Returns what is to be reported now, to be sent to every service that carries it.

        None where there is nothing to say, and nobody to say it to.
        """
        peers = self._peers
        if not self.has_news:
            return None
        complete = self._tells_all
        tenants = [shares for shares in self._to_tell() if self._is_reported(shares)]
        gone = tuple(self._gone)
        number = peers.number + bool(complete or tenants or gone)
        reports = tuple([shares.report(now_ns) for shares in tenants])
        for shares in tenants:
            shares.sent(number)
        self._reported.update(shares.tenant for shares in tenants)
        self._changed, self._gone, self._tells_all = set(), set(), False
        if number > peers.number:
            peers.sent(number, now_ns)
        self._reported_heard = peers.what_was_heard()
        return QuotaReport(peers.engine, number, complete, reports, gone, self._reported_heard)

    # Time.

    def expire(self, now_ns: int) -> None:
        """Gives back what lies in reserve, and forgets tenants of which nothing is left."""
        if now_ns < self._next_tidy_ns:
            return
        self._next_tidy_ns = now_ns + _TIDY_NS
        for tenant in list(self._restless):
            shares = self._tenants.get(tenant)
            if shares is None:
                self._restless.discard(tenant)
                continue
            if shares.tidy(now_ns):
                self._note_change(shares)
            if not shares.is_restless:
                self._restless.discard(tenant)
                self._forget(shares, now_ns)
        if self._peers.are_waited_for(now_ns) and now_ns >= self._next_reminder_ns:
            # Whoever missed a report needs all.
            self._next_reminder_ns = now_ns + PATIENCE_NS
            self._tells_all = True

    def take_disputes(self, now_ns: int) -> list[Dispute]:
        """Returns the tenants of which services say different limits for a while, once each."""
        disputes = []
        for tenant, shares in self._tenants.items():
            since_ns = shares.differ_since_ns
            if since_ns is None or now_ns - since_ns <= _DIFFER_NS:
                self._disputes.discard(tenant)
            elif tenant not in self._disputes:
                self._disputes.add(tenant)
                disputes.append(Dispute(tenant, shares.said(now_ns), shares.limits))
        return disputes

    # Inside.

    @property
    def _hears_more(self) -> bool:
        return self._reported_heard != self._peers.what_was_heard()

    def _to_tell(self) -> list[TenantShares]:
        if self._tells_all:
            return list(self._tenants.values())
        return [self._tenants[tenant] for tenant in self._changed if tenant in self._tenants]

    def _is_reported(self, shares: TenantShares) -> bool:
        return shares.owned or shares.is_restless or shares.tenant in self._reported

    def _note_change(self, shares: TenantShares) -> None:
        self._tenants[shares.tenant] = shares
        self._changed.add(shares.tenant)
        if shares.is_restless:
            self._restless.add(shares.tenant)

    def _lose(self, engines: Collection[str], now_ns: int) -> None:
        for engine in engines:
            peer = self._peers.find(engine)
            for tenant in peer.tenants if peer is not None else ():
                self._lost(engine, tenant, now_ns)
            self._peers.forget(engine)

    def _lost(self, engine: str, tenant: str, now_ns: int) -> None:
        shares = self._tenants.get(tenant)
        if shares is not None:
            shares.lost(engine, now_ns)
            self._forget(shares, now_ns)

    def _forget(self, shares: TenantShares, now_ns: int) -> None:
        """Forgets a tenant that has no account here, no share, nothing elsewhere and full pools."""
        if shares.owned or shares.is_restless:
            return
        if shares.tenant in self._reported:
            self._reported.discard(shares.tenant)
            self._changed.add(shares.tenant)
            self._gone.add(shares.tenant)
        shares.begin_anew()
        if not shares.elsewhere and shares.is_full(now_ns):
            self._restless.discard(shares.tenant)
            self._tenants.pop(shares.tenant, None)
            self._disputes.discard(shares.tenant)
        elif not shares.elsewhere:
            self._restless.add(shares.tenant)
