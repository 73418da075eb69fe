"""Products of FP8 weights and tokens rounded to e4m3, on the card's FP8 cores.

Owns the call and when it is possible; the rounding is `rounded_tokens`'. The product is cuBLAS's or CUTLASS's by way of `torch._scaled_mm`, without the fast accumulation that keeps 14 bits of a sum only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.low_bit.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.rounded_tokens import RoundedTokens

# Multiples that the card's FP8 products ask of both sizes of a weight.
_ALIGNMENT = 16


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the card multiplies FP8 by FP8 with scales per token and output: results are bf16 there, and sizes multiples of 16."""
    if weight.keeps_activations:
        return False
    if weight.kind is not QuantKind.FP8 or weight.is_grouped or weight.dtype != torch.bfloat16:
        return False
    aligned = weight.num_inputs % _ALIGNMENT == 0 and weight.num_outputs % _ALIGNMENT == 0
    return aligned and card.has_fp8_products(weight.device)


def scaled_linear_reference(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """See `scaled_linear`."""
    total = (tokens.numbers.float() @ weight.packed.float().t()) * tokens.scales * weight.scales[None, :]
    return (total if bias is None else total + bias.float()).to(weight.dtype)


def scaled_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens in e4m3, for weights that `can_scale`: [num_tokens, K] -> [num_tokens, N] bf16."""
    if not tokens.numbers.is_cuda:
        return scaled_linear_reference(tokens, weight, bias)
    product: Tensor = torch._scaled_mm(
        tokens.numbers,
        weight.packed.t(),
        scale_a=tokens.scales,
        scale_b=weight.scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product
