"""How far each rank is, in shared memory that the ranks write and the server reads.

Owns the memory's layout. By it the server sees whether a step makes progress, and which of several
ranks the others wait for. Every rank has a cache line of its own with three counters: the step of
the plan that it began last, collectives entered, and marks of progress inside steps. One writer
each stores them plainly, and the server reads them a few times a second. On a CPU a step sets a
mark with every layer. On a GPU the host only launches, so it marks no more than that a step began
and was launched: nobody sees collectives and layers on the device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

_LINE_BYTES = 64
_STRIDE = _LINE_BYTES // 8
_STEP, _COLLECTIVES, _PROGRESS, _NUM_COUNTERS = range(4)


class RankMark(NamedTuple):
    """The place in its work that a rank has reached; marks are in the order of the work."""

    # Step begun last, as plans count them; 0: none.
    step_id: int
    # Collectives entered since its start.
    collectives: int


def create_board(world_size: int) -> int:
    """Makes an empty board's descriptor, close-on-exec: hand it on with `pass_fds`."""
    descriptor = os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, world_size * _LINE_BYTES)
    return descriptor


class RankBoard:
    """The mapping of all ranks' lines; a rank writes its own line only."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        """Maps it; the descriptor may be closed."""
        self._world_size = world_size
        self._map = mmap.mmap(descriptor, world_size * _LINE_BYTES)
        self._view = memoryview(self._map)
        self._counters = self._view.cast("q")

    def line(self, rank: int) -> RankLine:
        """A rank's own line, to write."""
        return RankLine(self._counters[rank * _STRIDE : (rank + 1) * _STRIDE])

    def counters(self, rank: int) -> list[int]:
        """All counters of a rank, in the order in which `put` takes them."""
        first = rank * _STRIDE
        return self._counters[first : first + _NUM_COUNTERS].tolist()

    def put(self, rank: int, counters: Sequence[int]) -> None:
        """Writes the line of a rank that is on another host, from what was read of its own board.

        Raises:
            ValueError: These are not the counters of a line.
        """
        if len(counters) != _NUM_COUNTERS:
            raise ValueError(f"{len(counters)} counters of rank {rank}; a line has {_NUM_COUNTERS}")
        for index, counter in enumerate(counters):
            self._counters[rank * _STRIDE + index] = counter

    def marks(self) -> list[RankMark]:
        """The place of each rank, by rank."""
        return [RankMark(*counters[:_PROGRESS]) for counters in self._lines()]

    def progress(self) -> tuple[int, ...]:
        """All counters of all ranks; two readings differ if some rank went on in between."""
        return tuple(counter for counters in self._lines() for counter in counters)

    def close(self) -> None:
        """Gives the mapping back; no line of it may be in use."""
        self._counters.release()
        self._view.release()
        self._map.close()

    def _lines(self) -> list[list[int]]:
        return [self.counters(rank) for rank in range(self._world_size)]


class RankLine:
    """What one rank reports of itself."""

    def __init__(self, counters: memoryview) -> None:
        self._counters = counters

    def begin_step(self, step_id: int) -> None:
        """Notes that a step begins."""
        self._counters[_STEP] = step_id

    def enter_collective(self) -> None:
        """Notes that this rank waits for the others, or they for it."""
        self._counters[_COLLECTIVES] += 1

    def make_progress(self) -> None:
        """Notes that a part of a step is computed."""
        self._counters[_PROGRESS] += 1
