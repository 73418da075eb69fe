"""Activations rounded to e4m3 with a scale per token, and their product with FP8 weights on the card's FP8 cores.

Owns the rounding and the call. The product is cuBLAS's or CUTLASS's by way of `torch._scaled_mm`, without the fast accumulation that keeps 14 bits of a sum only.

Launch rule of the rounding: one token a program, 16 numbers a thread, at most 16 warps. Not measured yet.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.triton_runtime import uses_triton

LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)
# The smallest scale, for tokens that are all 0.
_LEAST_SCALE = 1e-12
# Numbers of a token that one program holds.
_LONGEST_ROW = 65_536
# Multiples that the card's FP8 products ask of both sizes of a weight.
_ALIGNMENT = 16


def quantize_tokens_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `quantize_tokens`."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=_LEAST_SCALE)
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


@triton.jit
def _quantize_tokens_kernel(
    x_ptr, out_ptr, scale_ptr, K: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wide = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0) / LARGEST, LEAST)
    # A product with the inverse may exceed the largest number by its rounding, which is then cut off.
    rounded = tl.minimum(tl.maximum(wide * (1.0 / scale), -LARGEST), LARGEST)
    tl.store(out_ptr + row * K + k, rounded.to(tl.float8e4nv), mask=k < K)
    tl.store(scale_ptr + row, scale)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each token to the nearest e4m3 of its own scale.

    Args:
        x: [num_tokens, K] bf16, fp16 or fp32.

    Returns:
        [num_tokens, K] e4m3fn and [num_tokens, 1] fp32 scales: their product is x, nearly.
    """
    num_tokens, size = x.shape
    if not uses_triton(x) or size > _LONGEST_ROW or num_tokens == 0:
        return quantize_tokens_reference(x)
    out = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_tokens_kernel[(num_tokens,)](
        x.contiguous(), out, scales, size, block, LARGEST, _LEAST_SCALE, num_warps=min(16, max(1, block // 512))
    )
    return out, scales


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the card multiplies FP8 by FP8 with scales per token and output: results are bf16 there, and sizes multiples of 16."""
    if weight.keeps_activations:
        return False
    if weight.kind is not QuantKind.FP8 or weight.is_grouped or weight.dtype != torch.bfloat16:
        return False
    aligned = weight.num_inputs % _ALIGNMENT == 0 and weight.num_outputs % _ALIGNMENT == 0
    return aligned and card.has_fp8_products(weight.device)


def scaled_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b with x rounded to e4m3, for weights that `can_scale`: [num_tokens, K] -> [num_tokens, N] bf16."""
    numbers, scales = quantize_tokens(x)
    product: Tensor = torch._scaled_mm(
        numbers,
        weight.packed.t(),
        scale_a=scales,
        scale_b=weight.scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product
