"""Products with weights that are restored from few bits for them: into the card's buffer, or
without a card in blocks of rows.

Owns how much is restored at a time. When a product goes this way is `linear.quantized`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.linear.dense import linear as plain_linear
from headrace_kernels.linear.gemm_weight_only import restore
from headrace_kernels.weight_formats import dequantized_buffer as restored_weights
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, restore_rows

# Numbers of a weight that are restored at a time without a card: 4 MB in fp32, which a processor's
# cache may hold until they are multiplied.
_BLOCK_NUMBERS = 1 << 20


def restored_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`linear` by way of the card's buffer for restored weights, of inputs in the weight's order."""
    step = restored_weights.rows_at_a_time(weight.num_outputs, weight.num_inputs, x.dtype)
    numbers = restored_weights.room(step, weight.num_inputs, x.dtype, x.device)
    if step == weight.num_outputs:
        restore(weight, range(step), numbers)
        return plain_linear(x, numbers, bias, out_dtype, out)
    if out is None:
        out = x.new_empty(x.shape[0], weight.num_outputs, dtype=out_dtype)
    for first in range(0, weight.num_outputs, step):
        rows = range(first, min(first + step, weight.num_outputs))
        part, places = numbers[: len(rows)], slice(rows.start, rows.stop)
        restore(weight, rows, part)
        out[:, places] = plain_linear(x, part, None if bias is None else bias[places], out.dtype)
    return out


def multiply_in_blocks(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    """`linear` without a card, into `out`, of inputs in the weight's order: rows of the weight are
    restored, multiplied and given up.
    """
    step = min(weight.num_outputs, max(1, _BLOCK_NUMBERS // weight.num_inputs))
    block = torch.empty(step, weight.num_inputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.num_outputs, step):
        rows = slice(first, min(first + step, weight.num_outputs))
        numbers = block[: rows.stop - first]
        restore_rows(weight, rows, numbers)
        out[:, rows] = plain_linear(x, numbers, None if bias is None else bias[rows], out.dtype)
