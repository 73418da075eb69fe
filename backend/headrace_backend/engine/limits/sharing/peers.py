"""The other engines that hold tenants to their quotas together with this one.

Owns which there are, what was heard of each, and which own report each has heard. A service names
the engines between which it carries reports; an engine that any service names is a peer. Does not
own what reports say of tenants (`tenant_shares`).

A peer that has not heard an own report for longer than a second is not waited for any more: it
hangs, or the way to it is cut, and a tenant must not stand still for that. What it took counts on
until no service names it.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace_backend.engine.limits.sharing.reports import QuotaReport

# Reports take milliseconds.
PATIENCE_NS = 1_000_000_000


class Peer:
    """One other engine."""

    __slots__ = ("heard", "is_known", "number", "tenants", "waiting_since_ns")

    def __init__(self) -> None:
        """Nothing is heard of it."""
        # Whether it has said all that it has.
        self.is_known = False
        # Its newest report without a gap before it, and tenants of which it has something.
        self.number = 0
        self.tenants: set[str] = set()
        # The newest own report that it has heard, and since when one is waited for.
        self.heard = -1
        self.waiting_since_ns: int | None = None


class Peers:
    """The other engines, by the names of their lives."""

    def __init__(self, engine: str) -> None:
        """There are none; `engine` is this engine's name."""
        self.engine = engine
        # Of the newest own report.
        self.number = 0
        self._peers: dict[str, Peer] = {}
        # What services say, by their streams.
        self._named: dict[int, frozenset[str]] = {}

    def __len__(self) -> int:
        """Engines beside this one."""
        return len(self._peers)

    @property
    def has_readers(self) -> bool:
        """Whether any service carries reports of this engine."""
        return bool(self._named)

    def find(self, engine: str) -> Peer | None:
        """The peer of a name, if there is one."""
        return self._peers.get(engine)

    def name(self, stream_id: int, engines: Collection[str]) -> list[str]:
        """A service names all engines that it carries reports between.

        Returns those of which nobody speaks any more.
        """
        self._named[stream_id] = frozenset(engines)
        return self._follow()

    def stream_lost(self, stream_id: int) -> list[str]:
        """A service is gone. Returns the engines of which nobody speaks any more."""
        return self._follow() if self._named.pop(stream_id, None) is not None else []

    def accept(self, report: QuotaReport, now_ns: int) -> bool:
        """Notes a report of another engine. Returns whether its tenants are news.

        A report after a gap is left: all that the engine has follows.
        """
        peer = self._peers.get(report.engine)
        if peer is None or not (report.complete or peer.is_known):
            return False
        has_news = bool(report.tenants or report.gone)
        if not report.complete and report.number > peer.number + has_news:
            return False
        heard = dict(report.heard).get(self.engine)
        if heard is not None and heard > peer.heard:
            peer.heard = heard
            peer.waiting_since_ns = now_ns if heard < self.number else None
        return report.number > peer.number or not peer.is_known

    def heard(self, now_ns: int) -> int:
        """The newest own report that all others have heard, but for those that nobody waits for.

        It is -1 while one of them does not know this engine yet.
        """
        return min((peer.heard for peer in self._peers.values() if not _is_silent(peer, now_ns)), default=self.number)

    def sent(self, number: int, now_ns: int) -> None:
        """Notes that a report with news was sent."""
        self.number = number
        for peer in self._peers.values():
            if peer.waiting_since_ns is None:
                peer.waiting_since_ns = now_ns

    def are_waited_for(self, now_ns: int) -> bool:
        """Whether one of them should have heard the newest report by now."""
        return any(_is_silent(peer, now_ns) for peer in self._peers.values())

    def what_was_heard(self) -> tuple[tuple[str, int], ...]:
        """The newest report of each of them that was heard."""
        return tuple((engine, peer.number) for engine, peer in self._peers.items() if peer.is_known)

    def forget(self, engine: str) -> None:
        """Has an engine be a peer no more."""
        self._peers.pop(engine, None)

    def _follow(self) -> list[str]:
        named = frozenset().union(*self._named.values()) - {self.engine}
        gone = [engine for engine in self._peers if engine not in named]
        for engine in named - self._peers.keys():
            self._peers[engine] = Peer()
        return gone


def _is_silent(peer: Peer, now_ns: int) -> bool:
    return peer.waiting_since_ns is not None and now_ns - peer.waiting_since_ns > PATIENCE_NS
