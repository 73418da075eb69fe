"""The output layer's weight in 8 bits, where the settings ask for one, and what is said of it once
it is there.

    piece of whole rows, of the output layer's tensor or of the embedding's that it is tied to ->
    HeadWeight, a scale per output

Owns that activations stay as they are: logits are compared with each other, so nothing but the
weight is rounded, whatever the card could do. Results are fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_backend.quantization.low_bit_weight import QuantizedRows, RoundedWeight
from headrace_backend.quantization.self_check import QuantizationSummary, check_product, checked_error
from headrace_backend.weights.destination import CopiedRows
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.weight_formats.quantized_weight import Arrangement

_PATH = "lm_head"


class HeadWeight(RoundedWeight):
    """A rank's rows of the vocabulary."""

    def __init__(self, num_outputs: int, num_inputs: int, scheme: Scheme, placement: Placement) -> None:
        """Allocates it, empty."""
        super().__init__(num_outputs, num_inputs, scheme, placement, Arrangement(keeps_activations=True))

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, num_inputs] -> [num_rows, num_outputs] fp32; `out`, if it is given."""
        return quantized_linear.linear(x, self.quantized, None, torch.float32, out)


def summarize_head(scheme: Scheme, targets: Mapping[str, WeightTarget], weight: HeadWeight) -> QuantizationSummary:
    """Checks the output layer and says how far it is from what was read.

    Args:
        scheme: What it was quantized by.
        targets: All targets of the model, filled.
        weight: Its weight.

    Raises:
        QuantizationRefused: It is farther from its original than rounding can bring it, or its
            product differs from the reference.
    """
    name, rows = _filled_by(targets, weight)
    error = checked_error(name, rows)
    check_product(_PATH, weight.quantized, weight.logits)
    return QuantizationSummary(scheme, 8 * weight.num_bytes / weight.num_weights, error, error, name)


def _filled_by(targets: Mapping[str, WeightTarget], weight: HeadWeight) -> tuple[str, QuantizedRows]:
    """The checkpoint's tensor that the weight was made of."""
    for name, target in targets.items():
        into = target.destination
        rows = into.copy if isinstance(into, CopiedRows) else into
        if isinstance(rows, QuantizedRows) and rows.weight is weight.quantized:
            return name, rows
    raise AssertionError("nothing fills the output layer")
