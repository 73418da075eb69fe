"""Which weight a layer's product gets: what its placement asks for."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.linear_weight import LinearWeight, PlainWeight
from headrace_backend.quantization.low_bit_weight import RoundedWeight
from headrace_backend.quantization.nf4_weight import Nf4Weight
from headrace_backend.quantization.parted_weight import PartedWeight
from headrace_backend.quantization.stored_weight import StoredWeight, are_alike
from headrace_backend.weights.placement import Placement
from headrace_kernels.block_weight import BlockKind
from headrace_kernels.linear import empty_weight
from headrace_model_folder import LayerFormat


def make_weight(
    num_outputs: int, num_inputs: int, placement: Placement, part_sizes: Sequence[int] | None = None
) -> LinearWeight:
    """An empty weight of the placement's type and scheme, of its formats, or in the blocks of its file.

    Args:
        num_outputs: Of all parts.
        num_inputs: Of each part.
        placement: Where and how.
        part_sizes: Outputs of each projection in it; None: there is one.

    Raises:
        QuantizationRefused: The scheme's groups or the file's blocks do not divide the inputs.
    """
    sizes = tuple(part_sizes or (num_outputs,))
    if placement.block_kinds is not None:
        return BlockLinearWeight.of_file(sizes, num_inputs, placement)
    if placement.scheme is not None and placement.scheme.kind is BlockKind.NF4:
        return Nf4Weight(num_outputs, num_inputs, placement)
    if placement.scheme is not None:
        return RoundedWeight(num_outputs, num_inputs, placement.scheme, placement)
    formats = placement.formats.get(placement.path, (None,) * len(sizes))
    assert len(formats) == len(sizes) and sum(sizes) == num_outputs
    if not any(formats):
        return _of_one_format(None, sizes, num_inputs, placement)
    if are_alike(formats):
        return _of_one_format(formats[0], sizes, num_inputs, placement)
    parts = [_of_one_format(form, (size,), num_inputs, placement) for form, size in zip(formats, sizes, strict=True)]
    return PartedWeight(parts)


def _of_one_format(
    form: LayerFormat | None, sizes: tuple[int, ...], num_inputs: int, placement: Placement
) -> LinearWeight:
    if form is None:
        return PlainWeight(empty_weight(sum(sizes), num_inputs, placement.dtype, placement.device))
    return StoredWeight(form, sizes, num_inputs, placement)
