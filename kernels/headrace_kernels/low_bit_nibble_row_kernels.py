"""The Triton kernel behind `low_bit_linear` for one row and weights of INT4: tensor cores multiply nibbles that were restored by a mask each, in the registers that they were loaded into.

Owns the kernel, its launch and the tiles that are worth trying; which runs when is `low_bit_linear`'s, 8 bits are `low_bit_row_kernels`'. With norm, SwiGLU and residual stream in the same launch.

One row needs so few products that what counts is the instructions for each weight: here 1.2 (bf16) or 0.9 (fp16), of which products are an eighth. An instruction of the tensor cores multiplies 16 outputs x
16 inputs by 16 inputs x 8 columns. Of the 32 threads of a warp, thread 4 g + t has outputs 2 g and 2 g + 1, and column g of x, each at the same four inputs of its t. Which inputs those are is free, as long as
it is the same ones on both sides: they are the two nibbles of the same part in two registers of words. So a thread loads 16 bytes of an output as they lie, four neighbours 64 bytes: 32 inputs in each of
four parts (an atom). Nothing is exchanged between threads but sums.

The eight columns are the one row, at eight places: parts 0 to 3 of one tile of the weight, and of the next. A product of part i and x has its sums in one column, and in the others what nobody reads; so every
thread holds numbers of x that no other thread of its warp has, and each is loaded, normed and counted once. The sums of a part end in threads of their own, where scale and zero point are applied to each once:
y = s (sum (q + c) x - (z + c) sum x). Products with ones give sum x, and of x with itself the squares of the norm.

Sums are fp32 in an order that depends on the tile alone: no atomics, the same bits every time.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.low_bit_kernels import bits_of, layout_of
from headrace_kernels.low_bit_numbers import column_products, column_sums, scaled_by_norm
from headrace_kernels.quantized_weight import QuantizedWeight
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.small_linear_kernels import finish


class NibbleRowTile(NamedTuple):
    """How a product of one row is cut."""

    # Outputs of one program: 16, or 32 by twice the loads of a thread. With SwiGLU 16, and as many for the gate.
    block_n: int
    # Fewer, where the inputs do not fill them: a warp has inputs of its own.
    num_warps: int
    # Tiles of the weight that a warp takes at a time: 1, or 2 so that no column of x is empty.
    tiles: int
    # Whether all loads of a step stand before what is done with any: the compiler would put some off, to save registers.
    loads_first: bool


@triton.jit
def _words_at(places, tile, NUM_TILES: tl.constexpr, FULL: tl.constexpr):
    """16 bytes for each thread. Tiles beyond the end are not read: whatever stands for them is multiplied by 0."""
    if FULL:
        return tl.load(places, eviction_policy="evict_first")
    return tl.load(places, mask=tile < NUM_TILES, eviction_policy="evict_first")


@triton.jit
def _tile_words(places, first_tile, TILES: tl.constexpr, ATOMS: tl.constexpr, NUM_TILES: tl.constexpr, PLANE: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """All atoms of some tiles: a tuple of [4, 8, warps, 8]."""
    words = ()
    for tile in tl.static_range(TILES):
        for atom in tl.static_range(ATOMS):
            words = words + (_words_at(places + tile * PLANE + atom * 32, first_tile + tile, NUM_TILES, FULL),)
    return words


@triton.jit
def _own_column(sums):
    """[4, 8, warps, (part, column, output)] -> [4, 8, warps, outputs] for even columns, whose part is the first, and for odd ones."""
    apart = tl.reshape(sums, (4, 8, sums.shape[2], 2, 2, 2))
    even, odd = tl.split(tl.permute(apart, (0, 1, 2, 5, 3, 4)))
    first, _ = tl.split(even)
    _, second = tl.split(odd)
    return first, second


@triton.jit
def _tile_sums(
    even, odd, xs, t, TILES: tl.constexpr, ATOMS: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr
):  # fmt: skip
    """Sums of (q + c) x of outputs 2 g (words `even`) and 2 g + 1 (`odd`), for a thread's two columns: two of [4, 8, warps, 2 outputs]."""
    own = tl.zeros([4, 8, xs[0].shape[2], 8], tl.float32)
    for tile in tl.static_range(TILES):
        low = tl.zeros([4, 8, xs[0].shape[2], 8], tl.float32)
        high = tl.zeros([4, 8, xs[0].shape[2], 8], tl.float32)
        for atom in tl.static_range(ATOMS):
            low = column_products(even[tile * ATOMS + atom], odd[tile * ATOMS + atom], xs[atom], low, 0, DTYPE, PLAIN)
            high = column_products(even[tile * ATOMS + atom], odd[tile * ATOMS + atom], xs[atom], high, 2, DTYPE, PLAIN)
        # Thread t has columns 2 t and 2 t + 1: parts 0 and 1 of the first tile, 2 and 3 of it, 0 and 1 of the second, 2 and 3.
        own = tl.where(t // 2 == tile, tl.where(t % 2 == 0, low, high), own)
    return _own_column(own)


@triton.jit
def _restored_sums(
    sums, x_sums, group, n, N_SCALES, scale_ptr, zero_ptr, OFFSET: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """s (sum (q + c) x - (z + c) sum x) for groups [4, 1, warps, 1] and outputs n."""
    places = group * N_SCALES + n
    zeros = tl.load(zero_ptr + places).to(tl.float32) + OFFSET
    return (sums * UNIT - zeros * x_sums) * tl.load(scale_ptr + places).to(tl.float32)


@triton.jit
def _over_inputs(totals):
    """[4, 8, warps, 2] -> [8, 2]."""
    return tl.sum(tl.sum(totals, 0), 1)


@triton.jit
def _sum_of_squares(products):
    """Of all columns g of x, from products [4, 8, warps, 4] of columns g and 2 t, g and 2 t + 1, and two of nothing."""
    column = tl.arange(0, 4)[None, None, None, :]
    other = 2 * tl.arange(0, 4)[:, None, None, None] + column
    is_own = (other == tl.arange(0, 8)[None, :, None, None]) & (column < 2)
    return tl.sum(tl.sum(tl.sum(tl.sum(tl.where(is_own, products, 0.0), 3), 0), 0), 0)


@triton.jit
def _nibble_row_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    eps,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, LOADS_FIRST: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """y[n] = sum_k x[k] w[n, k] for BLOCK_N outputs; with norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Of the numbers that `column_products` makes of nibbles: what is added to them, and what their sums are multiplied by, in even and odd parts.
    OFFSET: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 0.0
    EVEN_UNIT: tl.constexpr = float(1 << 24) if DTYPE == tl.float16 and not PLAIN else 1.0
    ODD_UNIT: tl.constexpr = float(1 << 20) if DTYPE == tl.float16 and not PLAIN else 1.0
    ATOMS: tl.constexpr = PLANE // 32
    NUM_TILES: tl.constexpr = WORDS // PLANE
    STEPS: tl.constexpr = (NUM_TILES + WARPS * TILES - 1) // (WARPS * TILES)
    FULL: tl.constexpr = NUM_TILES % (WARPS * TILES) == 0
    PAIR: tl.constexpr = GATED or BLOCK_N == 32
    N_SCALES: tl.constexpr = N * (2 if GATED else 1)
    # Dimensions: t, g, warps, and what a thread holds: in this order the compiler makes thread 4 g + t of them.
    t = tl.arange(0, 4)[:, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None]
    inner = tl.arange(0, 8)[None, None, None, :]
    n = tl.program_id(0) * BLOCK_N + 2 * g + tl.arange(0, 2)[None, None, None, :]
    n_even = tl.program_id(0) * BLOCK_N + 2 * g
    n_odd = n_even + 1
    # The second 16 outputs.
    AWAY: tl.constexpr = N if GATED else 16
    n_away, n_even_away, n_odd_away = n + AWAY, n_even + AWAY, n_odd + AWAY
    if N % BLOCK_N:
        # Outputs beyond the end repeat the last one, and are not stored.
        LAST: tl.constexpr = N_SCALES - 1
        n_away, n_even_away, n_odd_away = tl.minimum(n_away, LAST), tl.minimum(n_even_away, LAST), tl.minimum(n_odd_away, LAST)
        n, n_even, n_odd = tl.minimum(n, N - 1), tl.minimum(n_even, N - 1), tl.minimum(n_odd, N - 1)
    thread_words = word_ptr + (warp * TILES * PLANE + t * 8 + inner)
    even_places, odd_places = thread_words + n_even.to(tl.int64) * WORDS, thread_words + n_odd.to(tl.int64) * WORDS
    even_away, odd_away = thread_words + n_even_away.to(tl.int64) * WORDS, thread_words + n_odd_away.to(tl.int64) * WORDS
    totals = tl.zeros([4, 8, WARPS, 2], tl.float32)
    totals_away = tl.zeros([4, 8, WARPS, 2], tl.float32)
    squares = tl.zeros([4, 8, WARPS, 4], tl.float32)
    for step in tl.range(0, STEPS):
        tile = (step * WARPS + warp) * TILES
        words = step * (WARPS * TILES * PLANE)
        even = _tile_words(even_places + words, tile, TILES, ATOMS, NUM_TILES, PLANE, FULL)
        odd = _tile_words(odd_places + words, tile, TILES, ATOMS, NUM_TILES, PLANE, FULL)
        if PAIR:
            other_even = _tile_words(even_away + words, tile, TILES, ATOMS, NUM_TILES, PLANE, FULL)
            other_odd = _tile_words(odd_away + words, tile, TILES, ATOMS, NUM_TILES, PLANE, FULL)
        if LOADS_FIRST:
            tl.debug_barrier()
        xs = ()
        sums = tl.zeros([4, 8, WARPS, 8], tl.float32)
        for atom in tl.static_range(ATOMS):
            # The part of column g, of the tile that is its own.
            k = ((tile + g // 4) * 4 + g % 4) * PLANE + atom * 32 + t * 8
            mask = k < K
            if TILES == 1:
                mask = mask & (g < 4)
            raw = tl.load(x_ptr + (k + inner), mask=mask, other=0.0)
            x = raw
            if norm_ptr is not None:
                x = scaled_by_norm(raw, tl.load(norm_ptr + (k + inner), mask=mask, other=0.0), PLAIN)
            sums = column_sums(raw, x, sums, norm_ptr is not None, PLAIN)
            xs = xs + (x,)
        step_squares, x_sums = tl.split(tl.permute(tl.reshape(sums, (4, 8, WARPS, 2, 4)), (0, 1, 2, 4, 3)))
        squares += step_squares
        x_even, x_odd = tl.split(tl.reshape(x_sums, (4, 8, WARPS, 2, 2)))
        # Of a thread's columns 2 t and 2 t + 1.
        column_tile = tile + (t // 2 if TILES == 2 else 0)
        first = (column_tile * 4 + t % 2 * 2) * PLANE
        even_group, odd_group = tl.minimum(first, K - 1) // GROUP, tl.minimum(first + PLANE, K - 1) // GROUP
        even_sums, odd_sums = _tile_sums(even, odd, xs, t, TILES, ATOMS, DTYPE, PLAIN)
        totals += _restored_sums(even_sums, x_even, even_group, n, N_SCALES, scale_ptr, zero_ptr, OFFSET, EVEN_UNIT)
        totals += _restored_sums(odd_sums, x_odd, odd_group, n, N_SCALES, scale_ptr, zero_ptr, OFFSET, ODD_UNIT)
        if PAIR:
            even_sums, odd_sums = _tile_sums(other_even, other_odd, xs, t, TILES, ATOMS, DTYPE, PLAIN)
            totals_away += _restored_sums(even_sums, x_even, even_group, n_away, N_SCALES, scale_ptr, zero_ptr, OFFSET, EVEN_UNIT)  # fmt: skip
            totals_away += _restored_sums(odd_sums, x_odd, odd_group, n_away, N_SCALES, scale_ptr, zero_ptr, OFFSET, ODD_UNIT)  # fmt: skip
    y, away = _over_inputs(totals), _over_inputs(totals_away)
    if norm_ptr is not None:
        rstd = tl.rsqrt(_sum_of_squares(squares) / K + eps)
        y, away = y * rstd, away * rstd
    n_out = tl.program_id(0) * BLOCK_N + 2 * tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :]
    finish(y, away, 0, n_out, bias_ptr, out_ptr, 1, N, GATED, ADD)
    if PAIR and not GATED:
        finish(away, away, 0, n_out + AWAY, bias_ptr, out_ptr, 1, N, GATED, ADD)


def takes_nibble_row(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight of INT4: a thread loads eight inputs of x at a time."""
    return weight.num_inputs % 8 == 0


def _aligned(numbers: Tensor) -> Tensor:
    """A copy if they do not begin at 16 bytes: the kernel's threads would load less at a time, and not hold what its products need."""
    return numbers if numbers.data_ptr() % 16 == 0 else numbers.clone()


def multiply_nibble_row(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: NibbleRowTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """One row.

    Args:
        x: [1, K].
        weight: INT4 of N outputs, or 2 N with the gate first, such that `takes_nibble_row(weight)`.
        bias: One per output of the weight.
        out: [1, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    num_outputs = out.shape[1]
    assert x.shape == (1, weight.num_inputs) and x.dtype == weight.dtype and takes_nibble_row(weight)
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    assert weight.packed.data_ptr() % 16 == 0
    if norm is not None and x.dtype == torch.float16:
        # x g may be beyond its range, where x g / rms(x) is not.
        x, norm = rms_norm(x, *norm), None
    norm_weight, eps = norm or (None, 0.0)
    if norm_weight is not None:
        norm_weight = _aligned(norm_weight)
    layout = layout_of(weight, x.dtype)
    constants = {name: layout[name] for name in ("K", "WORDS", "GROUP", "PLANE", "PLAIN")}
    num_tiles = layout["WORDS"] // layout["PLANE"]
    warps = min(tile.num_warps, triton.next_power_of_2(triton.cdiv(num_tiles, tile.tiles)))
    block_n = 16 if gated else tile.block_n
    _nibble_row_kernel[(triton.cdiv(num_outputs, block_n),)](
        _aligned(x.contiguous()), norm_weight, *bits_of(weight), bias, out, eps,
        N=num_outputs, **constants, BLOCK_N=block_n, WARPS=warps, TILES=tile.tiles, LOADS_FIRST=tile.loads_first, GATED=gated, ADD=add,
        num_warps=warps,
    )  # fmt: skip


def nibble_row_variants(gated: bool) -> list[NibbleRowTile]:
    """Tiles that are worth timing for one row."""
    outputs = (16,) if gated else (16, 32)
    return [NibbleRowTile(*sizes) for sizes in itertools.product(outputs, (2, 4, 8, 16), (1, 2), (False, True))]
