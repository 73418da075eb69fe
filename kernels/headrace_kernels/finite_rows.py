"""Which rows of a matrix hold nothing but finite numbers.

Owns that test, by which a step reports whether what it wrote to the cache can be shared: one read
of the rows, one launch.

Launch rule: a program per row, 1,024 numbers at a time, 4 warps. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

_BLOCK = 1024
_WARPS = 4
# Rows from any one on, so the address has any alignment: nothing may be compiled for it.
_ROWS_POINTER = ["rows"]


def finite_rows_reference(rows: Tensor) -> Tensor:
    """Specification of `finite_rows`, in plain PyTorch."""
    return rows.isfinite().all(dim=1)


@triton.jit(do_not_specialize=_ROWS_POINTER, do_not_specialize_on_alignment=_ROWS_POINTER)
def finite_rows_kernel(rows, finite, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): `rows` [num_rows, SIZE] contiguous, `finite` bool [num_rows]."""
    row = tl.program_id(0)
    rows += row.to(tl.int64) * SIZE
    num_bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        values = tl.load(rows + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
        # False for infinities and NaN.
        num_bad += tl.where(tl.abs(values) < float("inf"), 0, 1)
    tl.store(finite + row, tl.sum(num_bad, axis=0) == 0)


def finite_rows(rows: Tensor) -> Tensor:
    """Whether each row is finite in all its numbers.

    Args:
        rows: [num_rows, size] bf16, fp16 or fp32, contiguous.

    Returns:
        bool [num_rows].
    """
    if not uses_triton(rows):
        return finite_rows_reference(rows)
    assert rows.is_contiguous()
    num_rows, size = rows.shape
    finite = torch.empty(num_rows, dtype=torch.bool, device=rows.device)
    if num_rows:
        finite_rows_kernel[(num_rows,)](rows, finite, SIZE=size, BLOCK=_BLOCK, num_warps=_WARPS)
    return finite
