"""What the numbers of a layer in blocks (GGUF's types, NF4) tell of how it was packed: the sums of `layer_statistics`, of steps, since these numbers are no integers with a zero point.

Owns what a step is, for each kind, and the ways in which a block's numbers may be confused: which half of a byte is first, which numbers share one.
"""

from __future__ import annotations

import math

import torch

from headrace_backend.quantization.layer_statistics import EVEN_SCATTER, Findings, LayerStatistics
from headrace_kernels.low_bit.block_weight import (
    NF4_KINDS,
    NF4_NUMBERS,
    BlockKind,
    BlockWeight,
    group_numbers,
    restore_rows,
)

# Numbers that are restored at a time: 16 MB.
_BLOCK_NUMBERS = 1 << 22
# NF4's numbers reach from -1 to 1: as many steps as there are numbers.
_NF4_STEPS = 8.0
_NF4_EVEN_SCATTER = math.sqrt(sum(number**2 for number in NF4_NUMBERS) / len(NF4_NUMBERS)) / 2
_NF4_ORDERS: dict[str, tuple[int, ...]] = {"the lower half of a byte first": (1, 0)}


def _half_orders(size: int) -> dict[str, tuple[int, ...]]:
    """Inputs `i` and `i + size / 2` share a byte. Confused: the halves, or neighbours share one."""
    half = size // 2
    return {
        f"the upper halves of {half} bytes first": (*range(half, size), *range(half)),
        f"neighbours in each of {half} bytes": tuple(place // 2 + place % 2 * half for place in range(size)),
        f"from neighbours in each of {half} bytes": tuple(
            2 * place % size + 2 * place // size for place in range(size)
        ),
    }


_SHORT_ORDERS, _LONG_ORDERS = _half_orders(32), _half_orders(64)
_ORDERS = dict.fromkeys((BlockKind.Q4_0, BlockKind.Q4_1, BlockKind.Q5_0, BlockKind.Q5_1), _SHORT_ORDERS)
_ORDERS |= dict.fromkeys((BlockKind.Q4_K, BlockKind.Q5_K), _LONG_ORDERS) | dict.fromkeys(NF4_KINDS, _NF4_ORDERS)


def block_findings(weight: BlockWeight, outputs: range) -> Findings | None:
    """Of some outputs, those of one layer. Waits for the device.

    Args:
        weight: Filled.
        outputs: Of the weight.
    """
    made, is_nf4 = weight.format, weight.kind in NF4_KINDS
    even = _NF4_EVEN_SCATTER if is_nf4 else EVEN_SCATTER
    statistics = LayerStatistics(sum(made.bits), not made.has_mins, even, _ORDERS.get(weight.kind, _SHORT_ORDERS))
    step = max(_BLOCK_NUMBERS // weight.num_inputs, 1)
    for first in range(outputs.start, outputs.stop, step):
        rows = slice(first, min(first + step, outputs.stop))
        values = torch.empty(rows.stop - first, weight.num_inputs, device=weight.device)
        restore_rows(weight, rows, values)
        scales, _ = group_numbers(weight, rows)
        scales = scales / _NF4_STEPS if is_nf4 else scales
        steps = values.view(len(values), -1, made.group) / torch.where(scales == 0, 1.0, scales)[:, :, None]
        statistics.add(steps, torch.zeros_like(scales), scales)
    statistics.finish(None)
    return statistics.read()
