"""Sums over all calibration tokens of a product's inputs, from which methods compute errors.

No method needs the tokens themselves.

For inputs X [tokens, K], a weight W and its approximation V, the squared error of the outputs is
||X (W - V)^T||^2 = trace((W - V) X^T X (W - V)^T).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace_quantize.checks import QuantizeRefused


class InputStatistics:
    """Sums over one product's inputs, fp32 on the inputs' device."""

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        # X^T X [K, K], half the Hessian of the squared error with respect to one output's weights.
        self.gram = torch.zeros(num_inputs, num_inputs, device=device)
        self._sizes = torch.zeros(num_inputs, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Adds [tokens, K]."""
        wide = x.float()
        self.gram.addmm_(wide.t(), wide)
        self._sizes += wide.abs().sum(0)
        self.tokens += len(x)

    def mean_sizes(self) -> Tensor:
        """[K] mean of |x|."""
        return self._sizes / max(self.tokens, 1)

    def check(self, name: str) -> None:
        """Looks whether all is finite.

        Raises:
            QuantizeRefused: It is not: the model overflows on this text. Names the projection.
        """
        if not bool(torch.isfinite(self.gram.sum())):
            raise QuantizeRefused(f"--calibration: the inputs of {name} are not finite on this text")


def output_error(difference: Tensor, gram: Tensor) -> Tensor:
    """Squared error of each output, [outputs]; never negative.

    Args:
        difference: [outputs, K] fp32.
        gram: [K, K].
    """
    return (difference @ gram).mul_(difference).sum(1).clamp_(min=0)


def rounding_error(weight: Tensor, dequantized: Tensor, gram: Tensor | None) -> float:
    """Relative error of the outputs; without a Gram matrix of the inputs that of the weights."""
    if gram is not None:
        return relative_output_error(weight, dequantized, gram)
    return float((weight - dequantized).norm() / weight.norm().clamp(min=torch.finfo(torch.float32).tiny))


def relative_output_error(weight: Tensor, approximation: Tensor, gram: Tensor) -> float:
    """||X (W - V)^T|| / ||X W^T||; 0 where the outputs are 0 and stay so."""
    error, whole = (float(output_error(part, gram).sum()) for part in (weight - approximation, weight))
    if whole == 0:
        return 0.0 if error == 0 else float("inf")
    return math.sqrt(error / whole)
