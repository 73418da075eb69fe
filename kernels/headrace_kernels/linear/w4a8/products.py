"""Products of INT4 weights and tokens rounded to e4m3 (W4A8), on the card's FP8 cores.

Owns when they are possible and by what: some tens to hundreds of rows by our own kernel
(`linear.w4a8.gemm_sm90`), which multiplies the weight's own numbers, more rows by
`torch._scaled_mm` with the weight rounded to e4m3 in the card's buffer (`linear.w4a8.dequantized`).
The rounding of tokens is `rounded_tokens`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear.cublas.fp8 import library_product
from headrace_kernels.linear.w4a8.dequantized import round_to_e4m3
from headrace_kernels.linear.w4a8.gemm_sm90 import W4A8Tile, multiply_w4a8, takes_w4a8_gemm
from headrace_kernels.linear.w4a8.token_sums import token_sums
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats import dequantized_buffer
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, dequantize, plane_inputs

# Rows from which inputs are rounded: at 64 rows of an 8B Llama our kernel takes 2.6 ms of 32 layers
# on an H200 and its sums of tokens 0.2, that of INT4 and bf16 2.9.
FEWEST_W4A8_ROWS = 65
# Up to so many rows our own kernel multiplies (256 rows: 5.9 ms, with sums of tokens 6.1; by INT4
# and bf16 6.6). From 512 on it takes twice as long as `_scaled_mm`.
_MOST_TILED_ROWS = 256
_TILE = W4A8Tile(64, 128, 64, 4, True)
# Multiples that the card's FP8 products ask of both sizes of a weight.
_ALIGNMENT = 16


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the GPU multiplies this weight by e4m3: a scheme that says so, results in bf16."""
    if weight.kind is not QuantKind.INT4 or weight.inputs is None or not weight.inputs.is_per_token:
        return False
    aligned = weight.num_inputs % _ALIGNMENT == 0 and weight.num_outputs % _ALIGNMENT == 0
    return aligned and weight.dtype == torch.bfloat16 and card.has_fp8_products(weight.device)


def w4a8_rule(num_rows: int, weight: QuantizedWeight) -> W4A8Tile | None:
    """The tile of our own kernel; None: the weight is rounded to e4m3. By sizes and card alone."""
    return _TILE if num_rows <= _MOST_TILED_ROWS and takes_w4a8_gemm(weight) else None


def scaled_linear_reference(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Specification of `scaled_linear`, in plain PyTorch."""
    numbers = dequantize(weight, torch.empty(weight.num_outputs, weight.num_inputs, device=weight.device))
    total = (tokens.numbers.float() @ numbers.t()) * tokens.scales
    return (total if bias is None else total + bias.float()).to(weight.dtype)


def scaled_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3, bf16 [num_tokens, N].

    The weight is one that `can_scale`.
    """
    if not tokens.numbers.is_cuda:
        return scaled_linear_reference(tokens, weight, bias)
    tile = w4a8_rule(len(tokens.numbers), weight)
    if tile is None:
        return _by_e4m3(tokens, weight, bias)
    out = torch.empty(len(tokens.numbers), weight.num_outputs, dtype=weight.dtype, device=weight.device)
    sums = token_sums(tokens.numbers, plane_inputs(weight.num_inputs, weight.group_size))
    multiply_w4a8(tokens, sums, weight, bias, out, tile)
    return out


def _by_e4m3(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    number, num_inputs = torch.float8_e4m3fn, weight.num_inputs
    step = dequantized_buffer.rows_at_a_time(weight.num_outputs, num_inputs, number)
    # Parts begin where the product's outputs may.
    step = step if step == weight.num_outputs else max(_ALIGNMENT, step // _ALIGNMENT * _ALIGNMENT)
    parts = []
    for first in range(0, weight.num_outputs, step):
        rows = range(first, min(first + step, weight.num_outputs))
        room = dequantized_buffer.room(len(rows), num_inputs, number, weight.device)
        numbers, scales = round_to_e4m3(weight, rows, room)
        of_rows = None if bias is None else bias[rows.start : rows.stop]
        parts.append(library_product(tokens, numbers, scales, of_rows))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
