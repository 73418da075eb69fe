"""Products of plain weights in bf16 for which cuBLAS is given the tile."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.linear.cublas.bindings import ProductShape
from headrace_kernels.linear.cublas.tiled import tiled_product
from headrace_kernels.linear.cublas.tiles import MOST_BF16_ROWS

# The copy engine reads rows that begin at multiples of 16 bytes.
_ALIGNMENT = 8


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """X W^T + b [num_tokens, out] by a tile of `cublas.tiles`; None: the rule names none.

    Args:
        x: [num_tokens, in].
        weight: [out, in].
        bias: [out].
    """
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    outputs, inputs = weight.shape
    # Every shape that is asked for is remembered, and prompts have any number of rows.
    if not 1 <= len(x) <= MOST_BF16_ROWS or outputs % _ALIGNMENT or inputs % _ALIGNMENT:
        return None
    tiled = tiled_product(weight.device, ProductShape(len(x), outputs, inputs, weight.dtype, bias is not None))
    if tiled is None:
        return None
    out = x.new_empty(len(x), outputs)
    tiled.launch(x, weight, bias, out, None)
    return out
