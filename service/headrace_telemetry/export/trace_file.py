"""The trace file: spans appended as lines of OTLP JSON, at most two files of a set size.

Owns the queue before it, its bound, and the change to a new file. Turning spans into JSON takes 20
us each, so that it is done a little at a time between other work; what the queue can't hold is
dropped and counted.
"""

from __future__ import annotations

import asyncio
import collections
import os
import pathlib
from typing import Final

import structlog

from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.otlp import otlp_json
from headrace_telemetry.spans.generation_spans import SpanBlock

_MOST_QUEUED_BYTES: Final = 64 << 20

_log = structlog.get_logger(process="telemetry")


class TraceFile:
    """A trace file, to which spans are appended up to a size.

    Args:
        path: where.
        limit_bytes: the size at which it becomes PATH.1 and a new one begins.
        scope: the serialized InstrumentationScope.
        counts: of what was written and dropped.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: pathlib.Path, limit_bytes: int, scope: bytes, counts: ExportCounts) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._scope = scope
        self._counts = counts
        self._queue: collections.deque[tuple[bytes, SpanBlock]] = collections.deque()
        self._queued_bytes = 0
        self._descriptor = _open(path)
        self._failing = False
        self._some = asyncio.Event()

    def put(self, resource: bytes, block: SpanBlock) -> None:
        """Queues spans of a resource; drops them if there is no room."""
        if self._queued_bytes + len(block.spans) > _MOST_QUEUED_BYTES:
            self._counts.file_dropped += block.num_spans
            return
        self._queue.append((resource, block))
        self._queued_bytes += len(block.spans)
        self._some.set()

    async def run(self) -> None:
        """Writes what is queued until cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._queue:
                self._write_next()
                await asyncio.sleep(0)

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        while self._queue:
            self._write_next()
        os.close(self._descriptor)

    def _write_next(self) -> None:
        resource, block = self._queue.popleft()
        self._queued_bytes -= len(block.spans)
        line = otlp_json.line(resource, self._scope, block.spans)
        try:
            self._change_file_before(len(line))
            _write_all(self._descriptor, line)
        except OSError as error:
            self._counts.file_dropped += block.num_spans
            if not self._failing:
                _log.error("the trace file can't be written", path=str(self._path), why=error.strerror)
            self._failing = True
        else:
            self._failing = False
            self._counts.written_bytes += len(line)

    def _change_file_before(self, num_bytes: int) -> None:
        """Begins a new file if this one would become too long."""
        size = os.fstat(self._descriptor).st_size
        if size == 0 or size + num_bytes <= self._limit_bytes:
            return
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        new = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = new


def _open(path: pathlib.Path) -> int:
    """Opens a file to append to.

    Whom its content concerns only its owner decides, so that it is theirs alone.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, line: bytes) -> None:
    """Appends a whole line.

    What a full disk took of it is cut off again, so that no line is half.
    """
    before = os.fstat(descriptor).st_size
    view = memoryview(line)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise
