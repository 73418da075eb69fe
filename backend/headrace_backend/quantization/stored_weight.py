"""A weight that another tool quantized, kept in our layout with the folder's own numbers.

Owns which kind, groups and arrangement of `QuantizedWeight` hold a format. The way from a folder's
tensors to it is `staged_layer`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.weight_formats.quantized_weight import (
    BLOCK_SIZE,
    INPUT_NUMBERS,
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
)
from headrace_model_folder import LayerFormat
from headrace_model_folder.formats.layer_format import LEAST_GROUP

KINDS = {"int4": QuantKind.INT4, "int8": QuantKind.INT8, "fp8": QuantKind.FP8}


class StoredWeight(LowBitWeight):
    """One or several projections in the same format."""

    def __init__(self, form: LayerFormat, outputs: Sequence[range], inputs: range, placement: Placement) -> None:
        """Allocates the weight, empty.

        Args:
            form: Format of all projections.
            outputs: Number of outputs of each projection that this rank keeps.
            inputs: Number of inputs that this rank keeps.
            placement: Type and device of the weight.

        Raises:
            QuantizationRefused: No group that there is divides a rank's inputs.
        """
        kind = KINDS[form.number]
        is_block = form.scales == "block"
        arrangement = Arrangement(
            has_zeros=kind is QuantKind.INT8 and not form.is_symmetric,
            scale_outputs=_scale_outputs(outputs) if is_block else 0,
            is_ordered=bool(form.order_digest),
            inputs=input_rounding(form),
            # Cards would round them of their own accord.
            keeps_activations=kind is QuantKind.FP8 and form.inputs is None,
        )
        group = BLOCK_SIZE if is_block else _kept_group(form, inputs, placement)
        sizes = (sum(len(rows) for rows in outputs), len(inputs), group)
        super().__init__(allocate(kind, *sizes, placement.dtype, placement.device, arrangement))

    def destination(self, outputs: range) -> Destination:
        """Implements `LinearWeight.destination`.

        It is filled by way of `StagedLayer`, which takes the place of its rows.
        """
        return StoredRows(self.quantized, outputs)


class StoredRows(Destination):
    """Some outputs of such a weight: where a layer's tensors go once all of them are there."""

    def __init__(self, weight: QuantizedWeight, outputs: range) -> None:
        self.weight = weight
        self.outputs = outputs
        self.shape, self.dtype, self.device = (len(outputs), weight.num_inputs), weight.dtype, weight.device

    def put(self, first: int, rows: Tensor) -> None:
        """Not called: there are no rows of plain numbers."""
        raise AssertionError("a stored weight is filled by its layer's tensors")


def input_rounding(form: LayerFormat) -> InputRounding | None:
    """How a format's inputs are rounded, as products take it; None: not at all."""
    if form.inputs is None:
        return None
    scale = form.inputs.scale if form.inputs.scales == "static" else None
    return InputRounding(
        INPUT_NUMBERS[KINDS[form.number]],
        form.inputs.group_size,
        form.inputs.is_symmetric,
        scale,
        form.inputs.zero_point,
    )


def _kept_group(form: LayerFormat, inputs: range, placement: Placement) -> int:
    """Number of inputs that share a scale in the weight.

    It is the format's group, or the largest piece of it that does not straddle ranks.
    """
    if not form.group_size:
        return len(inputs)
    size = math.gcd(form.group_size, inputs.start, inputs.stop)
    if size < LEAST_GROUP:
        raise QuantizationRefused(
            f"groups of {form.group_size} and their pieces down to {LEAST_GROUP} do not divide the {len(inputs)} "
            f"inputs that a rank has of {', '.join(placement.names)}"
        )
    return size


def _scale_outputs(outputs: Sequence[range]) -> int:
    """Number of outputs that share a scale in blocks.

    It is 128, or the largest power of two at whose multiples every part begins, in the weight and
    in the folder.
    """
    first, size = 0, BLOCK_SIZE
    for part in outputs:
        while first % size or part.start % size:
            size //= 2
        first += len(part)
    return size
