"""Reads the numbers of a loaded model's quantized layers back, as steps, and sums them up.

Owns what a step is, for each kind of weight, and the ways in which a block's numbers may be
confused: which half of a byte is first, which numbers share one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import torch

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.packing.layer_statistics import EVEN_SCATTER, Findings, LayerStatistics
from headrace_backend.quantization.block_linear_weight import BlockRows
from headrace_backend.quantization.stored_weight import StoredRows
from headrace_kernels.weight_formats.block_weight import (
    NF4_KINDS,
    BlockKind,
    BlockWeight,
    dequantize_rows,
    group_numbers,
)
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, group_scales
from headrace_kernels.weight_formats.quantized_weight import dequantize_ordered_rows as dequantize_stored_rows
from headrace_model_folder import LayerFormat

# Numbers that are dequantized at a time: 16 MB.
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
    """Returns the step of a table's numbers, and the scatter of numbers that fill it evenly.

    The table's range has as many steps as the table has numbers.
    """
    step = (max(table) - min(table)) / len(table)
    return step, statistics.pstdev(table) / step / len(table)


def findings_of(model: CausalLM, formats: Mapping[str, LayerFormat]) -> dict[str, Findings]:
    """What was found of each layer whose numbers another tool made, by its name in the folder.

    Embeddings are left out, which have middles and sizes of their own, and so is FP8, which has no
    steps.

    Args:
        model: Loaded, on one rank.
        formats: Formats of the folder's layers; none for a file of blocks.
    """
    found = {}
    for name, target in model.weight_targets().items():
        layer, rows = name.removesuffix(".weight"), target.destination
        one = None
        if isinstance(rows, StoredRows):
            one = stored_findings(rows.weight, rows.outputs, formats[layer])
        elif isinstance(rows, BlockRows) and ".layers." in name and ".experts." not in name:
            one = block_findings(rows.weight, rows.outputs)
        if one is not None:
            found[layer] = one
    return found


def stored_findings(weight: QuantizedWeight, outputs: range, form: LayerFormat) -> Findings | None:
    """Findings of one layer that a folder stores in integers; None for FP8. Waits for the device.

    Args:
        weight: The filled weight that holds the layer.
        outputs: The layer's outputs in the weight.
        form: The layer's format.
    """
    if weight.kind is QuantKind.FP8:
        return None
    found = LayerStatistics(form.bits, form.is_symmetric)
    for rows in _row_pieces(outputs, weight.num_inputs):
        values = torch.empty(rows.stop - rows.start, weight.num_inputs, device=weight.device)
        dequantize_stored_rows(weight, rows, values)
        scales = group_scales(weight, rows)
        groups = values.view(len(values), scales.shape[1], -1)
        found.add((groups / torch.where(scales == 0, 1.0, scales)[:, :, None]).round_(), scales)
    found.finish(None if weight.order is None else weight.order.long())
    return found.read()


def block_findings(weight: BlockWeight, outputs: range) -> Findings | None:
    """Findings of one layer in blocks (GGUF's types, NF4). Waits for the device.

    Args:
        weight: The filled weight that holds the layer.
        outputs: The layer's outputs in the weight.
    """
    made = weight.format
    step, even = _steps_of(made.table) if made.table else (1.0, EVEN_SCATTER)
    found = LayerStatistics(sum(made.bits), not made.has_mins, even, _ORDERS.get(weight.kind, _SHORT_ORDERS))
    for rows in _row_pieces(outputs, weight.num_inputs):
        values = torch.empty(rows.stop - rows.start, weight.num_inputs, device=weight.device)
        dequantize_rows(weight, rows, values)
        scales, _ = group_numbers(weight, rows)
        scales = scales * step
        steps = values.view(len(values), -1, made.group) / torch.where(scales == 0, 1.0, scales)[:, :, None]
        found.add(steps, scales)
    found.finish(None)
    return found.read()


def _row_pieces(outputs: range, num_inputs: int) -> Iterator[slice]:
    num_rows = max(_BLOCK_NUMBERS // num_inputs, 1)
    for first in range(outputs.start, outputs.stop, num_rows):
        yield slice(first, min(first + num_rows, outputs.stop))
