"""The KV caches: one tensor per layer, allocated once, and the copies of whole blocks that a plan asks for.

Owns how the memory is made and how blocks are copied before a forward pass. Does not own how many blocks there are (`memory_plan`) nor who holds which (the engine).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from headrace_backend.step_plan import ForwardPlan
from headrace_backend.worker.device_copies import indices_on_device
from headrace_kernels.kv_cache import copy_blocks


def allocate_kv_caches(
    num_layers: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One zeroed cache [num_blocks, 2, num_kv_heads, block_size, head_dim] per layer.

    Zeros, because attention multiplies what lies behind a row's end by 0, and 0 times a NaN is a NaN.
    """
    if device.type == "cpu":
        return [_lazy_zeros(shape, dtype) for _ in range(num_layers)]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]


def copy_planned_blocks(plan: ForwardPlan, kv_caches: list[torch.Tensor]) -> None:
    """Copies the plan's blocks in every layer; after its table updates, before its forward pass."""
    if plan.copy_sources.size:
        device = kv_caches[0].device
        sources, targets = (indices_on_device(blocks, device) for blocks in (plan.copy_sources, plan.copy_targets))
        copy_blocks(kv_caches, sources, targets)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the kernel hands out page by page as they are touched. torch.zeros writes them all: 4 to 14 s for 4 GiB."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
