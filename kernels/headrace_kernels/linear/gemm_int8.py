"""Products of INT8 weights and tokens rounded to 8-bit integers, on integer tensor cores.

Owns the product and when it is possible; the rounding is `rounded_tokens`'. Sums of integers are
exact, whatever the order; both scales are applied to them at the end, in fp32.

Launch rule: tiles of 128 by 128. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.triton_runtime import uses_triton
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Rows, outputs and inputs of a tile.
_BLOCK = 128
# Tiles that are loaded ahead, each 32 KB.
_STAGES = 3
# Inputs of a row begin at a multiple of 16 bytes.
_ALIGNMENT = 16


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether products of many rows may round activations.

    The weight's scheme does so with one scale for a token, and its rows lie as the tiles ask.
    """
    whole = weight.kind is QuantKind.INT8 and not weight.is_grouped
    rounds = weight.inputs is not None and weight.inputs.is_per_token
    return whole and rounds and weight.num_inputs % _ALIGNMENT == 0


def scaled_linear_reference(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Specification of `scaled_linear`, in plain PyTorch."""
    # fp64 holds any sum of integers.
    total = (tokens.numbers.double() @ weight.packed.double().t()).float() * tokens.scales * weight.scales[None, :]
    return (total if bias is None else total + bias.float()).to(weight.dtype)


@triton.jit(do_not_specialize=["M"])
def _gemm_int8_kernel(
    x_ptr, x_scale_ptr, word_ptr, scale_ptr, bias_ptr, out_ptr,
    M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
    # N is a constant so that it is known which multiples rows begin at: stores are of 16 bytes, and
    # of 2 otherwise.
    places = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def scaled_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """X W^T + b of tokens [num_tokens, K] in int8, [num_tokens, N] in the activation type.

    The weight is one that `can_scale`.
    """
    numbers, scales = tokens.numbers, tokens.scales
    if not uses_triton(numbers):
        return scaled_linear_reference(tokens, weight, bias)
    (num_rows, num_inputs), num_outputs = numbers.shape, weight.num_outputs
    out = torch.empty(num_rows, num_outputs, dtype=weight.dtype, device=numbers.device)
    stages = max(1, min(_STAGES, card.shared_bytes(numbers.device) // (2 * _BLOCK * _BLOCK)))
    _gemm_int8_kernel[(triton.cdiv(num_rows, _BLOCK), triton.cdiv(num_outputs, _BLOCK))](
        numbers, scales, weight.packed, weight.scales, bias, out, num_rows, num_outputs,
        num_inputs, _BLOCK, _BLOCK, _BLOCK, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return out
