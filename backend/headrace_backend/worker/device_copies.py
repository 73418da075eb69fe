"""Small columns on their way from the host to the device.

Owns how they get there without either side waiting: through pinned memory, which the copy reads later, in the order of the stream. On a CPU there is nothing to copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def copy_to_device(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The column as a tensor of the same type on the device. On a CPU it may share the column's memory, so the column must not be written afterwards."""
    tensor = torch.from_numpy(column)
    if device.type == "cpu":
        return tensor
    # torch's pinned allocator gives memory to no one else until the copies that read it are done.
    return tensor.pin_memory().to(device, non_blocking=True)


def indices_on_device(column: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """Indices as int64 on the device."""
    return copy_to_device(column.astype(np.int64), device)
