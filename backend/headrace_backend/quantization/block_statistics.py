"""What the numbers of a layer in blocks (GGUF's types, NF4) tell of how it was packed: the sums of
`layer_statistics`, of steps, since these numbers are no integers with a zero point.

Owns what a step is, for each kind, and the ways in which a block's numbers may be confused: which
half of a byte is first, which numbers share one.
"""

from __future__ import annotations

import statistics

import torch

from headrace_backend.quantization.layer_statistics import EVEN_SCATTER, Findings, LayerStatistics
from headrace_kernels.weight_formats.block_weight import (
    NF4_KINDS,
    BlockKind,
    BlockWeight,
    group_numbers,
    restore_rows,
)

# Numbers that are restored at a time: 16 MB.
_BLOCK_NUMBERS = 1 << 22
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


def _steps_of(table: tuple[float, ...]) -> tuple[float, float]:
    """What counts as a step where numbers are those of a table, and the scatter of numbers that
    fill it evenly: its range has as many steps as it has numbers.
    """
    step = (max(table) - min(table)) / len(table)
    return step, statistics.pstdev(table) / step / len(table)


def block_findings(weight: BlockWeight, outputs: range) -> Findings | None:
    """Of some outputs, those of one layer. Waits for the device.

    Args:
        weight: Filled.
        outputs: Of the weight.
    """
    made = weight.format
    step, even = _steps_of(made.table) if made.table else (1.0, EVEN_SCATTER)
    found = LayerStatistics(sum(made.bits), not made.has_mins, even, _ORDERS.get(weight.kind, _SHORT_ORDERS))
    num_rows = max(_BLOCK_NUMBERS // weight.num_inputs, 1)
    for first in range(outputs.start, outputs.stop, num_rows):
        rows = slice(first, min(first + num_rows, outputs.stop))
        values = torch.empty(rows.stop - first, weight.num_inputs, device=weight.device)
        restore_rows(weight, rows, values)
        scales, _ = group_numbers(weight, rows)
        scales = scales * step
        steps = values.view(len(values), -1, made.group) / torch.where(scales == 0, 1.0, scales)[:, :, None]
        found.add(steps, torch.zeros_like(scales), scales)
    found.finish(None)
    return found.read()
