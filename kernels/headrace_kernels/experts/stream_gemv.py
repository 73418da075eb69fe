"""The Triton kernels of `mixture` for one token and experts with plain weights or of 8 bits.

Few programs stream many rows each: a program finds its experts and reads the token once, and asks
for the next rows before it multiplies the last ones. Programs of a few rows would wait for choice,
token and memory anew, several times one after the other on each multiprocessor.

`_streamed_gate_up_kernel` computes inner elements of one pair of token and expert, with the norm
before and the gating behind. `_streamed_down_kernel` computes outputs over all of the token's
experts: their inner elements, times their weights, are one long row.

Both are launched early (`early_launch`). Gate and up wait before they read which expert it is, and
then let down start; so down finds the choice, and asks for rows before it waits.
"""

# Triton's decorator has no types, a kernel's arguments differ here and in the compiler, and its
# tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated
from headrace_kernels.experts.routing import Choice, own_expert
from headrace_kernels.weight_formats.conversions import wide_bytes
from headrace_kernels.weight_formats.scale_places import scale_places

# Warps of a program, at most, and weights of a warp's threads at a time.
_MOST_WARPS, _WARP_ELEMENTS = 16, 1024


class StreamTile(NamedTuple):
    """How one token's products are cut."""

    # Inner elements that a program of gate and up multiplies at a time, and how often.
    block_n: int
    gate_up_loops: int
    # Inner elements of all pairs in a block of the down product, of which a program has all for an
    # output, and how many outputs.
    block_k: int
    down_loops: int


@triton.jit
def _add_two(a, b, x, y):
    """Adds two sums at a time, for which warps meet once."""
    return a + x, b + y


@triton.jit
def _wide(words, LAYOUT: tl.constexpr):
    """Numbers of words in fp32, without their scales."""
    KIND: tl.constexpr = LAYOUT.kind
    PLAIN: tl.constexpr = LAYOUT.is_plain
    # Cards that launch early convert e4m3 themselves.
    NATIVE: tl.constexpr = KIND == "fp8" and not PLAIN
    if KIND == "plain":
        numbers = words.to(tl.float32)
    else:
        numbers = wide_bytes(words, KIND, NATIVE, PLAIN)
    return numbers


@triton.jit
def _group_scales(scale_ptr, rows, is_row, NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales of rows' groups of inputs, one for each 16 inputs: [BLOCK_N, BLOCK_K / 16] fp32.

    A group's is asked for once, and every thread has those of its own inputs. Of weights without
    groups what is returned in their place means nothing.
    """
    if LAYOUT.is_grouped:
        GROUPS: tl.constexpr = BLOCK_K // LAYOUT.group
        group = tl.arange(0, GROUPS)[None, :]
        places = scale_ptr + scale_places(rows[:, None], group, NUM_ROWS, LAYOUT)
        scales = tl.load(places, mask=is_row[:, None] & (group * LAYOUT.group < LAYOUT.num_inputs), other=0.0)
        scales = tl.broadcast_to(scales.to(tl.float32)[:, :, None], [rows.shape[0], GROUPS, LAYOUT.group // 16])
        scales = tl.reshape(scales, (rows.shape[0], BLOCK_K // 16))
    else:
        scales = rows
    return scales


@triton.jit
def _rows(
    weight_ptr, scale_ptr, first, n, k, N: tl.constexpr, NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Weights of gates n, behind `first` rows, and of their ups, with the scales of their groups.

    They are [BLOCK_N, BLOCK_K] each, gates, ups, and both scales as of `_group_scales`.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    places = weight_ptr + (first + n)[:, None] * K + k
    mask = (n < N)[:, None] & (k < K)
    gates, ups = tl.load(places, mask=mask, other=0), tl.load(places + N * K, mask=mask, other=0)
    gate_scales = _group_scales(scale_ptr, first + n, n < N, NUM_ROWS, LAYOUT, k.shape[1])
    up_scales = _group_scales(scale_ptr, first + N + n, n < N, NUM_ROWS, LAYOUT, k.shape[1])
    return gates, ups, gate_scales, up_scales


@triton.jit
def _products(x, words, scales, LAYOUT: tl.constexpr):
    """Products of x [BLOCK_N, BLOCK_K] with rows, to be added up over inputs.

    With groups each 16 inputs are added up and multiplied by their group's scale.
    """
    products = x * _wide(words, LAYOUT)
    if LAYOUT.is_grouped:
        products = tl.sum(tl.reshape(products, (x.shape[0], x.shape[1] // 16, 16)), 2) * scales
    return products


@triton.jit(do_not_specialize=["first_expert"])
def _streamed_gate_up_kernel(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr,
    eps, first_expert,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Program (pair, n): LOOPS times BLOCK_N inner elements of one pair, gated."""
    K: tl.constexpr = LAYOUT.num_inputs
    NUM_ROWS: tl.constexpr = 2 * N * NUM_EXPERTS
    pair = tl.program_id(0)
    offs, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    grid_before_is_done()
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    stride = tl.num_programs(1) * BLOCK_N
    n = tl.program_id(1) * BLOCK_N + offs
    first = expert * (2 * N)
    rows = _rows(weight_ptr, scale_ptr, first, n, k, N, NUM_ROWS, LAYOUT)
    x_row = x_ptr + (pair // PER_TOKEN).to(tl.int64) * K
    # Each thread reads what it multiplies.
    whole = tl.zeros([BLOCK_N, BLOCK_K], tl.int32) + k
    x = tl.load(x_row + whole, mask=whole < K, other=0.0).to(tl.float32)
    rstd = 1.0
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.max(tl.sum(x * x, 1), 0) / K + eps)
        x = x * tl.load(norm_ptr + whole, mask=whole < K, other=0.0).to(tl.float32)
    grid_behind_may_start()
    for _ in tl.range(0, LOOPS):
        following = n + stride
        next_rows = _rows(weight_ptr, scale_ptr, first, following, k, N, NUM_ROWS, LAYOUT)
        gates, ups, gate_scales, up_scales = rows
        gate, up = tl.reduce(
            (_products(x, gates, gate_scales, LAYOUT), _products(x, ups, up_scales, LAYOUT)), 1, _add_two
        )
        gate, up = gate * rstd, up * rstd
        if scale_ptr is not None:
            if not LAYOUT.is_grouped:
                scales = scale_ptr + first + n
                gate *= tl.load(scales, mask=n < N, other=0.0)
                up *= tl.load(scales + N, mask=n < N, other=0.0)
        if bias_ptr is not None:
            biases = bias_ptr + first + n
            gate += tl.load(biases, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(biases + N, mask=n < N, other=0.0).to(tl.float32)
        inner = gated(gate, up, GATING)
        tl.store(out_ptr + pair.to(tl.int64) * N + n, inner.to(out_ptr.dtype.element_ty), mask=n < N)
        rows, n = next_rows, following


@triton.jit
def _long_rows(
    weight_ptr, scale_ptr, places, n,
    BLOCKS: tl.constexpr, WORDS: tl.constexpr, NUM_ROWS: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Weights of output n for a token's long row, a tuple of blocks, and of their scales if any.

    places has of each WORDS elements of a block, whose scale is one, where those of output 0 are,
    where their scale is, and whether they are read.
    """
    scale_place = n
    if LAYOUT.is_grouped:
        scale_place = scale_places(n, 0, NUM_ROWS, LAYOUT)
    rows, scales = (), ()
    for block in tl.static_range(BLOCKS):
        words, own_scales, is_read = places[block]
        # A thread's elements are of one expert, and lie at a multiple of 16 bytes.
        offs = words + n * LAYOUT.num_inputs + tl.arange(0, WORDS)[None, :]
        offs = tl.max_contiguous(tl.multiple_of(offs, [1, WORDS]), [1, WORDS])
        is_row = is_read & (n < N)
        rows = rows + (tl.load(weight_ptr + offs, mask=is_row, other=0),)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + own_scales + scale_place, mask=is_row, other=0.0)
            scales = scales + (scale.to(tl.float32),)
    return rows, scales


@triton.jit(do_not_specialize=["first_expert"])
def _streamed_down_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    ADD: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (n): weighted sums over the token's experts, for output n and each so many further.

    The inner elements of all pairs, [PER_TOKEN, K], are one long row. A thread has 16 bytes' worth
    of neighbours of it in each block.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    NUM_ROWS: tl.constexpr = N * NUM_EXPERTS
    WORDS: tl.constexpr = 8 if LAYOUT.kind == "plain" else 16
    BLOCKS: tl.constexpr = (PER_TOKEN * K + BLOCK_K - 1) // BLOCK_K
    n, stride = tl.program_id(0), tl.num_programs(0)
    pairs, firsts, places = (), (), ()
    for block in tl.static_range(BLOCKS):
        starts = block * BLOCK_K + tl.arange(0, BLOCK_K // WORDS)[:, None] * WORDS
        pair = tl.minimum(starts // K, PER_TOKEN - 1)
        expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
        is_read = is_here & (starts < PER_TOKEN * K)
        own_scales = expert * N
        if LAYOUT.is_grouped:
            own_scales = scale_places(own_scales, starts % K // LAYOUT.group, NUM_ROWS, LAYOUT)
        pairs, firsts = pairs + (pair,), firsts + (starts,)
        places = places + ((expert * N * K + starts % K, own_scales, is_read),)
    rows, scales = _long_rows(weight_ptr, scale_ptr, places, n, BLOCKS, WORDS, NUM_ROWS, N, LAYOUT)
    slots = tl.arange(0, SLOTS)
    slot_expert, is_slot = own_expert(experts_ptr, tl.minimum(slots, PER_TOKEN - 1), first_expert, NUM_EXPERTS)
    is_slot = is_slot & (slots < PER_TOKEN)
    grid_behind_may_start()
    grid_before_is_done()
    inputs = ()
    for block in tl.static_range(BLOCKS):
        _, _, is_read = places[block]
        k = firsts[block] + tl.arange(0, WORDS)[None, :]
        factor = tl.load(weights_ptr + pairs[block], mask=is_read, other=0.0)
        inputs = inputs + (tl.load(x_ptr + k, mask=is_read, other=0.0).to(tl.float32) * factor,)
    slot_factors = tl.load(weights_ptr + slots, mask=is_slot, other=0.0)
    while n < N:
        next_rows, next_scales = _long_rows(
            weight_ptr, scale_ptr, places, n + stride, BLOCKS, WORDS, NUM_ROWS, N, LAYOUT
        )
        start = 0.0
        if ADD:
            start = tl.load(out_ptr + n).to(tl.float32)
        if bias_ptr is not None:
            biases = tl.load(bias_ptr + slot_expert * N + n, mask=is_slot, other=0.0).to(tl.float32)
            start += tl.sum(biases * slot_factors, 0)
        products = tl.zeros([BLOCK_K // WORDS, WORDS], tl.float32)
        for block in tl.static_range(BLOCKS):
            numbers = _wide(rows[block], LAYOUT)
            if scale_ptr is not None:
                numbers *= scales[block]
            products += inputs[block] * numbers
        y = tl.sum(tl.sum(products, 1), 0) + start
        tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty))
        rows, scales = next_rows, next_scales
        n += stride


def multiply_streams(
    x: Tensor,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    out: Tensor,
    tile: StreamTile,
    norm: tuple[Tensor, float] | None,
    add: bool,
    gating: Gating = SILU,
) -> None:
    """Computes one token, in two launches.

    Args:
        x: [1, hidden], contiguous.
        choice: Experts and weights of the token.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each, plain or of 8 bits.
        down: Down projections of all experts, `inner` inputs each, of which 16 bytes have a whole
            number.
        out: [1, hidden], written, or with `add` added to; may then be x itself.
        tile: How both products are cut.
        norm: Weight and epsilon of an RMS norm of x; None: x is multiplied as it is.
        add: The result is added to `out`.
        gating: What is between gate-up and down.
    """
    per_token, (norm_weight, eps) = choice.experts.shape[1], norm or (None, 0.0)
    shared = {"NUM_EXPERTS": gate_up.num_experts, "PER_TOKEN": per_token, "launch_pdl": True}
    inner = x.new_empty(per_token, down.num_inputs)
    block_k = triton.next_power_of_2(gate_up.num_inputs)
    grid = (per_token, triton.cdiv(down.num_inputs, tile.gate_up_loops * tile.block_n))
    words, scales, _ = gate_up.bits()
    _streamed_gate_up_kernel[grid](
        x, norm_weight, words, scales, gate_up.bias, choice.experts, inner, eps, gate_up.first_expert,
        N=down.num_inputs, LAYOUT=gate_up.layout(), **shared, GATING=gating,
        BLOCK_N=tile.block_n, BLOCK_K=block_k, LOOPS=tile.gate_up_loops, num_warps=_warps(tile.block_n * block_k),
    )  # fmt: skip
    words, scales, _ = down.bits()
    _streamed_down_kernel[(triton.cdiv(down.num_outputs, tile.down_loops),)](
        inner, words, scales, down.bias, choice.experts, choice.weights, out, down.first_expert,
        N=down.num_outputs, LAYOUT=down.layout(), **shared, SLOTS=triton.next_power_of_2(per_token), ADD=add,
        BLOCK_K=tile.block_k, num_warps=_warps(2 * tile.block_k),
    )  # fmt: skip


def _warps(elements: int) -> int:
    """Warps whose threads have 32 elements each."""
    return min(_MOST_WARPS, max(1, elements // _WARP_ELEMENTS))
