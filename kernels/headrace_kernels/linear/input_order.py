"""Inputs of a product in the order of its weight's own: x[:, order].

Groups of such a weight hold inputs that are no neighbours.

Owns the gathering alone. It is an operation before the product: loading x through the order inside
a product would scatter the loads of every one of its programs.

Launch rule: 1,024 inputs of one row a program. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

_BLOCK = 1024


def take_inputs_reference(x: Tensor, order: Tensor) -> Tensor:
    """Specification of `take_inputs`, in plain PyTorch."""
    return x.index_select(1, order)


@triton.jit
def _take_kernel(x_ptr, order_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * K
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = tl.load(order_ptr + k, mask=k < K, other=0)
    tl.store(out_ptr + row + k, tl.load(x_ptr + row + places, mask=k < K), mask=k < K)


def take_inputs(x: Tensor, order: Tensor | None) -> Tensor:
    """Gathers the columns of x in the order that a weight stores its inputs in.

    Args:
        x: [num_rows, K] bf16, fp16 or fp32.
        order: [K] int32, each from 0 to K - 1; None: as they are.

    Returns:
        [num_rows, K], out[:, k] = x[:, order[k]]; x itself where there is no order.
    """
    if order is None:
        return x
    num_rows, num_inputs = x.shape
    if not uses_triton(x) or num_rows == 0:
        return take_inputs_reference(x, order)
    out = x.new_empty(x.shape)
    # A grid's second dimension ends at 65,535 rows, more than any step has.
    _take_kernel[(triton.cdiv(num_inputs, _BLOCK), num_rows)](x.contiguous(), order, out, num_inputs, _BLOCK)
    return out
