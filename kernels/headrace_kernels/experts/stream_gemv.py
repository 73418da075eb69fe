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
def _rows(weight_ptr, first, n, k, N: tl.constexpr, K: tl.constexpr):
    """Weights of gates n, behind `first` rows, and of their ups, [BLOCK_N, BLOCK_K] each."""
    places = weight_ptr + (first + n)[:, None] * K + k
    mask = (n < N)[:, None] & (k < K)
    return tl.load(places, mask=mask, other=0), tl.load(places + N * K, mask=mask, other=0)


@triton.jit(do_not_specialize=["first_expert"])
def _streamed_gate_up_kernel(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr,
    eps, first_expert,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Program (pair, n): LOOPS times BLOCK_N inner elements of one pair, gated."""
    K: tl.constexpr = LAYOUT.num_inputs
    pair = tl.program_id(0)
    offs, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    grid_before_is_done()
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    stride = tl.num_programs(1) * BLOCK_N
    n = tl.program_id(1) * BLOCK_N + offs
    first = expert * (2 * N)
    gate_rows, up_rows = _rows(weight_ptr, first, n, k, N, K)
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
        next_gates, next_ups = _rows(weight_ptr, first, following, k, N, K)
        gate, up = tl.reduce((x * _wide(gate_rows, LAYOUT), x * _wide(up_rows, LAYOUT)), 1, _add_two)
        gate, up = gate * rstd, up * rstd
        if scale_ptr is not None:
            scales = scale_ptr + first + n
            gate *= tl.load(scales, mask=n < N, other=0.0)
            up *= tl.load(scales + N, mask=n < N, other=0.0)
        if bias_ptr is not None:
            biases = bias_ptr + first + n
            gate += tl.load(biases, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(biases + N, mask=n < N, other=0.0).to(tl.float32)
        inner = gated(gate, up, GATING)
        tl.store(out_ptr + pair.to(tl.int64) * N + n, inner.to(out_ptr.dtype.element_ty), mask=n < N)
        gate_rows, up_rows, n = next_gates, next_ups, following


@triton.jit
def _long_rows(
    weight_ptr, scale_ptr, places, n, BLOCKS: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """Weights of output n for a token's long row, a tuple of blocks, and of their scales if any.

    places has a block's elements, the first rows of their experts, and whether they are read.
    """
    rows, scales = (), ()
    for block in tl.static_range(BLOCKS):
        k, first, is_read = places[block]
        # A thread's elements are of one expert, and lie at a multiple of 16 bytes.
        offs = tl.max_contiguous(tl.multiple_of((first + n) * K + k % K, [1, WORDS]), [1, WORDS])
        is_row = is_read & (n < N)
        rows = rows + (tl.load(weight_ptr + offs, mask=is_row, other=0),)
        if scale_ptr is not None:
            scales = scales + (tl.load(scale_ptr + first + n, mask=is_row, other=0.0),)
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
    WORDS: tl.constexpr = 8 if LAYOUT.kind == "plain" else 16
    BLOCKS: tl.constexpr = (PER_TOKEN * K + BLOCK_K - 1) // BLOCK_K
    n, stride = tl.program_id(0), tl.num_programs(0)
    pairs, places = (), ()
    for block in tl.static_range(BLOCKS):
        starts = block * BLOCK_K + tl.arange(0, BLOCK_K // WORDS)[:, None] * WORDS
        pair = tl.minimum(starts // K, PER_TOKEN - 1)
        expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
        is_read = is_here & (starts < PER_TOKEN * K)
        pairs, places = pairs + (pair,), places + ((starts + tl.arange(0, WORDS)[None, :], expert * N, is_read),)
    rows, scales = _long_rows(weight_ptr, scale_ptr, places, n, BLOCKS, WORDS, N, K)
    slots = tl.arange(0, SLOTS)
    slot_expert, is_slot = own_expert(experts_ptr, tl.minimum(slots, PER_TOKEN - 1), first_expert, NUM_EXPERTS)
    is_slot = is_slot & (slots < PER_TOKEN)
    grid_behind_may_start()
    grid_before_is_done()
    inputs = ()
    for block in tl.static_range(BLOCKS):
        k, _, is_read = places[block]
        factor = tl.load(weights_ptr + pairs[block], mask=is_read, other=0.0)
        inputs = inputs + (tl.load(x_ptr + k, mask=is_read, other=0.0).to(tl.float32) * factor,)
    slot_factors = tl.load(weights_ptr + slots, mask=is_slot, other=0.0)
    while n < N:
        next_rows, next_scales = _long_rows(weight_ptr, scale_ptr, places, n + stride, BLOCKS, WORDS, N, K)
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
