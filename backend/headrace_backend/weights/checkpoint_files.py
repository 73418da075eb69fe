"""What every way of loading shares: open files, reading at an offset, cutting a tensor into pieces, and progress.

Files are read with `preadv`; nothing is mapped, and nothing stays open afterwards, so a file that is truncated or replaced under a running server can't touch it.
"""

from __future__ import annotations

import math
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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


# Below, a read for each row costs more than reading what lies between: a call takes about as long as copying so much. Not measured on disks.
_LEAST_SPAN_BYTES = 4096


def read_as(record: TensorRecord) -> torch.dtype:
    """The type that a record's bytes are read as: its own, or bytes where it is in blocks."""
    return DTYPES.get(record.dtype, torch.uint8)


class RowSpan(NamedTuple):
    """Which bytes of each row of a checkpoint tensor are read."""

    # From one row to the next.
    row_bytes: int
    # The first byte that is read, counted in the row.
    first: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether rows are read whole, and therefore in one piece."""
        return self.num_bytes == self.row_bytes

    @classmethod
    def of(cls, target: WeightTarget, record: TensorRecord) -> RowSpan:
        """What is read of a tensor for a target."""
        if target.destination.block is not None:
            row_bytes, rest = divmod(record.num_bytes, record.shape[0])
            assert not rest
            return cls.of_columns(target.kept, (record.shape[0], row_bytes), 1)
        return cls.of_columns(target.columns, record.shape, DTYPES[record.dtype].itemsize)

    @classmethod
    def of_columns(
        cls, columns: range | None, shape: tuple[int, ...], itemsize: int, least: int = _LEAST_SPAN_BYTES
    ) -> RowSpan:
        """What is read where a rank keeps some columns: those alone if they are worth a read for each row, else whole rows.

        Args:
            columns: Along dimension 1; None: all there is.
            shape: Of the checkpoint tensor.
            itemsize: Bytes of a number.
            least: Of a span that is read by itself.
        """
        row_bytes = math.prod(shape[1:]) * itemsize
        if columns is None or len(columns) * itemsize < least:
            return cls(row_bytes, 0, row_bytes)
        return cls(row_bytes, columns.start * itemsize, len(columns) * itemsize)


class CheckpointFiles:
    """Open descriptors by file name, shared by the readers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}

    def read(self, into: Tensor, offset: int, file: str, name: str) -> None:
        """Fills a contiguous tensor in host memory with the bytes of `file` from `offset`.

        Raises:
            InvalidModelFolder: The file ends before, or can't be read; it and the tensor `name` are named.
        """
        self._read(memoryview(into.view(torch.uint8).numpy()), offset, file, name)  # type: ignore[arg-type]  # arrays are buffers

    def _read(self, view: memoryview, offset: int, file: str, name: str) -> None:
        """`read` into bytes."""
        descriptor = self._descriptor(file)
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
        """Fills a contiguous tensor in host memory with the span of as many rows as it has place for.

        Args:
            into: [num_rows * span.num_bytes] bytes, of any type.
            offset: Of the first row.
            span: What is read of each.
            file: Its name.
            name: The tensor's.

        Raises:
            InvalidModelFolder: As `read`.
        """
        if span.is_whole:
            self.read(into, offset, file, name)
            return
        # One view for all rows: a tensor for each would cost more than a short read.
        view = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays are buffers
        for index in range(len(view) // span.num_bytes):
            row = view[index * span.num_bytes : (index + 1) * span.num_bytes]
            self._read(row, offset + index * span.row_bytes + span.first, file, name)

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


class ByteCounter:
    """Bytes done so far, reported in MiB whenever another MiB is full."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = math.ceil(total / _UNIT)
        self._progress = progress
        progress("weights", 0, self._total, "MiB")

    def add(self, num_bytes: int) -> None:
        """Counts bytes, from any thread."""
        with self._lock:
            before, self._done = math.ceil(self._done / _UNIT), self._done + num_bytes
            if math.ceil(self._done / _UNIT) > before:
                self._progress("weights", math.ceil(self._done / _UNIT), self._total, "MiB")


def row_pieces(rows: range, rows_per_piece: int) -> Iterator[tuple[int, int]]:
    """Consecutive parts of the rows as (first, end)."""
    for first in range(rows.start, rows.stop, rows_per_piece):
        yield first, min(first + rows_per_piece, rows.stop)


def all_finite(values: Tensor) -> Tensor:
    """[] whether no value is a NaN or an infinity, on the device of the values, of which there is at least one."""
    if values.dtype == torch.float8_e4m3fn:
        return ((values.view(torch.uint8) & _E4M3_NAN) != _E4M3_NAN).all()
    if not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, most = values.aminmax()
    return least.isfinite() & most.isfinite()


def reading_order(records: Mapping[str, TensorRecord], targets: Mapping[str, WeightTarget]) -> list[str]:
    """Names of the targets as they lie in the files, so that reads follow each other on the disk; those of a batch together, where its largest tensor lies."""
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
