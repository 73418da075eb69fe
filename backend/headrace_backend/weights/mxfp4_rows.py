"""Destinations of a weight in MXFP4: a folder's or GGUF file's bytes as they are, or numbers.

Numbers are rounded; they come where weights are made and not read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace_backend.weights.destination import Destination
from headrace_kernels.weight_formats.mxfp4 import (
    GROUP,
    GROUP_BYTES,
    Mxfp4Weight,
    quantize_mxfp4_rows,
    store_blocks,
    store_file_blocks,
    store_scales,
)


class Mxfp4Rows(Destination):
    """Some outputs of a weight, as numbers."""

    def __init__(self, weight: Mxfp4Weight, outputs: range) -> None:
        self._weight, self._first = weight, outputs.start
        self.shape, self.dtype, self.device = (len(outputs), weight.num_inputs), weight.dtype, weight.device
        self.blocks = _StoredRows(self, (GROUP, GROUP_BYTES), store_blocks)
        self.scales = _StoredRows(self, (GROUP, 1), store_scales)
        # A GGUF file's blocks, which begin with their scale.
        self.file_blocks = _StoredRows(self, (GROUP, 1 + GROUP_BYTES), store_file_blocks)

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        quantize_mxfp4_rows(rows.to(self.device), self._weight, self._first + first)

    def store(self, first: int, rows: Tensor, how: Callable[[Mxfp4Weight, int, Tensor], None]) -> None:
        """Stores a folder's or file's bytes [num_rows, bytes] in the rows from `first` on."""
        how(self._weight, self._first + first, rows.to(self.device))


class _StoredRows(Destination):
    """Blocks or scales of the same outputs, as bytes."""

    def __init__(
        self, rows: Mxfp4Rows, block: tuple[int, int], how: Callable[[Mxfp4Weight, int, Tensor], None]
    ) -> None:
        self._rows, self._how, self.block = rows, how, block
        self.shape, self.device, self.dtype = rows.shape, rows.device, torch.uint8

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        self._rows.store(first, rows, self._how)
