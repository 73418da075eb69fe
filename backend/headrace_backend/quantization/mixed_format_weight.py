"""A mixed-format weight: each projection multiplies by itself, and results are put side by side.

Owns that and no arithmetic. It costs a launch per part, and nothing is fused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from headrace_backend.quantization.linear_weight import LinearWeight, WeightReport, total_report
from headrace_backend.weights.destination import Destination
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.swiglu import swiglu


class MixedFormatWeight(LinearWeight):
    """Outputs of several weights of the same inputs, in order."""

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = sum(part.num_outputs for part in parts), parts[0].num_inputs
        self.parts = nn.ModuleList(parts)
        # The same, with their type.
        self._parts = tuple(parts)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.multiply`."""
        found, first = [], 0
        for part in self._parts:
            own = None if bias is None else bias[first : first + part.num_outputs]
            found.append(part.multiply(x, own))
            first += part.num_outputs
        return torch.cat(found, dim=1)

    def after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.after_norm`."""
        return self.multiply(rms_norm(x, norm_weight, eps), bias)

    def swiglu_after_norm(self, x: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Implements `LinearWeight.swiglu_after_norm`."""
        return swiglu(self.after_norm(x, norm_weight, eps, bias))

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Implements `LinearWeight.add_to`."""
        residual.add_(self.multiply(x, bias))

    def fuses(self, num_tokens: int) -> bool:
        """Implements `LinearWeight.fuses`."""
        return False

    def launch_kind(self) -> Hashable:
        """Implements `LinearWeight.launch_kind`."""
        return type(self), tuple(part.launch_kind() for part in self._parts)

    def destination(self, outputs: range) -> Destination:
        """Implements `LinearWeight.destination`. The outputs are those of one part."""
        first = 0
        for part in self._parts:
            if outputs == range(first, first + part.num_outputs):
                return part.destination(range(part.num_outputs))
            first += part.num_outputs
        raise AssertionError(f"{outputs} are no part")

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`."""
        for part in self._parts:
            part.finish(layer)

    def report(self) -> WeightReport:
        """Implements `LinearWeight.report`."""
        return total_report(self._parts)
