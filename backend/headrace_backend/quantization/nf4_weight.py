"""Rows that are rounded to NF4 while they come.

    piece of whole rows -quantize_rows-> BlockWeight -dequantize_rows-> distance from the piece

Owns how far they may be: the widest gap between NF4's numbers, and what rounding a scale adds. The
original is never held beyond its piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.tensor_error import RoundedRows
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import Placement
from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight, dequantize_rows
from headrace_kernels.weight_formats.nf4 import GROUP, quantize_rows

# Half the widest gap, between -1 and the number after it; of the scale.
_NUMBER_ERROR = (1 - 0.6961928) / 2
# Half the widest gap of the 8 bits of a scale; of the largest scale of a row at most.
_SCALE_ERROR = 0.0071
# Weights that are in fp32 at a time while they are compared: 16 MB.
_BLOCK_NUMBERS = 1 << 22


class Nf4Weight(BlockLinearWeight):
    """Projections that are rounded to NF4 on their device."""

    def __init__(self, num_outputs: int, num_inputs: int, placement: Placement) -> None:
        """Allocates it, empty.

        Raises:
            QuantizationRefused: Blocks do not divide the inputs.
        """
        super().__init__((BlockKind.NF4,), (num_outputs,), num_inputs, placement, nested=0)

    def destination(self, outputs: range) -> Destination:
        """Implements `LinearWeight.destination`."""
        return Nf4Rows(self.blocks[0], outputs)


class Nf4Rows(RoundedRows):
    """Some outputs of a weight, rounded while they come."""

    def __init__(self, weight: BlockWeight, outputs: range) -> None:
        self._weight, self._outputs = weight, outputs
        self.shape, self.dtype, self.device = (len(outputs), weight.num_inputs), weight.dtype, weight.device
        # Squares: of the differences, of the largest possible ones, of the original.
        self._sums = torch.zeros(3, dtype=torch.float32, device=weight.device)

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        begin, step = self._outputs.start + first, max(_BLOCK_NUMBERS // self._weight.num_inputs, 1)
        for offset in range(0, len(rows), step):
            self._quantize(rows[offset : offset + step].to(self.device), begin + offset)

    def error(self) -> tuple[float, float]:
        """Implements `RoundedRows.error`."""
        difference, limit, square = self._sums.tolist()
        if square == 0:
            return (0.0 if difference == 0 else float("inf")), 0.0
        return (difference / square) ** 0.5, (limit / square) ** 0.5

    def _quantize(self, rows: Tensor, begin: int) -> None:
        quantize_rows(rows, self._weight, begin)
        found = torch.empty_like(rows, dtype=torch.float32)
        dequantize_rows(self._weight, slice(begin, begin + len(rows)), found)
        exact = rows.float()
        scales = exact.abs().view(len(rows), -1, GROUP).amax(2)
        most = _NUMBER_ERROR * scales + _SCALE_ERROR * scales.amax(1, keepdim=True)
        self._sums += torch.stack([(found - exact).square().sum(), most.square().sum() * GROUP, exact.square().sum()])
