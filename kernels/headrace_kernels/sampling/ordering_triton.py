"""The order of `ordering`, inside Triton kernels: logits as integers that sort as the logits do.

Owns device functions, no launch. A token comes *before* another if its key is higher, or equal and
its id lower; NaN has no place here, callers look for it first.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Low bits that are equal in all keys of a type, once it is float32: searches over keys need not
# decide them.
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

# Comes before no token, and no token before it.
LOWEST_KEY = tl.constexpr(-(2**31))
# Higher than any token.
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_keys(logits, SHIFT: tl.constexpr):
    """int32 keys of float32 logits."""
    # Adding 0 turns -0.0, which would sort below 0.0, into 0.0.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def comes_before(keys, ids, key, id):
    """Whether tokens (keys, ids) come before the token (key, id)."""
    return (keys > key) | ((keys == key) & (ids < id))


@triton.jit
def best_of(values, ids):
    """The highest value, and the lowest id among those that have it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, NO_ID), axis=0)
