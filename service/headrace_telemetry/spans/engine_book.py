"""What is known of one life of a backend.

Its newest steps, who was in them, and the requests that it numbered.

Owns the memory of them, which is bounded. Steps come from the backend with their members and from
services without; whoever tells a step first, it is one. What is exported when is `step_export`'s,
what a span says `step_spans`'s.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_facts import facts, step_records
from headrace_telemetry.otlp.otlp_bytes import link, text_element
from headrace_telemetry.spans import step_ids
from headrace_telemetry.spans.span_frame import check_time

NUM_STEPS: Final = 65_536
# About 800 bytes each. Steps name their requests when they are exported, seconds after they were
# computed, so that the newest are enough.
NUM_REQUESTS: Final = 16_384

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
_TIMES: Final = ("planned_at_ns", "started_at_ns", "finished_at_ns", "settled_at_ns")
_UNKNOWN: Final = text_element("?")


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request as steps know it.

    Attributes:
        request_id: its id.
        element: the id as an element of an attribute, serialized.
        link: a link to its inference span, serialized.
        span: its inference span; None: nobody traces it.
        kept: whether its trace is exported; None: its end decides.
    """

    request_id: str
    element: bytes
    link: bytes
    span: facts.SpanContext | None
    kept: bool | None


class Members(NamedTuple):
    """The requests and chunks in a step, by the requests' numbers.

    Attributes:
        numbers: requests of its sequences.
        chunks: prompt chunks as (number, first token, tokens), [n, 3].
        preempted: requests that lost their row for it.
    """

    numbers: U32
    chunks: U32
    preempted: U32


class FoundSteps(NamedTuple):
    """Steps that were looked for.

    Attributes:
        known: which are known, [n].
        records: of no use where they are not known, [n].
        link_ids: trace id and span id, known or not, [n, 24].
    """

    known: npt.NDArray[np.bool_]
    records: step_records.Records
    link_ids: npt.NDArray[np.uint8]


class People(NamedTuple):
    """The requests that took part in a step.

    Attributes:
        ids: their ids as elements of an attribute; "?" for one that is forgotten.
        traced: those that may be exported.
    """

    ids: bytes
    traced: list[Request]


class _Reported(NamedTuple):
    """One fact of steps with members: flat columns, and where each step's entries end."""

    columns: tuple[U32, U32, U32]
    ends: tuple[npt.NDArray[np.int64], ...]

    def members(self, row: int) -> Members:
        """Returns the members of one step."""
        parts = [
            column[ends[row - 1] if row else 0 : ends[row]]
            for column, ends in zip(self.columns, self.ends, strict=True)
        ]
        return Members(*parts)


class EngineBook:
    """Steps and requests of one engine.

    Args:
        engine: names the life of the backend.
        num_steps: how many of the newest steps are remembered.
    """

    def __init__(self, engine: str, num_steps: int = NUM_STEPS) -> None:
        self.engine = engine
        self.facts: facts.EngineFacts | None = None
        # Who tells its steps with their members; None: only services speak of it.
        self.source: facts.Hello | None = None
        # The serialized Resource of its backend, also after that has gone.
        self.resource = b""
        self.num_steps = num_steps
        self._modulus = np.uint64(num_steps)
        self._records = np.zeros(num_steps, step_records.RECORD)
        self._step_ids = self._records["step_id"]
        self._ids = np.zeros((num_steps, 24), np.uint8)
        self._offsets = np.zeros(num_steps, np.int64)
        # The step in this place that was exported.
        self._exported = np.zeros(num_steps, np.uint64)
        # Members of each step (`_packed`): as arrays they would take a kilobyte, which 65,536 times
        # is most of this process's memory.
        self._reported: list[bytes | None] = [None] * num_steps
        self._requests: collections.OrderedDict[int, Request] = collections.OrderedDict()
        # Most steps have the members of the one before.
        self._last_people: tuple[bytes, People] = (b"", People(b"", []))

    def add_request(self, began: facts.RequestBegan) -> Request:
        """A request has got its number. The oldest is forgotten when there are too many."""
        kept = None if began.span is not None and not began.span.sampled else began.span is not None
        span_link = _link(began.span) if began.span is not None else b""
        request = Request(began.request_id, text_element(began.request_id, 256), span_link, began.span, kept)
        self._requests[began.number] = request
        self._last_people = (b"", People(b"", []))
        if len(self._requests) > NUM_REQUESTS:
            self._requests.popitem(last=False)
        return request

    def request(self, number: int) -> Request | None:
        """Returns the request of a number, while it is remembered."""
        return self._requests.get(number)

    def people(self, numbers: U32) -> People:
        """Returns the requests of these numbers, each once."""
        key = numbers.tobytes()
        if self._last_people[0] != key:
            requests = [self._requests.get(number) for number in dict.fromkeys(numbers.tolist())]
            traced = [request for request in requests if request is not None and request.span is not None]
            self._last_people = (key, People(self.ids(requests), traced))
        return self._last_people[1]

    @staticmethod
    def ids(requests: Iterable[Request | None]) -> bytes:
        """Ids of requests as elements of an attribute; "?" for one that is forgotten."""
        return b"".join([_UNKNOWN if request is None else request.element for request in requests])

    def add_steps(self, steps: facts.Steps) -> U64:
        """Remembers steps.

        Returns the ids of those that were not known with members before, and are now.

        Raises:
            ValueError: columns that do not fit together, times that are none, or more steps than
                are remembered.
        """
        records = step_records.decode(steps.records)
        if len(records) > self.num_steps:
            raise ValueError(f"{len(records)} steps at once")
        for name in _TIMES:
            if len(records):
                check_time(int(records[name].max()) + max(steps.unix_offset_ns, 0))
        reported = _read_members(steps, len(records)) if steps.member_counts else None
        slots = self._slots(records["step_id"])
        known = self._step_ids[slots] == records["step_id"]
        # One that is older than what stands in its place came too late.
        fresh = ~known & (self._step_ids[slots] < records["step_id"])
        self._insert(records[fresh], slots[fresh], steps.unix_offset_ns)
        if reported is None:
            return np.zeros(0, np.uint64)
        return self._insert_members(reported, records, slots, known, fresh)

    def has(self, ids: U64) -> npt.NDArray[np.bool_]:
        """Which of these steps are known, [n]."""
        return np.asarray((self._step_ids[self._slots(ids)] == ids) & (ids > 0))

    def find(self, ids: U64) -> FoundSteps:
        """Looks for steps."""
        slots = self._slots(ids)
        known = np.asarray((self._step_ids[slots] == ids) & (ids > 0))
        link_ids = self._ids[slots]
        if not known.all():
            for row in np.flatnonzero(~known):
                link_ids[row] = np.frombuffer(_ids_of(self.engine, int(ids[row])), np.uint8)
        return FoundSteps(known, self._records[slots], link_ids)

    def not_exported(self, ids: U64) -> U64:
        """Returns which of these steps were not exported yet."""
        return np.asarray(ids[self._exported[self._slots(ids)] != ids])

    def set_exported(self, ids: U64) -> None:
        """Notes that known steps were exported."""
        self._exported[self._slots(ids)] = ids

    def records(self, ids: U64) -> step_records.Records:
        """Records of steps that are known, [n]."""
        return self._records[self._slots(ids)]

    def members(self, step_id: int) -> Members | None:
        """Who was in a step; None: the backend has not reported it."""
        slot = step_id % self.num_steps
        reported = self._reported[slot]
        if reported is None or self._step_ids[slot] != step_id:
            return None
        return _unpacked(reported)

    def unix_offsets_ns(self, ids: U64) -> npt.NDArray[np.int64]:
        """What takes the times of known steps to UNIX time, [n]."""
        return self._offsets[self._slots(ids)]

    def _slots(self, ids: U64) -> npt.NDArray[np.intp]:
        return (ids % self._modulus).view(np.int64)

    def _insert(self, records: step_records.Records, slots: npt.NDArray[np.intp], offset_ns: int) -> None:
        if not len(records):
            return
        self._records[slots] = records
        self._offsets[slots] = offset_ns
        derived = b"".join([_ids_of(self.engine, step_id) for step_id in records["step_id"].tolist()])
        self._ids[slots] = np.frombuffer(derived, np.uint8).reshape(-1, 24)
        for slot in slots.tolist():
            self._reported[slot] = None

    def _insert_members(
        self,
        reported: _Reported,
        records: step_records.Records,
        slots: npt.NDArray[np.intp],
        known: npt.NDArray[np.bool_],
        fresh: npt.NDArray[np.bool_],
    ) -> U64:
        added = []
        for row in np.flatnonzero(known | fresh).tolist():
            slot = int(slots[row])
            if self._reported[slot] is None:
                self._reported[slot] = _packed(reported.members(row))
                added.append(row)
        return records["step_id"][added].astype(np.uint64)


_last_trace: dict[str, tuple[int, bytes]] = {}


def _ids_of(engine: str, step_id: int) -> bytes:
    """Trace id and span id of a step; the trace id of an engine's newest steps is remembered."""
    part = (step_id - 1) // step_ids.STEPS_PER_TRACE
    last = _last_trace.get(engine)
    if last is None or last[0] != part:
        if len(_last_trace) > 64:
            _last_trace.clear()
        last = _last_trace[engine] = (part, step_ids.trace_id(engine, max(step_id, 1)))
    return last[1] + step_ids.span_id(engine, step_id)


def _link(span: facts.SpanContext) -> bytes:
    return link(bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id), span.tracestate)


def _packed(members: Members) -> bytes:
    """Returns a step's members as 4-byte numbers.

    How many requests and chunks there are, then all columns.
    """
    counts = np.array([len(members.numbers), len(members.chunks)], np.uint32)
    return b"".join([counts.tobytes(), *(column.tobytes() for column in members)])


def _unpacked(data: bytes) -> Members:
    """Returns what `_packed` was given."""
    values = np.frombuffer(data, np.uint32)
    num_requests, num_chunks = values[:2].tolist()
    chunks = 2 + num_requests
    preempted = chunks + 3 * num_chunks
    return Members(values[2:chunks], values[chunks:preempted].reshape(-1, 3), values[preempted:])


def _read_members(steps: facts.Steps, num_steps: int) -> _Reported:
    """Reads the columns of members. Raises ValueError if they do not fit together."""
    columns, ends = [], []
    parts = (
        (steps.member_counts, steps.members, 1),
        (steps.chunk_counts, steps.chunks, 3),
        (steps.preempted_counts, steps.preempted, 1),
    )
    for counts_bytes, flat_bytes, width in parts:
        counts = np.frombuffer(counts_bytes, "<u4") if counts_bytes else np.zeros(num_steps, np.uint32)
        flat = np.frombuffer(flat_bytes, "<u4")
        end = np.cumsum(counts[-num_steps:] if num_steps else counts[:0], dtype=np.int64)
        if len(counts) != num_steps or (int(end[-1]) if num_steps else 0) * width != len(flat):
            raise ValueError("columns of a step's members do not fit together")
        columns.append(flat.reshape(-1, width) if width > 1 else flat)
        ends.append(end)
    return _Reported((columns[0], columns[1], columns[2]), tuple(ends))
