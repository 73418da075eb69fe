"""How far the ranks of one life are, and, once nothing moves any more, which the others wait for.

Owns the board of one life's ranks (`rank_board`) and the words. A rank is late if it is behind
others: it began fewer steps than any, or entered fewer collectives than another of its pipeline
stage. Where all are at the same place, one that is stopped was stopped inside a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace_backend.server.workers.worker_process import RankDescriptors
from headrace_backend.step.rank_board import RankBoard, RankMark


class WatchedRank(Protocol):
    """A rank's process, on this host or on another."""

    @property
    def rank(self) -> int:
        """Its number, over all hosts."""

    @property
    def place(self) -> str:
        """The process, for people."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""


class RankWatch:
    """Reads the board of one life of the workers, and finds ranks that are late."""

    def __init__(self, world_size: int, stage_size: int) -> None:
        """Nothing is shared with ranks yet, of which each pipeline stage has `stage_size`."""
        self._world_size = world_size
        self._stage_size = stage_size
        self._board: RankBoard | None = None

    def watch(self, ranks: RankDescriptors) -> None:
        """Reads the board that this host's ranks inherit, from now on; may be called once."""
        self._board = RankBoard(ranks.board, self._world_size)

    def put(self, rank: int, counters: Sequence[int]) -> None:
        """Notes how far a rank of another host is. Raises ValueError if that is no line."""
        if self._board is not None:
            self._board.put(rank, counters)

    def progress(self) -> tuple[int, ...]:
        """All counters of the board; two readings differ if some rank went on in between."""
        return () if self._board is None else self._board.progress()

    def begun_step_id(self) -> int:
        """The step that any rank began last, as plans count them; 0: none."""
        return 0 if self._board is None else max(mark.step_id for mark in self._board.marks())

    def described(self, workers: Sequence[WatchedRank]) -> str:
        """Which ranks are waited for and where each is, as the end of a message.

        It is empty where there is one rank.
        """
        if self._board is None or self._world_size == 1:
            return ""
        marks = self._board.marks()
        late = [worker.rank for worker in workers if worker.is_stopped] or behind(marks, self._stage_size)
        who = f"the others wait for rank {', '.join(map(str, late))}" if late else "all ranks are at the same place"
        where = "; ".join(
            f"worker {worker.rank} ({state(worker)}) at step {mark.step_id}, collective {mark.collectives}"
            for worker, mark in zip(workers, marks, strict=True)
        )
        return f": {who}: {where}"

    def close(self) -> None:
        """Gives the board back."""
        if self._board is not None:
            self._board.close()


def behind(marks: Sequence[RankMark], stage_size: int) -> list[int]:
    """Ranks that are behind the one that is farthest; none if all are at the same place.

    Ranks of other pipeline stages, of which each has `stage_size`, enter other collectives: they
    are compared by their steps.
    """
    last_step_id = max(mark.step_id for mark in marks)
    late = []
    for rank, mark in enumerate(marks):
        first = rank // stage_size * stage_size
        if mark.step_id < last_step_id or mark < max(marks[first : first + stage_size]):
            late.append(rank)
    return late


def state(worker: WatchedRank) -> str:
    """Describes the state of a worker's process in words."""
    return f"{worker.place}, {'stopped' if worker.is_stopped else 'running'}"
