"""Products of FP8 weights and tokens rounded to e4m3, on the card's FP8 cores.

Owns when they are possible, and from how many rows. The product is cuBLAS's (`linear.cublas.fp8`),
the rounding `rounded_tokens`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear.cublas.fp8 import block_product, has_block_products, library_product
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import BLOCK_SIZE, QuantizedWeight, QuantKind, dequantize

# Multiples that the card's FP8 products ask of both sizes of a weight.
_ALIGNMENT = 16
# Tokens of weights in blocks: a scale for the inputs of each.
GROUPS_OF_BLOCKS = InputRounding(torch.float8_e4m3fn, BLOCK_SIZE)
# Rows from which tokens are rounded: on sm_90; on other cards, where fewer were not measured; and
# for weights in blocks, which fewer rows multiply faster in 16 bits.
_FEWEST_ROWS, _FEWEST_ROWS_ELSEWHERE, _FEWEST_BLOCK_ROWS = 33, 65, 17


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the GPU multiplies FP8 by FP8, with scales per token and output or in blocks.

    Results are bf16 then, and sizes multiples of 16.
    """
    if weight.kind is not QuantKind.FP8 or weight.dtype != torch.bfloat16 or weight.keeps_activations:
        return False
    is_aligned = weight.num_inputs % _ALIGNMENT == 0 and weight.num_outputs % _ALIGNMENT == 0
    return is_aligned and (_can_scale_blocks(weight) if weight.is_grouped else _can_scale_rows(weight))


def _can_scale_rows(weight: QuantizedWeight) -> bool:
    takes_tokens = weight.inputs is None or weight.inputs.is_per_token
    return takes_tokens and card.has_fp8_products(weight.device)


def _can_scale_blocks(weight: QuantizedWeight) -> bool:
    """Blocks of 128 by 128 alone, on sm_90: so much the library can."""
    is_whole = weight.scale_outputs == weight.group_size == BLOCK_SIZE and weight.num_inputs % BLOCK_SIZE == 0
    takes_tokens = weight.inputs is None or weight.inputs == GROUPS_OF_BLOCKS
    return is_whole and takes_tokens and card.has_warpgroup_instructions(weight.device) and has_block_products()


def takes_rows(num_rows: int, weight: QuantizedWeight) -> bool:
    """Whether so many rows are multiplied so: by sizes and card alone."""
    if weight.is_grouped:
        fewest = _FEWEST_BLOCK_ROWS
    else:
        fewest = _FEWEST_ROWS if card.has_warpgroup_instructions(weight.device) else _FEWEST_ROWS_ELSEWHERE
    return num_rows >= fewest and can_scale(weight)


def rounding(weight: QuantizedWeight) -> InputRounding:
    """How tokens are rounded for a weight that `can_scale`."""
    return weight.inputs or (GROUPS_OF_BLOCKS if weight.is_grouped else InputRounding(torch.float8_e4m3fn))


def scaled_linear_reference(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Specification of `scaled_linear`, in plain PyTorch."""
    if weight.is_grouped:
        wide = torch.empty(weight.packed.shape, dtype=torch.float32, device=weight.device)
        total = tokens.values() @ dequantize(weight, wide).t()
    else:
        total = (tokens.numbers.float() @ weight.packed.float().t()) * tokens.scales * weight.scales[None, :]
    return (total if bias is None else total + bias.float()).to(weight.dtype)


def scaled_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3, bf16 [num_tokens, N].

    The weight is one that `can_scale`.
    """
    if not tokens.numbers.is_cuda:
        return scaled_linear_reference(tokens, weight, bias)
    multiply = block_product if weight.is_grouped else library_product
    return multiply(tokens, weight.packed, weight.scales, bias)
