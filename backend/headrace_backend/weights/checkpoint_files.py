"""What every way of loading shares: open files, reading at an offset, cutting a tensor into pieces, and progress.

Files are read with `preadv`; nothing is mapped, and nothing stays open afterwards, so a file that is truncated or replaced under a running server can't touch it.
"""

from __future__ import annotations

import math
import os
import pathlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace_backend.weights.progress import Progress
from headrace_model_folder import InvalidModelFolder, TensorRecord

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNIT = 1 << 20


def read_as(record: TensorRecord) -> torch.dtype:
    """The type that a record's bytes are read as: its own, or bytes where it is in blocks."""
    return DTYPES.get(record.dtype, torch.uint8)


def row_bytes(record: TensorRecord) -> int:
    """Bytes of one row of a tensor."""
    return record.num_bytes // record.shape[0] if record.num_bytes else 0


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
        descriptor = self._descriptor(file)
        view = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays are buffers
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise InvalidModelFolder(f"{file}: tensor {name!r} can't be read: {error.strerror}") from None
            if count == 0:
                raise InvalidModelFolder(f"{file}: is truncated: tensor {name!r} ends before byte {offset + len(view)}")
            done += count

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


def not_finite(file: str, name: str) -> InvalidModelFolder:
    """The refusal of a tensor that holds a NaN or an infinity."""
    return InvalidModelFolder(f"{file}: tensor {name!r} holds a value that is not finite")
