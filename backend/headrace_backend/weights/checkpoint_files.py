"""What every way of loading shares.

Open files, reading at an offset, cutting a tensor into pieces, and progress.

Files are read with `preadv`; nothing is mapped, and nothing stays open afterwards, so a file that
is truncated or replaced under a running server can't touch it.
"""

from __future__ import annotations

import math
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.progress import Progress
from headrace_model_folder import InvalidModelFolder, TensorRecord

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}
# e4m3 without its sign: the only code that is not finite.
_E4M3_NAN = 0x7F
_UNIT = 1 << 20

# Parts of rows are read one by one where at least so much lies between two; where less does, it is
# read too, and parts are cut out of memory. A read by itself costs 5 to 20 us however short it is:
# readers take turns at Python's lock for each. GB/s of parts of eight readers on 4 cores, from the
# page cache, one by one and cut: 4 of 8 KiB 0.4 and 3.0; 1 of 8 KiB 0.1 and 1.1; 14 of 28 KiB 0.8
# and 3.4; 3.5 of 28 KiB 0.6 and 1.1; 28 of 112 KiB 1.3 and 2.1; 14 of 112 KiB 0.7 and 1.2; 112 of
# 224 KiB 4.1 and 3.5; 56 of 448 KiB 2.4 and 1.5 (medians). Disks were not measured. Linux reads
# ahead by as much, and ranks follow each other through the files and share the page cache, so that
# together they ask a disk for each byte once.
_LEAST_GAP_BYTES = 128 << 10
# Rows at a time that are cut out of memory: few calls, and still in the processor's cache when they
# are cut.
_SCRATCH_BYTES = 1 << 20


def read_as(record: TensorRecord) -> torch.dtype:
    """The type that a record's bytes are read as: its own, or bytes where it is in blocks."""
    return DTYPES.get(record.dtype, torch.uint8)


class RowSpan(NamedTuple):
    """Which bytes of each row of a checkpoint tensor are kept."""

    # From one row to the next.
    row_bytes: int
    # The first byte that is kept, counted in the row.
    first: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether rows are kept whole, and therefore read in one piece."""
        return self.num_bytes == self.row_bytes

    @property
    def is_apart(self) -> bool:
        """Whether so much lies between the parts of two rows that each is worth a read."""
        return self.row_bytes - self.num_bytes >= _LEAST_GAP_BYTES

    @classmethod
    def of(cls, target: WeightTarget, record: TensorRecord) -> RowSpan:
        """What is kept of a tensor by a target."""
        if target.destination.block is not None:
            row_bytes, rest = divmod(record.num_bytes, record.shape[0])
            assert not rest
            return cls.of_columns(target.kept, (record.shape[0], row_bytes), 1)
        columns, shape = target.columns, record.shape
        if record.columns is not None:
            first, width = record.columns
            assert columns is not None
            columns, shape = range(first + columns.start, first + columns.stop), (shape[0], width)
        return cls.of_columns(columns, shape, DTYPES[record.dtype].itemsize)

    @classmethod
    def of_columns(cls, columns: range | None, shape: tuple[int, ...], itemsize: int) -> RowSpan:
        """Returns the span that is kept of each row where a rank keeps some columns.

        Args:
            columns: Range along dimension 1; None: all there is.
            shape: Shape of the checkpoint tensor.
            itemsize: Bytes of one number.
        """
        row_bytes = math.prod(shape[1:]) * itemsize
        if columns is None:
            return cls(row_bytes, 0, row_bytes)
        return cls(row_bytes, columns.start * itemsize, len(columns) * itemsize)


class CheckpointFiles:
    """Open descriptors by file name, shared by the readers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}
        # Each reader has a scratch buffer of its own.
        self._scratch = threading.local()

    def read(self, into: Tensor, offset: int, file: str, name: str) -> None:
        """Fills a contiguous tensor in host memory with the bytes of `file` from `offset`.

        Raises:
            InvalidModelFolder: The file ends before, or can't be read; it and the tensor `name` are
                named.
        """
        self._read(_bytes_of(into.view(torch.uint8).numpy()), self._descriptor(file), offset, file, name)

    @staticmethod
    def _read(view: memoryview, descriptor: int, offset: int, file: str, name: str) -> None:
        """`read` into bytes, from an open file."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise InvalidModelFolder(f"{file}: tensor {name!r} can't be read: {error.strerror}") from None
            if count == 0:
                raise InvalidModelFolder(f"{file}: is truncated: tensor {name!r} ends before byte {offset + len(view)}")
            done += count

    def read_rows(self, into: Tensor, offset: int, span: RowSpan, file: str, name: str) -> None:
        """Fills a contiguous tensor in host memory with one span of each row that it has place for.

        What lies between is read too where that is faster.

        Args:
            into: [num_rows * span.num_bytes] bytes, of any type.
            offset: Byte offset of the first row.
            span: Bytes that are kept of each row.
            file: Name of the file.
            name: Name of the tensor.

        Raises:
            InvalidModelFolder: As `read`.
        """
        if span.is_whole:
            self.read(into, offset, file, name)
            return
        parts = into.view(torch.uint8).numpy().reshape(-1, span.num_bytes)
        if span.is_apart:
            self._read_parts(parts, offset, span, file, name)
        else:
            self._cut_parts(parts, offset, span, file, name)

    def _read_parts(self, parts: np.ndarray, offset: int, span: RowSpan, file: str, name: str) -> None:
        """Rows' parts, [num_rows, bytes], one by one."""
        # One view for all rows: an array for each would cost more than a short read.
        view, descriptor = _bytes_of(parts.reshape(-1)), self._descriptor(file)
        for index in range(len(parts)):
            part = view[index * span.num_bytes : (index + 1) * span.num_bytes]
            self._read(part, descriptor, offset + index * span.row_bytes + span.first, file, name)

    def _cut_parts(self, parts: np.ndarray, offset: int, span: RowSpan, file: str, name: str) -> None:
        """Reads the rows from the first part to the last, and cuts the parts out of them."""
        rows_at_once = max(_SCRATCH_BYTES // span.row_bytes, 1)
        scratch, descriptor = self._scratch_of(rows_at_once * span.row_bytes), self._descriptor(file)
        for first, end in row_pieces(range(len(parts)), rows_at_once):
            rows = scratch[: (end - first) * span.row_bytes]
            # Ends with the last part: no byte behind it is needed.
            num_bytes = len(rows) - span.row_bytes + span.num_bytes
            begin = offset + first * span.row_bytes + span.first
            self._read(_bytes_of(rows[:num_bytes]), descriptor, begin, file, name)
            # Without Python's lock, as reads are.
            np.copyto(parts[first:end], rows.reshape(-1, span.row_bytes)[:, : span.num_bytes])

    def _scratch_of(self, num_bytes: int) -> np.ndarray:
        """The calling reader's scratch buffer, at least so long."""
        scratch: np.ndarray | None = getattr(self._scratch, "buffer", None)
        if scratch is None or len(scratch) < num_bytes:
            scratch = self._scratch.buffer = np.empty(max(num_bytes, _SCRATCH_BYTES), np.uint8)
        return scratch

    def close(self) -> None:
        """Closes all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise InvalidModelFolder(f"{file}: can't be opened: {error.strerror}") from None
            return self._descriptors[file]


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # arrays are buffers


class ByteCounter:
    """Bytes done so far, reported in MiB whenever another MiB is full."""

    def __init__(self, total: int, progress: Progress, phase: str = "weights") -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = math.ceil(total / _UNIT)
        self._progress = progress
        self._phase = phase
        progress(phase, 0, self._total, "MiB")

    def add(self, num_bytes: int) -> None:
        """Counts bytes, from any thread."""
        with self._lock:
            before, self._done = math.ceil(self._done / _UNIT), self._done + num_bytes
            if math.ceil(self._done / _UNIT) > before:
                self._progress(self._phase, math.ceil(self._done / _UNIT), self._total, "MiB")


def row_pieces(rows: range, rows_per_piece: int) -> Iterator[tuple[int, int]]:
    """Consecutive parts of the rows as (first, end)."""
    for first in range(rows.start, rows.stop, rows_per_piece):
        yield first, min(first + rows_per_piece, rows.stop)


def all_finite(values: Tensor) -> Tensor:
    """Whether no value is a NaN or an infinity, as a bool [] on the device of the values.

    There is at least one value.
    """
    if values.dtype == torch.float8_e4m3fn:
        # Not `all` of comparisons: on a CPU that takes 5.4 ms for 4 MiB, this 0.7.
        return (values.view(torch.uint8) & _E4M3_NAN).amax() != _E4M3_NAN
    if not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, most = values.aminmax()
    return least.isfinite() & most.isfinite()


def reading_order(records: Mapping[str, TensorRecord], targets: Mapping[str, WeightTarget]) -> list[str]:
    """Names of the targets in the order of the files, so that reads follow each other on the disk.

    Targets of a batch stand together, where its largest tensor lies.
    """
    anchors: dict[str, TensorRecord] = {}
    for name, target in targets.items():
        record = records[name]
        if target.batch and (target.batch not in anchors or anchors[target.batch].num_bytes < record.num_bytes):
            anchors[target.batch] = record

    def place(name: str) -> tuple[str, int, str, int]:
        anchor = anchors.get(targets[name].batch, records[name])
        return anchor.file, anchor.offset, records[name].file, records[name].offset

    return sorted(targets, key=place)


def not_finite(file: str, name: str) -> InvalidModelFolder:
    """The refusal of a tensor that holds a NaN or an infinity."""
    return InvalidModelFolder(f"{file}: tensor {name!r} holds a value that is not finite")
