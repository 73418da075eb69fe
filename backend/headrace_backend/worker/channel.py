"""A worker's channels: two rings (plans in, results out) and the descriptors that make it a rank.

Owns waiting: as long as the parent lives, however slow it is. Does not own what a plan means
(`loop`). Without torch.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.messages import LoadProgress, Notice, RecordKind, WorkerMessage, encode_message
from headrace_backend.step.plan import StepResult
from headrace_backend.step.ring import RingFull, RingReader, RingWriter
from headrace_backend.worker.lifetime import end_if_orphaned


class RankLinks(NamedTuple):
    """Which rank a worker is, and the descriptors that it inherits as such."""

    rank: int = 0
    # The board on which it reports how far it is (`rank_board`); None: nobody looks.
    board: int | None = None
    # The anonymous file in which several ranks of one host find each other; with `meeting` the
    # socket at which this rank serves the store there. None: it has neither.
    store: int | None = None
    # Where ranks of several hosts find each other; None: all are on this one.
    meeting: MeetingPoint | None = None


# How often a waiting worker makes sure that it still has a parent.
_PARENT_CHECK_S = 1.0
# The next plan is mostly there already, or comes while the engine reads the last result; longer
# waits sleep.
_SPIN_S = 50e-6
# Progress within a phase is sent this often at most.
_PROGRESS_INTERVAL_S = 0.2


class Channel:
    """Reads records of the plan ring, writes records of the result ring."""

    def __init__(self, plans: RingReader, results: RingWriter, parent_pid: int) -> None:
        self._plans = plans
        self._results = results
        self._parent_pid = parent_pid
        self._last_progress = ("", 0.0)

    def wait(self) -> tuple[int, bytes]:
        """The next record, whenever it comes."""
        while (record := self._plans.read(_PARENT_CHECK_S, _SPIN_S)) is None:
            end_if_orphaned(self._parent_pid)
        return record

    def poll(self) -> tuple[int, bytes] | None:
        """The next record, if it is there."""
        return self._plans.try_read()

    def send_result(self, result: StepResult) -> None:
        """Answers a plan."""
        self._write(RecordKind.STEP_RESULT, result.encode())

    def send_drafts(self, drafts: StepDrafts) -> None:
        """Reports what rows with grammars have drafted for a step."""
        self._write(RecordKind.DRAFTS, drafts.encode())

    def send_message(self, message: WorkerMessage) -> None:
        """Sends anything that is no step."""
        self._write(RecordKind.MESSAGE, encode_message(message))

    def send_progress(self, phase: str, done: int, total: int, unit: str, detail: str = "") -> None:
        """Sends how far a start-up phase is: its beginning, its end, and some steps between."""
        now = time.monotonic()
        last_phase, last_time = self._last_progress
        if phase != last_phase or done >= total or now - last_time >= _PROGRESS_INTERVAL_S:
            self._last_progress = (phase, now)
            self.send_message(LoadProgress(phase, done, total, unit, detail))

    def check_parent(self) -> None:
        """Ends the process if the parent is gone."""
        end_if_orphaned(self._parent_pid)

    def _write(self, kind: RecordKind, payload: bytes) -> None:
        while True:
            try:
                self._results.write(kind, payload, _PARENT_CHECK_S)
                return
            except RingFull:
                end_if_orphaned(self._parent_pid)


class FollowerChannel(Channel):
    """The channel of a rank that is not asked for tokens.

    All ranks of the last pipeline stage draw the same, and the first of them reports the tokens.
    """

    _reported_late_work = 0

    def send_result(self, result: StepResult) -> None:
        """Reports only what the reporting rank can't know: work that this rank did late.

        By compiling or capturing when it should have been warm it held all ranks up.
        """
        if result.late_work > self._reported_late_work:
            self._reported_late_work = result.late_work
            self.send_message(Notice(f"{result.late_work} kernels or graphs so far were made late, in a step"))

    def send_drafts(self, drafts: StepDrafts) -> None:
        """Reports nothing: all ranks draft the same."""
