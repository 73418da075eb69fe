"""The engines to which a service sent prompts with a beginning, the newest first.

Owns a bounded table of two generations: the younger is written, and becomes the older when it is
half of the bound. So a beginning is kept that was asked for within as many others, and each keeps a
few engines. The table tells how much of a prompt an engine probably has in its cache; an engine may
have evicted it meanwhile, or have got it from another service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_service.engines.routing.prefix_keys import LENGTHS

# About 13 MB when full.
_MOST_KEYS = 1 << 16
_MOST_ENGINES = 4


class Placements:
    """Remembers by keys of beginnings the numbers of engines."""

    __slots__ = ("_most_keys", "_older", "_younger")

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        """Nothing was sent."""
        self._younger: dict[int, tuple[int, ...]] = {}
        self._older: dict[int, tuple[int, ...]] = {}
        self._most_keys = most_keys

    def __len__(self) -> int:
        return len(self._younger) + len(self._older)

    def note(self, keys: Iterable[int], number: int) -> None:
        """Notes that a prompt with these keys went to an engine."""
        younger, older = self._younger, self._older
        alone = (number,)
        for key in keys:
            before = younger.get(key)
            if before is None:
                before = older.get(key)
                if before is None:
                    younger[key] = alone
                    continue
            elif before[0] == number:
                continue
            younger[key] = (number, *[other for other in before if other != number][: _MOST_ENGINES - 1])
        if len(younger) > self._most_keys // 2:
            self._younger, self._older = {}, younger

    def find(self, keys: Sequence[int]) -> dict[int, int]:
        """Returns the tokens of a prompt that engines were sent before, by their numbers.

        The shortest beginning is looked up first: all that were noted of a prompt are kept as long
        as each other, so behind one that is not known none is.
        """
        younger, older = self._younger, self._older
        found: dict[int, int] = {}
        for key, length in zip(keys, LENGTHS, strict=False):
            engines = younger.get(key) or older.get(key)
            if engines is None:
                break
            for number in engines:
                found[number] = length
        return found
