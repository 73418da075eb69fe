"""Which weight a layer's product gets: what its placement asks for."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.linear_weight import LinearWeight, PlainWeight
from headrace_backend.quantization.low_bit_weight import RoundedWeight
from headrace_backend.quantization.mixed_format_weight import MixedFormatWeight
from headrace_backend.quantization.nf4_weight import Nf4Weight
from headrace_backend.quantization.stored_weight import StoredWeight
from headrace_backend.weights.placement import Placement
from headrace_kernels.linear.dense import empty_weight
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_model_folder import LayerFormat
from headrace_model_folder.formats.layer_format import are_alike


def make_weight(outputs: Sequence[range], inputs: range, placement: Placement) -> LinearWeight:
    """Makes an empty weight of the placement's type and scheme, of its formats, or in file blocks.

    Args:
        outputs: Number of outputs of each projection that this rank keeps.
        inputs: Number of inputs of each projection that this rank keeps.
        placement: Device, type, and how the weights are stored.

    Raises:
        QuantizationRefused: The scheme's groups or the file's blocks do not divide the inputs.
    """
    sizes, num_inputs = tuple(len(rows) for rows in outputs), len(inputs)
    if placement.block_kinds is not None:
        return BlockLinearWeight.of_file(sizes, num_inputs, placement)
    if placement.scheme is not None and placement.scheme.kind is BlockKind.NF4:
        return Nf4Weight(sum(sizes), num_inputs, placement)
    if placement.scheme is not None:
        return RoundedWeight(sum(sizes), num_inputs, placement.scheme, placement)
    formats = placement.layer_formats
    assert len(formats) == len(sizes)
    if not any(formats):
        return _of_one_format(None, outputs, inputs, placement)
    if are_alike(formats):
        return _of_one_format(formats[0], outputs, inputs, placement)
    parts = [_of_one_format(form, (rows,), inputs, placement) for form, rows in zip(formats, outputs, strict=True)]
    return MixedFormatWeight(parts)


def _of_one_format(
    form: LayerFormat | None, outputs: Sequence[range], inputs: range, placement: Placement
) -> LinearWeight:
    if form is None:
        size = sum(len(rows) for rows in outputs)
        return PlainWeight(empty_weight(size, len(inputs), placement.dtype, placement.device))
    return StoredWeight(form, outputs, inputs, placement)
