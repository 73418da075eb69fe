"""What launch rules ask of the card: how much of something it has, and what it can do.

Owns the questions and their answers, each asked of the driver once. For CPU tensors, on which
kernels run in the interpreter or are compiled in tests, the answers are those of a small card.
"""

from __future__ import annotations

import functools

import torch

# Shared memory of a program on sm_86 and sm_89, the smallest that kernels are compiled for.
_SMALL_SHARED_BYTES = 101_376
_SMALL_MULTIPROCESSORS = 2


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take."""
    if device.type != "cuda":
        return _SMALL_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stubs


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the card."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _SMALL_MULTIPROCESSORS
    )


@functools.cache
def has_warpgroup_products(device: torch.device) -> bool:
    """Whether products take operands from shared memory (sm_90 and later).

    Older GPUs have them in registers, and tiles must be smaller.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_warpgroup_instructions(device: torch.device) -> bool:
    """Whether the GPU has sm_90's own instructions for those products.

    Later GPUs have others.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles can be read by descriptor: cards from sm_90 on, and the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_fp8_products(device: torch.device) -> bool:
    """Whether tensor cores multiply e4m3 (sm_89 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels can start while the one before them runs (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
