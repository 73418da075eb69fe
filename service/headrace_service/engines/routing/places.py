"""An order of the engines for a prompt, which all services come to alike.

Owns the sets of wide beginnings. Each beginning of a prompt has an order of its own over the
engines. Where more requests begin so than one engine should compute, the beginning is wide: it has
a set of engines, the first ones in its order, and the next longer beginning is ordered within the
set. So everybody's system prompt is spread over many engines while the turns of one conversation,
which share a longer beginning, still meet at one of them. Sets double and halve in their order, so
services whose counts differ a little have the same sets or such that hold each other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace_service.engines.routing.popularity import LEAST_WINDOW, Popularity
from headrace_service.engines.routing.prefix_keys import LENGTHS
from headrace_service.engines.routing.rendezvous import Indices, Rendezvous

# A set has engines for so many times the share of requests that begin so.
_SPARE = 1.25
# An engine more computes the beginning once more; it must be for so many requests at least.
_REQUESTS_EACH = 16
# So many times the requests that an engine more must be for: a beginning that everybody has can be
# as wide as there are engines.
_WINDOW_EACH = 2 * _REQUESTS_EACH
_MOST_SETS = 1024


class Place(NamedTuple):
    """An order of all engines for a prompt: those of a set first, by a key."""

    # None: all engines.
    members: Indices | None
    key: int
    # Tokens of the prompt that are wide: each engine of the set is taken to have them.
    shared_tokens: int


class Places:
    """Finds the places of prompts among engines that stay the same.

    Args:
        order: the engines.
        popularity: counts the beginnings; outlives the engines.
    """

    def __init__(self, order: Rendezvous, popularity: Popularity) -> None:
        self._order = order
        self._popularity = popularity
        popularity.window = max(LEAST_WINDOW, _WINDOW_EACH * len(order))
        self._sets: dict[tuple[int, int, int], Indices] = {}
        # Draws among engines that all have the whole prompt.
        self._random = random.Random(0)

    def find(self, keys: Sequence[int]) -> Place:
        """Returns the place of a prompt by the keys of its beginnings, and counts them."""
        self._popularity.count_request()
        members: Indices | None = None
        size, parent, shared_tokens = len(self._order), 0, 0
        for key, length in zip(keys, LENGTHS, strict=False):
            count = self._popularity.count(key)
            # Most beginnings are asked for too seldom to be wide.
            width = self._width(count) if count > _REQUESTS_EACH else 1
            if width == 1:
                return Place(members, key, shared_tokens)
            shared_tokens = length
            if width < size:
                members, size, parent = self._set(parent, key, width, members), width, key
        return Place(members, self._random.getrandbits(64), shared_tokens)

    def ordered(self, place: Place, count: int) -> list[int]:
        """Returns the first engines of a place, of its set if it has one; fewer if there are."""
        return self._order.first(place.key, count, place.members)

    def beyond(self, place: Place, count: int) -> list[int]:
        """Returns the first engines in a place's order that are not of its set."""
        if place.members is None:
            return []
        return self._order.first_beyond(place.key, count, place.members)

    def _width(self, count: int) -> int:
        """Returns how many engines a beginning needs that so many requests have.

        It is a power of two, or all engines.
        """
        share = count / self._popularity.total
        needed = min(_SPARE * share * len(self._order), count / _REQUESTS_EACH)
        return 1 if needed <= 1 else min(1 << math.ceil(math.log2(needed)), len(self._order))

    def _set(self, parent: int, key: int, width: int, among: Indices | None) -> Indices:
        """Returns the first engines of a wide beginning, among those of a shorter one."""
        name = (parent, key, width)
        found = self._sets.get(name)
        if found is None:
            if len(self._sets) >= _MOST_SETS:
                self._sets.clear()
            found = self._sets[name] = np.array(self._order.first(key, width, among))
        return found
