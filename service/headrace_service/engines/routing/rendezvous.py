"""The order that a key gives to engines: rendezvous hashing over 64-bit words.

Owns the weights. Each key weighs each engine by a hash of both, and the heaviest come first. So all
services come to one order without a word between them, an engine that leaves moves only what was
its own, and one that joins moves nothing between others. No two engines weigh the same, because the
hash is one to one for each key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace_service.engines.routing.prefix_keys import Words, mix

Indices = npt.NDArray[np.intp]
# Up to so many it is quicker to look for one after the other.
_TAKEN_SINGLY = 2


class Rendezvous:
    """Orders engines, which are named by their index in `numbers`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Takes the engines' numbers, which differ."""
        self._marks = mix(mix(np.array(numbers, np.uint64) + np.uint64(1)))
        # Written for each key anew.
        self._words, self._shifted = np.empty_like(self._marks), np.empty_like(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def first(self, key: int, count: int, among: Indices | None = None) -> list[int]:
        """Returns the first engines in a key's order, of all or of some.

        Args:
            key: 64 bits.
            count: how many; all if there are no more.
            among: indices of the engines to order; None: all.
        """
        if among is None:
            return _heaviest(self._weights(key), min(count, len(self._marks)))
        weights = mix(self._marks[among] ^ np.uint64(key))
        return [int(among[index]) for index in _heaviest(weights, min(count, len(weights)))]

    def first_beyond(self, key: int, count: int, besides: Indices) -> list[int]:
        """Returns the first engines in a key's order that are not among some."""
        weights = self._weights(key)
        weights[besides] = 0
        return _heaviest(weights, min(count, len(weights) - len(besides)))

    def _weights(self, key: int) -> Words:
        """Returns each engine's weight, in memory that the next call writes again."""
        return mix(np.bitwise_xor(self._marks, np.uint64(key), out=self._words), self._shifted)


def _heaviest(weights: Words, count: int) -> list[int]:
    """Returns the indices of the heaviest, the heaviest first."""
    if count > _TAKEN_SINGLY:
        found = np.argpartition(weights, len(weights) - count)[-count:] if count < len(weights) else None
        order = weights.argsort() if found is None else found[weights[found].argsort()]
        ordered: list[int] = order[::-1].tolist()
        return ordered
    heaviest = []
    for _ in range(count):
        heaviest.append(int(weights.argmax()))
        # No weight is less than 0, and what was taken comes no more.
        weights[heaviest[-1]] = 0
    return heaviest
