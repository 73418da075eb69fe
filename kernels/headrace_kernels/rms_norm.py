"""Root mean square norm, alone or fused with the residual addition before it.

Its results are in the model's dtype, or rounded to 8 bits for the product behind it, or both where
a router reads beside experts in FP8. What is added may be in parts, the outputs of a token's
experts, which are added up first.

One kernel per operation. A program holds whole rows in registers and reads each number once; short
rows (the norm of each head) share a program. Rows longer than any known model's take the reference.

Launch rule: one row a program from 2,048 numbers on, otherwise as many rows as fill 2,048; 16
numbers (two loads of 16 bytes) a thread, at most 16 warps. It does not depend on the number of
rows, so a row's result does not either. With the residual stream, 8,192 rows of 4,096 reach 3.92
TB/s on an H200 (docs/experiments.md, "Launch rules of kernels"). Parts have 4 numbers a thread:
with 16 the compiler waits for some parts before it asks for the others, and a step of 64 rows of
Qwen3-30B-A3B takes 1% longer ("down's weights, and outputs in parts").
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import (
    Activations,
    RoundedTokens,
    round_tokens,
    round_tokens_reference,
    store_rounded,
    takes_size,
)
from headrace_kernels.triton_runtime import uses_triton

# Numbers of a row that 16 warps hold in registers, 64 in each thread.
_LONGEST_ROW = 32_768
# Numbers of a program that holds several rows.
_SHARED_PROGRAM = 2048


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension. See `rms_norm`."""
    wide = x.float()
    # One reduction instead of square and mean: the mean square is the norm squared over the size.
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()
    # Rounding to the weight's type, mostly the storage type, happens before the weight is applied,
    # as in the models' training code.
    normed: Tensor = (wide * inverse).to(weight.dtype)
    return normed.mul_(weight).to(x.dtype)


def summed(x: Tensor) -> Tensor:
    """The sum of a layer's output that is in parts; an output that is whole as it is.

    Args:
        x: [num_tokens, parts, size], added up in order in fp32; or [num_tokens, size].

    Returns:
        [num_tokens, size] in the type of x.
    """
    if x.dim() == 2:
        return x
    total = x[:, 0].float()
    for part in x.unbind(1)[1:]:
        total = total + part
    return total.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then the norm of the sum. See `add_rms_norm`."""
    return rms_norm_reference(residual.add_(summed(x)), weight, eps)


def rounded_rms_norm_reference(x: Tensor, weight: Tensor, eps: float, rounding: InputRounding) -> RoundedTokens:
    """The norm in the type of x, then rounded. See `rounded_rms_norm`."""
    return round_tokens_reference(rms_norm_reference(x, weight, eps), rounding)


def rounded_add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding
) -> RoundedTokens:
    """`residual += x` in place, then the norm in their type, then rounded.

    See `rounded_add_rms_norm`.
    """
    return round_tokens_reference(add_rms_norm_reference(x, residual, weight, eps), rounding)


@triton.jit
def scaled_by_rms(wide, mean_square, weight, eps):
    """`wide` [rows, n] fp32 over its root mean square, times `weight`, fp32.

    The mean square [rows] is given. The quotient is rounded to the weight's type, which is the
    storage type or fp32, the product once more by the store.
    """
    inverse = tl.rsqrt(mean_square + eps)
    return (wide * inverse[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _weights(weight, rows, offs, mask):
    """The weight for each of the rows.

    Loaded in the rows' own shape, which keeps it in the rows' layout. A parameter, so it is read
    before the kernel ahead has ended.
    """
    return tl.load(weight + offs + rows[:, None] * 0, mask=mask, other=0.0)


@triton.jit
def _store(
    normed, out, scales, unrounded, places, mask, rows, num_rows, DTYPE: tl.constexpr,
    room, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores norms, fp32 to be rounded to DTYPE; with scales, rounded to 8 bits from there.

    unrounded: Pointer to DTYPE, where norms that are rounded to 8 bits are stored too; None.
    room, GROUP and GROUPS are those of `store_rounded`.
    """
    if unrounded is not None:
        tl.store(unrounded + places, normed.to(DTYPE), mask=mask)
    if scales is None:
        tl.store(out + places, normed.to(out.dtype.element_ty), mask=mask)
    else:
        store_rounded(normed, out, scales, places, mask, rows, rows < num_rows, DTYPE, None, GROUP, GROUPS, room)


@triton.jit
def store_added_norm(
    added, stream, factors, residual, out, scales, places, mask, rows, num_rows, eps, SIZE: tl.constexpr,
    room, GROUP: tl.constexpr, GROUPS: tl.constexpr, unrounded=None,
):  # fmt: skip
    """Stores the residual stream with what is added to it, and the norm of that.

    All are [rows, n] fp32, 0 outside the mask, stored at `places`; the others as `_store` takes
    them.
    """
    DTYPE: tl.constexpr = residual.dtype.element_ty
    # The stream is kept in the storage type, and the norm is that of what is kept.
    total = (stream + added).to(DTYPE)
    tl.store(residual + places, total, mask=mask)
    wide = total.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1) / SIZE
    normed = scaled_by_rms(wide, mean_square, factors, eps)
    _store(normed, out, scales, unrounded, places, mask, rows, num_rows, DTYPE, room, GROUP, GROUPS)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    scales,
    unrounded,
    num_rows,
    eps,
    room,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INNER_ROWS: tl.constexpr,
    OUTER_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        grid_behind_may_start()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (offs < SIZE)
    factors = _weights(weight, rows, offs, mask)
    if EARLY:
        grid_before_is_done()
    starts = rows // INNER_ROWS * OUTER_STRIDE + rows % INNER_ROWS * INNER_STRIDE
    wide = tl.load(x + starts[:, None] + offs, mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1) / SIZE
    normed = scaled_by_rms(wide, mean_square, factors, eps)
    places = rows[:, None] * SIZE + offs
    _store(normed, out, scales, unrounded, places, mask, rows, num_rows, x.dtype.element_ty, room, GROUP, GROUPS)


@triton.jit
def _sum_of_parts(x, rows, offs, mask, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Rows of x [rows, PARTS, SIZE] added up in order, fp32, rounded as whole outputs are."""
    total = tl.load(x + (rows * PARTS)[:, None] * SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        own = (rows * PARTS + part)[:, None] * SIZE + offs
        total += tl.load(x + own, mask=mask, other=0.0).to(tl.float32)
    return total.to(x.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    unrounded,
    num_rows,
    eps,
    room,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        grid_behind_may_start()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (offs < SIZE)
    factors = _weights(weight, rows, offs, mask)
    if EARLY:
        grid_before_is_done()
    places = rows[:, None] * SIZE + offs
    added = _sum_of_parts(x, rows, offs, mask, PARTS, SIZE)
    stream = tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    store_added_norm(
        added, stream, factors, residual, out, scales, places, mask, rows, num_rows, eps, SIZE,
        room, GROUP, GROUPS, unrounded,
    )  # fmt: skip


def launch_rule(size: int) -> tuple[int, int, int]:
    """Rows of a program, elements of a row rounded up to a power of two, and warps.

    Rows have `size` elements.
    """
    block = max(16, triton.next_power_of_2(size))
    rows = max(1, _SHARED_PROGRAM // block)
    return rows, block, min(16, max(1, rows * block // 512))


def _row_layout(x: Tensor) -> tuple[int, int, int] | None:
    """Layout of the rows of x: rows side by side, stride of such groups, stride within.

    It is None if no two strides describe it.
    """
    size = x.shape[-1]
    if x.is_contiguous():
        return 1, size, 0
    if x.stride(-1) != 1:
        return None
    if x.dim() == 2:
        return 1, x.stride(0), 0
    return (x.shape[1], x.stride(0), x.stride(1)) if x.dim() == 3 else None


def _launch_rms_norm(x: Tensor, weight: Tensor, eps: float, to: Activations) -> None:
    out, scales, kept = _parts(to)
    layout = _row_layout(x)
    if layout is None:
        x, layout = x.contiguous(), (1, x.shape[-1], 0)
    num_rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    if num_rows:
        rows, block, num_warps = launch_rule(size)
        grid = (triton.cdiv(num_rows, rows),)
        # Products of few rows start while it runs, and it while the product before them does.
        early = card.launches_early(x.device)
        _rms_norm_kernel[grid](
            x, weight, out, scales, kept, num_rows, eps, *_grouping(to, block), *layout, size, rows, block, early,
            num_warps=num_warps, launch_pdl=early,
        )  # fmt: skip


def _launch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, to: Activations) -> None:
    out, scales, kept = _parts(to)
    (num_rows, size), parts = residual.shape, x.shape[1:-1].numel()
    if num_rows:
        rows, block, num_warps = launch_rule(size)
        if parts > 1:
            # So few numbers a thread that it has all parts' under way at a time.
            num_warps = min(16, max(1, rows * block // 128))
        grid = (triton.cdiv(num_rows, rows),)
        early = card.launches_early(x.device)
        _add_rms_norm_kernel[grid](
            x, residual, weight, out, scales, kept, num_rows, eps, *_grouping(to, block), parts,
            size, rows, block, early, num_warps=num_warps, launch_pdl=early,
        )  # fmt: skip


def _parts(to: Activations) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A kernel's outputs: norms or their numbers, scales, and norms beside their numbers."""
    return (to, None, None) if isinstance(to, Tensor) else (to.numbers, to.scales, to.unrounded)


def _grouping(to: Activations, block: int) -> tuple[int | None, int, int]:
    """`room`, GROUP and GROUPS of a kernel whose programs hold `block` numbers of a row."""
    return (None, 0, 1) if isinstance(to, Tensor) else to.grouping(block)


def _rounded_behind(normed: Tensor, rounding: InputRounding, keeps: bool) -> RoundedTokens:
    """Norms that an operation of its own rounds, kept as they are too if asked for."""
    return dataclasses.replace(round_tokens(normed, rounding), unrounded=normed if keeps else None)


def _takes(x: Tensor) -> bool:
    """Whether the kernels norm x."""
    return uses_triton(x) and x.shape[-1] <= _LONGEST_ROW


def _takes_sum(x: Tensor, residual: Tensor) -> bool:
    """Whether the kernels add x to the residual stream and norm that."""
    return _takes(x) and x.is_contiguous() and residual.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes the last dimension.

    Args:
        x: [..., size] in any floating type; may be a view with strides.
        weight: [size] in the type of x, or fp32, which leaves one rounding: that of the product.
        eps: Added to the mean square.

    Returns:
        [..., size] in the type of x.
    """
    if not _takes(x):
        return rms_norm_reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, weight, eps, out)
    return out


def rounded_rms_norm(
    x: Tensor, weight: Tensor, eps: float, rounding: InputRounding, keeps: bool = False
) -> RoundedTokens:
    """`round_tokens` of the norm, in one operation.

    Args:
        x: [num_tokens, size].
        weight: [size] in the type of x, or fp32, which leaves one rounding: that of the product.
        eps: Added to the mean square.
        rounding: A symmetric one without a static scale, as `round_tokens` takes it.
        keeps: Whether the norm itself is stored too, as `unrounded`.

    Returns:
        [num_tokens, size].
    """
    if not _takes(x) or not takes_size(x.shape[-1]):
        return _rounded_behind(rms_norm(x, weight, eps), rounding, keeps)
    tokens = RoundedTokens.empty(x.shape, rounding, x.device, x.dtype if keeps else None)
    _launch_rms_norm(x, weight, eps, tokens)
    return tokens


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to the residual stream, which is changed in place, and normalizes the sum.

    Args:
        x: [num_tokens, size] a layer's output, or its parts [num_tokens, parts, size], added up as
            `summed` does.
        residual: [num_tokens, size] the residual stream; holds the sum afterwards.
        weight: [size].
        eps: Added to the mean square.

    Returns:
        [num_tokens, size] the normalized sum.
    """
    if not _takes_sum(x, residual):
        return add_rms_norm_reference(x, residual, weight, eps)
    out = torch.empty_like(residual)
    _launch_add_rms_norm(x, residual, weight, eps, out)
    return out


def rounded_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding, keeps: bool = False
) -> RoundedTokens:
    """`round_tokens` of the normalized sum, in one operation.

    Args:
        x: [num_tokens, size] a layer's output, or its parts [num_tokens, parts, size], added up as
            `summed` does.
        residual: [num_tokens, size] the residual stream; holds the sum afterwards.
        weight: [size].
        eps: Added to the mean square.
        rounding: A symmetric one without a static scale, as `round_tokens` takes it.
        keeps: Whether the norm itself is stored too, as `unrounded`.

    Returns:
        [num_tokens, size].
    """
    if not _takes_sum(x, residual) or not takes_size(x.shape[-1]):
        return _rounded_behind(add_rms_norm(x, residual, weight, eps), rounding, keeps)
    tokens = RoundedTokens.empty(residual.shape, rounding, x.device, x.dtype if keeps else None)
    _launch_add_rms_norm(x, residual, weight, eps, tokens)
    return tokens
