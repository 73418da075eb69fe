"""Rotary position embedding, in the half-split layout of most Hugging Face checkpoints.

Dimension i of the first half and dimension i of the second half form a plane, which rotates by the
angle of the token's position. In the interleaved layout (GLM) each two dimensions that follow each
other do. If only the first `rotary_dim` of a head's dimensions rotate, the two
halves are theirs, and the other dimensions stay as they are; the width of the table says how many
rotate. The step's rows of the table are taken once (`rope_rows`) and serve every layer. On a GPU a
layer rotates its heads in `rope_kv` or `attention.decode`, together with what comes before and
after.

Launch rule of `rope_rows`: 8 tokens a program, 4 warps, whatever the number of tokens; it runs once
a step. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

_TOKENS = 8


def rope_rows_reference(table: Tensor, positions: Tensor) -> Tensor:
    """Specification of `rope_rows`, in plain PyTorch."""
    cosine, sine = table.index_select(0, positions).unbind(1)
    return torch.stack((cosine, -sine, sine), dim=1)


@triton.jit
def rotated(x, partner, cosine, sine):
    """Rotated values of a plane, fp32.

    `partner` is the plane's other value, `sine` negative for the first of the two.

    The rounding is spelled out (a product, then a fused multiply-add), so that all kernels that
    rotate heads give the same bits.
    """
    return tl.fma(x, cosine, partner * sine)


@triton.jit(do_not_specialize=["positions", "num_tokens"])
def _rope_rows_kernel(table, positions, out, num_tokens, HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (tokens < num_tokens)[:, None] & (offs < HALF)
    position = tl.load(positions + tokens, mask=tokens < num_tokens, other=0)
    row = table + position[:, None] * (2 * HALF) + offs
    cosine = tl.load(row, mask=mask, other=0.0)
    sine = tl.load(row + HALF, mask=mask, other=0.0)
    place = out + tokens[:, None] * (3 * HALF) + offs
    tl.store(place, cosine, mask=mask)
    tl.store(place + HALF, -sine, mask=mask)
    tl.store(place + 2 * HALF, sine, mask=mask)


def _rope_rows_triton(table: Tensor, positions: Tensor) -> Tensor:
    num_tokens, half = positions.shape[0], table.shape[2]
    out = torch.empty(num_tokens, 3, half, dtype=table.dtype, device=table.device)
    if num_tokens:
        grid, block = (triton.cdiv(num_tokens, _TOKENS),), triton.next_power_of_2(half)
        _rope_rows_kernel[grid](table, positions, out, num_tokens, half, _TOKENS, block, num_warps=4)
    return out


def rope_rows(table: Tensor, positions: Tensor) -> Tensor:
    """The step's rotations.

    Args:
        table: [max_position, 2, rotary_dim / 2] fp32 of `rope_table`.
        positions: [num_tokens] int64.

    Returns:
        [num_tokens, 3, rotary_dim / 2] fp32: cosine, minus sine, sine. The two signs belong to the
        plane's two halves.
    """
    return _rope_rows_triton(table, positions) if uses_triton(table) else rope_rows_reference(table, positions)


def rope_reference(x: Tensor, rows: Tensor, interleaved: bool = False) -> Tensor:
    """Specification of `rope`, in plain PyTorch."""
    half = rows.shape[-1]
    if 2 * half < x.shape[-1]:
        return torch.cat((rope_reference(x[..., : 2 * half], rows, interleaved), x[..., 2 * half :]), dim=-1)
    if interleaved:
        halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return torch.stack(rope_reference(halves, rows).chunk(2, dim=-1), dim=-1).view(x.shape)
    halves = x.view(*x.shape[:-1], 2, half)
    wide = halves.float()
    rotated = wide * rows[:, None, :1]
    rotated.addcmul_(wide.flip(-2), rows[:, None, 1:])
    return rotated.view(x.shape).to(x.dtype)


def rope(x: Tensor, rows: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates every head of every token.

    Args:
        x: [num_tokens, num_heads, head_dim], queries or keys or both; may be a view with strides.
        rows: [num_tokens, 3, rotary_dim / 2] fp32 of `rope_rows`; dimensions of x from rotary_dim
            on stay as they are.
        interleaved: Whether planes are of neighbours, and not of the two halves.

    Returns:
        [num_tokens, num_heads, head_dim] contiguous, in the type of x.
    """
    return rope_reference(x, rows, interleaved)
