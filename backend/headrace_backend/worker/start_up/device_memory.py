"""Answers what of a card's memory is free, held and needed, by asking CUDA.

Owns the calls into torch's allocator. *Reserved* is what torch has taken from the card, for tensors
or to keep; the *peak* is the most it had reserved since `reset_peak`.
"""

from __future__ import annotations

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Answers in bytes. Numbers are those of this process, but for `total` and `free`."""

    def total(self) -> int:
        """All of the device's memory."""

    def free(self) -> int:
        """What nobody uses."""

    def allocated(self) -> int:
        """What tensors hold."""

    def reserved(self) -> int:
        """What torch has taken from the device."""

    def peak_reserved(self) -> int:
        """The most that torch had taken since the last `reset_peak`."""

    def reset_peak(self) -> None:
        """Forgets earlier peaks."""

    def release(self) -> None:
        """Waits for the device, and gives back what no tensor holds."""


class CudaMemory:
    """`DeviceMemory` of one card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Implements `DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """Implements `DeviceMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        """Implements `DeviceMemory.allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        """Implements `DeviceMemory.reserved`."""
        return torch.cuda.memory_reserved(self._device)

    def peak_reserved(self) -> int:
        """Implements `DeviceMemory.peak_reserved`."""
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        """Implements `DeviceMemory.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Implements `DeviceMemory.release`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
