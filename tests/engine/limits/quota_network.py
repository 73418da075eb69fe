"""Several engines' quotas, and services that carry reports between them as late as a test likes."""

from __future__ import annotations

import collections
import dataclasses

from tests.engine.harness import request

from headrace_backend.cache_groups import SequenceBlocks
from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.limits.quotas import Quotas
from headrace_backend.engine.limits.sharing.reports import QuotaReport
from headrace_backend.engine.limits.tenant_account import Claim, TenantAccount
from headrace_backend.engine.request import EngineRequest, TenantLimits


@dataclasses.dataclass
class Running:
    """A request that an engine admitted."""

    engine: str
    claim: Claim
    num_tokens: int


class QuotaNetwork:
    """Engines by name, services by the engines that each carries reports between."""

    def __init__(self, engines: str, services: dict[int, str]) -> None:
        self.now_ns = 10**9
        self.engines: dict[str, Quotas] = {}
        self.services: dict[int, set[str]] = {service: set() for service in services}
        # Reports on their way, oldest first, by service, sender and receiver.
        self.ways: dict[tuple[int, str, str], collections.deque[QuotaReport]] = {}
        self.running: list[Running] = []
        for engine in engines:
            self.engines[engine] = Quotas(SequenceBlocks(16), engine)
        for service, named in services.items():
            for engine in named:
                self.connect(service, engine)

    # -- the network

    def connect(self, service: int, engine: str) -> None:
        self.engines.setdefault(engine, Quotas(SequenceBlocks(16), engine))
        self.services[service].add(engine)
        self._name(service)

    def disconnect(self, service: int, engine: str) -> None:
        """A service and an engine lose each other, with what was on the way between them."""
        self.services[service].discard(engine)
        self.ways = {way: queue for way, queue in self.ways.items() if way[0] != service or engine not in way[1:]}
        if engine in self.engines:
            self.engines[engine].shared.stream_lost(service, self.now_ns)
        self._name(service)

    def lose(self, engine: str) -> None:
        """An engine dies."""
        self.running = [each for each in self.running if each.engine != engine]
        del self.engines[engine]
        for service in self.services:
            self.disconnect(service, engine)

    def _name(self, service: int) -> None:
        for engine in self.services[service]:
            self.engines[engine].shared.name_peers(service, self.services[service], self.now_ns)

    def flush(self, engine: str) -> bool:
        """Has an engine say what it has to say."""
        report = self.engines[engine].shared.take_report(self.now_ns)
        if report is None:
            return False
        for service, named in self.services.items():
            for other in named - {engine} if engine in named else ():
                self.ways.setdefault((service, engine, other), collections.deque()).append(report)
        return True

    @property
    def pending(self) -> list[tuple[int, str, str]]:
        return sorted(way for way, queue in self.ways.items() if queue)

    def deliver(self, way: tuple[int, str, str]) -> None:
        self.engines[way[2]].read_report(self.ways[way].popleft(), self.now_ns)

    def settle(self) -> None:
        """Everything is said and heard."""
        busy = True
        while busy:
            busy = any([self.flush(engine) for engine in list(self.engines)])
            for way in self.pending:
                while self.ways[way]:
                    self.deliver(way)
                    busy = True

    def wait(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns
        for quotas in self.engines.values():
            quotas.expire(self.now_ns)

    # -- requests

    def add(self, engine: str, limits: TenantLimits, tokens: int = 2, tenant: str = "key", **changes: object) -> None:
        """Has an engine admit a request of so many tokens. Raises RequestRefused."""
        quotas = self.engines[engine]
        spec: EngineRequest = request(1, tokens - 1, tenant=tenant, limits=limits, **changes)
        account = quotas.account(tenant, limits, self.now_ns)
        charge = quotas.admit(account, spec, self.now_ns)
        self.running.append(Running(engine, Claim(account, charge, 1, 0), tokens))

    def add_patiently(self, engine: str, limits: TenantLimits, tokens: int = 2, tenant: str = "key") -> bool:
        """Asks as a service does. Says whether the request was admitted."""
        for _ in range(200):
            try:
                self.add(engine, limits, tokens, tenant)
            except RequestRefused as refused:
                if not refused.asks_others:
                    return False
                assert refused.retry_after_ns is not None
                self.settle()
                self.wait(refused.retry_after_ns)
                self.settle()
            else:
                return True
        return False

    def end(self, running: Running, num_used: int | None = None) -> None:
        self.running.remove(running)
        used = running.num_tokens if num_used is None else num_used
        self.engines[running.engine].ended(running.claim, used, self.now_ns)

    def account(self, engine: str, tenant: str = "key") -> TenantAccount | None:
        return self.engines[engine].find(tenant)
