"""Small columns on their way from the host to the device.

Owns how they get there without either side waiting: through pinned memory, which the copy reads
later, in the order of the stream. torch's pinned allocator gives that memory to no one else until
the copies that read it are done. What is large and comes while the device computes goes beside its
stream (`EarlyCopies`).
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch


def staging_memory(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host, not written yet, that a device can copy from while the host goes on."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_to_device(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of the column on the device, of the same type and shape.

    The column may be written, or its memory go, at once.
    """
    dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
    host = staging_memory(column.shape, dtype, device)
    host.numpy()[...] = column
    return host.to(device, non_blocking=True)


def indices_on_device(column: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """Indices as int64 on the device."""
    return copy_to_device(column.astype(np.int64, copy=False), device)


class EarlyCopies:
    """Copies that do not wait for what was launched before them, only what is launched after."""

    def __init__(self, device: torch.device) -> None:
        """Takes a stream of its own where the device has some."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, *columns: npt.NDArray[np.int32]) -> list[torch.Tensor]:
        """One copy of several columns: each as it was, flat, on the device.

        They may be used by what the current stream is given from now on.
        """
        ends = list(itertools.accumulate(column.size for column in columns))
        host = staging_memory(ends[-1], torch.int32, self._device)
        parts = [slice(end - column.size, end) for column, end in zip(columns, ends, strict=True)]
        for part, column in zip(parts, columns, strict=True):
            host.numpy()[part] = column.reshape(-1)
        there = self._copied(host)
        return [there[part] for part in parts]

    def _copied(self, host: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return host.to(self._device)
        with torch.cuda.stream(self._stream):
            there = host.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # Its memory is the copies' stream's, which may not write it again before it was read.
        there.record_stream(current)
        return there
