"""Norm and gate of the heads' outputs of a linear attention: norm(x) * weight * silu(gate).

The norm is over each head. It is rounded to the model's type before its weight and behind it, and
all once more.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.rms_norm import rms_norm_reference, scaled_by_rms
from headrace_kernels.triton_runtime import uses_triton

# Numbers of a program, 16 for each thread of its warps. Not measured yet.
_NUMBERS, _NUM_WARPS = 2048, 4


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One operation after another. See `gated_rms_norm`."""
    normed = rms_norm_reference(x, weight, eps)
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)


@triton.jit(do_not_specialize=["num_lines"])
def _gated_rms_norm_kernel(
    x, gate, weight, out, num_lines, gate_stride, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (lines < num_lines)[:, None] & (offs < SIZE)
    wide = tl.load(x + lines[:, None] * SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    gates = gate + lines[:, None] // HEADS * gate_stride + lines[:, None] % HEADS * SIZE + offs
    opened = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(weight + offs, mask=offs < SIZE, other=0.0)
    normed = scaled_by_rms(wide, tl.sum(wide * wide, axis=1) / SIZE, factors, eps)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    gated = normed * (opened / (1.0 + tl.exp(-opened)))
    tl.store(out + lines[:, None] * SIZE + offs, gated.to(out.dtype.element_ty), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norms each head's output and multiplies it by silu of its gate.

    Args:
        x: [num_tokens, num_heads, head_dim] contiguous.
        gate: [num_tokens, num_heads, head_dim] in the same type; tokens may have a stride.
        weight: [head_dim] in the same type.
        eps: Added to the mean square.

    Returns:
        [num_tokens, num_heads, head_dim] in the type of x.
    """
    if not uses_triton(x):
        return gated_rms_norm_reference(x, gate, weight, eps)
    num_tokens, num_heads, size = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(size)
    lines = max(1, _NUMBERS // block)
    _gated_rms_norm_kernel[(triton.cdiv(num_tokens * num_heads, lines),)](
        x, gate, weight, out, num_tokens * num_heads, gate.stride(0), eps, num_heads, size, lines, block,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out
