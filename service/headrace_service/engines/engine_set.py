"""The engines of one model, wherever they are: they come and go while the model is served.

Owns which engines there are, by number, and asks a `Router` for one of them. Does not own their
connections nor who says that they come and go (`served_models`). Numbers come from outside, so
that all service processes give an engine the same one: request ids and prefixes name engines by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from headrace_service.engines.engine_holds import EngineHolds
from headrace_service.engines.quota_relay import QuotaRelay
from headrace_service.engines.routing.router import RoutedEngine, Router, RoutingKey


class Member(RoutedEngine, Protocol):
    """One engine of the set."""

    @property
    def is_known(self) -> bool:
        """Whether it has said what it serves."""


Engine = TypeVar("Engine", bound=Member)


class EngineSet(Generic[Engine]):
    """The engines of one model, in the order of their numbers.

    Attributes:
        quotas: carries what they report of quotas from each to the others.
        holds: tells each of them which engines this process holds.
    """

    def __init__(self) -> None:
        self.quotas = QuotaRelay()
        self.holds = EngineHolds()
        self._engines: tuple[Engine, ...] = ()
        self._router: Router[Engine] = Router()

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def add(self, engine: Engine) -> None:
        """Takes an engine in. Raises ValueError: its number is taken."""
        if any(other.number == engine.number for other in self._engines):
            raise ValueError(f"engine {engine.number} is in the set already")
        self._set(sorted((*self._engines, engine), key=lambda each: each.number))

    def remove(self, engine: Engine) -> None:
        """Lets an engine go; what it computes is its connection's to end."""
        self._set([other for other in self._engines if other is not engine])

    def choose(self, key: RoutingKey) -> Engine:
        """Returns the engine for a new request; the set has at least one."""
        return self._router.choose(key)

    def choose_among(self, able: Sequence[Engine], key: RoutingKey) -> Engine:
        """Returns the engine for what a lost engine computed, of at least one that may go on."""
        return self._router.place(key, {engine.number for engine in able})

    @property
    def best(self) -> Engine:
        """Returns the engine that answers for all: a serving one, else a known one, else the first.

        The set has at least one engine.
        """
        return max(self._engines, key=lambda engine: (engine.serving, engine.is_known))

    def _set(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._router.set_engines(self._engines)
