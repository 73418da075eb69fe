"""Rows of experts from a GGUF file's blocks, put into the layout of numbers with scales of groups.

The numbers are the file's own: Q8_0 is INT8, and Q4_0 INT4 with zero points of 8, in groups of 32.
Scales are kept in the activations' type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_backend.weights.destination import Destination
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_kernels.weight_formats.gguf_blocks import FILE_BLOCKS, pieces_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.weight_formats.stored_rows import Rows, store_rows

# Kinds of blocks whose numbers a weight with scales of groups can hold.
EXPERT_BLOCKS = {BlockKind.Q8_0: QuantKind.INT8, BlockKind.Q4_0: QuantKind.INT4}
_MIDDLE = 8
# Numbers that are unpacked at a time.
_AT_ONCE = 1 << 22


class ExpertBlockRows(Destination):
    """Some outputs of such a weight, as a file has them."""

    def __init__(self, weight: QuantizedWeight, kind: BlockKind, outputs: range) -> None:
        self._weight, self._kind, self._first = weight, kind, outputs.start
        self.shape, self.dtype, self.device = (len(outputs), weight.num_inputs), weight.dtype, weight.device
        self.block = FILE_BLOCKS[kind]

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`; rows are bytes."""
        step = max(_AT_ONCE // self._weight.num_inputs, 1)
        for offset in range(0, len(rows), step):
            pieces = pieces_of(self._kind, rows[offset : offset + step].to(self.device))
            zeros = None
            if self._weight.zeros is not None:
                zeros = torch.full(pieces.scales.shape, _MIDDLE, dtype=torch.uint8, device=self.device)
            store_rows(Rows(pieces.numbers, pieces.scales.float(), zeros), self._weight, self._first + first + offset)
