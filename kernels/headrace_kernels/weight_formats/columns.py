"""Scales and zero points of a step's four parts, as a kernel that asks for them ahead takes them.

The compiler's pipeline copies weights and activations ahead of the step that multiplies them, at
least four bytes at a time. Scales are fewer, so a product would wait for memory in each of its
parts. A kernel loads those of four parts side by side instead, while it computes the step before.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def four_columns(block):
    """[..., BLOCK_N, 4] -> four of [..., BLOCK_N, 1]; there may be one more dimension in front."""
    if len(block.shape) == 2:
        pairs = tl.reshape(block, (block.shape[0], 2, 2))
    else:
        pairs = tl.reshape(block, (block.shape[0], block.shape[1], 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first.expand_dims(-1), second.expand_dims(-1), third.expand_dims(-1), fourth.expand_dims(-1)
