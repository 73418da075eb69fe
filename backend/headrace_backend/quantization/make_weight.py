"""Which weight a layer's product gets: what its placement asks for."""

from __future__ import annotations

from headrace_backend.quantization.linear_weight import LinearWeight, PlainWeight
from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.weights.placement import Placement
from headrace_kernels.linear import empty_weight


def make_weight(num_outputs: int, num_inputs: int, placement: Placement) -> LinearWeight:
    """An empty weight of the placement's type and scheme.

    Raises:
        QuantizationRefused: The scheme's groups do not divide the inputs.
    """
    if placement.scheme is not None:
        return LowBitWeight(num_outputs, num_inputs, placement.scheme, placement)
    return PlainWeight(empty_weight(num_outputs, num_inputs, placement.dtype, placement.device))
