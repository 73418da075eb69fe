"""Quantized values that exist already, put into the layout of a `QuantizedWeight`.

Nothing is rounded but scales, to the dtype in which the weight keeps them.

Owns the step from plain numbers, scales and zero points to the layout. Where they come from (files
of other tools), and whether they are finite, is the caller's business.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, pack_nibbles


class Rows(NamedTuple):
    """Some outputs of a weight, with inputs in the order of the weight's own."""

    # [num_rows, K]: INT4 uint8 from 0 to 15, INT8 int8, FP8 e4m3fn.
    numbers: Tensor
    # [num_rows, groups] fp32; one group where scales are those of outputs. FP8 in blocks: None, see
    # `store_blocks`.
    scales: Tensor | None
    # As the scales: INT4 uint8 from 0 to 15, INT8 int8 or None.
    zeros: Tensor | None


def store_rows(rows: Rows, target: QuantizedWeight, first_row: int) -> None:
    """Writes rows into a weight.

    Args:
        rows: On the target's device.
        target: Changed in its rows `first_row` and on.
        first_row: Row of the target that the first one becomes.
    """
    places = slice(first_row, first_row + len(rows.numbers))
    assert rows.numbers.shape[1] == target.num_inputs and 0 <= first_row and places.stop <= target.num_outputs
    is_int4 = target.kind is QuantKind.INT4
    target.packed[places] = pack_nibbles(rows.numbers, target) if is_int4 else rows.numbers
    if rows.scales is not None:
        _store_scales(rows.scales, target, places)
    assert (rows.zeros is None) == (target.zeros is None)
    if rows.zeros is not None and target.zeros is not None:
        target.zeros[:, places] = rows.zeros.t()


def _store_scales(scales: Tensor, target: QuantizedWeight, places: slice) -> None:
    assert target.scale_outputs == 1
    if target.is_grouped:
        target.scales[:, places] = scales.t().to(target.scales.dtype)
    else:
        target.scales[places] = scales[:, 0]


def store_blocks(scales: Tensor, block_outputs: int, target: QuantizedWeight, outputs: range, skipped: int = 0) -> None:
    """Writes the scales of blocks, for FP8.

    Args:
        scales: [ceil((skipped + len(outputs)) / block_outputs), ceil(K / 128)] fp32.
        block_outputs: Outputs of a block of these scales, a multiple of the target's.
        target: Changed in the blocks that lie in `outputs`.
        outputs: Outputs of the target; begins with a block of it.
        skipped: Outputs of the first block that lie before those, a multiple of the target's.
    """
    assert target.is_grouped and block_outputs % target.scale_outputs == skipped % target.scale_outputs == 0
    assert outputs.start % target.scale_outputs == 0
    first, before = outputs.start // target.scale_outputs, skipped // target.scale_outputs
    count = -(-len(outputs) // target.scale_outputs)
    repeated = scales.repeat_interleave(block_outputs // target.scale_outputs, 0)[before : before + count]
    target.scales[:, first : first + count] = repeated.t()


def store_order(order: Tensor, target: QuantizedWeight) -> None:
    """Writes which input of x each stored input is: [K], every input once."""
    assert target.order is not None and order.shape == target.order.shape
    target.order.copy_(order.to(torch.int32))
