"""Reads a folder's tensors into their targets by offset and in parallel, cutting and casting.

Owns the choice between the two ways and the one for a CPU: each reader takes a tensor and reads it
piece by piece into a buffer of its own. The way to a GPU is `pinned_loader`. The offsets come from
validated headers. A tensor that holds a NaN or an infinity is refused.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Mapping
from typing import Protocol

import torch

from headrace_backend.weights.checkpoint_files import (
    ByteCounter,
    CheckpointFiles,
    RowSpan,
    all_finite,
    not_finite,
    read_as,
    reading_order,
    row_pieces,
)
from headrace_backend.weights.pinned_loader import PINNED_BYTES, CudaTransfer, load_through_buffers
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.progress import Progress
from headrace_model_folder import TensorRecord

# One read: large enough for full bandwidth, small enough that the copy out of it finds it in the
# cache.
_PIECE_BYTES = 16 << 20
_NUM_READERS = 4


class WeightsFolder(Protocol):
    """A folder whose tensors are known."""

    @property
    def weights_folder(self) -> pathlib.Path:
        """The folder that the tensors' files are in."""

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """Name -> place in a file."""


def pinned_bytes(device: torch.device) -> int:
    """Host memory that is pinned while weights are read for a device."""
    return PINNED_BYTES if device.type == "cuda" else 0


def load_weights(
    folder: WeightsFolder, targets: Mapping[str, WeightTarget], progress: Progress, phase: str = "weights"
) -> None:
    """Fills every target from the folder's tensor of the same name.

    Args:
        folder: A folder opened with its weights.
        targets: Checkpoint tensor name -> where it goes. All on one device.
        progress: Called with (phase, done, total, unit), from several threads but one at a time.
        phase: What to call it there.

    Raises:
        InvalidModelFolder: a file is shorter than its header says, unreadable, or a tensor is not
            finite; file and tensor are named.
    """
    files = CheckpointFiles(folder.weights_folder)
    counter = ByteCounter(sum(folder.tensors[name].num_bytes for name in targets), progress, phase)
    device = next(iter(targets.values())).device
    try:
        if device.type == "cuda":
            transfer = CudaTransfer(device)
            load_through_buffers(files, folder.tensors, targets, counter, transfer)
            transfer.give_back_buffers()
        else:
            _load_directly(files, folder.tensors, targets, counter)
    finally:
        files.close()


def _load_directly(
    files: CheckpointFiles,
    records: Mapping[str, TensorRecord],
    targets: Mapping[str, WeightTarget],
    counter: ByteCounter,
) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weights")
    try:
        readers = [
            pool.submit(_read_tensor, files, name, records[name], targets[name], counter)
            for name in reading_order(records, targets)
        ]
        for reader in concurrent.futures.as_completed(readers):
            reader.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_tensor(
    files: CheckpointFiles, name: str, record: TensorRecord, target: WeightTarget, counter: ByteCounter
) -> None:
    """Reads the target's rows piece by piece.

    Of each row only what the target keeps is read if that is worth it, else all, to be cut
    afterwards.
    """
    dtype, span = read_as(record), RowSpan.of(target, record)
    rows_per_piece = max(_PIECE_BYTES // max(span.num_bytes, 1), 1)
    for first, last in row_pieces(target.rows, rows_per_piece):
        piece = torch.empty((last - first) * span.num_bytes // dtype.itemsize, dtype=dtype)
        files.read_rows(piece, record.offset + first * span.row_bytes, span, record.file, name)
        if piece.numel() and not all_finite(piece):
            raise not_finite(record.file, name)
        target.put(piece, first, last)
        counter.add(piece.nbytes)
    # Bytes that other ranks keep count as done, so that the total is the checkpoint's.
    counter.add(record.num_bytes - len(target.rows) * span.num_bytes)
