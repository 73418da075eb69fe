"""Sums of rounded tokens over the inputs that share a zero point, for products with INT4 weights.

Owns the kernel and its reference. A weight is s (q - z), and the tensor cores multiply q alone:
what z takes off is s z times the sum of a group's tokens. `linear.w4a8.gemm_sm90` multiplies those
sums as well; they are of the tokens' e4m3 numbers, without their scales.

The layout is that of the product's steps: of each 4 P inputs (P is the weight's plane) four sums of
P inputs, then four zeros.
"""

# Triton's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headrace_kernels.triton_runtime import uses_triton

# Numbers of a step: its four sums and as many zeros.
SUMS_OF_STEP = 8
# Numbers that a program adds up.
_PROGRAM_NUMBERS = 4096


def token_sums_reference(numbers: Tensor, plane: int) -> Tensor:
    """Specification of `token_sums`, in plain PyTorch."""
    sums = numbers.float().view(len(numbers), -1, 4, plane).sum(-1)
    return functional.pad(sums, (0, SUMS_OF_STEP - 4)).flatten(1)


@triton.jit(do_not_specialize=["num_steps"])
def _token_sums_kernel(numbers_ptr, sums_ptr, num_steps, PLANE: tl.constexpr, STEPS: tl.constexpr):
    """Sums of STEPS steps, counted over all tokens."""
    step = tl.program_id(0).to(tl.int64) * STEPS + tl.arange(0, STEPS)
    mask = step[:, None, None] < num_steps
    places = step[:, None, None] * (4 * PLANE) + tl.arange(0, 4)[None, :, None] * PLANE
    numbers = tl.load(numbers_ptr + (places + tl.arange(0, PLANE)[None, None, :]), mask=mask, other=0.0)
    sums = tl.sum(numbers.to(tl.float32), 2)
    # Four sums and four zeros.
    padded = tl.reshape(tl.permute(tl.join(sums, tl.zeros_like(sums)), (0, 2, 1)), (STEPS, 8))
    tl.store(sums_ptr + step[:, None] * 8 + tl.arange(0, 8)[None, :], padded, mask=step[:, None] < num_steps)


def token_sums(numbers: Tensor, plane: int) -> Tensor:
    """Sums of each `plane` inputs of tokens.

    Args:
        numbers: [num_tokens, K] e4m3, where 4 P divides K.
        plane: P, inputs of a sum: 64 or 128.

    Returns:
        [num_tokens, K / (4 P) * 8] fp32 (see the module).
    """
    num_tokens, num_inputs = numbers.shape
    assert num_inputs % (4 * plane) == 0 and numbers.is_contiguous()
    if not uses_triton(numbers) or num_tokens == 0:
        return token_sums_reference(numbers, plane)
    num_steps = num_tokens * num_inputs // (4 * plane)
    sums = torch.empty(num_tokens, num_steps // num_tokens * SUMS_OF_STEP, dtype=torch.float32, device=numbers.device)
    steps = max(1, _PROGRAM_NUMBERS // (4 * plane))
    _token_sums_kernel[(triton.cdiv(num_steps, steps),)](
        numbers, sums, num_steps, PLANE=plane, STEPS=steps, num_warps=4
    )
    return sums
