"""Sequences that wait for a row, most urgent first.

Owns the order: a heap over urgency keys that never change while a sequence waits, so that ageing costs nothing. One step of priority
weighs as much as `ageing_s` of waiting:

    key = arrival - priority * ageing        (smaller is more urgent)

Two requests keep their order for ever, and whatever has waited `ageing_s` per step of priority longer is ahead: nobody starves. A preempted
sequence comes back with its old key, ahead of whoever came later. Adding and removing cost O(log waiting); what was aborted is
skipped when it surfaces, or swept out when it makes up half of the heap.

Also counts the tokens that wait, by which the token budget tells a crowd from a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from headrace_backend.engine.sequence import LiveRequest, Sequence
from headrace_backend.engine.token_budget import MAX_COUNTED_TOKENS

_MIN_SWEEP = 64


class WaitingQueue:
    """A heap of sequences with lazy removal."""

    __slots__ = ("_heap", "_num_dead", "num_counted_tokens")

    def __init__(self) -> None:
        """Empty."""
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._num_dead = 0
        # Tokens to compute of all live sequences, each counted up to a limit.
        self.num_counted_tokens = 0

    def __len__(self) -> int:
        """Live sequences."""
        return len(self._heap) - self._num_dead

    def __iter__(self) -> Iterator[Sequence]:
        """Live sequences, in no particular order."""
        return (entry[3] for entry in self._heap if not entry[3].ended)

    def push(self, sequence: Sequence) -> None:
        """Enters a sequence by its urgency."""
        sequence.num_counted_tokens = min(sequence.num_tokens, MAX_COUNTED_TOKENS)
        self.num_counted_tokens += sequence.num_counted_tokens
        heapq.heappush(self._heap, (*sequence.urgency, sequence))

    def peek(self) -> Sequence | None:
        """The most urgent live sequence."""
        heap = self._heap
        while heap and heap[0][3].ended:
            heapq.heappop(heap)
            self._num_dead -= 1
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Removes what `peek` showed."""
        sequence = heapq.heappop(self._heap)[3]
        self.num_counted_tokens -= sequence.num_counted_tokens
        return sequence

    def take(self, requests: AbstractSet[LiveRequest] | None = None) -> list[Sequence]:
        """Removes the live sequences of these requests; None: of all."""
        live = list(self)
        taken = [sequence for sequence in live if requests is None or sequence.request in requests]
        left = [sequence for sequence in live if requests is not None and sequence.request not in requests]
        self._heap, self._num_dead, self.num_counted_tokens = [], 0, 0
        for sequence in left:
            self.push(sequence)
        return taken

    def note_ended(self, sequence: Sequence) -> None:
        """A sequence in the queue ended: it is dead weight from now on."""
        self.num_counted_tokens -= sequence.num_counted_tokens
        self._num_dead += 1
        if self._num_dead > _MIN_SWEEP and 2 * self._num_dead > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[3].ended]
            heapq.heapify(self._heap)
            self._num_dead = 0
