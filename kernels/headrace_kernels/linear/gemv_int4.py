"""The GEMV behind `linear.quantized` for weights of INT4: products of one row.

Tensor cores multiply nibbles that were dequantized by a mask each, in the registers that they
were loaded into.

Owns the kernel, its launch and the tiles that are worth trying; which runs when is
`linear.quantized`'s, 8 bits are `linear.gemv_8bit`'. With norm, SwiGLU and residual stream in the
same launch.

One row needs so few products that what counts is the instructions for each weight: here 1.2 (bf16)
or 0.9 (fp16), of which products are an eighth. An instruction of the tensor cores multiplies 16
outputs x 16 inputs by 16 inputs x 8 columns. Of the 32 threads of a warp, thread 4 g + t has
outputs 2 g and 2 g + 1, and column g of x, each at the same four inputs of its t. Which inputs
those are is free, as long as it is the same ones on both sides: they are the two nibbles of the
same part in two registers of words. So a thread loads 16 bytes of an output as they lie, four
neighbours 64 bytes: 32 inputs in each of four parts (an atom). Nothing is exchanged between threads
but sums.

The eight columns are the one row, at eight places: parts 0 to 3 of one tile of the weight, and of
the next. A product of part i and x has its sums in one column, and in the others what nobody reads;
so every thread holds numbers of x that no other thread of its warp has, and each is loaded, normed
and counted once. The sums of a part end in threads of their own, where scale and zero point are
applied to each once: y = s (sum (q + c) x - (z + c) sum x). Products with ones give sum x, and of x
with itself the squares of the norm.

It is launched early where the card can (`early_launch`): a program has words and scales of its
first step under way before it waits for the kernel before it. Sums are fp32 in an order that
depends on the tile alone: no atomics, the same bits every time.
"""

# Triton's decorator has no types, a kernel's arguments differ here and in the compiler, and its
# tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc"

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.linear.dense_small_batch_kernels import finish, stream_at
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.weight_formats.conversions import column_products, column_sums, scaled_by_norm
from headrace_kernels.weight_formats.kernel_layout import bits_of, layout_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight


class Int4GemvTile(NamedTuple):
    """How a product of one row is cut."""

    # Outputs of one program: 16, or 32 by twice the loads of a thread. With SwiGLU 16, and as many
    # for the gate.
    block_n: int
    # Fewer, where the inputs do not fill them: a warp has inputs of its own.
    num_warps: int
    # Atoms of a run: 1, 2, or 4, at most those of a tile. A warp takes two runs at a time, whose
    # words are loaded before any is used; the next ones while these are used.
    run: int
    # Most registers of a thread, so that more programs run at a time; None: as the compiler likes.
    max_registers: int | None = None


@triton.jit
def _fence(PLAIN: tl.constexpr):
    """Loads before it stay before it. The compiler would put some off, to save registers."""
    if not PLAIN:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _words_at(places, run, NUM_RUNS: tl.constexpr, FULL: tl.constexpr):
    """16 bytes for each thread.

    Runs beyond the end are not read: whatever stands for them is multiplied by 0.
    """
    if FULL:
        return tl.load(places, eviction_policy="evict_first")
    return tl.load(places, mask=run < NUM_RUNS, eviction_policy="evict_first")


@triton.jit
def _atom_words(places, run, place, RUN: tl.constexpr, NUM_RUNS: tl.constexpr, FULL: tl.constexpr):
    """Atom `place` of run `run` and on of outputs 2 g and 2 g + 1: two of [4, 8, warps, 8]."""
    offset = run * (32 * RUN) + place * 32
    own_run = run + place // RUN
    return _words_at(places[0] + offset, own_run, NUM_RUNS, FULL), _words_at(
        places[1] + offset, own_run, NUM_RUNS, FULL
    )


@triton.jit
def _side_words(places, run, RUN: tl.constexpr, NUM_RUNS: tl.constexpr, FULL: tl.constexpr):
    """All atoms of two runs: a tuple of pairs."""
    words = ()
    for place in tl.static_range(2 * RUN):
        words = words + (_atom_words(places, run, place, RUN, NUM_RUNS, FULL),)
    return words


@triton.jit
def _side_products(
    words, xs, places, next_run,
    RUN: tl.constexpr, NUM_RUNS: tl.constexpr, FULL: tl.constexpr, AHEAD: tl.constexpr, DTYPE: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums of (q + c) x of a thread's even and its odd column for two runs.

    Each is [4, 8, warps, 2 outputs].

    If AHEAD, words of the next runs too, each loaded when its place is free.
    """
    t = tl.arange(0, 4)[:, None, None, None]
    own = tl.zeros([4, 8, xs[0].shape[2], 8], tl.float32)
    following = ()
    for each in tl.static_range(2):
        low = tl.zeros([4, 8, xs[0].shape[2], 8], tl.float32)
        high = tl.zeros([4, 8, xs[0].shape[2], 8], tl.float32)
        for atom in tl.static_range(RUN):
            even, odd = words[each * RUN + atom]
            low = column_products(even, odd, xs[atom], low, 0, DTYPE, PLAIN)
            high = column_products(even, odd, xs[atom], high, 2, DTYPE, PLAIN)
            if AHEAD:
                following = following + (_atom_words(places, next_run, each * RUN + atom, RUN, NUM_RUNS, FULL),)
                _fence(PLAIN)
        # Thread t has columns 2 t and 2 t + 1: parts 0 and 1 of the first run, 2 and 3 of it, 0 and
        # 1 of the second, 2 and 3.
        own = tl.where(t // 2 == each, tl.where(t % 2 == 0, low, high), own)
    # Sums are (part, column, output), and of even columns those of the first part are its own.
    even, odd = tl.split(tl.permute(tl.reshape(own, (4, 8, xs[0].shape[2], 2, 2, 2)), (0, 1, 2, 5, 3, 4)))
    return tl.split(even)[0], tl.split(odd)[1], following


@triton.jit
def _group_scales(
    run, n, N_SCALES, scale_ptr, zero_ptr, K: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Scales and zero points of outputs n in the groups of a thread's even column, and of its odd.

    A thread's columns 2 t and 2 t + 1 are parts of the two runs from `run` [1, 1, warps, 1] on.
    """
    t = tl.arange(0, 4)[:, None, None, None]
    first = _first_input(run + t // 2, t % 2 * 2, PLANE, RUN)
    even = tl.minimum(first, K - 1) // GROUP * N_SCALES + n
    odd = tl.minimum(first + PLANE, K - 1) // GROUP * N_SCALES + n
    return (tl.load(scale_ptr + even), tl.load(zero_ptr + even)), (tl.load(scale_ptr + odd), tl.load(zero_ptr + odd))


@triton.jit
def _dequantized_sums(sums, x_sums, scales, OFFSET: tl.constexpr, UNIT: tl.constexpr):
    """The part s (sum (q + c) x - (z + c) sum x), of scales and zero points (s, z)."""
    return (sums * UNIT - (scales[1].to(tl.float32) + OFFSET) * x_sums) * scales[0].to(tl.float32)


@triton.jit
def _columns_of_x(x_ptr, norm_ptr, run, K: tl.constexpr, PLANE: tl.constexpr, RUN: tl.constexpr, PLAIN: tl.constexpr):
    """The elements of x (times the norm's weight) that threads have of two runs from `run` on.

    Returns a tuple of RUN times [4, 8, warps, 8]; and `column_sums` of them.
    """
    t = tl.arange(0, 4)[:, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None]
    first = _first_input(run + g // 4, g % 4, PLANE, RUN) + t * 8
    xs = ()
    sums = tl.zeros([4, 8, run.shape[2], 8], tl.float32)
    for atom in tl.static_range(RUN):
        k = first + atom * 32
        places = k + tl.arange(0, 8)[None, None, None, :]
        raw = tl.load(x_ptr + places, mask=k < K, other=0.0)
        x = raw
        if norm_ptr is not None:
            x = scaled_by_norm(raw, tl.load(norm_ptr + places, mask=k < K, other=0.0), PLAIN)
        sums = column_sums(raw, x, sums, norm_ptr is not None, PLAIN)
        xs = xs + (x,)
    return xs, sums


@triton.jit
def _first_input(run, part, PLANE: tl.constexpr, RUN: tl.constexpr):
    """First input of a part of a run."""
    RUNS: tl.constexpr = PLANE // (32 * RUN)
    return (run // RUNS * 4 + part) * PLANE + run % RUNS * (32 * RUN)


@triton.jit
def _own_squares(products):
    """Squares of columns g of x: [4, 8, warps, 2], one of eight is not 0.

    From products [4, 8, warps, 4] of columns g and 2 t, g and 2 t + 1, and two of nothing.
    """
    column = tl.arange(0, 4)[None, None, None, :]
    other = 2 * tl.arange(0, 4)[:, None, None, None] + column
    is_own = (other == tl.arange(0, 8)[None, :, None, None]) & (column < 2)
    own = tl.sum(tl.where(is_own, products, 0.0), 3)
    return tl.join(own, own)


@triton.jit
def _over_inputs(totals):
    """[4, 8, warps, ...] -> [8, ...]."""
    return tl.sum(tl.sum(totals, 0), 1)


@triton.jit
def _gemv_int4_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    eps,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, RUN: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    PLAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[n] = sum_k x[k] w[n, k] for BLOCK_N outputs.

    With norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Of the numbers that `column_products` makes of nibbles: what is added to them, and what their
    # sums are multiplied by, in even and odd parts.
    OFFSET: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 0.0
    EVEN_UNIT: tl.constexpr = float(1 << 24) if DTYPE == tl.float16 and not PLAIN else 1.0
    ODD_UNIT: tl.constexpr = float(1 << 20) if DTYPE == tl.float16 and not PLAIN else 1.0
    NUM_RUNS: tl.constexpr = WORDS // (32 * RUN)
    STEPS: tl.constexpr = (NUM_RUNS + 2 * WARPS - 1) // (2 * WARPS)
    # Outputs come in sides of 16, the second of which is SwiGLU's other half, or follows the first.
    SIDES: tl.constexpr = 2 if GATED or BLOCK_N == 32 else 1
    AWAY: tl.constexpr = N if GATED else 16
    N_SCALES: tl.constexpr = N * (2 if GATED else 1)
    # Dimensions: t, g, warps, and what a thread holds: in this order the compiler makes thread 4 g
    # + t of them.
    t = tl.arange(0, 4)[:, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None]
    pair = tl.arange(0, 2)[None, None, None, :]
    thread_words = word_ptr + (t * 8 + tl.arange(0, 8)[None, None, None, :])
    outputs, places, words, scales, totals = (), (), (), (), ()
    for side in tl.static_range(SIDES):
        n = tl.program_id(0) * BLOCK_N + 2 * g
        n_even, n_odd, n = n, n + 1, n + pair
        if side == 1:
            n_even, n_odd, n = n_even + AWAY, n_odd + AWAY, n + AWAY
        if N % BLOCK_N:
            # Outputs beyond the end repeat the last one, and are not stored.
            n_even, n_odd, n = (
                tl.minimum(n_even, N_SCALES - 1),
                tl.minimum(n_odd, N_SCALES - 1),
                tl.minimum(n, N_SCALES - 1),
            )
        outputs = outputs + (n,)
        places = places + ((thread_words + n_even.to(tl.int64) * WORDS, thread_words + n_odd.to(tl.int64) * WORDS),)
        words = words + (_side_words(places[side], 2 * warp, RUN, NUM_RUNS, 2 * WARPS <= NUM_RUNS),)
        totals = totals + (tl.zeros([4, 8, WARPS, 2], tl.float32),)
        scales = scales + (_group_scales(2 * warp, n, N_SCALES, scale_ptr, zero_ptr, K, GROUP, PLANE, RUN),)
    squares = tl.zeros([4, 8, WARPS, 4], tl.float32)
    n_out = tl.program_id(0) * BLOCK_N + 2 * tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :]
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    residual = tl.zeros([8, 2], tl.float32)
    residual_away = tl.zeros([8, 2], tl.float32)
    if ADD:
        residual = stream_at(0, n_out, out_ptr, 1, N)
        if SIDES == 2:
            residual_away = stream_at(0, n_out + AWAY, out_ptr, 1, N)
    # Unrolled, so that words of the next step come into registers of their own.
    for step in tl.static_range(STEPS):
        run = 2 * (step * WARPS + warp)
        _fence(PLAIN)
        xs, sums = _columns_of_x(x_ptr, norm_ptr, run, K, PLANE, RUN, PLAIN)
        step_squares, x_sums = tl.split(tl.permute(tl.reshape(sums, (4, 8, WARPS, 2, 4)), (0, 1, 2, 4, 3)))
        squares += step_squares
        x_even, x_odd = tl.split(tl.reshape(x_sums, (4, 8, WARPS, 2, 2)))
        following, added = (), ()
        for side in tl.static_range(SIDES):
            even, odd, loaded = _side_products(
                words[side],
                xs,
                places[side],
                run + 2 * WARPS,
                RUN,
                NUM_RUNS,
                (step + 2) * 2 * WARPS <= NUM_RUNS,
                step + 1 < STEPS,
                DTYPE,
                PLAIN,
            )
            following = following + (loaded,)
            if step:
                of_even, of_odd = _group_scales(run, outputs[side], N_SCALES, scale_ptr, zero_ptr, K, GROUP, PLANE, RUN)
            else:
                of_even, of_odd = scales[side]
            total = totals[side] + _dequantized_sums(even, x_even, of_even, OFFSET, EVEN_UNIT)
            total += _dequantized_sums(odd, x_odd, of_odd, OFFSET, ODD_UNIT)
            added = added + (total,)
        words, totals = following, added
    # All sums over warps at once.
    total = tl.join(totals[0], totals[1]) if SIDES == 2 else totals[0]
    if norm_ptr is not None:
        own = _own_squares(squares)
        total = tl.join(total, tl.join(own, own) if SIDES == 2 else own)
        total, columns = tl.split(_over_inputs(total))
        total *= tl.rsqrt(tl.sum(columns, 0) / K + eps)[None]
    else:
        total = _over_inputs(total)
    if SIDES == 2:
        y, away = tl.split(total)
        finish(y + residual, away, 0, n_out, bias_ptr, out_ptr, 1, N, GATED, False)
        if not GATED:
            finish(away + residual_away, away, 0, n_out + AWAY, bias_ptr, out_ptr, 1, N, GATED, False)
    else:
        finish(total + residual, total, 0, n_out, bias_ptr, out_ptr, 1, N, GATED, False)


def takes_gemv_int4(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight of INT4.

    A thread loads eight inputs of x at a time.
    """
    return weight.num_inputs % 8 == 0


def _aligned(numbers: Tensor) -> Tensor:
    """x, or a copy if it does not begin at 16 bytes.

    The kernel's threads would load less at a time, and not hold what its products need.
    """
    return numbers if numbers.data_ptr() % 16 == 0 else numbers.clone()


def multiply_gemv_int4(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: Int4GemvTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Multiplies one row by an INT4 weight.

    Args:
        x: [1, K].
        weight: INT4 of N outputs, or 2 N with the gate first, such that `takes_gemv_int4(weight)`.
        bias: One per output of the weight.
        out: [1, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    num_outputs = out.shape[1]
    assert x.shape == (1, weight.num_inputs) and x.dtype == weight.dtype and takes_gemv_int4(weight)
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    assert weight.packed.data_ptr() % 16 == 0
    if norm is not None and (x.dtype == torch.float16 or norm[0].dtype != x.dtype):
        # x g may be beyond fp16's range, where x g / rms(x) is not; and the product of both is one
        # of bf16 numbers, which factors in fp32 are not.
        x, norm = rms_norm(x, *norm), None
    norm_weight, eps = norm or (None, 0.0)
    if norm_weight is not None:
        norm_weight = _aligned(norm_weight)
    layout = layout_of(weight, x.dtype)
    constants = {"K": layout.num_inputs, "WORDS": layout.num_words, "GROUP": layout.group, "PLANE": layout.plane}
    constants["PLAIN"] = layout.is_plain
    run = min(tile.run, layout.plane // 32)
    warps = min(tile.num_warps, triton.next_power_of_2(triton.cdiv(layout.num_words, 64 * run)))
    block_n = 16 if gated else tile.block_n
    early = card.launches_early(weight.device)
    _gemv_int4_kernel[(triton.cdiv(num_outputs, block_n),)](
        _aligned(x.contiguous()), norm_weight, *bits_of(weight), bias, out, eps,
        N=num_outputs, **constants, BLOCK_N=block_n, WARPS=warps, RUN=run, GATED=gated, ADD=add, EARLY=early,
        num_warps=warps, maxnreg=tile.max_registers, launch_pdl=early,
    )  # fmt: skip


def gemv_int4_variants(gated: bool) -> list[Int4GemvTile]:
    """Tiles that are worth timing for one row."""
    outputs = (16,) if gated else (16, 32)
    return [Int4GemvTile(*sizes) for sizes in itertools.product(outputs, (2, 4, 8, 16), (1, 2, 4))]
