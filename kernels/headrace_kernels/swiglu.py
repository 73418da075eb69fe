"""SwiGLU: silu(gate) * up over the two halves of one projection; GeGLU with GELU in silu's place.

GELU is its approximation by tanh, which is gate * sigmoid(2 u) with
u = sqrt(2 / pi) (gate + 0.044715 gate^3), where silu is gate * sigmoid(gate).

Its results are in the model's dtype, or rounded to 8 bits for the product behind it.

Launch rules. Plain: 1,024 outputs of one row a program up to 64 rows, so that few rows still reach
many multiprocessors, 2,048 beyond, so that more loads are under way; 4 warps. Rounded, where a
row's scale is wanted before any of it is stored: a row a program, up to 64 numbers a thread, so
that several rows are under way on a multiprocessor. At 14,336 outputs 8 warps leave no lane idle
and reach 4.26 TB/s at 8,192 rows on an H200 (docs/experiments.md, "Launch rules of kernels"). Rows
that are rounded in groups have a program each, too, which is not measured.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import (
    RoundedTokens,
    round_tokens,
    round_tokens_reference,
    store_rounded,
    takes_size,
)
from headrace_kernels.triton_runtime import uses_triton

# What the gate passes through.
Activation = Literal["silu", "gelu_tanh"]
# Outputs of a row that one program holds.
_LONGEST_ROW = 32_768
# 2 sqrt(2 / pi)
_GELU_SLOPE = tl.constexpr(1.5957691216057308)


def swiglu_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Specification of `swiglu`, in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    passed = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return passed.mul_(up)


def rounded_swiglu_reference(
    gate_up: Tensor, rounding: InputRounding, activation: Activation = "silu"
) -> RoundedTokens:
    """SwiGLU in the type of gate_up, then rounded. See `rounded_swiglu`."""
    return round_tokens_reference(swiglu_reference(gate_up, activation), rounding)


@triton.jit
def _gated(gate, up, IS_GELU: tl.constexpr):
    """activation(gate) * up of numbers in the storage type, fp32, to be rounded to it."""
    wide = gate.to(tl.float32)
    if IS_GELU:
        slope = _GELU_SLOPE * (wide + 0.044715 * wide * wide * wide)
    else:
        slope = wide
    # The gate is rounded to the storage type before the product, as two operations would.
    passed = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype).to(tl.float32)
    return passed * up.to(tl.float32)


@triton.jit
def _swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    start = gate_up + row * (2 * SIZE)
    gate = tl.load(start + offs, mask=mask, other=0.0)
    up = tl.load(start + SIZE + offs, mask=mask, other=0.0)
    tl.store(out + row * SIZE + offs, _gated(gate, up, IS_GELU).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rounded_swiglu_kernel(
    gate_up, out, scales, room, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = offs < SIZE
    start = gate_up + rows[:, None] * (2 * SIZE)
    gate = tl.load(start + offs, mask=mask, other=0.0)
    up = tl.load(start + SIZE + offs, mask=mask, other=0.0)
    store_rounded(
        _gated(gate, up, IS_GELU), out, scales, rows[:, None] * SIZE + offs, mask, rows, None,
        gate_up.dtype.element_ty, None, GROUP, GROUPS, room,
    )  # fmt: skip


def launch_rule(num_tokens: int) -> tuple[int, int]:
    """Outputs of a program, and warps."""
    return (1024, 4) if num_tokens <= 64 else (2048, 4)


def rounded_launch_rule(size: int) -> tuple[int, int]:
    """Outputs of a program, all those of a row rounded up to a power of two, and warps."""
    block = max(16, triton.next_power_of_2(size))
    return block, min(16, max(1, block // 2048))


def _swiglu_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block, num_warps = launch_rule(num_tokens)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, block))
        _swiglu_kernel[grid](gate_up.contiguous(), out, size, block, activation == "gelu_tanh", num_warps=num_warps)
    return out


def swiglu(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """The gated activation of an MLP.

    Args:
        gate_up: [num_tokens, 2 * size], the gate in the first half, the value in the second.
        activation: What the gate passes through.

    Returns:
        [num_tokens, size] in the type of gate_up.
    """
    run = _swiglu_triton if uses_triton(gate_up) else swiglu_reference
    return run(gate_up, activation)


def rounded_swiglu(gate_up: Tensor, rounding: InputRounding, activation: Activation = "silu") -> RoundedTokens:
    """`round_tokens` of `swiglu`, in one operation.

    Args:
        gate_up: [num_tokens, 2 * size], the gate in the first half, the value in the second.
        rounding: A symmetric one without a static scale, as `round_tokens` takes it.
        activation: What the gate passes through.

    Returns:
        [num_tokens, size].
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if not uses_triton(gate_up) or size > _LONGEST_ROW or not takes_size(size) or num_tokens == 0:
        return round_tokens(swiglu(gate_up, activation), rounding)
    tokens = RoundedTokens.empty((num_tokens, size), rounding, gate_up.device)
    block, num_warps = rounded_launch_rule(size)
    _rounded_swiglu_kernel[(num_tokens,)](
        gate_up.contiguous(), tokens.numbers, tokens.scales, *tokens.grouping(block), size, block,
        activation == "gelu_tanh", num_warps=num_warps,
    )  # fmt: skip
    return tokens
