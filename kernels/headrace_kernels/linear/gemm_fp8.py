"""Products of FP8 weights and tokens rounded to e4m3, on the card's FP8 cores.

Owns when they are possible, and from how many rows. The product is cuBLAS's (`linear.cublas.fp8`),
the rounding `rounded_tokens`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear.cublas.fp8 import library_product
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Multiples that the card's FP8 products ask of both sizes of a weight.
_ALIGNMENT = 16
# Rows from which tokens are rounded, on sm_90 and on other cards, where fewer were not measured.
_FEWEST_ROWS, _FEWEST_ROWS_ELSEWHERE = 33, 65


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the GPU multiplies FP8 by FP8 with scales per token and output.

    Results are bf16 then, and sizes multiples of 16.
    """
    if weight.keeps_activations or (weight.inputs is not None and not weight.inputs.is_per_token):
        return False
    if weight.kind is not QuantKind.FP8 or weight.is_grouped or weight.dtype != torch.bfloat16:
        return False
    aligned = weight.num_inputs % _ALIGNMENT == 0 and weight.num_outputs % _ALIGNMENT == 0
    return aligned and card.has_fp8_products(weight.device)


def takes_rows(num_rows: int, weight: QuantizedWeight) -> bool:
    """Whether so many rows are multiplied so: by sizes and card alone."""
    is_sm_90 = card.has_warpgroup_instructions(weight.device)
    return num_rows >= (_FEWEST_ROWS if is_sm_90 else _FEWEST_ROWS_ELSEWHERE) and can_scale(weight)


def scaled_linear_reference(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Specification of `scaled_linear`, in plain PyTorch."""
    total = (tokens.numbers.float() @ weight.packed.float().t()) * tokens.scales * weight.scales[None, :]
    return (total if bias is None else total + bias.float()).to(weight.dtype)


def scaled_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in e4m3, bf16 [num_tokens, N].

    The weight is one that `can_scale`.
    """
    if not tokens.numbers.is_cuda:
        return scaled_linear_reference(tokens, weight, bias)
    return library_product(tokens, weight.packed, weight.scales, bias)
