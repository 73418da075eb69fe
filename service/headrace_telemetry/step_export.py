"""Which steps are exported, and when: each at most once, and as late as its links need it.

Owns the wait. A step is exported if somebody in it is. Under head sampling that is known when the
step comes. Under tail sampling the ends of its recorded members decide, so that a step waits for
them, 30 s at most; one that was let go by then is exported after all when a later end asks for it.
A step of which only services have spoken waits a moment for the backend to say who was in it: its
connection may have come later than theirs.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from headrace_telemetry.spans.engine_book import U64, EngineBook, Request

_LONGEST_WAIT_NS: Final = 30_000_000_000
_MEMBERS_WAIT_NS: Final = 5_000_000_000
_MOST_WAITING: Final = 32_768

Emit = Callable[[EngineBook, U64, list[list[Request]]], None]


class _Waiting(NamedTuple):
    """A step that waits, and until when."""

    until_ns: int
    book: EngineBook
    step_id: int


class StepExport:
    """Decides on the steps of all engines.

    Args:
        emit: exports steps, each with links to its requests.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        # For ends of members, and for members to be reported. In order of their times.
        self._undecided: collections.deque[_Waiting] = collections.deque()
        self._unpeopled: collections.deque[_Waiting] = collections.deque()
        # Steps that wait, and whether an exported generation was in them.
        self._waiting: dict[tuple[str, int], bool] = {}

    def arrived(self, book: EngineBook, step_ids: U64, now_ns: int) -> None:
        """Notes that the members of these steps are known now."""
        ready = []
        for step_id in step_ids.tolist():
            kept = [request.kept for request in _traced(book, step_id)]
            wanted = self._waiting.get((book.engine, step_id), False)
            if None in kept:
                self._undecided.append(self._wait(book, step_id, now_ns + _LONGEST_WAIT_NS, wanted))
            elif wanted or True in kept:
                ready.append(step_id)
        self._export(book, ready)
        while len(self._undecided) > _MOST_WAITING:
            self._let_go(self._undecided.popleft())

    def wanted(self, book: EngineBook, step_ids: U64, now_ns: int) -> None:
        """An exported generation was in these steps, which are known."""
        ready = []
        for step_id in book.not_exported(step_ids).tolist():
            if (book.engine, step_id) in self._waiting:
                self._waiting[book.engine, step_id] = True
            elif book.members(step_id) is not None:
                ready.append(step_id)
            else:
                self._unpeopled.append(self._wait(book, step_id, now_ns + _MEMBERS_WAIT_NS, wanted=True))
        self._export(book, ready)
        while len(self._unpeopled) > _MOST_WAITING:
            self._export_waiting(self._unpeopled.popleft())

    def tick(self, now_ns: int) -> None:
        """Lets go of the steps whose wait is over."""
        while self._undecided and (self._undecided[0].until_ns <= now_ns or _decided(self._undecided[0])):
            self._let_go(self._undecided.popleft())
        while self._unpeopled and self._unpeopled[0].until_ns <= now_ns:
            self._export_waiting(self._unpeopled.popleft())

    def finish(self) -> None:
        """Lets go of all steps: nobody will end any more."""
        while self._undecided:
            self._let_go(self._undecided.popleft())
        while self._unpeopled:
            self._export_waiting(self._unpeopled.popleft())

    def links(self, book: EngineBook, step_id: int) -> list[Request]:
        """Returns the exported requests that were in a step, as far as is known now."""
        return [request for request in _traced(book, step_id) if request.kept]

    def _wait(self, book: EngineBook, step_id: int, until_ns: int, wanted: bool) -> _Waiting:
        self._waiting[book.engine, step_id] = wanted
        return _Waiting(until_ns, book, step_id)

    def _let_go(self, step: _Waiting) -> None:
        """Exports a step if somebody in it is exported."""
        wanted = self._waiting.pop((step.book.engine, step.step_id), False)
        if wanted or any(request.kept for request in _traced(step.book, step.step_id)):
            self._export(step.book, [step.step_id])

    def _export_waiting(self, step: _Waiting) -> None:
        if (step.book.engine, step.step_id) in self._waiting:
            self._export(step.book, [step.step_id])

    def _export(self, book: EngineBook, step_ids: list[int]) -> None:
        """Exports those of the steps that are known and were not exported before."""
        if not step_ids:
            return
        for step_id in step_ids:
            self._waiting.pop((book.engine, step_id), None)
        ids = book.not_exported(np.array(step_ids, np.uint64))
        ids = ids[book.has(ids)]
        book.set_exported(ids)
        if len(ids):
            self._emit(book, ids, [self.links(book, step_id) for step_id in ids.tolist()])


def _traced(book: EngineBook, step_id: int) -> list[Request]:
    """The requests in a step that may be exported."""
    members = book.members(step_id)
    return book.people(members.numbers).traced if members is not None else []


def _decided(step: _Waiting) -> bool:
    """Whether all that could keep it have ended."""
    return all(request.kept is not None for request in _traced(step.book, step.step_id))
