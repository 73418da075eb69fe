"""The Triton kernel behind `linear.quantized` for 2 to 16 rows.

It multiplies by the bits themselves, each weight read once.

Owns the kernel, its launch, the list of tiles that are worth trying, and what it shares with the
kernels of more rows (`linear.gemm_weight_only`); which runs when is `linear.quantized`'s. All work
on the tensor cores and compute Y^T = W X^T. Inputs come in pieces of PLANE: a word of INT4 holds
PARTS = 4 of them, one of the others 1. Sums are fp32 in an order that depends on the tile alone: no
atomics, the same bits every time.

`_small_batch_kernel`: up to 16 rows. Each warp sums pieces of its own (slices), so that a program
needs few outputs and no second program for the same ones. INT4: y = s (sum (q + c) x - (z + c) sum
x) per
    group, where the second sum is a product with ones, which puts it where the first one is; INT8
    and FP8 with scales of groups likewise. Numbers dequantized whole would pass through shared
    memory on their way to these tensor cores. With norm, SwiGLU, residual stream in the same
    launch.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear.dense_small_batch_kernels import finish
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.conversions import numbers_of
from headrace_kernels.weight_formats.kernel_layout import bits_of, layout_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.weight_formats.scale_places import scale_places

# Rows of `_small_batch_kernel`.
MAX_SMALL_BATCH_ROWS = 16


class SmallBatchTile(NamedTuple):
    """How a product of few rows is cut."""

    # Outputs of one program (with SwiGLU as many again, for the gate).
    block_n: int
    # Words of a row that a slice loads at a time, at most a piece.
    block_words: int
    # Parts of what is loaded that are summed apart, by different warps.
    slices: int
    num_warps: int
    # Tiles that are loaded ahead.
    num_stages: int
    # Whether the norm is taken where x is loaded, or by a kernel of its own before.
    norm_inside: bool = True


class _Staged(Protocol):
    """A tile that is loaded in stages."""

    @property
    def num_stages(self) -> int: ...


@triton.jit
def _dot(w, x, total, PLAIN: tl.constexpr):
    if PLAIN:
        return total + tl.dot(w, x.to(tl.float32))
    return tl.dot(w, x, total)


@triton.jit(do_not_specialize=["M", "N"])
def _small_batch_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    M, N, eps,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr, SLICES: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_N outputs and ROWS rows.

    With norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    GROUP: tl.constexpr = LAYOUT.group
    PLANE: tl.constexpr = LAYOUT.plane
    KIND: tl.constexpr = LAYOUT.kind
    OFFSET: tl.constexpr = LAYOUT.offset
    GROUPED: tl.constexpr = LAYOUT.is_grouped
    PLAIN: tl.constexpr = LAYOUT.is_plain
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 4 if KIND == "int4" else 1
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)[None, None, :]
    # Outputs beyond the end repeat the last one, and are not stored.
    n_read = tl.minimum(n, N - 1)[None, :, None]
    s = tl.arange(0, SLICES)[:, None, None]
    j = tl.arange(0, BLOCK_WORDS)
    word_places = word_ptr + n_read.to(tl.int64) * WORDS
    up_words = N.to(tl.int64) * WORDS
    total = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    up_total = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([SLICES, BLOCK_WORDS, ROWS], tl.float32)
    ones = tl.full([SLICES, BLOCK_N, BLOCK_WORDS], 1.0, tl.float32 if PLAIN else DTYPE)
    # Outputs of the weight, in which those of gate and up follow each other.
    num_rows = N * (2 if GATED else 1)
    BLOCKS: tl.constexpr = PLANE // BLOCK_WORDS
    for step in tl.range(0, (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS, SLICES):
        word = (step + s) * BLOCK_WORDS + j[None, None, :]  # [SLICES, 1, BLOCK_WORDS]
        words = tl.load(word_places + word, mask=word < WORDS, other=0, eviction_policy="evict_first")
        if GATED:
            words_up = tl.load(word_places + up_words + word, mask=word < WORDS, other=0, eviction_policy="evict_first")
        tile, inner = (step + s) // BLOCKS, (step + s) % BLOCKS * BLOCK_WORDS
        for i in tl.static_range(PARTS):
            piece = (tile * PARTS + i) * PLANE  # first input, [SLICES, 1, 1]
            k = piece + inner + j[None, :, None]
            # Rows that only fill the tile are not read: every program reads all of x, which adds up
            # in the cache.
            x = tl.load(x_ptr + m * K + k, mask=(k < K) & (m < M), other=0.0)
            if norm_ptr is not None:
                wide = x.to(tl.float32)
                squares += wide * wide
                x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)).to(DTYPE)
            if GROUPED:
                zero = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
                group = tl.minimum(piece, K - 1) // GROUP
                places = group * num_rows + n_read
                if zero_ptr is not None:
                    inputs = _dot(ones, x, zero, PLAIN)
                    shift = tl.load(zero_ptr + places).to(tl.float32) + OFFSET
                    part = _dot(numbers_of(words, i, KIND, DTYPE, PLAIN), x, zero, PLAIN) - shift * inputs
                else:
                    part = _dot(numbers_of(words, i, KIND, DTYPE, PLAIN), x, zero, PLAIN)
                total += part * tl.load(scale_ptr + scale_places(n_read, group, num_rows, LAYOUT)).to(tl.float32)
                if GATED:
                    part_up = _dot(numbers_of(words_up, i, KIND, DTYPE, PLAIN), x, zero, PLAIN)
                    if zero_ptr is not None:
                        shift_up = tl.load(zero_ptr + places + N).to(tl.float32) + OFFSET
                        part_up = part_up - shift_up * inputs
                    up_places = scale_places(n_read + N, group, num_rows, LAYOUT)
                    up_total += part_up * tl.load(scale_ptr + up_places).to(tl.float32)
            else:
                total = _dot(numbers_of(words, i, KIND, DTYPE, PLAIN), x, total, PLAIN)
                if GATED:
                    up_total = _dot(numbers_of(words_up, i, KIND, DTYPE, PLAIN), x, up_total, PLAIN)
    y, up = tl.sum(total, 0), tl.sum(up_total, 0)
    if not GROUPED:
        n_read = tl.minimum(n, N - 1)[:, None]
        y *= tl.load(scale_ptr + n_read)
        if GATED:
            up *= tl.load(scale_ptr + N + n_read)
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(tl.sum(squares, 0), 0) / K + eps)[None, :]
        y, up = y * rstd, up * rstd
    finish(y, up, tl.arange(0, ROWS)[None, :], n[:, None], bias_ptr, out_ptr, M, N, GATED, ADD)


def _stages(tile: _Staged, weight: QuantizedWeight, block_words: int, columns: int, words: int) -> int:
    """Stages of the tile that fit the shared memory.

    A stage has `words` words and `columns` rows of x for each of their inputs.

    Products of before sm_90 keep one more.
    """
    parts = 4 if weight.kind is QuantKind.INT4 else 1
    stage_bytes = words * weight.packed.element_size() + parts * block_words * columns * 2
    return max(1, min(tile.num_stages, card.shared_bytes(weight.device) // stage_bytes))


def takes(weight: QuantizedWeight) -> bool:
    """Whether the kernels multiply by this weight.

    Not fp32 activations on a card: tensor cores would cut them to tf32.
    """
    return INTERPRETED or weight.dtype != torch.float32


def multiply_small_batch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: SmallBatchTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Multiplies 2 to 16 rows by a quantized weight.

    Args:
        x: [num_rows, K], at most MAX_SMALL_BATCH_ROWS of them.
        weight: N outputs, or 2 N with the gate first.
        bias: One per output of the weight.
        out: [num_rows, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert num_rows <= MAX_SMALL_BATCH_ROWS and num_inputs == weight.num_inputs and x.dtype == weight.dtype
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    if norm is not None and not tile.norm_inside:
        x, norm = rms_norm(x, *norm), None
    norm_weight, eps = norm or (None, 0.0)
    layout = layout_of(weight, x.dtype)
    block_words = min(tile.block_words, layout.plane)
    slices = min(tile.slices, triton.next_power_of_2(triton.cdiv(layout.num_words, block_words)))
    rows = 8 if num_rows <= 8 else MAX_SMALL_BATCH_ROWS
    words = slices * block_words * tile.block_n * (2 if gated else 1)
    _small_batch_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        x.contiguous(), norm_weight, *bits_of(weight), bias, out, num_rows, num_outputs, eps,
        LAYOUT=layout, ROWS=rows, BLOCK_N=tile.block_n,
        BLOCK_WORDS=block_words, SLICES=slices, GATED=gated, ADD=add,
        num_warps=tile.num_warps, num_stages=_stages(tile, weight, slices * block_words, rows, words),
    )  # fmt: skip


def small_batch_variants(kind: QuantKind, gated: bool, normed: bool) -> list[SmallBatchTile]:
    """Tiles that are worth timing for few rows."""
    # (outputs, words, slices, warps, stages). Few outputs are more programs; many are less of x for
    # each of them.
    if kind is QuantKind.INT4:
        sizes = [(16, 64, 4, 4, 4), (16, 128, 4, 4, 3), (32, 64, 4, 4, 3), (32, 32, 4, 4, 4)]
        sizes += [(32, 32, 4, 4, 3)] if gated else [(64, 32, 4, 4, 3), (32, 64, 2, 2, 4)]
    else:
        sizes = [(16, 128, 4, 4, 3), (16, 256, 4, 4, 3), (16, 128, 4, 4, 5), (16, 128, 8, 8, 3), (32, 128, 4, 4, 3)]
        sizes += [] if gated else [(32, 64, 4, 4, 4), (32, 128, 2, 2, 4)]
    return [
        SmallBatchTile(*size, norm_inside=inside)
        for size in sizes
        for inside in ((True, False) if normed else (False,))
    ]
