"""Zeroed memory of caches, which on a CPU is taken page by page as it is touched."""

from __future__ import annotations

import math

import numpy as np
import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros.

    On a CPU the kernel hands out its pages as they are touched: torch.zeros writes them all, which
    takes 4 to 14 s for 4 GiB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
