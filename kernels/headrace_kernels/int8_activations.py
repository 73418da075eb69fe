"""Activations rounded to 8-bit integers with a scale per token, and their product with INT8 weights on integer tensor cores.

Owns the rounding, the product and when it is possible. Sums of integers are exact, whatever the order; both scales are applied to them at the end, in fp32.

Launch rules: the rounding takes one token a program, the product tiles of 128 by 128. Neither is measured yet.
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

_LARGEST = 127.0
# The smallest scale, for tokens that are all 0.
_LEAST_SCALE = 1e-12
# Numbers of a token that one program holds.
_LONGEST_ROW = 65_536
# Rows, outputs and inputs of a tile.
_BLOCK = 128
# Tiles that are loaded ahead, each 32 KB.
_STAGES = 3
# Inputs of a row begin at a multiple of 16 bytes.
_ALIGNMENT = 16


def quantize_tokens_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `quantize_tokens`."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=_LEAST_SCALE)
    return (wide / scales).clamp_(-_LARGEST, _LARGEST).round_().to(torch.int8), scales


@triton.jit
def _quantize_tokens_kernel(x_ptr, out_ptr, scale_ptr, K: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wide = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0) / 127.0, LEAST)
    # Half away from zero: one of two nearest, where the reference takes the even one.
    scaled = wide * (1.0 / scale)
    rounded = tl.floor(tl.abs(scaled) + 0.5)
    rounded = tl.minimum(rounded, 127.0)
    tl.store(out_ptr + row * K + k, tl.where(scaled < 0, -rounded, rounded).to(tl.int8), mask=k < K)
    tl.store(scale_ptr + row, scale)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each token to the nearest integers of its own scale.

    Args:
        x: [num_tokens, K] bf16, fp16 or fp32.

    Returns:
        [num_tokens, K] int8 from -127 to 127 and [num_tokens, 1] fp32 scales: their product is x, nearly.
    """
    num_tokens, size = x.shape
    if not uses_triton(x) or size > _LONGEST_ROW or num_tokens == 0:
        return quantize_tokens_reference(x)
    out = torch.empty(num_tokens, size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_tokens_kernel[(num_tokens,)](
        x.contiguous(), out, scales, size, block, _LEAST_SCALE, num_warps=min(16, max(1, block // 512))
    )
    return out, scales


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether products of many rows may round activations: where the weight's scheme does so, and its rows lie as the tiles ask."""
    whole = weight.kind is QuantKind.INT8 and not weight.is_grouped
    return whole and weight.rounds_activations and weight.num_inputs % _ALIGNMENT == 0


def scaled_linear_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """See `scaled_linear`."""
    numbers, scales = quantize_tokens_reference(x)
    # fp64 holds any sum of integers.
    total = (numbers.double() @ weight.packed.double().t()).float() * scales * weight.scales[None, :]
    return (total if bias is None else total + bias.float()).to(x.dtype)


@triton.jit(do_not_specialize=["M", "N"])
def _scaled_kernel(
    x_ptr, x_scale_ptr, word_ptr, scale_ptr, bias_ptr, out_ptr,
    M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Y = X W^T for a tile: integers summed exactly, then both scales and the bias."""
    # Programs of the same outputs follow each other, so that their weight is read from memory once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and outputs beyond the end repeat the last ones, and are not stored.
    rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K
    outputs = word_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in tl.range(0, K, BLOCK_K):
        place = first + k
        x = tl.load(rows + place[None, :], mask=place[None, :] < K, other=0)
        w = tl.load(outputs + place[:, None], mask=place[:, None] < K, other=0)
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + tl.minimum(m, M - 1))[:, None]
    y = total.to(tl.float32) * x_scale * tl.load(scale_ptr + tl.minimum(n, N - 1))[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + tl.minimum(n, N - 1)).to(tl.float32)[None, :]
    places = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def scaled_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b with x rounded to 8-bit integers, for weights that `can_scale`: [num_tokens, K] -> [num_tokens, N] in the type of x."""
    if not uses_triton(x):
        return scaled_linear_reference(x, weight, bias)
    numbers, scales = quantize_tokens(x)
    (num_rows, num_inputs), num_outputs = x.shape, weight.num_outputs
    out = x.new_empty(num_rows, num_outputs)
    stages = max(1, min(_STAGES, card.shared_bytes(x.device) // (2 * _BLOCK * _BLOCK)))
    _scaled_kernel[(triton.cdiv(num_rows, _BLOCK), triton.cdiv(num_outputs, _BLOCK))](
        numbers, scales, weight.packed, weight.scales, bias, out, num_rows, num_outputs,
        num_inputs, _BLOCK, _BLOCK, _BLOCK, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return out
