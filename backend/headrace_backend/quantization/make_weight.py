"""Which weight a layer's product gets: what its placement asks for."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.linear_weight import LinearWeight, PlainWeight
from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.quantization.nf4_weight import Nf4Weight
from headrace_backend.weights.placement import Placement
from headrace_kernels.block_weight import BlockKind
from headrace_kernels.linear import empty_weight


def make_weight(
    num_outputs: int, num_inputs: int, placement: Placement, sizes: Sequence[int] | None = None
) -> LinearWeight:
    """An empty weight of the placement's type and scheme, or as the file has it.

    Args:
        num_outputs: Of all projections.
        num_inputs: Of all.
        placement: What it asks for.
        sizes: Outputs of each projection, where there are several.

    Raises:
        QuantizationRefused: The scheme's groups or the file's blocks do not divide the inputs.
    """
    if (kinds := placement.stored_kinds) is not None:
        return BlockLinearWeight(kinds, sizes or (num_outputs,), num_inputs, placement)
    if placement.scheme is not None and placement.scheme.kind is BlockKind.NF4:
        return Nf4Weight(num_outputs, num_inputs, placement)
    if placement.scheme is not None:
        return LowBitWeight(num_outputs, num_inputs, placement.scheme, placement)
    return PlainWeight(empty_weight(num_outputs, num_inputs, placement.dtype, placement.device))
