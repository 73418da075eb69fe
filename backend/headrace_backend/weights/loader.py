"""Reads a folder's tensors into their targets: by offset, in parallel, cut and cast while they are read.

Files are read with `preadv` into buffers of bounded size; nothing stays mapped or open afterwards, so a file that is truncated or replaced under a running server can't
touch it. The offsets come from validated headers. A tensor that holds a NaN or an infinity is refused.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from headrace_backend.weights.placement import WeightTarget
from headrace_model_folder import InvalidModelFolder, ModelFolder, TensorRecord

# One read: large enough for full bandwidth, small enough that few buffers are cheap to pin.
_PIECE_BYTES = 16 << 20
_NUM_READERS = 4
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNIT = 1 << 20

Progress = Callable[[str, int, int, str], None]


def load_weights(folder: ModelFolder, targets: Mapping[str, WeightTarget], progress: Progress) -> None:
    """Fills every target from the folder's tensor of the same name.

    Args:
        folder: A folder opened with its weights.
        targets: Checkpoint tensor name -> where it goes.
        progress: Called with (phase, done, total, unit), from several threads but one at a time.

    Raises:
        InvalidModelFolder: a file is shorter than its header says, unreadable, or a tensor is not finite; file and tensor are named.
    """
    files = _Files(folder.path)
    total = sum(folder.tensors[name].num_bytes for name in targets)
    counter = _Counter(total, progress)
    pool = concurrent.futures.ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weights")
    try:
        readers = [
            pool.submit(_read_tensor, files, name, folder.tensors[name], target, counter)
            for name, target in targets.items()
        ]
        for reader in concurrent.futures.as_completed(readers):
            reader.result()
    finally:
        pool.shutdown(cancel_futures=True)
        files.close()


class _Files:
    """Open descriptors by file name, shared by the readers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}

    def descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise InvalidModelFolder(f"{file}: can't be opened: {error.strerror}") from None
            return self._descriptors[file]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class _Counter:
    """Bytes done so far, reported in MiB whenever another MiB is full."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = math.ceil(total / _UNIT)
        self._progress = progress
        progress("weights", 0, self._total, "MiB")

    def add(self, num_bytes: int) -> None:
        with self._lock:
            before, self._done = math.ceil(self._done / _UNIT), self._done + num_bytes
            if math.ceil(self._done / _UNIT) > before:
                self._progress("weights", math.ceil(self._done / _UNIT), self._total, "MiB")


def _read_tensor(files: _Files, name: str, record: TensorRecord, target: WeightTarget, counter: _Counter) -> None:
    """Reads the target's rows piece by piece; columns are cut after reading, since a row's bytes lie together."""
    dtype = _DTYPES[record.dtype]
    row_length = math.prod(record.shape[1:])
    rows_per_piece = max(_PIECE_BYTES // max(row_length * dtype.itemsize, 1), 1)
    descriptor = files.descriptor(record.file)
    for first, last in _pieces(target.rows, rows_per_piece):
        offset = record.offset + first * row_length * dtype.itemsize
        piece = torch.empty((last - first) * row_length, dtype=dtype, pin_memory=target.tensor.is_cuda)
        _read_exactly(descriptor, piece, offset, record.file, name)
        _check_finite(piece, record.file, name)
        _place(piece, target, first, last)
        counter.add((last - first) * row_length * dtype.itemsize)
    # Bytes of rows that other ranks keep count as done, so that the total is the checkpoint's.
    counter.add(record.num_bytes - len(target.rows) * row_length * dtype.itemsize)


def _pieces(rows: range, rows_per_piece: int) -> Iterator[tuple[int, int]]:
    for first in range(rows.start, rows.stop, rows_per_piece):
        yield first, min(first + rows_per_piece, rows.stop)


def _read_exactly(descriptor: int, piece: Tensor, offset: int, file: str, name: str) -> None:
    view = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays are buffers
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise InvalidModelFolder(f"{file}: tensor {name!r} can't be read: {error.strerror}") from None
        if count == 0:
            raise InvalidModelFolder(f"{file}: is truncated: tensor {name!r} ends before byte {offset + len(view)}")
        done += count


def _check_finite(piece: Tensor, file: str, name: str) -> None:
    if piece.numel() and not all(math.isfinite(bound) for bound in piece.aminmax()):
        raise InvalidModelFolder(f"{file}: tensor {name!r} holds a value that is not finite")


def _place(piece: Tensor, target: WeightTarget, first: int, last: int) -> None:
    rows = target.tensor[first - target.rows.start : last - target.rows.start]
    if target.columns is None:
        rows.copy_(piece)
    else:
        rows.copy_(piece.view(last - first, -1)[:, target.columns.start : target.columns.stop])
