"""The GEMV behind `linear.quantized` for weights of 8 bits: products of one row.

Weights are read once and multiplied on the ordinary cores. The way to the GEMV of INT4
(`linear.gemv_int4`) goes through here.

Owns the kernel, its launch and the tiles that are worth trying; which runs when is
`linear.quantized`'s. It is to `linear.small_batch` what the `vector` kernel is to the `tile`
kernel in `small_linear_kernels`: a program has few outputs, asks for all of their bits at once, and
each thread sums what it holds. With norm, SwiGLU and residual stream in the same launch.

It is launched early where the card can (`early_launch`): a program asks for as much of its weight
as registers hold, and for scales, and only then waits for the kernel before it.

A thread holds 16 inputs of an output. The inputs of one thread stand in one dimension and threads
in the first, so that whatever a thread multiplies lies in its own registers: bits, x, and scales.
Sums are fp32 in an order that depends on the tile alone: no atomics, the same bits every time.
"""

# Triton's decorator has no types, a kernel's arguments differ here and in the compiler, and its
# tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import itertools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.linear.dense_small_batch_kernels import finish, loads_ahead, stream_at
from headrace_kernels.linear.gemv_int4 import (
    Int4GemvTile,
    gemv_int4_variants,
    multiply_gemv_int4,
    takes_gemv_int4,
)
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.conversions import wide_bytes
from headrace_kernels.weight_formats.kernel_layout import bits_of, layout_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.weight_formats.scale_places import scale_places


class GemvTile(NamedTuple):
    """How a product of one row is cut."""

    # Outputs of one program (with SwiGLU as many again, for the gate).
    block_n: int
    # Fewer, where the inputs do not fill them: a thread takes 16 bytes of an output at a time.
    num_warps: int
    # Whether all loads of a weight stand before what is done with any: the compiler would put some
    # off, to save registers.
    loads_first: bool


@triton.jit
def _byte_sums(words, x, scales, zeros, zero_ptr, LAYOUT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """What words [threads, outputs, 16] of 8 bits add to the sums [threads, outputs].

    scales, zeros: Of `_chunk_constants`.
    """
    KIND: tl.constexpr = LAYOUT.kind
    sums = tl.sum(wide_bytes(words, KIND, NATIVE_FP8, LAYOUT.is_plain) * x[:, None, :], 2)
    if LAYOUT.is_grouped:
        if zero_ptr is not None:
            sums -= zeros.to(tl.float32) * tl.sum(x, 1)[:, None]
        sums *= scales.to(tl.float32)
    return sums


@triton.jit
def _chunk_constants(scale_ptr, zero_ptr, chunk, n, N_SCALES, LAYOUT: tl.constexpr):
    """Scales and zero points [threads, outputs] of chunks [threads] of outputs n [1, outputs].

    Of weights without groups, or zero points, what is returned in their place means nothing.
    """
    scales = chunk[:, None]
    zeros = scales
    if LAYOUT.is_grouped:
        group = (tl.minimum(chunk * 16, LAYOUT.num_inputs - 1) // LAYOUT.group)[:, None]
        scales = tl.load(scale_ptr + scale_places(n, group, N_SCALES, LAYOUT))
        if zero_ptr is not None:
            zeros = tl.load(zero_ptr + group * N_SCALES + n)
    return scales, zeros


@triton.jit
def _chunk(places, up_words, scale_ptr, zero_ptr, chunk, n, N: tl.constexpr, LAYOUT: tl.constexpr, GATED: tl.constexpr):
    """16 bytes of chunk [threads] of each output, and of the ups to those gates, with constants.

    Both are [threads, outputs, 16]; without GATED they are the same.
    """
    WORDS: tl.constexpr = LAYOUT.num_words
    N_SCALES: tl.constexpr = 2 * N if GATED else N
    word = chunk[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    words = tl.load(places + word, mask=word < WORDS, other=0, eviction_policy="evict_first")
    words_up = words
    if GATED:
        words_up = tl.load(places + up_words + word, mask=word < WORDS, other=0, eviction_policy="evict_first")
    scales, zeros = _chunk_constants(scale_ptr, zero_ptr, chunk, n, N_SCALES, LAYOUT)
    scales_up, zeros_up = scales, zeros
    if GATED:
        scales_up, zeros_up = _chunk_constants(scale_ptr, zero_ptr, chunk, N + n, N_SCALES, LAYOUT)
    return words, scales, zeros, words_up, scales_up, zeros_up


@triton.jit
def _gemv_8bit_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    eps,
    N: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr, THREADS: tl.constexpr, LOADS_FIRST: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    NATIVE_FP8: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y[n] = sum_k x[k] w[n, k] for BLOCK_N outputs.

    With norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums. AHEAD: loads of a
    thread that are under way while it multiplies what an earlier one brought, 1 or more.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    # Each of 16 bytes of every output for every thread.
    LOADS: tl.constexpr = (WORDS + 16 * THREADS - 1) // (16 * THREADS)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if N % BLOCK_N:
        # Outputs beyond the end repeat the last one, and are not stored.
        n = tl.minimum(n, N - 1)
    thread = tl.arange(0, THREADS)
    word_places = word_ptr + n.to(tl.int64)[:, :, None] * WORDS
    up_words = tl.full([], N, tl.int64) * WORDS
    n_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n_out, N - 1)
    scale, scale_up = 1.0, 1.0
    if not LAYOUT.is_grouped:
        scale = tl.load(scale_ptr + n_read)
        if GATED:
            scale_up = tl.load(scale_ptr + N + n_read)
    loaded = ()
    for load in tl.static_range(AHEAD):
        chunk = load * THREADS + thread
        loaded = loaded + (_chunk(word_places, up_words, scale_ptr, zero_ptr, chunk, n, N, LAYOUT, GATED),)
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    elif LOADS_FIRST:
        tl.debug_barrier()
    residual = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        residual = stream_at(0, n_out, out_ptr, 1, N)
    totals = tl.zeros([THREADS, BLOCK_N], tl.float32)
    up_totals = tl.zeros([THREADS, BLOCK_N], tl.float32)
    squares = tl.zeros([THREADS], tl.float32)
    for load in tl.static_range(LOADS):
        chunk = load * THREADS + thread
        words, scales, zeros, words_up, scales_up, zeros_up = loaded[load]
        # Two loads of 16 bytes a thread.
        k = chunk[:, None, None] * 16 + tl.arange(0, 2)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += tl.sum(tl.sum(x * x, 2), 1)
            x = x * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x = tl.reshape(x, (THREADS, 16))
        totals += _byte_sums(words, x, scales, zeros, zero_ptr, LAYOUT, NATIVE_FP8)
        if GATED:
            up_totals += _byte_sums(words_up, x, scales_up, zeros_up, zero_ptr, LAYOUT, NATIVE_FP8)
        if load + AHEAD < LOADS:
            chunk += AHEAD * THREADS
            loaded = loaded + (_chunk(word_places, up_words, scale_ptr, zero_ptr, chunk, n, N, LAYOUT, GATED),)
            if LOADS_FIRST:
                tl.debug_barrier()
    y, up = tl.sum(totals, 0) * scale, tl.sum(up_totals, 0) * scale_up
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y, up = y * rstd, up * rstd
    finish(y + residual, up, 0, n_out, bias_ptr, out_ptr, 1, N, GATED, False)


def takes_gemv(weight: QuantizedWeight) -> bool:
    """Whether a kernel of one row multiplies by this weight.

    Of 8 bits, outputs begin at multiples of 16 bytes, and what a thread holds lies within one
    group.
    """
    if weight.kind is QuantKind.INT4:
        return takes_gemv_int4(weight)
    row_bytes = weight.packed.shape[1] * weight.packed.element_size()
    return row_bytes % 16 == 0 and (weight.group_size == weight.num_inputs or weight.group_size % 16 == 0)


def _converts_fp8(weight: QuantizedWeight) -> bool:
    return weight.kind is QuantKind.FP8 and not INTERPRETED and card.has_fp8_products(weight.device)


def multiply_gemv(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: GemvTile | Int4GemvTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Multiplies one row by a weight of 8 bits.

    Args:
        x: [1, K].
        weight: N outputs, or 2 N with the gate first, such that `takes_gemv(weight)`.
        bias: One per output of the weight.
        out: [1, N], written, or with `add` added to.
        tile: The sizes, of INT4's kernel for INT4.
        norm: Weight and epsilon of an RMS norm of x.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    if isinstance(tile, Int4GemvTile):
        multiply_gemv_int4(x, weight, bias, out, tile, norm, gated, add)
        return
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert (
        weight.kind is not QuantKind.INT4
        and num_rows == 1
        and num_inputs == weight.num_inputs
        and x.dtype == weight.dtype
        and takes_gemv(weight)
    )
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    norm_weight, eps = norm or (None, 0.0)
    layout, (words, scales, zeros) = layout_of(weight, x.dtype), bits_of(weight)
    chunks = triton.cdiv(words.shape[1], 16)
    threads = min(32 * tile.num_warps, max(32, triton.next_power_of_2(chunks)))
    early = card.launches_early(weight.device)
    load_bytes = 16 * threads * tile.block_n * (2 if gated else 1)
    _gemv_8bit_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        x.contiguous(), norm_weight, words, scales, zeros, bias, out, eps,
        N=num_outputs, LAYOUT=layout, NATIVE_FP8=_converts_fp8(weight), BLOCK_N=tile.block_n, THREADS=threads,
        LOADS_FIRST=tile.loads_first, GATED=gated, ADD=add, EARLY=early,
        AHEAD=loads_ahead(load_bytes, threads // 32, triton.cdiv(chunks, threads)) if early else 1,
        num_warps=threads // 32, launch_pdl=early,
    )  # fmt: skip


def gemv_variants(kind: QuantKind, gated: bool) -> list[GemvTile] | list[Int4GemvTile]:
    """Tiles that are worth timing for one row."""
    if kind is QuantKind.INT4:
        return gemv_int4_variants(gated)
    outputs = (2, 4, 8) if gated else (4, 8)
    return [GemvTile(*sizes) for sizes in itertools.product(outputs, (2, 4, 8, 16), (False, True))]
