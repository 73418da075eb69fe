"""SwiGLU: silu(gate) * up over the two halves of one projection.

Launch rule: 1,024 outputs of one row a program up to 64 rows, so that few rows still reach many multiprocessors, 2,048 beyond, so that more loads are under way; 4 warps. Not measured yet.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headrace_kernels.triton_runtime import uses_triton


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """See `swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


@triton.jit
def _swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    start = gate_up + row * (2 * SIZE)
    gate = tl.load(start + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    # silu(gate) is rounded to the storage type before the product, as two operations would.
    silu = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + offs, (silu * up).to(out.dtype.element_ty), mask=mask)


def launch_rule(num_tokens: int) -> tuple[int, int]:
    """Outputs of a program, and warps."""
    return (1024, 4) if num_tokens <= 64 else (2048, 4)


def _swiglu_triton(gate_up: Tensor) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block, num_warps = launch_rule(num_tokens)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, block))
        _swiglu_kernel[grid](gate_up.contiguous(), out, size, block, num_warps=num_warps)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """The gated activation of an MLP.

    Args:
        gate_up: [num_tokens, 2 * size], the gate in the first half, the value in the second.

    Returns:
        [num_tokens, size] in the type of gate_up.
    """
    return _swiglu_triton(gate_up) if uses_triton(gate_up) else swiglu_reference(gate_up)
