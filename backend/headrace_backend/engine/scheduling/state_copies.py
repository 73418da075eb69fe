"""States of recurrent layers that sequences take over: copies between rows, and with checkpoints.

A row's state lies in the worker, in the line of the row, and only a step that computes the row
changes it. A sequence that goes on where another one stands, because outputs share a prompt or a
hypothesis goes on in several ways, needs that one's state. The step that is planned next copies it
before its pass: by then the step that computes what both share has run, and no later one. So it
does no harm if either row has changed hands meanwhile: who takes a row begins with an empty state,
or with a checkpoint's.

Checkpoints have the lines behind the rows' and their scratch line. A row's state is saved in the
same way as another row takes it over, by the step planned next; a checkpoint's state is copied back
by the very step that admits the row. A step reads all that it copies before it writes any of it. So
what is copied back is what the slot held before this step's own saves; if the slot's save is one of
them, the state is read from the row that it is saved from.

Owns what is still to be copied. Does not own rows (`scheduler`) nor slots (`state_checkpoints`).
"""

from __future__ import annotations

from typing import NamedTuple

from headrace_backend.engine.requests.sequence import Sequence


class StateCopy(NamedTuple):
    """Lines between which all states are copied."""

    source: int
    target: int


class StateCopies:
    """Copies for the step that is planned next, and for the one after it."""

    __slots__ = ("_due", "_first_slot_line", "_next", "are_kept")

    def __init__(self, are_kept: bool, num_rows: int) -> None:
        """Nothing is to be copied; nothing ever is unless rows keep states.

        Args:
            are_kept: Whether rows keep states.
            num_rows: Rows of the batch, behind which there is one more line, for padding.
        """
        self.are_kept = are_kept
        self._first_slot_line = num_rows + 1
        # Sources by target: of two copies to one line the later is for who has it now.
        self._due: dict[int, int] = {}
        self._next: dict[int, int] = {}

    def note(self, source: Sequence, target: Sequence) -> None:
        """Has `target` go on from `source`, whose last token is in a step that was planned."""
        if self.are_kept:
            self._next[target.row] = source.row

    def save(self, sequence: Sequence, slot: int) -> None:
        """Keeps the state that the step in the making leaves of a sequence."""
        self._next[self._first_slot_line + slot] = sequence.row

    def restore(self, slot: int, sequence: Sequence) -> None:
        """Has a sequence that takes a row with the step in the making begin with a known state."""
        line = self._first_slot_line + slot
        self._due[sequence.row] = self._due.get(line, line)

    def begin_step(self) -> None:
        """Begins the planning of a step: what is noted from now on is for the one after it."""
        self._due |= self._next
        self._next = {}

    def take(self) -> list[StateCopy]:
        """Copies of the step in the making, which is sent."""
        due, self._due = self._due, {}
        return [StateCopy(source, target) for target, source in due.items()]

    def forget(self) -> None:
        """The worker is lost with all states."""
        self._due, self._next = {}, {}
