"""Weights of few bits: their common parts, and weights whose rows are quantized as they come.

    piece of whole rows -quantize_rows-> QuantizedWeight -dequantize_rows-> how far they are from
    the piece

Owns what a loader sees of such a weight. The original is never held beyond its piece. Weights that
another tool quantized are `stored_weight`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch
from torch import Tensor

from headrace_backend.quantization.linear_weight import LinearWeight, WeightReport
from headrace_backend.quantization.product_check import check_product
from headrace_backend.quantization.tensor_error import RoundedRows, TensorError
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.launch_kind import launch_kind
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import (
    INPUT_NUMBERS,
    PLAIN,
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize_rows,
    quantize_rows,
)

# Weights that are in fp32 at a time while they are compared: 16 MB.
_BLOCK_NUMBERS = 1 << 22


class LowBitWeight(LinearWeight):
    """A weight of few bits, of one or several projections that share an input.

    Each projection is filled by a destination of its own.
    """

    def __init__(self, quantized: QuantizedWeight) -> None:
        """Takes an empty one."""
        super().__init__()
        self.num_outputs, self.num_inputs = quantized.num_outputs, quantized.num_inputs
        self.quantized = quantized
        # How the folder says that inputs are rounded, where `quantized` does not say it.
        self.stated_inputs: InputRounding | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes, scales and zero points included."""
        return self.quantized.num_bytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.multiply`."""
        return quantized_linear.linear(x, self.quantized, bias)

    def after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.after_norm`."""
        return quantized_linear.norm_linear(x, norm_weight, eps, self.quantized, bias)

    def swiglu_after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.swiglu_after_norm`."""
        return quantized_linear.norm_swiglu(x, norm_weight, eps, self.quantized, bias)

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Implements `LinearWeight.add_to`."""
        quantized_linear.linear_add(x, self.quantized, bias, residual)

    def fuses(self, num_tokens: int) -> bool:
        """Implements `LinearWeight.fuses`."""
        return quantized_linear.fuses(num_tokens, self.quantized)

    def launch_kind(self) -> Hashable:
        """Implements `LinearWeight.launch_kind`."""
        return type(self), launch_kind(self.quantized)

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """Implements `LinearWeight.rounds_to`."""
        return quantized_linear.rounds_to(num_tokens, self.quantized)

    def input_rounding(self, num_tokens: int) -> InputRounding | None:
        """How a product of so many tokens rounds them first; None: it takes them as they are."""
        return quantized_linear.input_rounding(num_tokens, self.quantized)

    def multiply_rounded(self, tokens: RoundedTokens, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.multiply_rounded`."""
        return quantized_linear.rounded_linear(tokens, self.quantized, bias)

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`."""
        check_product(layer, self.quantized, lambda rows: self.multiply(rows, None))

    def report(self) -> WeightReport:
        """Implements `LinearWeight.report`."""
        return WeightReport(self.num_bytes, {self.quantized.kind.value: self.num_weights})


class RoundedWeight(LowBitWeight):
    """A weight that is quantized by a scheme of the settings."""

    def __init__(
        self,
        num_outputs: int,
        num_inputs: int,
        scheme: Scheme,
        placement: Placement,
        arrangement: Arrangement = PLAIN,
    ) -> None:
        """Allocates it, empty.

        Raises:
            QuantizationRefused: The scheme's groups do not divide the inputs.
        """
        group = scheme.group(num_inputs)
        assert isinstance(scheme.kind, QuantKind)
        if scheme.rounds_inputs:
            arrangement = dataclasses.replace(arrangement, inputs=InputRounding(INPUT_NUMBERS[scheme.kind]))
        sizes = (num_outputs, num_inputs, group)
        super().__init__(allocate(scheme.kind, *sizes, placement.dtype, placement.device, arrangement))

    def destination(self, outputs: range) -> Destination:
        """Implements `LinearWeight.destination`."""
        return QuantizedRows(self.quantized, outputs)


class QuantizedRows(RoundedRows):
    """Some outputs of a weight, quantized while they come."""

    def __init__(self, weight: QuantizedWeight, outputs: range) -> None:
        self.weight = weight
        self._outputs = outputs
        self.shape, self.dtype, self.device = (len(outputs), weight.num_inputs), weight.dtype, weight.device
        self._error = TensorError(weight.kind, weight.group_size, weight.device)
        # [num_rows] fp32, the largest magnitudes of whole rows, where these are a rank's parts of
        # them; None: the rows' own. To be set before any row comes.
        self.magnitudes: Tensor | None = None

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        step = max(_BLOCK_NUMBERS // self.weight.num_inputs, 1)
        for offset in range(0, len(rows), step):
            self._quantize(rows[offset : offset + step].to(self.device), first + offset)

    def error(self) -> tuple[float, float]:
        """Implements `RoundedRows.error`."""
        return self._error.read()

    def _quantize(self, rows: Tensor, first: int) -> None:
        begin = self._outputs.start + first
        magnitudes = None if self.magnitudes is None else self.magnitudes[first : first + len(rows)]
        quantize_rows(rows, self.weight, begin, magnitudes)
        found = torch.empty_like(rows, dtype=torch.float32)
        dequantize_rows(self.weight, slice(begin, begin + len(rows)), found)
        self._error.add(rows, found, magnitudes)
