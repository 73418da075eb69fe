"""Spans on their way to the collector.

A queue that is bounded in bytes, batches of at most 4 MiB, attempts until it takes them.

Owns what is waiting, what is dropped, and when it is tried again. A collector that is down, hangs
or answers errors costs its queue's memory and nothing else: nobody here waits for it.
"""

from __future__ import annotations

import asyncio
import collections
import time
from typing import Final, NamedTuple, Protocol

import structlog
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.otlp import otlp_bytes
from headrace_telemetry.otlp.otlp_channel import TRACES, Backoff, ExportFailed
from headrace_telemetry.spans.generation_spans import SpanBlock

SIGNAL: Final = "traces"
# A collector takes 4 MiB by default; what encloses the spans takes some of it.
_BATCH_BYTES: Final = (4 << 20) - (256 << 10)
_GIVE_UP_S: Final = 300.0
_HURRIED_PAUSE_S: Final = 0.1
_BLOCK_OVERHEAD_BYTES: Final = 200

_log = structlog.get_logger(process="telemetry")


class Channel(Protocol):
    """A connection to a collector."""

    async def export(self, method: str, request: bytes, timeout_s: float | None = None) -> bytes:
        """Sends a request. Raises ExportFailed."""


class _Batch(NamedTuple):
    """A request, and what it has."""

    request: bytes
    num_spans: int
    num_bytes: int


class SpanExporter:
    """A bounded queue of spans, and the task that sends them to a collector.

    Args:
        channel: to the collector.
        scope: the serialized InstrumentationScope.
        queue_bytes: most that may wait.
        delay_s: how long spans wait for others.
        counts: of what was taken and dropped.
    """

    def __init__(self, channel: Channel, scope: bytes, queue_bytes: int, delay_s: float, counts: ExportCounts) -> None:
        self._channel = channel
        self._scope = scope
        self._queue_bytes = queue_bytes
        self._delay_s = delay_s
        self._counts = counts
        self._queue: collections.deque[tuple[bytes, SpanBlock]] = collections.deque()
        self._some = asyncio.Event()
        self._full_batch = asyncio.Event()
        self._stopping = asyncio.Event()
        # What was said last of a collector that does not take all; "" while it does.
        self._said = ""

    def put(self, resource: bytes, block: SpanBlock) -> None:
        """Queues spans of a resource; drops them if there is no room."""
        num_bytes = _size(block)
        if self._counts.queued_bytes + num_bytes > self._queue_bytes or len(block.spans) > _BATCH_BYTES:
            self._counts.add(self._counts.dropped, SIGNAL, block.num_spans)
            return
        self._queue.append((resource, block))
        self._counts.queued_bytes += num_bytes
        self._some.set()
        if self._counts.queued_bytes >= _BATCH_BYTES:
            self._full_batch.set()

    async def run(self) -> None:
        """Sends until `flush` has been called and nothing is left, or until cancelled."""
        while self._queue or not self._stopping.is_set():
            await _first_of(self._some, self._stopping)
            await _first_of(self._full_batch, self._stopping, timeout_s=self._delay_s)
            self._some.clear()
            self._full_batch.clear()
            while self._queue:
                await self._send(self._take())

    async def flush(self, running: asyncio.Task[None], timeout_s: float) -> None:
        """Lets `run` send what is left, for some seconds at most; then ends it.

        What could not be sent counts as dropped.
        """
        self._stopping.set()
        await asyncio.wait({running}, timeout=timeout_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        left = sum(block.num_spans for _, block in self._queue)
        if left:
            self._counts.add(self._counts.dropped, SIGNAL, left)
            _log.warning("spans were left when telemetry ended", spans=left)

    def _take(self) -> _Batch:
        """The next batch, its spans together by resource."""
        by_resource: dict[bytes, list[bytes]] = {}
        num_bytes = num_spans = size = 0
        while self._queue and size + len(self._queue[0][1].spans) <= _BATCH_BYTES:
            resource, block = self._queue.popleft()
            by_resource.setdefault(resource, []).append(block.spans)
            size += len(block.spans)
            num_bytes += _size(block)
            num_spans += block.num_spans
        parts = [otlp_bytes.resource_spans(resource, self._scope, spans) for resource, spans in by_resource.items()]
        return _Batch(b"".join(parts), num_spans, num_bytes)

    async def _send(self, batch: _Batch) -> None:
        """Sends a batch until it is taken, refused for good, or too old.

        Its bytes count as queued meanwhile.
        """
        taken = False
        try:
            taken = await self._attempts(batch)
        finally:
            self._counts.queued_bytes -= batch.num_bytes
            if not taken:
                self._counts.add(self._counts.dropped, SIGNAL, batch.num_spans)

    async def _attempts(self, batch: _Batch) -> bool:
        """Whether the collector took the batch in the end."""
        backoff = Backoff()
        until = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                reply = await self._channel.export(TRACES, batch.request)
            except ExportFailed as failure:
                self._counts.add(self._counts.failures, SIGNAL, 1)
                self._note(failure)
                if not failure.transient or time.monotonic() >= until:
                    return False
                await self._pause(backoff.next_pause_s(failure.retry_after_s))
            else:
                self._took(batch, reply)
                return True

    async def _pause(self, pause_s: float) -> None:
        """Waits before the next attempt.

        Hardly at all when it stops, or its time would pass in pauses.
        """
        await _first_of(self._stopping, timeout_s=pause_s)
        if self._stopping.is_set():
            await asyncio.sleep(_HURRIED_PAUSE_S)

    def _took(self, batch: _Batch, reply: bytes) -> None:
        """Counts what the collector says that it took."""
        try:
            partial = ExportTraceServiceResponse.FromString(reply).partial_success
        except DecodeError:
            partial = ExportTraceServiceResponse().partial_success
        rejected = min(max(partial.rejected_spans, 0), batch.num_spans)
        self._counts.add(self._counts.exported, SIGNAL, batch.num_spans - rejected)
        if rejected:
            self._counts.add(self._counts.dropped, SIGNAL, rejected)
            self._warn("the collector rejected spans", spans=rejected, why=partial.error_message[:200])
            return
        if self._said:
            _log.info("the collector takes spans again")
        self._said = ""

    def _note(self, failure: ExportFailed) -> None:
        said = {"why": failure.code, "said": failure.said, "tried_again": failure.transient}
        self._warn("the collector does not take spans", **said)

    def _warn(self, event: str, **fields: object) -> None:
        """Logs what ails the collector, when it begins or becomes something else."""
        said = f"{event}, {fields.get('tried_again')}"
        if said != self._said:
            _log.warning(event, **fields)
        self._said = said


def _size(block: SpanBlock) -> int:
    return len(block.spans) + _BLOCK_OVERHEAD_BYTES


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Waits until one of the events is set, or the time is over."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
