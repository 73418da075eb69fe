"""Recent traces in memory, for `headrace trace`.

Found by request id or trace id, the oldest forgotten first.

Owns the bound in bytes, over spans of requests and of steps together. They are kept as they were
exported; nothing is encoded twice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.spans.engine_book import U64

# What an entry takes beside its bytes: tuples, keys, places in dictionaries.
_ENTRY_BYTES = 400
StepKey = tuple[str, int]


class RingPart(NamedTuple):
    """Spans of one resource, and the steps that they were in."""

    resource: bytes
    spans: bytes
    request_id: str = ""
    engine: str = ""
    steps: U64 | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that the traces take, in bytes, about."""
        return len(self.spans) + (self.steps.nbytes if self.steps is not None else 0) + _ENTRY_BYTES


class Found(NamedTuple):
    """A trace: its spans by resource, and its steps."""

    spans: list[tuple[bytes, bytes]]
    steps: list[StepKey]


@dataclasses.dataclass(slots=True)
class _Trace:
    parts: collections.deque[RingPart]


class TraceRing:
    """The recent traces in memory, the oldest forgotten first.

    Args:
        limit_bytes: what it may take; 0: it remembers nothing.
        counts: gets how much memory it takes.
    """

    def __init__(self, limit_bytes: int, counts: ExportCounts) -> None:
        self._limit_bytes = limit_bytes
        self._counts = counts
        self._traces: dict[str, _Trace] = {}
        self._by_request: dict[str, str] = {}
        self._steps: dict[StepKey, tuple[bytes, bytes]] = {}
        # In order of arrival: a trace whose oldest part goes next, or a step.
        self._order: collections.deque[str | StepKey] = collections.deque()

    def add(self, trace_id: str, part: RingPart) -> None:
        """Remembers spans of a trace (id in hex)."""
        self._traces.setdefault(trace_id, _Trace(collections.deque())).parts.append(part)
        if part.request_id:
            self._by_request[part.request_id] = trace_id
        self._grow(trace_id, part.num_bytes)

    def add_step(self, step: StepKey, resource: bytes, span: bytes) -> None:
        """Remembers the span of a step, once."""
        if step in self._steps:
            return
        self._steps[step] = (resource, span)
        self._grow(step, len(span) + _ENTRY_BYTES)

    def find(self, key: str) -> Found | None:
        """Returns the trace of a request id or trace id."""
        trace = self._traces.get(self._by_request.get(key, key))
        if trace is None:
            return None
        steps = {
            (part.engine, step_id): None
            for part in trace.parts
            if part.steps is not None
            for step_id in part.steps.tolist()
        }
        return Found([(part.resource, part.spans) for part in trace.parts], list(steps))

    def step(self, step: StepKey) -> tuple[bytes, bytes] | None:
        """Resource and span of a remembered step."""
        return self._steps.get(step)

    def _grow(self, entry: str | StepKey, num_bytes: int) -> None:
        self._order.append(entry)
        self._counts.ring_bytes += num_bytes
        while self._counts.ring_bytes > self._limit_bytes:
            self._counts.ring_bytes -= self._forget(self._order.popleft())

    def _forget(self, entry: str | StepKey) -> int:
        """Forgets a step, or the oldest part of a trace. Returns how many bytes that frees."""
        if isinstance(entry, tuple):
            return len(self._steps.pop(entry)[1]) + _ENTRY_BYTES
        trace = self._traces[entry]
        part = trace.parts.popleft()
        if part.request_id and self._by_request.get(part.request_id) == entry:
            self._forget_request(part.request_id, trace.parts)
        if not trace.parts:
            del self._traces[entry]
        return part.num_bytes

    def _forget_request(self, request_id: str, parts: Sequence[RingPart]) -> None:
        """Forgets where a request's trace is, unless it has parts left there."""
        if not any(part.request_id == request_id for part in parts):
            del self._by_request[request_id]
