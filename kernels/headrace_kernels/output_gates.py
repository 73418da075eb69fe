"""Gates of attention's heads, which a projection has beside each query.

    [num_tokens, num_heads, (query, gate)], keys and values -> queries, keys and values; gates

Two kernels, each of one launch that starts early: one takes queries, keys and values out, the other
multiplies heads by gates where the projection left these.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.triton_runtime import uses_triton

# Elements of a program, eight for each thread. Not measured.
_BLOCK, _NUM_WARPS = 1024, 4


def without_gates_reference(projected: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Takes the gates out in PyTorch's operations. See `without_gates`."""
    size = num_heads * head_dim
    queries, gates = projected[:, : 2 * size].view(-1, num_heads, 2, head_dim).unbind(2)
    return torch.cat((queries.flatten(1), projected[:, 2 * size :]), dim=1), gates


def gate_heads_reference(heads: Tensor, gates: Tensor) -> Tensor:
    """Multiplies in PyTorch's operations. See `gate_heads`."""
    return heads.mul_(gates.sigmoid().flatten(1))


@triton.jit
def _without_gates_kernel(
    projected, out, stride, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Before a query stand as many gates as queries; before keys and values all of them.
    gates = tl.where(offs < QUERIES, offs // HEAD_DIM * HEAD_DIM, QUERIES)
    values = tl.load(projected + token * stride + offs + gates, mask=offs < WIDTH)
    tl.store(out + token * WIDTH + offs, values, mask=offs < WIDTH)


@triton.jit
def _gate_heads_kernel(
    heads, gates, heads_stride, token_stride, head_stride, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    of_token = gates + token * token_stride
    gate = tl.load(of_token + offs // HEAD_DIM * head_stride + offs % HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
    # The sigmoid is rounded to the type, as the operations one by one do.
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(heads.dtype.element_ty).to(tl.float32)
    places = heads + token * heads_stride + offs
    value = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, (value * opened).to(heads.dtype.element_ty), mask=mask)


def without_gates(projected: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Takes the gates out of a projection.

    Args:
        projected: [num_tokens, 2 * num_heads * head_dim + keys and values]; behind each head's
            query stand as many elements of its gate.
        num_heads: Number of query heads.
        head_dim: Elements of a head.

    Returns:
        [num_tokens, queries, keys and values], contiguous, and [num_tokens, num_heads, head_dim]
        the gates, a view of `projected`.
    """
    if not uses_triton(projected):
        return without_gates_reference(projected, num_heads, head_dim)
    size = num_heads * head_dim
    num_tokens, width = projected.shape[0], projected.shape[1] - size
    out, early = projected.new_empty(num_tokens, width), card.launches_early(projected.device)
    _without_gates_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        projected, out, projected.stride(0), size, head_dim, width, _BLOCK, early,
        num_warps=_NUM_WARPS, launch_pdl=early,
    )  # fmt: skip
    return out, projected[:, : 2 * size].view(-1, num_heads, 2, head_dim)[:, :, 1]


def gate_heads(heads: Tensor, gates: Tensor) -> Tensor:
    """Multiplies heads in place by the sigmoid of their gates.

    Args:
        heads: [num_tokens, num_heads * head_dim], whose lines may have a stride.
        gates: [num_tokens, num_heads, head_dim] in the same type, as `without_gates` returns them.

    Returns:
        The heads.
    """
    if not uses_triton(heads):
        return gate_heads_reference(heads, gates)
    (num_tokens, size), early = heads.shape, card.launches_early(heads.device)
    _gate_heads_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        heads, gates, heads.stride(0), gates.stride(0), gates.stride(1), gates.shape[2], size, _BLOCK, early,
        num_warps=_NUM_WARPS, launch_pdl=early,
    )  # fmt: skip
    return heads
