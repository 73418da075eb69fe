"""Products with weights in blocks, and rows of such a weight.

These are the operations of `dense.linear` and `embedding` for a `BlockWeight`.

Owns which path runs for how many rows. Where Triton does not run, the weight is dequantized in
blocks of rows, each used and given up, so that nothing of it is kept beside its bits.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from headrace_kernels.linear.block_quantized_kernels import (
    MAX_SMALL_BATCH_ROWS,
    dequantize_into,
    gather,
    multiply_small_batch,
    takes,
)
from headrace_kernels.linear.dense import linear as plain_linear
from headrace_kernels.linear.dense import linear_reference as plain_linear_reference
from headrace_kernels.triton_runtime import uses_triton
from headrace_kernels.weight_formats import dequantized_buffer as dequantized_buffer
from headrace_kernels.weight_formats.block_weight import BlockWeight, dequantize_rows

# Numbers of a weight that are dequantized at a time without a card: 4 MB in fp32, which a
# processor's cache may hold until they are multiplied.
_BLOCK_NUMBERS = 1 << 20


class Path(enum.Enum):
    """How a product is computed."""

    # Without Triton: rows of the weight are dequantized, multiplied and given up.
    BLOCKS = "blocks"
    SMALL_BATCH = "small batch"
    # Dequantized into the GPU's buffer, then cuBLAS.
    DEQUANTIZED = "dequantized"


def path_rule(num_rows: int, weight: BlockWeight) -> Path:
    """Which path a product takes, by sizes, type and card alone."""
    if not uses_triton(weight.scales):
        return Path.BLOCKS
    return Path.SMALL_BATCH if takes(weight) and 1 <= num_rows <= MAX_SMALL_BATCH_ROWS else Path.DEQUANTIZED


def dequantized(weight: BlockWeight) -> Tensor:
    """[N, K] all of a weight in the activations' type: the reference."""
    out = torch.empty(weight.num_outputs, weight.num_inputs, dtype=weight.dtype, device=weight.device)
    step = max(_BLOCK_NUMBERS // weight.num_inputs, 1)
    for first in range(0, weight.num_outputs, step):
        dequantize_rows(weight, slice(first, min(first + step, weight.num_outputs)), out[first : first + step])
    return out


def linear_reference(
    x: Tensor, weight: BlockWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Specification of `linear`, in plain PyTorch."""
    return plain_linear_reference(x, dequantized(weight), bias, out_dtype)


def linear(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X W^T + b.

    Args:
        x: [num_tokens, in] in the weight's activation type.
        weight: Filled.
        bias: [out].
        out_dtype: Dtype of the result; None: the dtype of x.
        out: [num_tokens, out] to be written, whose rows may be parts of longer ones; None: a new
            tensor.

    Returns:
        [num_tokens, out], summed in fp32; `out` if given.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.num_outputs, dtype=out_dtype or x.dtype)
    path = path_rule(x.shape[0], weight)
    if path is Path.SMALL_BATCH:
        multiply_small_batch(x, weight, bias, out)
    else:
        _multiply_in_parts(x, weight, bias, out, path)
    return out


def _multiply_in_parts(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor, path: Path) -> None:
    """Dequantizes rows of the weight, as many as there is room for, and multiplies by them."""
    is_dequantized = path is Path.DEQUANTIZED
    size = (weight.num_outputs, weight.num_inputs)
    step = dequantized_buffer.rows_at_a_time(*size, x.dtype) if is_dequantized else max(_BLOCK_NUMBERS // size[1], 1)
    room = dequantized_buffer.room(min(step, size[0]), size[1], x.dtype, x.device)
    for first in range(0, size[0], step):
        rows = slice(first, min(first + step, size[0]))
        numbers = room[: rows.stop - first]
        if is_dequantized:
            dequantize_into(weight, range(rows.start, rows.stop), numbers)
        else:
            dequantize_rows(weight, rows, numbers)
        part_bias = None if bias is None else bias[rows]
        out[:, rows] = plain_linear(x, numbers, part_bias, out.dtype, is_parameter=False)


def embedding_reference(token_ids: Tensor, weight: BlockWeight) -> Tensor:
    """Specification of `embedding`, in plain PyTorch."""
    out = torch.empty(len(token_ids), weight.num_inputs, dtype=weight.dtype, device=weight.device)
    dequantize_rows(weight, token_ids, out)
    return out


def embedding(token_ids: Tensor, weight: BlockWeight) -> Tensor:
    """Looks the rows of tokens up in a table of blocks.

    Args:
        token_ids: [num_tokens] int64.
        weight: [vocabulary, size].

    Returns:
        [num_tokens, size] in the activations' type.
    """
    if not uses_triton(weight.scales):
        return embedding_reference(token_ids, weight)
    out = torch.empty(len(token_ids), weight.num_inputs, dtype=weight.dtype, device=weight.device)
    gather(weight, token_ids, out)
    return out
