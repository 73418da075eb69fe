"""Sequences that have a row, most urgent first, and the rows that are free.

Owns rows and who has them. Does not own blocks (`row_blocks` gives them back), nor the choice of
who takes a row (`queue_admission`, `known_tokens`) or loses one (`row_blocks`).
"""

from __future__ import annotations

import bisect

from headrace_backend.engine.requests.sequence import LiveRequest, Sequence


class Batch:
    """Rows, over all lives of workers."""

    __slots__ = ("_free_rows", "_leaving_rows", "entered", "num_masked_rows", "num_rows", "running")

    def __init__(self, num_rows: int) -> None:
        """Starts without a worker: nobody has a row, and none can be taken."""
        self.num_rows = num_rows
        # Sequences with a row, most urgent first.
        self.running: list[Sequence] = []
        # Rows whose draws a grammar restricts.
        self.num_masked_rows = 0
        # Requests that took a row in the step planned last, while they had none.
        self.entered: list[LiveRequest] = []
        self._free_rows: list[int] = []
        # Given back, but the worker does not know it yet.
        self._leaving_rows: list[int] = []

    def worker_ready(self) -> None:
        """Starts with a worker, all of whose rows are free."""
        assert not self.running, "sequences of the worker before were evicted"
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        self._leaving_rows = []

    def evict(self, now_ns: int) -> list[Sequence]:
        """Takes the rows of all sequences, as the worker is lost, and returns these sequences."""
        evicted, self.running = self.running, []
        self.num_masked_rows = 0
        for sequence in evicted:
            sequence.leave_row()
            sequence.request.account.num_running -= 1
            sequence.request.lost_row(now_ns)
        return evicted

    def begin_step(self) -> None:
        """Begins the planning of a step, with which nobody has taken a row yet."""
        self.entered.clear()

    @property
    def num_free_rows(self) -> int:
        """Rows that can be taken."""
        return len(self._free_rows)

    def next_rows(self, count: int) -> list[int]:
        """Returns the rows that the next `count` sequences would take, in that order."""
        return self._free_rows[: -count - 1 : -1]

    def take_row(self, sequence: Sequence, now_ns: int) -> None:
        """Gives a sequence the next row."""
        sequence.row = self._free_rows.pop()
        self.num_masked_rows += sequence.grammar is not None
        bisect.insort(self.running, sequence, key=_urgency)
        sequence.request.account.num_running += 1
        if sequence.request.num_rows == 0:
            self.entered.append(sequence.request)
        sequence.request.took_row(now_ns)

    def leave_row(self, sequence: Sequence, now_ns: int) -> None:
        """Takes a sequence's row, whose blocks have been given back."""
        del self.running[bisect.bisect_left(self.running, sequence.urgency, key=_urgency)]
        self._free_rows.append(sequence.row)
        self.num_masked_rows -= sequence.grammar is not None
        self._leaving_rows.append(sequence.row)
        sequence.leave_row()
        sequence.request.account.num_running -= 1
        sequence.request.lost_row(now_ns)

    def take_leaving_rows(self) -> list[int]:
        """Rows to be announced as released with the plan being sent."""
        leaving, self._leaving_rows = self._leaving_rows, []
        return leaving

    def check_integrity(self) -> None:
        """Asserts that each row is free or had by one sequence, and that these are in order."""
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.num_rows)), "a row is lost or held twice"
        assert all(not sequence.ended for sequence in self.running), "an ended sequence holds a row"
        assert all(s.num_settled <= s.num_computed <= s.capacity for s in self.running), "settled <= scheduled <= room"
        num_masked = sum(sequence.grammar is not None for sequence in self.running)
        assert num_masked == self.num_masked_rows, "rows with a grammar are counted"
        keys = [sequence.urgency for sequence in self.running]
        assert keys == sorted(keys), "running sequences are ordered by urgency"


def _urgency(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.urgency
