"""The Triton kernels behind `block_quantized`.

They multiply small batches by the bits themselves, each weight read once, and dequantize rows
of a weight.

Owns the kernels and their launch; which runs when is `block_linear`'s. Sums are fp32 in an order
that depends on the sizes alone: no atomics, the same bits every time.

`_small_batch_kernel`: up to 32 rows, on the tensor cores, Y^T = W X^T. Each warp sums tiles of its
own (slices). The PLANE inputs of a part have one scale, so that what is multiplied are the small
integers
    themselves, exact in any type, and scales meet sums: y = s (sum (q + c) x - (c + offset) sum x)
    - m sum x, where sum x is a product with ones, which puts it where the first sum is.
`_dequantize_kernel`: rows in order, or those that indices name, rounded once. NF4's and IQ4's
numbers come from a table of 16.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.block_numbers import (
    block_layout,
    block_planes,
    integers,
    min_of,
    number_tables,
    part_numbers,
    scale_of,
    tile_scales,
)
from headrace_kernels.weight_formats.block_weight import PARTS, BlockWeight
from headrace_kernels.weight_formats.columns import four_columns

# Rows of `_small_batch_kernel`.
MAX_SMALL_BATCH_ROWS = 32
# Outputs beyond which a product has programs enough with two slices of its inputs, and with four.
_WIDE_OUTPUTS, _NARROW_OUTPUTS = 8192, 4096
# Of `_dequantize_kernel`.
_NUM_WARPS, _DEQUANTIZED_ROWS = 4, 16


class SmallTile(NamedTuple):
    """How a product of few rows is cut."""

    # Rows that are computed, those of the batch and others that are not stored.
    rows: int
    # Outputs of one program.
    block_n: int
    # Warps of a program, of which each sums tiles of its own.
    slices: int


def small_rule(num_rows: int, weight: BlockWeight) -> SmallTile:
    """The tile of up to 32 rows.

    On an H200 those that took products of an 8B Llama in Q4_K, Q6_K and Q8_0 least for 1, 8, 16 and
    32 rows, of up to 27, or up to a fifth more (docs/experiments.md, "experts of few tokens in
    tiles"). Numbers of several planes take registers, so that fewer outputs fit.
    """
    rows = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    has_one_plane = weight.pairs is None and weight.singles is None
    if weight.num_outputs > _WIDE_OUTPUTS:
        block_n, slices = 512 // rows if has_one_plane else 16, 2
    else:
        has_many_slices = rows == 8 or rows == 16 and not has_one_plane and weight.num_outputs <= _NARROW_OUTPUTS
        block_n, slices = 16, 8 if has_many_slices else 4
    return SmallTile(rows, block_n, min(slices, triton.next_power_of_2(weight.num_tiles)))


@triton.jit
def _dot(w, x, PLAIN: tl.constexpr):
    if PLAIN:
        return tl.dot(w, x.to(tl.float32))
    return tl.dot(w, x)


@triton.jit(do_not_specialize=["M", "N", "row_stride"])
def _small_batch_kernel(
    x_ptr, nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr, group_min_ptr,
    table_ptr, code_ptr,
    bias_ptr, out_ptr,
    M, N, row_stride,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_N outputs and ROWS rows. `out` has rows of row_stride numbers."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SIGNED: tl.constexpr = octet_ptr is not None
    # Taken off the numbers that are multiplied.
    SHIFT: tl.constexpr = LAYOUT.offset + (128 if DTYPE == tl.bfloat16 and not SIGNED and table_ptr is None else 0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)[None, None, :]
    # Outputs beyond the end repeat the last one, and are not stored.
    n_read = tl.minimum(n, N - 1)[None, :, None]
    row = n_read.to(tl.int64)
    s = tl.arange(0, SLICES)[:, None, None]
    j = tl.arange(0, LAYOUT.plane)
    total = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    inputs = total
    ones = tl.full([SLICES, BLOCK_N, LAYOUT.plane], 1.0, tl.float32 if PLAIN else DTYPE)
    parts = s * 4 + tl.arange(0, 4)[None, None, :]
    ahead = tile_scales(scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, n_read, parts, N, LAYOUT)
    for step in tl.range(0, LAYOUT.num_tiles, SLICES):
        tile = step + s
        parts += 4 * SLICES
        scales, mins = four_columns(ahead[0]), four_columns(ahead[1])
        ahead = tile_scales(scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, n_read, parts, N, LAYOUT)
        for i in tl.static_range(4):
            w = part_numbers(
                nibble_ptr, pair_ptr, single_ptr, octet_ptr, table_ptr,
                row, tile, j[None, None, :], tile < LAYOUT.num_tiles, i, LAYOUT, DTYPE, PLAIN,
            )  # fmt: skip
            k = (tile * 4 + i) * LAYOUT.plane + j[None, :, None]
            x = tl.load(x_ptr + m * LAYOUT.num_inputs + k, mask=(k < LAYOUT.num_inputs) & (m < M), other=0.0)
            part = _dot(w, x, PLAIN)
            if SHIFT != 0 or LAYOUT.has_mins:
                inputs = _dot(ones, x, PLAIN)
                part -= SHIFT * inputs
            total += part * scales[i]
            if LAYOUT.has_mins:
                total -= inputs * mins[i]
    y = tl.sum(total, 0)
    n_out, m_out = n[:, None], tl.arange(0, ROWS)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n_out, mask=n_out < N, other=0.0).to(tl.float32)
    places = out_ptr + m_out.to(tl.int64) * row_stride + n_out
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=(m_out < M) & (n_out < N))


@triton.jit(do_not_specialize=["N", "first_row", "num_rows", "index_ptr"])
def _dequantize_kernel(
    nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, table_ptr,
    code_ptr,
    index_ptr, out_ptr,
    N, first_row, num_rows,
    LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows of W, from first_row on or at index_ptr, into `out` [num_rows, K]."""
    r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if INDEXED:
        n = tl.load(index_ptr + r, mask=r < num_rows, other=0).to(tl.int64)
    else:
        n = tl.minimum(first_row + r, N - 1).to(tl.int64)
    n = n[:, None]
    tile = tl.program_id(0)
    j = tl.arange(0, LAYOUT.plane)[None, :]
    is_here = (r < num_rows)[:, None]
    for i in tl.static_range(4):
        q = integers(nibble_ptr, pair_ptr, single_ptr, octet_ptr, n, tile, j, is_here, i, LAYOUT)
        piece = (tile * 4 + i) * LAYOUT.plane
        first = tl.minimum(piece, LAYOUT.num_inputs - 1)
        if table_ptr is not None:
            numbers = tl.load(table_ptr + q).to(tl.float32)
        else:
            numbers = (q - LAYOUT.offset).to(tl.float32)
        numbers *= scale_of(scale_ptr, min_ptr, group_scale_ptr, code_ptr, first, n, N, LAYOUT)
        if LAYOUT.has_mins:
            numbers -= min_of(min_ptr, group_scale_ptr, group_min_ptr, first, n, N, LAYOUT)
        k = piece + j
        places = out_ptr + r.to(tl.int64)[:, None] * LAYOUT.num_inputs + k
        tl.store(places, numbers.to(out_ptr.dtype.element_ty), mask=is_here & (k < LAYOUT.num_inputs))


def takes(weight: BlockWeight) -> bool:
    """Whether `_small_batch_kernel` multiplies by this weight.

    Not fp32 activations on a card: tensor cores would cut them to tf32.
    """
    return INTERPRETED or weight.dtype != torch.float32


def multiply_small_batch(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor) -> None:
    """Multiplies up to 32 rows by a weight in blocks.

    Args:
        x: [num_rows, K], at most MAX_SMALL_BATCH_ROWS of them.
        weight: N outputs.
        bias: [N].
        out: [num_rows, N], written; its rows may be parts of longer ones.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert num_rows <= MAX_SMALL_BATCH_ROWS and num_inputs == weight.num_inputs and x.dtype == weight.dtype
    assert num_outputs == weight.num_outputs and out.stride(1) == 1
    layout, tile = block_layout(weight), small_rule(num_rows, weight)
    _small_batch_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        x.contiguous(), *block_planes(weight), *number_tables(weight, x.dtype), bias, out, num_rows, num_outputs,
        out.stride(0),
        LAYOUT=layout, ROWS=tile.rows, BLOCK_N=tile.block_n, SLICES=tile.slices, PLAIN=INTERPRETED,
        num_warps=tile.slices, num_stages=_stages(layout.plane, tile, weight.device),
    )  # fmt: skip


def _stages(plane: int, tile: SmallTile, device: torch.device) -> int:
    """Tiles that are loaded ahead, as many as fit the shared memory.

    A word and an element of x take 2 bytes.
    """
    stage_bytes = 2 * plane * tile.slices * (tile.block_n * 2 + PARTS * tile.rows)
    return max(1, min(3, card.shared_bytes(device) // stage_bytes))


def dequantize_into(weight: BlockWeight, rows: range, out: Tensor) -> None:
    """Numbers of some rows, rounded once: [len(rows), K] into `out`, contiguous."""
    _dequantize(weight, None, rows.start, out)


def gather(weight: BlockWeight, indices: Tensor, out: Tensor) -> None:
    """Dequantizes the rows that int64 indices name into `out` [len(indices), K], contiguous."""
    _dequantize(weight, indices, 0, out)


def _dequantize(weight: BlockWeight, indices: Tensor | None, first_row: int, out: Tensor) -> None:
    num_rows = len(out)
    assert out.shape == (num_rows, weight.num_inputs) and out.is_contiguous()
    if not num_rows:
        return
    layout = block_layout(weight)
    _dequantize_kernel[(layout.num_tiles, triton.cdiv(num_rows, _DEQUANTIZED_ROWS))](
        *block_planes(weight), *number_tables(weight, torch.float32), indices, out, weight.num_outputs, first_row,
        num_rows,
        LAYOUT=layout, BLOCK_N=_DEQUANTIZED_ROWS, INDEXED=indices is not None, num_warps=_NUM_WARPS,
    )  # fmt: skip
