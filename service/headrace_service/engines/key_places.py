"""At which engine a request under an idempotency key begins, and who is asked for the key before.

Each key has an order over the engines of its model: its own engine, which is the same at every
service, and then the order in which guardians move its request when that one is lost
(`takeover_order`). A new request begins at the first engine of that order that is reachable. The
key's request may have moved to any other, so those that are reachable are asked before; those that
are not are named to the engine where it begins, which refuses while another service knows more of
them (`engine_holds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace_service.engines import takeover_order


class KeyedEngine(Protocol):
    """One engine, as far as keys go."""

    @property
    def number(self) -> int:
        """Its number among the model's engines, the same in every service process."""

    @property
    def is_reachable(self) -> bool:
        """Whether it hears of requests."""


Engine = TypeVar("Engine", bound=KeyedEngine)


class KeyPlace(NamedTuple, Generic[Engine]):
    """The engines that concern a request under a key.

    Attributes:
        engine: Takes the request if no other one knows the key; the key's own where none is
            reachable.
        asked: The other engines that are asked for the key before.
        unasked: Engines that may know the key and can't be asked.
    """

    engine: Engine
    asked: list[Engine]
    unasked: list[Engine]


def find(engines: Iterable[Engine], home: Engine, place: str) -> KeyPlace[Engine]:
    """Returns where a request begins.

    Args:
        engines: All engines of the model.
        home: The key's own engine.
        place: The key's place in the order (`request_ids.key_place`).
    """
    others = [engine for engine in engines if engine is not home]
    reachable: list[Engine] = []
    unasked: list[Engine] = []
    for engine in (home, *takeover_order.in_order(others, place, len(others))):
        (reachable if engine.is_reachable else unasked).append(engine)
        # As many as are asked for a request's id besides the engine that it names.
        if len(reachable) > takeover_order.MOST:
            break
    if not reachable:
        return KeyPlace(home, [], unasked)
    return KeyPlace(reachable[0], reachable[1:], unasked)
