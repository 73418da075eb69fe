"""States of recurrent layers that sequences take over from others: copies between rows.

A row's state lies in the worker, in the line of the row, and only a step that computes the row
changes it. A sequence that goes on where another one stands, because outputs share a prompt or a
hypothesis goes on in several ways, needs that one's state. The step that is planned next copies it
before its pass: by then the step that computes what both share has run, and no later one. So it
does no harm if either row has changed hands meanwhile: who takes a row begins with an empty state.

Owns what is still to be copied. Does not own rows (`scheduler`).
"""

from __future__ import annotations

from typing import NamedTuple

from headrace_backend.engine.requests.sequence import Sequence


class StateCopy(NamedTuple):
    """Rows between which all states are copied."""

    source: int
    target: int


class StateCopies:
    """Copies for the step that is planned next, and for the one after it."""

    __slots__ = ("_next", "_num_due", "are_kept")

    def __init__(self, are_kept: bool) -> None:
        """Nothing is to be copied; nothing ever is unless rows keep states."""
        self.are_kept = are_kept
        self._next: list[StateCopy] = []
        # Of these, what the step in the making copies.
        self._num_due = 0

    def note(self, source: Sequence, target: Sequence) -> None:
        """Has `target` go on from `source`, whose last token is in a step that was planned."""
        if self.are_kept:
            self._next.append(StateCopy(source.row, target.row))

    def begin_step(self) -> None:
        """Begins the planning of a step: what is noted from now on is for the one after it."""
        self._num_due = len(self._next)

    def take(self) -> list[StateCopy]:
        """Copies of the step in the making, which is sent."""
        due, self._next = self._next[: self._num_due], self._next[self._num_due :]
        self._num_due = 0
        return due

    def forget(self) -> None:
        """The worker is lost with all states."""
        self._next, self._num_due = [], 0
