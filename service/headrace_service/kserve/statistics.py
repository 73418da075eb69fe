"""Counts and durations of every model, over all service processes of a server.

Owns what ModelStatistics answers. Clients' connections are spread over processes, so each process
counts into a file of its own in the server's private folder, and whoever is asked adds all files
up. One writer per file, eight-byte counters, no lock: a reader may see a request's counters half
written, and right a moment later. A process that is started again goes on with its file; without a
folder, or room in it for the names, a process counts for itself. Models beyond the first 128 names,
or beyond the room, are not counted, which a warning says.

    128 names of 256 bytes | 128 records, each of which takes room once it has a name

Nothing of a file is touched before the file system has promised room for it: on a full one the
kernel ends whoever touches mapped memory that has none.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.kserve.messages.refusals import VERSION

# Responses of a request beyond these are not counted one by one (they are in all other counts).
MAX_RESPONSES = 1024
MAX_BATCH = 16
_MAX_MODELS = 128
_NAME_BYTES = 256
_SUFFIX = ".kserve-statistics"
_INFER = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_BATCH = ("compute_input", "compute_infer", "compute_output")
_RESPONSE = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")

# A model's counters: every duration is a pair (count, nanoseconds).
_RECORD = np.dtype(
    [
        ("last_inference_ms", "<i8"),
        ("inferences", "<i8"),
        ("executions", "<i8"),
        ("infer", "<i8", (len(_INFER), 2)),
        ("batch", "<i8", (MAX_BATCH, len(_BATCH), 2)),
        ("responses", "<i8", (MAX_RESPONSES, len(_RESPONSE), 2)),
    ]
)
_NAME = np.dtype(f"S{_NAME_BYTES}")
_ALL_NAMES_BYTES = _MAX_MODELS * _NAME_BYTES
_FILE_BYTES = _ALL_NAMES_BYTES + _MAX_MODELS * _RECORD.itemsize
_Array = np.ndarray[Any, np.dtype[Any]]
_log = structlog.get_logger("headrace.service")


class _Table(NamedTuple):
    """The names of models, b"" where there is none yet, and the counters of each."""

    names: _Array
    records: _Array


@dataclasses.dataclass(slots=True)
class Durations:
    """How the time of a request was spent, in nanoseconds."""

    total: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0


@dataclasses.dataclass(slots=True)
class ResponseTimes:
    """The responses of one request of a decoupled model, each by two moments.

    The moments, in ns of CLOCK_MONOTONIC, are when it was ready and when it was sent.

    Attributes:
        begin_ns: when computing began.
        ready_ns: per response.
        sent_ns: likewise.
        empty: index of the response that only said it was the last, if there was one.
    """

    begin_ns: int
    ready_ns: list[int] = dataclasses.field(default_factory=list)
    sent_ns: list[int] = dataclasses.field(default_factory=list)
    empty: int | None = None


class ModelCounters:
    """The counters of one model in this process."""

    def __init__(self, record: np.void) -> None:
        self._record = record
        self._infer: npt.NDArray[np.int64] = record["infer"]
        self._batch: npt.NDArray[np.int64] = record["batch"]
        self._responses: npt.NDArray[np.int64] = record["responses"]

    def succeeded(self, durations: Durations, batch_size: int = 1) -> None:
        """Counts a request that was answered whole."""
        parts = [durations.compute_input, durations.compute_infer, durations.compute_output]
        self._infer[0] += (1, durations.total)
        self._infer[2:6] += [(1, part) for part in (durations.queue, *parts)]
        self._batch[min(batch_size, MAX_BATCH) - 1] += [(1, part) for part in parts]
        self._record["inferences"] += batch_size
        self._record["executions"] += 1
        self._record["last_inference_ms"] = time.time_ns() // 1_000_000

    def failed(self, total_ns: int) -> None:
        """Counts a request that ended with an error or was cancelled."""
        self._infer[1] += (1, total_ns)

    def responded(self, times: ResponseTimes) -> None:
        """Counts the responses that a request got."""
        num = min(len(times.sent_ns), MAX_RESPONSES)
        if num == 0:
            return
        ready = np.array(times.ready_ns[:num], dtype=np.int64)
        sent = np.array(times.sent_ns[:num], dtype=np.int64)
        before = np.concatenate(([times.begin_ns], sent[:-1]))
        rows = self._responses[:num]
        columns = np.zeros(rows.shape, dtype=np.int64)
        columns[:, 0, 1] = ready - before
        columns[:, 1, 1] = sent - ready
        columns[:, 2, 1] = sent - before
        columns[:, :3, 0] = 1
        if times.empty is not None and times.empty < num:
            columns[times.empty, 4] = columns[times.empty, 2]
            columns[times.empty, :4] = 0
        rows += np.maximum(columns, 0)

    def response_failed(self, index: int, duration_ns: int, cancelled: bool) -> None:
        """Counts the error, or the end by cancellation, that came in a response's place."""
        if index < MAX_RESPONSES:
            self._responses[index, 5 if cancelled else 3] += (1, max(duration_ns, 0))


class Statistics:
    """The counters of this process, and the sum over all.

    Args:
        folder: shared by the service processes of one server; None: this process alone.
        process_name: names this process's file; unique on the server.
    """

    def __init__(self, folder: pathlib.Path | None, process_name: str) -> None:
        self._folder = folder
        self._own = _with_room(folder / (_file_name(process_name) + _SUFFIX)) if folder is not None else None
        self._table = _in_memory() if self._own is None else _mapped(self._own, "r+")
        self._counters: dict[str, ModelCounters] = {}

    def of(self, name: str) -> ModelCounters:
        """Returns the counters of a model by the name it is asked by."""
        found = self._counters.get(name)
        if found is None:
            found = self._counters[name] = ModelCounters(self._record(name))
        return found

    def report(self, name: str, *, decoupled: bool) -> pb.ModelStatistics:
        """Returns a model's statistics over all processes."""
        key = _key(name)
        total = np.zeros(1, _RECORD)[0]
        for table in self._all_tables():
            for slot in np.flatnonzero(table.names == key):
                _add(total, table.records[slot])
        return _message(name, total, decoupled)

    def _record(self, name: str) -> np.void:
        key = _key(name)
        names, records = self._table
        known, free = np.flatnonzero(names == key), np.flatnonzero(names == b"")
        if not len(known) and not len(free):
            _log.warning("kserve.statistics_full", models=_MAX_MODELS)
            return _uncounted()
        slot = int(known[0] if len(known) else free[0])
        if not self._has_room(slot):
            return _uncounted()
        names[slot] = key
        record: np.void = records[slot]
        return record

    def _has_room(self, slot: int) -> bool:
        """Whether a record may be touched; asks the file system for its room."""
        return self._own is None or _reserve(self._own, _ALL_NAMES_BYTES + slot * _RECORD.itemsize, _RECORD.itemsize)

    def _all_tables(self) -> Iterator[_Table]:
        yield self._table
        if self._folder is None:
            return
        for path in sorted(self._folder.glob("*" + _SUFFIX)):
            if path != self._own:
                table = _read(path)
                if table is not None:
                    yield table


def _uncounted() -> np.void:
    record: np.void = np.zeros(1, _RECORD)[0]
    return record


def _key(name: str) -> bytes:
    return name.encode()[:_NAME_BYTES]


def _file_name(process_name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in process_name)


def _in_memory() -> _Table:
    return _Table(np.zeros(_MAX_MODELS, _NAME), np.zeros(_MAX_MODELS, _RECORD))


def _with_room(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the path of a file with room for its names; None if there is no room.

    The file is new and empty unless there was one.
    """
    if path.exists() and path.stat().st_size == _FILE_BYTES:
        return path
    try:
        path.write_bytes(b"")
    except OSError as error:
        _log.warning("kserve.statistics_without_room", why=error.strerror)
        return None
    if not _reserve(path, 0, _ALL_NAMES_BYTES):
        path.unlink()
        return None
    # Of this size only now: others read no file that is shorter.
    os.truncate(path, _FILE_BYTES)
    return path


def _reserve(path: pathlib.Path, offset: int, num_bytes: int) -> bool:
    """Whether the file system has room for that part of a file, which then is its own.

    Says in the log if not.
    """
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), offset, num_bytes)
    except OSError as error:
        _log.warning("kserve.statistics_without_room", why=error.strerror)
        return False
    return True


def _mapped(path: pathlib.Path, mode: Literal["r", "r+"]) -> _Table:
    names = np.memmap(path, _NAME, mode, shape=(_MAX_MODELS,))
    return _Table(names, np.memmap(path, _RECORD, mode, offset=_ALL_NAMES_BYTES, shape=(_MAX_MODELS,)))


def _read(path: pathlib.Path) -> _Table | None:
    try:
        return _mapped(path, "r")
    except (OSError, ValueError) as error:
        _log.warning("kserve.statistics_unreadable", exception_type=type(error).__name__)
        return None


def _add(total: np.void, record: np.void) -> None:
    for field in ("inferences", "executions", "infer", "batch", "responses"):
        total[field] += record[field]
    total["last_inference_ms"] = max(total["last_inference_ms"], record["last_inference_ms"])


def _message(name: str, total: np.void, decoupled: bool) -> pb.ModelStatistics:
    message = pb.ModelStatistics(
        name=name,
        version=VERSION,
        last_inference=int(total["last_inference_ms"]),
        inference_count=int(total["inferences"]),
        execution_count=int(total["executions"]),
        inference_stats=pb.InferStatistics(**_durations(_INFER, total["infer"])),
    )
    for index in np.flatnonzero(total["batch"][:, 0, 0]):
        message.batch_stats.add(batch_size=int(index) + 1, **_durations(_BATCH, total["batch"][index]))
    if decoupled:
        for index in np.flatnonzero(total["responses"][:, :, 0].any(axis=1)):
            durations = pb.InferResponseStatistics(**_durations(_RESPONSE, total["responses"][index]))
            message.response_stats[str(index)].CopyFrom(durations)
    return message


def _durations(names: Sequence[str], columns: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {
        name: pb.StatisticDuration(count=int(count), ns=int(ns))
        for name, (count, ns) in zip(names, columns, strict=True)
    }
