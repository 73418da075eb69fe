"""The output layer's weight in 8 bits, where the settings ask for one.

    piece of whole rows, of the output layer's tensor or of the embedding's that it is tied to ->
    HeadWeight, a scale per output

Owns that activations stay as they are: logits are compared with each other, so nothing but the
weight is rounded, whatever the card could do. Results are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_backend.quantization.low_bit_weight import RoundedWeight
from headrace_backend.quantization.product_check import check_product
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.weight_formats.quantized_weight import Arrangement


class HeadWeight(RoundedWeight):
    """A rank's rows of the vocabulary."""

    def __init__(self, num_outputs: int, num_inputs: int, scheme: Scheme, placement: Placement) -> None:
        """Allocates it, empty."""
        super().__init__(num_outputs, num_inputs, scheme, placement, Arrangement(keeps_activations=True))

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, num_inputs] -> [num_rows, num_outputs] fp32; `out`, if it is given."""
        return quantized_linear.linear(x, self.quantized, None, torch.float32, out)

    def finish(self, layer: str) -> None:
        """Implements `LinearWeight.finish`. Its products are logits."""
        check_product(layer, self.quantized, self.logits)
