"""In which order engines are asked for a request whose own engine was lost.

Each request has a place (`request_ids`), and each place an order of its own over the engines, the
same in every process (rendezvous hashing): the guardian of the request offers it to them in that
order, and whoever looks for it later asks in that order. So nobody keeps a table of what went
where, and what one engine had is spread over all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol, TypeVar

from headrace_service.engines.routing.rendezvous import Rendezvous

# Most engines that are asked, however many there are: an id that nobody has must cost little.
MOST = 8


class NumberedEngine(Protocol):
    """One engine, as far as the order goes."""

    @property
    def number(self) -> int:
        """Its number among the model's engines, the same in every service process."""


Engine = TypeVar("Engine", bound=NumberedEngine)


def in_order(engines: Iterable[Engine], place: str, most: int = MOST) -> list[Engine]:
    """Returns the first engines in the order of a place."""
    among = list(engines)
    order = Rendezvous([engine.number for engine in among])
    return [among[index] for index in order.first(_key(place), most)]


def _key(place: str) -> int:
    return int.from_bytes(hashlib.blake2b(place.encode(errors="replace"), digest_size=8, person=b"takeover").digest())
