"""Which request must end next because its time is up.

Owns a heap of deadlines, with lazy removal: a request that ended before its deadline is skipped
when it surfaces, or swept out when such make up half of the heap. Does not end anything
(`endings`), and knows of a request no more than `Timed` says.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

_MIN_SWEEP = 64


class Timed(Protocol):
    """A request, with the part of it that deadlines need."""

    # On the engine's clock.
    deadline_ns: int
    # Its own among all requests; the earlier of two with one deadline ends first.
    sequence_number: int

    @property
    def active(self) -> bool:
        """Whether the request has not ended."""


R = TypeVar("R", bound=Timed)


class Deadlines(Generic[R]):
    """Deadlines of active requests."""

    def __init__(self) -> None:
        """No request is watched."""
        self._heap: list[tuple[int, int, R]] = []
        self._num_ended = 0

    def push(self, request: R) -> None:
        """Watches a request's deadline."""
        heapq.heappush(self._heap, (request.deadline_ns, request.sequence_number, request))

    def next_ns(self) -> int | None:
        """The earliest deadline."""
        heap = self._heap
        while heap and not heap[0][2].active:
            heapq.heappop(heap)
            self._num_ended -= 1
        return heap[0][0] if heap else None

    def first_expired(self, now_ns: int) -> R | None:
        """An active request whose deadline has passed. It is to be ended by the caller."""
        next_ns = self.next_ns()
        return self._heap[0][2] if next_ns is not None and next_ns <= now_ns else None

    def note_ended(self) -> None:
        """Notes that a request ended."""
        self._num_ended += 1
        if self._num_ended > _MIN_SWEEP and 2 * self._num_ended > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].active]
            heapq.heapify(self._heap)
            self._num_ended = 0
