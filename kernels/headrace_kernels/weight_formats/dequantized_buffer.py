"""One buffer per GPU for weights that are dequantized for a product.

All layers share it.

Owns the buffer and how large it is. A weight reserves its part when it is made, so the buffer keeps
its address once a model stands, and captured graphs may use it. Steps of one card run on one
stream, so a product is through with the buffer before the next one writes to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Longer weights are dequantized and multiplied in parts. Parts cost launches, and cuBLAS is slower
# with few outputs at a time: 32 layers of an 8B Llama with 512 rows of INT4 take 14.1 ms whole on
# an H200, 17.4 in parts of 64 MB (docs/experiments.md, "Launch rules of products").
_MOST_BYTES = 1 << 28

_buffers: dict[torch.device, Tensor] = {}


def rows_at_a_time(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """Rows of a weight that are dequantized together."""
    return max(1, min(num_outputs, _MOST_BYTES // (num_inputs * dtype.itemsize)))


def scratch_bytes(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """What a weight of that size needs of the buffer.

    The largest of a card's weights is what the buffer takes.
    """
    return rows_at_a_time(num_outputs, num_inputs, dtype) * num_inputs * dtype.itemsize


def reserve(num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sees to it that the buffer of a card is large enough for a weight.

    Elsewhere there is none.
    """
    needed, device = scratch_bytes(num_outputs, num_inputs, dtype), _indexed(device)
    if device.type == "cuda" and (device not in _buffers or _buffers[device].nbytes < needed):
        # The smaller one goes first: both need not fit.
        _buffers.pop(device, None)
        _buffers[device] = torch.empty(needed, dtype=torch.uint8, device=device)


def release(device: torch.device) -> None:
    """Gives the buffer of a card back, when no weight on it is used any more."""
    _buffers.pop(_indexed(device), None)


def room(num_rows: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_rows, num_inputs] of the buffer, full of what was there; without a card fresh."""
    if device.type != "cuda":
        return torch.empty(num_rows, num_inputs, dtype=dtype, device=device)
    num_bytes = math.prod((num_rows, num_inputs, dtype.itemsize))
    return _buffers[_indexed(device)][:num_bytes].view(dtype).view(num_rows, num_inputs)


def _indexed(device: torch.device) -> torch.device:
    """The card that is meant by one without a number, as its tensors name it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
