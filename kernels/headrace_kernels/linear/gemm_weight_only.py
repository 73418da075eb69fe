"""The Triton GEMM behind `linear.quantized`, for 17 rows and more.

It multiplies by the bits themselves. Another kernel dequantizes weights in memory for cuBLAS.

Owns the kernels, their launch, and the list of tiles that are worth trying; which runs when is
`linear.quantized`'s. As in `linear.small_batch`, products are Y^T = W X^T, and sums are fp32 in an
order that depends on the tile alone.

`_gemm_kernel`: numbers are dequantized whole, rounded to the activations' type as `dequantize`
does, before they are multiplied; long inputs may be split among programs, whose sums
`_add_splits_kernel`
    adds. It takes every weight and card; `linear.gemm_weight_only_sm90` has the faster one for
    those that it takes.
`_dequantize_kernel`: the numbers of some outputs, for a product by cuBLAS.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.linear.dense_small_batch_kernels import finish
from headrace_kernels.linear.gemm_weight_only_sm90 import WarpgroupTile, launch
from headrace_kernels.linear.small_batch import _dot, _stages
from headrace_kernels.weight_formats.conversions import dequantized_bytes, dequantized_nibbles, numbers_of
from headrace_kernels.weight_formats.kernel_layout import WeightLayout, bits_of, layout_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.weight_formats.scale_places import scale_places


class GemmTile(NamedTuple):
    """How a product of more rows is cut."""

    block_n: int
    # Rows of one program.
    block_m: int
    # Words of a row that are loaded at a time, at most a piece.
    block_words: int
    num_warps: int
    num_stages: int
    # Programs among which the inputs are split.
    splits: int = 1


@triton.jit
def _dequantized_group(
    words, scale_ptr, zero_ptr, group, n, N, PART: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr
):
    """Dequantizes words [outputs, inputs of one group] of outputs n, rounded once to DTYPE."""
    KIND: tl.constexpr = LAYOUT.kind
    PLAIN: tl.constexpr = LAYOUT.is_plain
    places = (group * N + n)[:, None]
    if KIND == "int4":
        numbers = dequantized_nibbles(
            words, tl.load(zero_ptr + places), tl.load(scale_ptr + places), PART, DTYPE, PLAIN
        )
    else:
        scales = tl.load(scale_ptr + scale_places(n, group, N, LAYOUT)[:, None])
        if zero_ptr is not None:
            numbers = dequantized_bytes(words, tl.load(zero_ptr + places), scales, KIND, DTYPE, PLAIN, True)
        else:
            numbers = dequantized_bytes(words, words, scales, KIND, DTYPE, PLAIN, False)
    return numbers


@triton.jit(do_not_specialize=["M", "N"])
def _gemm_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    M, N,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_N outputs, BLOCK_M rows and one split of the inputs.

    With several splits `out` is fp32 [SPLITS, M, N] of sums.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    GROUP: tl.constexpr = LAYOUT.group
    PLANE: tl.constexpr = LAYOUT.plane
    KIND: tl.constexpr = LAYOUT.kind
    GROUPED: tl.constexpr = LAYOUT.is_grouped
    PLAIN: tl.constexpr = LAYOUT.is_plain
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 4 if KIND == "int4" else 1
    # Programs of the same outputs follow each other, so that their weight is read from memory once.
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    j = tl.arange(0, BLOCK_WORDS)
    n_read = tl.minimum(n, N - 1)
    # Rows beyond the end repeat the last one; unlike a mask this leaves loads whole.
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K
    word_places = word_ptr + n_read.to(tl.int64)[:, None] * WORDS
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    BLOCKS: tl.constexpr = PLANE // BLOCK_WORDS
    STEPS: tl.constexpr = (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    for step in tl.range(split * SHARE, tl.minimum((split + 1) * SHARE, STEPS)):
        word = step * BLOCK_WORDS + j[None, :]
        words = tl.load(word_places + word, mask=word < WORDS, other=0)
        tile, inner = step // BLOCKS, step % BLOCKS * BLOCK_WORDS
        for i in tl.static_range(PARTS):
            piece = (tile * PARTS + i) * PLANE
            k = piece + inner + j[:, None]
            x = tl.load(x_rows + k, mask=k < K, other=0.0)
            if GROUPED:
                group = tl.minimum(piece, K - 1) // GROUP
                w = _dequantized_group(words, scale_ptr, zero_ptr, group, n_read, N, i, LAYOUT, DTYPE)
            else:
                w = numbers_of(words, i, KIND, DTYPE, PLAIN)
            total = _dot(w, x, total, PLAIN)
    if not GROUPED:
        total *= tl.load(scale_ptr + n_read)[:, None]
    first_row = split.to(tl.int64) * M
    if SPLITS > 1:
        m_out, n_out = m[None, :], n[:, None]
        tl.store(out_ptr + (first_row + m_out) * N + n_out, total, mask=(m_out < M) & (n_out < N))
    else:
        finish(total, total, m[None, :].to(tl.int64), n[:, None], bias_ptr, out_ptr, M, N, False, False)


@triton.jit(do_not_specialize=["M", "N"])
def _add_splits_kernel(sums_ptr, bias_ptr, out_ptr, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds [SPLITS, M, N] in order."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + (split * M + row) * N + n, mask=n < N, other=0.0)
    finish(total, total, row, n, bias_ptr, out_ptr, M, N, False, False)


@triton.jit(do_not_specialize=["N", "first_row", "num_rows"])
def _dequantize_kernel(
    word_ptr, scale_ptr, zero_ptr, out_ptr,
    N, first_row, num_rows,
    LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows first_row and on of W, rounded to the type of `out` [num_rows, K]."""
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    GROUP: tl.constexpr = LAYOUT.group
    PLANE: tl.constexpr = LAYOUT.plane
    KIND: tl.constexpr = LAYOUT.kind
    GROUPED: tl.constexpr = LAYOUT.is_grouped
    PLAIN: tl.constexpr = LAYOUT.is_plain
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PARTS: tl.constexpr = 4 if KIND == "int4" else 1
    r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(first_row + r, N - 1)
    j = tl.arange(0, PLANE)[None, :]
    word = tl.program_id(0) * PLANE + j
    words = tl.load(word_ptr + n.to(tl.int64)[:, None] * WORDS + word, mask=word < WORDS, other=0)
    for i in tl.static_range(PARTS):
        piece = (tl.program_id(0) * PARTS + i) * PLANE
        if GROUPED:
            group = tl.minimum(piece, K - 1) // GROUP
            numbers = _dequantized_group(words, scale_ptr, zero_ptr, group, n, N, i, LAYOUT, DTYPE)
        else:
            numbers = numbers_of(words, i, KIND, DTYPE, PLAIN).to(tl.float32) * tl.load(scale_ptr + n)[:, None]
        k = piece + j
        out_places = out_ptr + r.to(tl.int64)[:, None] * K + k
        tl.store(out_places, numbers.to(DTYPE), mask=(r < num_rows)[:, None] & (k < K))


def multiply_gemm(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, tile: GemmTile | WarpgroupTile
) -> None:
    """More rows: x [num_rows, K] -> out [num_rows, N]."""
    num_rows, num_outputs = out.shape
    assert num_outputs == weight.num_outputs and x.shape == (num_rows, weight.num_inputs) and x.dtype == weight.dtype
    splits, layout = tile.splits, layout_of(weight, x.dtype)
    target = out if splits == 1 else out.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    if isinstance(tile, WarpgroupTile):
        launch(x.contiguous(), bits_of(weight), bias, target, layout, tile)
    else:
        _launch_gemm(x.contiguous(), weight, bias, target, layout, tile)
    if splits > 1:
        _add_splits_kernel[(triton.cdiv(num_outputs, 1024), num_rows)](
            target, bias, out, num_rows, num_outputs, SPLITS=splits, BLOCK=1024
        )


def _launch_gemm(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, target: Tensor, layout: WeightLayout, tile: GemmTile
) -> None:
    num_rows, num_outputs = target.shape[-2:]
    splits = tile.splits
    block_words = min(tile.block_words, layout.plane)
    _gemm_kernel[(triton.cdiv(num_rows, tile.block_m), triton.cdiv(num_outputs, tile.block_n), splits)](
        x, *bits_of(weight), bias, target, num_rows, num_outputs,
        LAYOUT=layout, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, SPLITS=splits,
        BLOCK_WORDS=block_words,
        num_warps=tile.num_warps, num_stages=_stages(tile, weight, block_words, tile.block_m,
        block_words * tile.block_n),
    )  # fmt: skip


def dequantize_into(weight: QuantizedWeight, rows: range, out: Tensor) -> None:
    """Dequantizes some rows into `out` [len(rows), K], contiguous, in the activations' type.

    Each number is rounded once.
    """
    assert out.shape == (len(rows), weight.num_inputs) and out.is_contiguous()
    layout = layout_of(weight, out.dtype)
    block_n = 16
    grid = (triton.cdiv(layout.num_words, layout.plane), triton.cdiv(len(rows), block_n))
    _dequantize_kernel[grid](
        *bits_of(weight), out, weight.num_outputs, rows.start, len(rows),
        LAYOUT=layout, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def gemm_variants(kind: QuantKind, num_rows: int, num_outputs: int) -> list[GemmTile]:
    """Tiles that are worth timing for more rows.

    Their programs are at least most of a wave on 132 multiprocessors, and not many waves because
    of splitting.
    """
    # (outputs, rows, words, warps, stages).
    if num_rows <= 32:
        sizes = [(64, 32, 64, 4, 3), (64, 32, 64, 4, 5), (64, 32, 128, 4, 3), (128, 32, 64, 8, 4)]
    elif num_rows <= 64:
        sizes = [(64, 64, 64, 4, 3), (64, 64, 32, 4, 4), (128, 64, 64, 8, 3), (128, 64, 32, 4, 4)]
    else:
        sizes = [
            (64, 64, 64, 4, 3),
            (128, 64, 64, 8, 3),
            (128, 64, 32, 4, 4),
            (128, 128, 32, 8, 4),
            (128, 128, 64, 8, 3),
        ]
    if kind is not QuantKind.INT4:
        # A word is one input here and four there.
        sizes = [(n, m, 2 * words, warps, stages) for n, m, words, warps, stages in sizes]
    tiles = [GemmTile(*size, splits=splits) for size in sizes for splits in (1, 2, 4, 8)]
    return [
        tile for tile in tiles if 90 <= gemm_programs(tile, num_rows, num_outputs) <= (600 if tile.splits > 1 else 1e9)
    ]


def gemm_programs(tile: GemmTile, num_rows: int, num_outputs: int) -> int:
    """How many programs multiply."""
    return int(triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outputs, tile.block_n) * tile.splits)
