"""Products with weights that are dequantized for them.

Weights are dequantized into the GPU's buffer, or without a GPU in blocks of rows.

Owns how much is dequantized at a time. When a product goes this way is `linear.quantized`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.linear.dense import linear as plain_linear
from headrace_kernels.linear.gemm_weight_only import dequantize_into
from headrace_kernels.weight_formats import dequantized_buffer as dequantized_buffer
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, dequantize_ordered_rows

# Numbers of a weight that are dequantized at a time without a card: 4 MB in fp32, which a
# processor's cache may hold until they are multiplied.
_BLOCK_NUMBERS = 1 << 20


def dequantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`linear` by way of the GPU's buffer, of inputs in the weight's order."""
    step = dequantized_buffer.rows_at_a_time(weight.num_outputs, weight.num_inputs, x.dtype)
    numbers = dequantized_buffer.room(step, weight.num_inputs, x.dtype, x.device)
    if step == weight.num_outputs:
        dequantize_into(weight, range(step), numbers)
        return plain_linear(x, numbers, bias, out_dtype, out, is_parameter=False)
    if out is None:
        out = x.new_empty(x.shape[0], weight.num_outputs, dtype=out_dtype)
    for first in range(0, weight.num_outputs, step):
        rows = range(first, min(first + step, weight.num_outputs))
        part, places = numbers[: len(rows)], slice(rows.start, rows.stop)
        dequantize_into(weight, rows, part)
        part_bias = None if bias is None else bias[places]
        out[:, places] = plain_linear(x, part, part_bias, out.dtype, is_parameter=False)
    return out


def multiply_in_blocks(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    """`linear` without a GPU, into `out`, of inputs in the weight's order.

    Rows of the weight are dequantized, multiplied and given up.
    """
    step = min(weight.num_outputs, max(1, _BLOCK_NUMBERS // weight.num_inputs))
    block = torch.empty(step, weight.num_inputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.num_outputs, step):
        rows = slice(first, min(first + step, weight.num_outputs))
        numbers = block[: rows.stop - first]
        dequantize_ordered_rows(weight, rows, numbers)
        part_bias = None if bias is None else bias[rows]
        out[:, rows] = plain_linear(x, numbers, part_bias, out.dtype, is_parameter=False)
