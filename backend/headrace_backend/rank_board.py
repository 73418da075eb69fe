"""How far each rank is, in shared memory that all ranks write and the server reads: so that a group that hangs can be told apart by rank.

Owns the memory's layout. Every rank has a cache line of its own with three counters: steps begun, collectives entered, and the step of the plan. They are written by plain stores, one writer each, and
read only when something is wrong. Whoever is behind all others is waited for. On GPUs collectives inside a step are not counted (nobody on the host sees them), steps are.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

_LINE_BYTES = 64
_STEP, _COLLECTIVES = 0, 1


class RankMark(NamedTuple):
    """Where a rank is; ordered as ranks are."""

    # Step begun last, as plans count them; 0: none.
    step_id: int
    # Collectives entered since its start.
    collectives: int


def create_board(world_size: int) -> int:
    """An empty board's descriptor, close-on-exec: hand it on with subprocess's `pass_fds`."""
    descriptor = os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, world_size * _LINE_BYTES)
    return descriptor


class RankBoard:
    """The mapping. A rank writes its own line only."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        """Maps it; the descriptor may be closed."""
        self._world_size = world_size
        self._map = mmap.mmap(descriptor, world_size * _LINE_BYTES)
        self._view = memoryview(self._map)
        self._counters = self._view.cast("q")

    def line(self, rank: int) -> RankLine:
        """A rank's own line, to write."""
        first = rank * _LINE_BYTES // 8
        return RankLine(self._counters[first : first + _LINE_BYTES // 8])

    def marks(self) -> list[RankMark]:
        """By rank."""
        stride = _LINE_BYTES // 8
        return [
            RankMark(self._counters[rank * stride + _STEP], self._counters[rank * stride + _COLLECTIVES])
            for rank in range(self._world_size)
        ]

    def close(self) -> None:
        """Gives the mapping back; no line of it may be in use."""
        self._counters.release()
        self._view.release()
        self._map.close()


class RankLine:
    """What one rank tells of itself."""

    def __init__(self, counters: memoryview) -> None:
        self._counters = counters

    def begin_step(self, step_id: int) -> None:
        """Notes that a step begins."""
        self._counters[_STEP] = step_id

    def enter_collective(self) -> None:
        """Notes that this rank waits for the others, or they for it."""
        self._counters[_COLLECTIVES] += 1
