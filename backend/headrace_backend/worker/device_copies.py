"""Small columns on their way from the host to the device.

Owns how they get there without either side waiting: through pinned memory, which the copy reads
later, in the order of the stream. torch's pinned allocator gives that memory to no one else until
the copies that read it are done.
"""

from __future__ import annotations

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
