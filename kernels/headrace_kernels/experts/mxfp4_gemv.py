"""The Triton kernels of `mixture` for few tokens and experts in MXFP4.

Each pair of token and expert reads its expert's weights for itself (`mxfp4_products` says how a
warp multiplies them). `_few_gate_up_kernel` computes inner elements of one pair, with the norm
before and the gating behind; a warp has some of the inputs, and multiplies gates and ups side by
side. `_few_down_kernel` computes outputs of one token over all of its experts, added to the
residual stream or not; a warp has some of the inputs of one expert, and multiplies two tiles of an
output side by side, so that there are twice the programs. A program asks for the weights of some
steps before it computes, and for one more whenever it is through with one.

A program of gates and ups has one block of them or several, one after the other. Of several it
finds the choice, prepares the token and waits for memory once, and asks for the next block's first
weights among the products of the last ones.

Both may be launched early (`early_launch`). Gate and up wait before they read which expert it is,
and let the next kernel start behind that; so down finds the choice, and asks for weights before it
waits.

Sums are fp32 in an order that depends on the tile alone: no atomics, the same bits every time.
"""

# Triton's decorator has no types, a kernel's arguments differ here and in the compiler, and its
# tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated
from headrace_kernels.experts.routing import Choice, own_expert
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.mxfp4 import TILE_INPUTS, Mxfp4Weight
from headrace_kernels.weight_formats.mxfp4_products import (
    columns_for_products,
    row_pair_products,
    tile_pair_products,
)

# Warps of a program, at most.
_MOST_WARPS = 16
# Inner elements of a block of gate and up, and outputs of a block of down.
BLOCK_INNER, BLOCK_OUTPUTS = 8, 8


class FewTile(NamedTuple):
    """How a product of few tokens is cut."""

    # Warps that share the inputs of an expert, a power of two.
    parts: int
    # Steps of 256 inputs whose weights are asked for ahead.
    ahead: int
    # Blocks that a program of gates and ups computes, one after the other; one of down has one.
    loops: int = 1
    # Loads stay among the products, where they are written.
    in_order: bool = False


@triton.jit
def _masked(mask, is_read):
    """Narrows a mask to where something is read; None: everywhere."""
    if is_read is not None:
        mask = mask & is_read
    return mask


@triton.jit
def _step_words(word_ptr, scale_ptr, rows, step, is_read, TILES: tl.constexpr):
    """Words and scales of two tiles, a tuple as the products of so many sides take it.

    Rows are a tuple of one side or two, [1, 8, warps or 1, 1] each; step and is_read are
    [1, 1, warps, 1]. Words that are not read may be anything: all bits are numbers, and the token's
    numbers for them are 0.
    """
    t, words = tl.arange(0, 4)[:, None, None, None], ()
    places = word_ptr + step * 32 + t * 4 + tl.arange(0, 4)[None, None, None, :]
    for tile in tl.static_range(2):
        of_tile = _masked(2 * step + tile < TILES, is_read)
        for side in tl.static_range(len(rows)):
            words = words + (tl.load(places + rows[side] * (16 * TILES) + 16 * tile, mask=of_tile),)
    # By a minimum that the compiler does not see through: of neighbours it would load two at once,
    # and threads would exchange them by way of shared memory.
    own = scale_ptr + step * 4 + tl.minimum(t, 3)
    of_group = _masked(2 * step + t // 2 < TILES, is_read)
    return words + (tl.load(own + _of_sides(rows) * (2 * TILES), mask=of_group, other=0),)


@triton.jit
def _of_sides(rows):
    """[1, 8, warps or 1, sides]."""
    if len(rows) == 1:
        return rows[0]
    else:
        return tl.where(tl.arange(0, 2)[None, None, None, :] == 0, rows[0], rows[1])


@triton.jit
def _step_products(words, x, zero, PLAIN: tl.constexpr):
    """Products of what `_step_words` returns: [4, 8, warps, 2 sides]."""
    if len(words) == 3:
        first, second, scales = words
        return row_pair_products(first, second, scales, x, zero, PLAIN)
    else:
        first_a, first_b, second_a, second_b, scales = words
        return tile_pair_products(first_a, first_b, second_a, second_b, scales, x, zero, PLAIN)


@triton.jit
def _first_words(
    word_ptr, scale_ptr, rows, part, is_read, TILES: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr
):
    """What a warp asks for before it computes: a tuple of AHEAD steps."""
    words = ()
    for number in tl.static_range(AHEAD):
        words = words + (_step_words(word_ptr, scale_ptr, rows, number * PARTS + part, is_read, TILES),)
    return words


@triton.jit
def _step_numbers(ptr, part, K: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """Numbers of a warp's steps, a tuple of [4, 8, warps, 8], of K numbers in a row.

    ptr points to them, one or [1, 1, warps, 1].
    """
    t, g = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    numbers = ()
    for number in tl.static_range(STEPS):
        k = (number * PARTS + part) * 256 + g * 32 + t * 8 + tl.arange(0, 8)[None, None, None, :]
        numbers = numbers + (tl.load(ptr + k, mask=k < K, other=0.0),)
    return numbers


@triton.jit
def _columns(xs, factors, PLAIN: tl.constexpr):
    """A warp's numbers as products take them, what undoes their scaling, and its squares of x.

    The first are a tuple of what `columns_for_products` returns for each step, of x times a norm's
    weights.
    """
    squares, numbers = tl.zeros(xs[0].shape, tl.float32), ()
    for number in tl.static_range(len(xs)):
        x = xs[number].to(tl.float32)
        if factors is not None:
            squares += x * x
            x = x * factors[number].to(tl.float32)
        numbers = numbers + (x,)
    columns, undone = columns_for_products(numbers, PLAIN)
    return columns, undone, squares


@triton.jit
def _warp_sums(
    columns, undone, words, word_ptr, scale_ptr, rows, next_rows, part, is_read, is_next,
    TILES: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, STREAMS: tl.constexpr, IN_ORDER: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """A warp's share of the products [4, 8, warps, sides], and the first words of the next rows.

    A step is 256 inputs; the warp has those that are its `part` of PARTS. Rows are a tuple of the
    sides'. Unless the program STREAMS there are no next ones.
    """
    STEPS: tl.constexpr = len(columns)
    SIDES: tl.constexpr = len(rows)
    next_words = ()
    totals = tl.zeros([4, 8, part.shape[2], 2 * SIDES], tl.float32)
    for number in tl.static_range(STEPS):
        # One turn, of which the assembler does not know. It keeps loads between such loops where
        # they are; else it would put off all that the next rows need until the last product.
        turns = tl.num_programs(2) if IN_ORDER else 1
        for turn in tl.range(0, turns):
            totals += _step_products(words[number], columns[number], turn, PLAIN)
        if number + AHEAD < STEPS:
            step = (number + AHEAD) * PARTS + part
            words = words + (_step_words(word_ptr, scale_ptr, rows, step, is_read, TILES),)
        elif STREAMS:
            step = (number + AHEAD - STEPS) * PARTS + part
            next_words = next_words + (_step_words(word_ptr, scale_ptr, next_rows, step, is_next, TILES),)
    even, odd = tl.split(tl.reshape(totals, (4, 8, part.shape[2], SIDES, 2)))
    return (even + odd) * undone, next_words


@triton.jit
def _over_warps(totals):
    """[4, 8, warps, sides] -> [8, sides]."""
    return tl.sum(tl.sum(totals, 0), 1)


@triton.jit
def _gate_up_rows(expert, block, N: tl.constexpr):
    """Rows of a block's gates and of its ups, [1, 8, 1, 1] each.

    Elements beyond the end repeat the last one.
    """
    gates = (expert * (2 * N) + tl.minimum(block * 8 + tl.arange(0, 8), N - 1))[None, :, None, None]
    return gates, gates + N


@triton.jit
def _gate_up_biases(bias_ptr, expert, block, is_read, N: tl.constexpr):
    """Biases of a block's gates and of its ups, [8] each, or nothing."""
    biases = ()
    if bias_ptr is not None:
        n = block * 8 + tl.arange(0, 8)
        mask, places = (n < N) & is_read, bias_ptr + expert * (2 * N) + n
        biases = (tl.load(places, mask=mask, other=0.0), tl.load(places + N, mask=mask, other=0.0))
    return biases


@triton.jit(do_not_specialize=["first_expert"])
def _few_gate_up_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr,
    eps, first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATING: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, STREAMS: tl.constexpr, IN_ORDER: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (block, pair): eight inner elements of one pair, gated.

    It has those of each so many blocks further too. Sides are gates and ups. With norm_ptr = g, x
    is x g / rms(x), whose divisor is applied to the sums.
    """
    TILES: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = ((TILES + 1) // 2 + PARTS - 1) // PARTS
    BLOCKS: tl.constexpr = (N + 7) // 8
    first_block, stride, pair = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    part = tl.arange(0, PARTS)[None, None, :, None]
    factors = None
    if norm_ptr is not None:
        factors = _step_numbers(norm_ptr, part, K, PARTS, STEPS)
    if EARLY:
        grid_before_is_done()
    xs = _step_numbers(x_ptr + (pair // PER_TOKEN).to(tl.int64) * K, part, K, PARTS, STEPS)
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    rows = _gate_up_rows(expert, first_block, N)
    words = _first_words(word_ptr, scale_ptr, rows, part, None, TILES, PARTS, AHEAD)
    biases = _gate_up_biases(bias_ptr, expert, first_block, True, N)
    if EARLY:
        # The compiler keeps what comes before this call before it.
        grid_behind_may_start()
    columns, undone, squares = _columns(xs, factors, PLAIN)
    rstd = 1.0
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(squares) / K + eps)
    for block in tl.range(first_block, BLOCKS, stride):
        following = block + stride
        is_next = following < BLOCKS
        rows, next_rows = _gate_up_rows(expert, block, N), _gate_up_rows(expert, following, N)
        if STREAMS:
            next_biases = _gate_up_biases(bias_ptr, expert, following, is_next, N)
        totals, next_words = _warp_sums(
            columns, undone, words, word_ptr, scale_ptr, rows, next_rows, part, None, is_next,
            TILES, PARTS, AHEAD, STREAMS, IN_ORDER, PLAIN,
        )  # fmt: skip
        gate, up = tl.split(_over_warps(totals) * rstd)
        if bias_ptr is not None:
            gate, up = gate + biases[0].to(tl.float32), up + biases[1].to(tl.float32)
        inner = gated(gate, up, GATING).to(out_ptr.dtype.element_ty)
        n = block * 8 + tl.arange(0, 8)
        tl.store(out_ptr + pair.to(tl.int64) * N + n, inner, mask=n < N)
        if STREAMS:
            words, biases = next_words, next_biases


@triton.jit(do_not_specialize=["first_expert"])
def _few_down_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, IN_ORDER: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (block, token): the weighted sum over the token's experts for eight outputs.

    There is one side, and outputs beyond the end repeat the last one. The token's experts are SLOTS
    times PARTS warps, a power of two; those that it does not have, or that are not here, are not
    read.
    """
    TILES: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = ((TILES + 1) // 2 + PARTS - 1) // PARTS
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    warp = tl.arange(0, SLOTS * PARTS)[None, None, :, None]
    slot, part = warp // PARTS, warp % PARTS
    pairs = token * PER_TOKEN + tl.minimum(slot, PER_TOKEN - 1)
    expert, is_here = own_expert(experts_ptr, pairs, first_expert, NUM_EXPERTS)
    is_own = is_here & (slot < PER_TOKEN)
    n = block * 8 + tl.arange(0, 8)[None, :, None, None]
    row = expert * N + tl.minimum(n, N - 1)
    words = _first_words(word_ptr, scale_ptr, (row,), part, is_own, TILES, PARTS, AHEAD)
    # One thread counts what is added: to an expert's product a bias, to all of them what was there.
    is_first = tl.arange(0, 4)[:, None, None, None] == 0
    if bias_ptr is not None:
        biases = tl.load(bias_ptr + row, mask=is_first & (part == 0), other=0.0)
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    if ADD:
        y = tl.load(out_ptr + token * N + n, mask=is_first & (warp == 0) & (n < N), other=0.0)
    xs = _step_numbers(x_ptr + pairs * K, part, K, PARTS, STEPS)
    factors = tl.load(weights_ptr + pairs)
    columns, undone, _ = _columns(xs, None, PLAIN)
    totals, _ = _warp_sums(
        columns, undone, words, word_ptr, scale_ptr, (row,), None, part, is_own, None,
        TILES, PARTS, AHEAD, False, IN_ORDER, PLAIN,
    )  # fmt: skip
    if bias_ptr is not None:
        totals += biases.to(tl.float32)
    # Nobody has written what experts that are not here would multiply: it may be anything.
    totals = tl.where(is_own, totals * factors, 0.0)
    if ADD:
        totals += y.to(tl.float32)
    stored = block * 8 + tl.arange(0, 8)[:, None]
    tl.store(out_ptr + token * N + stored, _over_warps(totals).to(out_ptr.dtype.element_ty), mask=stored < N)


def _bits(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor | None]:
    """Two words in a number each, two scales too, and biases."""
    assert isinstance(weights.weight, Mxfp4Weight)
    return weights.weight.packed.view(torch.int32), weights.weight.scales.view(torch.int16), weights.bias


def multiply_few(
    x: Tensor,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    out: Tensor,
    tiles: tuple[FewTile, FewTile],
    norm: tuple[Tensor, float] | None,
    add: bool,
    gating: Gating = SILU,
) -> None:
    """Computes few tokens, in two launches.

    Args:
        x: [num_tokens, hidden], contiguous, in 16 bits.
        choice: Experts and weights of the tokens.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        out: [num_tokens, hidden], written, or with `add` added to; may then be x itself.
        tiles: Tile of the gate-up product, and of the down product.
        norm: Weight and epsilon of an RMS norm of x; None: x is multiplied as it is.
        add: The result is added to `out`.
        gating: What is between gate-up and down.
    """
    num_tokens, per_token = choice.experts.shape
    inner = x.new_empty(num_tokens * per_token, down.num_inputs)
    shared = {"NUM_EXPERTS": gate_up.num_experts, "PER_TOKEN": per_token, "PLAIN": INTERPRETED}
    norm_weight, eps = norm or (None, 0.0)
    slots = triton.next_power_of_2(per_token)
    _few_gate_up_kernel[(triton.cdiv(down.num_inputs, BLOCK_INNER * tiles[0].loops), len(inner))](
        x, norm_weight, *_bits(gate_up), choice.experts, inner, eps,
        gate_up.first_expert, N=down.num_inputs, K=gate_up.num_inputs, **shared, GATING=gating,
        STREAMS=tiles[0].loops > 1, **_few_options(gate_up, tiles[0], 1),
    )  # fmt: skip
    _few_down_kernel[(triton.cdiv(down.num_outputs, BLOCK_OUTPUTS), num_tokens)](
        inner, *_bits(down), choice.experts, choice.weights, out, down.first_expert,
        N=down.num_outputs, K=down.num_inputs, **shared, SLOTS=slots, ADD=add, **_few_options(down, tiles[1], slots),
    )  # fmt: skip


def _few_options(weights: ExpertWeights, tile: FewTile, slots: int) -> dict[str, int | bool]:
    """Options of a launch whose programs have `slots` experts."""
    steps = triton.cdiv(weights.num_inputs, 2 * TILE_INPUTS)
    parts = max(1, min(tile.parts, triton.next_power_of_2(steps), _MOST_WARPS // slots))
    early = card.launches_early(weights.storage.device)
    return {
        "PARTS": parts,
        "AHEAD": min(tile.ahead, triton.cdiv(steps, parts)),
        "IN_ORDER": tile.in_order,
        "EARLY": early,
        "num_warps": slots * parts,
        "launch_pdl": early,
    }
