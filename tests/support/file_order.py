"""In which order the processes of pytest take the files of the suite.

Owns the order of files alone: a file's tests stay together and in theirs. Neighbours of a room
often wait for the same thing, a watchdog or a process that ends; taken one after the other, as
their names are sorted, all processes wait at once, and cores have nothing to do. In this order any
room is spread over the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")
# Multiples of it, without their whole part, leave no large gap anywhere, however many there are.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_LONG_ROOMS = tuple(
    f"tests/{room}/" for room in "e2e faults stack backend/workers parallel worker quantize telemetry_real".split()
)
# Share of the run over which their files are spread.
_NOT_LAST = 0.75


def spread(tests: Sequence[tuple[str, _T]]) -> list[_T]:
    """Returns tests, each given with its file, in the order in which they are to run.

    The order is equal in every process.
    """
    files = dict.fromkeys(file for file, _ in tests)
    places = {file: index * _GOLDEN_RATIO % 1 * _reach(file) for index, file in enumerate(files)}
    return [test for _, test in sorted(tests, key=lambda each: places[each[0]])]


def _reach(file: str) -> float:
    """The share of the run, from its beginning, in which a file may be."""
    return _NOT_LAST if file.startswith(_LONG_ROOMS) else 1.0
