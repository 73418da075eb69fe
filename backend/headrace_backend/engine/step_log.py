"""What settled steps leave behind for telemetry.

The log has a record of each step, the requests that were in it, and the requests whose end only the
engine can report.

Owns the records' making, the ring of the newest ones for services, and what waits to be reported.
Reports to nobody itself (the server does), and decides nothing. While nobody asks (`keeps_records`
and `tells` are False) a step costs two branches.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections import deque
from typing import NamedTuple

import numpy as np

from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.scheduler import Scheduler
from headrace_backend.step.plan import StepResult
from headrace_facts import facts
from headrace_facts.step_records import RECORD, StepFlag

# A service that lags gets so many.
MAX_RECORDS = 4096
# As often as backends and services write to the telemetry process, where each fact of steps costs
# far more than one step more in it.
RECORDS_EVERY_NS = 50_000_000
# As `step_records.RECORD` has its fields.
_RECORD = struct.Struct("<7Q14I")
assert _RECORD.size == RECORD.itemsize
# Numbers: an enum's members cost more to combine than the whole record.
_CAPTURED, _LATE_WORK, _ISOLATED = int(StepFlag.CAPTURED), int(StepFlag.LATE_WORK), int(StepFlag.ISOLATED)
_NUMBER = operator.attrgetter("number")


def _u32() -> array[int]:
    return array("I")


class EndedRequest(NamedTuple):
    """A request that has ended, and what was recorded of it."""

    request: LiveRequest
    trace: facts.EngineTrace | None


class _Waiting:
    """Columns of `facts.Steps` in the making."""

    __slots__ = ("chunk_counts", "chunks", "member_counts", "members", "preempted", "preempted_counts", "records")

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.member_counts = _u32()
        self.members: list[bytes] = []
        self.chunk_counts = _u32()
        self.chunks = _u32()
        self.preempted_counts = _u32()
        self.preempted = _u32()

    def add(self, record: bytes, members: bytes, step: InFlightStep) -> None:
        """Adds one step."""
        self.records.append(record)
        self.member_counts.append(len(members) // 4)
        self.members.append(members)
        self.chunk_counts.append(len(step.entries))
        for sequence, first_token, num_tokens in step.entries:
            self.chunks.extend((sequence.number, first_token, num_tokens))
        self.preempted_counts.append(len(step.preempted))
        self.preempted.extend(step.preempted)


class StepReader:
    """One reader's place in the ring of records."""

    __slots__ = ("_due_at_ns", "_log", "_num_taken")

    def __init__(self, log: StepLog) -> None:
        """Begins with the next step."""
        self._log = log
        self._num_taken = log.num_records
        self._due_at_ns = 0

    def take_due(self, now_ns: int) -> bytes:
        """Takes the records once in `RECORDS_EVERY_NS`; returns nothing in between.

        `now_ns` is the engine's clock.
        """
        if now_ns < self._due_at_ns:
            return b""
        self._due_at_ns = now_ns + RECORDS_EVERY_NS
        return self.take()

    def take(self) -> bytes:
        """Takes the records of the steps settled since the last call, side by side.

        If there are too many, it takes the newest ones.
        """
        log = self._log
        num_new, self._num_taken = log.num_records - self._num_taken, log.num_records
        newest = log.newest
        if num_new == 1:
            return newest[-1]
        return b"".join([newest[index] for index in range(-min(num_new, len(newest)), 0)])


class StepLog:
    """Records of settled steps, and ended requests, until they are taken."""

    def __init__(self, engine: str = "", unix_offset_ns: int = 0) -> None:
        """Nobody asks.

        Args:
            engine: Names this life of the backend: 16 hex digits.
            unix_offset_ns: What takes the engine's clock to UNIX time.
        """
        self.engine = engine
        self.unix_offset_ns = unix_offset_ns
        # Some service asked for records.
        self.keeps_records = False
        # The server tells facts: who was in a step, and requests that end unread.
        self.tells = False
        self.newest: deque[bytes] = deque(maxlen=MAX_RECORDS)
        # Made so far.
        self.num_records = 0
        self._waiting = _Waiting()
        self._ended: list[EndedRequest] = []
        # Steps of decoding mostly have the same sequences as the one before.
        self._last_samples: list[Sequence] = []
        self._last_members = b""
        self._device_free_ns = 0
        self._late_work = 0
        self._lost_drafts = 0

    def reader(self) -> StepReader:
        """Makes a reader for a service that asks for records from now on."""
        self.keeps_records = True
        return StepReader(self)

    def worker_ready(self) -> None:
        """A worker that has compiled nothing, and lost no draft, since it was ready takes over."""
        self._late_work = self._lost_drafts = 0

    def note_plan(self, step: InFlightStep, scheduler: Scheduler, num_waiting: int, isolated: bool) -> None:
        """Notes what is to be seen at the moment when a step is planned."""
        kv = scheduler.kv
        assert kv is not None, "a step was planned"
        step.num_blocks, step.free_blocks = kv.pool.num_blocks, kv.pool.num_available
        step.num_waiting, step.isolated = num_waiting, isolated
        step.preempted, step.stalled = scheduler.stats.take_preempted(), scheduler.stats.take_stalled()

    def note_step(self, step_id: int, step: InFlightStep, result: StepResult, now_ns: int) -> None:
        """A step was settled, as number `step_id` over all lives of workers.

        One that was launched while the one before ran began when that one was done.
        """
        late_work = result.late_work > self._late_work
        self._late_work = result.late_work
        num_lost_drafts = result.lost_drafts - self._lost_drafts
        self._lost_drafts = result.lost_drafts
        started_at_ns = max(result.started_at_ns, self._device_free_ns)
        self._device_free_ns = result.finished_at_ns
        if not (self.keeps_records or self.tells):
            return
        flags = result.captured * _CAPTURED | late_work * _LATE_WORK | step.isolated * _ISOLATED
        load, num_forced = step.load, step.num_forced
        record = _RECORD.pack(
            step_id,
            step.planned_at_ns,
            started_at_ns,
            result.finished_at_ns,
            now_ns,
            int(load.context_tokens),
            int(load.attention_pairs),
            step.num_sequences,
            load.num_prefill_tokens - load.num_forced_tokens,
            load.num_decodes + load.num_forced_rows,
            result.tokens.size + num_forced,
            step.free_blocks,
            step.num_blocks,
            step.num_waiting,
            len(step.preempted),
            load.num_draft_tokens,
            # Each sample's first token is no draft.
            result.tokens.size - np.count_nonzero(result.counts) if result.counts.size else 0,
            flags,
            result.padded_tokens,
            num_lost_drafts,
            num_forced,
        )
        if self.keeps_records:
            self.newest.append(record)
            self.num_records += 1
        if self.tells:
            self._waiting.add(record, self._members(step), step)

    def note_ended(self, request: LiveRequest, trace: facts.EngineTrace | None) -> None:
        """Notes a request that has ended and that no service can report."""
        if self.tells:
            self._ended.append(EndedRequest(request, trace))

    def take_steps(self) -> facts.Steps | None:
        """Steps settled since the last call; None if there are none."""
        waiting = self._waiting
        if not waiting.records:
            return None
        self._waiting = _Waiting()
        return facts.Steps(
            self.engine,
            self.unix_offset_ns,
            b"".join(waiting.records),
            waiting.member_counts.tobytes(),
            b"".join(waiting.members),
            waiting.chunk_counts.tobytes(),
            waiting.chunks.tobytes(),
            waiting.preempted_counts.tobytes(),
            waiting.preempted.tobytes(),
        )

    def take_ended(self) -> list[EndedRequest]:
        """Requests that are to be reported since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _members(self, step: InFlightStep) -> bytes:
        """Request numbers of a step's sequences, uint32; a request may appear several times."""
        samples = step.samples
        if samples != self._last_samples:
            self._last_samples, self._last_members = samples, array("I", map(_NUMBER, samples)).tobytes()
        if not step.chunks:
            return self._last_members
        return self._last_members + array("I", [sequence.number for sequence, _, _ in step.chunks]).tobytes()
