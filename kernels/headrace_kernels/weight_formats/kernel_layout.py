"""A `QuantizedWeight` as kernels take it: its tensors, and what a kernel is compiled for.

Owns the two. What the bits mean is `quantized_weight`'s; how they become numbers, `conversions`'.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.conversions import OFFSETS
from headrace_kernels.weight_formats.quantized_weight import GROUP_SIZES, QuantizedWeight, QuantKind, plane_inputs

# Words of a piece where the layout leaves it open: the longest that is loaded at a time.
_PLANE_8_BITS = 512


class WeightLayout(NamedTuple):
    """What a kernel is compiled for of a `QuantizedWeight`: one constexpr of every kernel."""

    num_inputs: int
    # Words of a row.
    num_words: int
    # Inputs of a group, which share a scale.
    group: int
    # Inputs of a piece: a word of INT4 holds one of each of 4 pieces.
    plane: int
    # "int4", "int8" or "fp8".
    kind: str
    # What conversions add to INT4's numbers (`conversions.OFFSETS`).
    offset: int
    is_grouped: bool
    # Outputs that share a scale.
    scale_outputs: int
    # Whether the interpreter runs the kernel, with plain arithmetic in fp32.
    is_plain: bool


def bits_of(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, scales, zeros as kernels read them; e4m3 as bytes, a type that all cards have."""
    packed = weight.packed.view(torch.int8) if weight.kind is QuantKind.FP8 else weight.packed
    return packed, weight.scales, weight.zeros


def layout_of(weight: QuantizedWeight, dtype: torch.dtype) -> WeightLayout:
    """The constants that kernels are compiled for, of one weight and activations in `dtype`."""
    plane = _PLANE_8_BITS
    if weight.kind is QuantKind.INT4:
        plane = plane_inputs(weight.num_inputs, weight.group_size)
    elif weight.is_grouped and weight.group_size in GROUP_SIZES:
        # What is loaded at a time lies within one group.
        plane = weight.group_size
    return WeightLayout(
        num_inputs=weight.num_inputs,
        num_words=weight.packed.shape[1],
        group=weight.group_size,
        plane=plane,
        kind=weight.kind.value,
        offset=OFFSETS[dtype] if weight.kind is QuantKind.INT4 else 0,
        is_grouped=weight.is_grouped,
        scale_outputs=weight.scale_outputs,
        is_plain=INTERPRETED,
    )
