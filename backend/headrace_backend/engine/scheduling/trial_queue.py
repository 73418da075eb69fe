"""Sequences that wait apart while a few requests are on trial (`isolation`).

Owns who is held, and moves sequences between the waiting queue and the held ones. Does not decide
who is on trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue


class TrialQueue:
    """The entrance to the waiting queue, behind which others are held during trials."""

    __slots__ = ("_held", "_waiting")

    def __init__(self, waiting: WaitingQueue) -> None:
        """Nobody is on trial: whoever enters goes to `waiting`."""
        self._waiting = waiting
        # Those that are not to be computed while a few are on trial; None: nobody is on trial.
        self._held: WaitingQueue | None = None

    def __iter__(self) -> Iterator[Sequence]:
        """Sequences that are held, in no particular order."""
        return iter(self._held or ())

    def enter(self, sequence: Sequence) -> None:
        """Has a sequence that has computed nothing wait, or be held."""
        if self._held is not None:
            _hold([sequence], self._held)
        else:
            self._waiting.push(sequence)

    def note_ended(self, sequence: Sequence) -> None:
        """Notes that a sequence in either queue has ended."""
        queue = self._held if sequence.held else self._waiting
        assert queue is not None, "what is held is in a queue"
        queue.note_ended(sequence)

    def try_alone(self, requests: AbstractSet[LiveRequest]) -> None:
        """Leaves only sequences of these requests in the waiting queue, and holds all others."""
        if self._held is None:
            self._held = WaitingQueue()
        _hold(self._waiting.take(), self._held)
        self._release(self._held.take(requests))

    def try_nobody(self) -> None:
        """Ends trials: whoever is held waits again."""
        if self._held is not None:
            self._release(self._held.take())
            self._held = None

    def check_integrity(self) -> None:
        """Asserts that nobody is held who may be admitted."""
        assert all(not sequence.held for sequence in self._waiting), "what is held may not be admitted"

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.held = False
            self._waiting.push(sequence)


def _hold(sequences: Iterable[Sequence], held: WaitingQueue) -> None:
    for sequence in sequences:
        sequence.held = True
        held.push(sequence)
