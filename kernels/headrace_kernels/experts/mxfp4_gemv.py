"""The Triton kernels of `mixture` for few tokens and experts in MXFP4.

Each pair of token and expert reads its expert's weights for itself (`mxfp4_products` says how a
warp multiplies them). `_few_gate_up_kernel` computes inner elements of one pair, with the norm
before and the gating behind; a warp has some of the inputs. `_few_down_kernel` computes outputs of
one token over all of its experts, added to the residual stream or not; a warp has some of the
inputs of one expert. A program asks for the weights of some steps before it computes, and for one
more whenever it is through with one.

A program has one block of outputs or several, one after the other. Of several it finds the choice,
prepares the token and waits for memory once, and asks for the next block's first weights among the
products of the last ones.

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
from headrace_kernels.weight_formats.mxfp4_products import columns_for_products, tile_pair_products

# Warps of a program, at most.
_MOST_WARPS = 16
# Inner elements of a block of gate and up, and outputs of a block of down.
BLOCK_INNER, BLOCK_OUTPUTS = 8, 16


class FewTile(NamedTuple):
    """How a product of few tokens is cut."""

    # Warps that share the inputs of an expert, a power of two.
    parts: int
    # Steps of 256 inputs whose weights are asked for ahead.
    ahead: int
    # Blocks of outputs that a program computes, one after the other.
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
def _step_words(word_ptr, scale_ptr, a, b, step, is_read, TILES: tl.constexpr):
    """Words and scales of two tiles for `tile_pair_products`, of rows a and b.

    They are [1, 8, warps or 1, 1], step and is_read [1, 1, warps, 1]. Words that are not read may
    be anything: all bits are numbers, and the token's numbers for them are 0.
    """
    t = tl.arange(0, 4)[:, None, None, None]
    places = word_ptr + step * 32 + t * 4 + tl.arange(0, 4)[None, None, None, :]
    first, second = _masked(2 * step < TILES, is_read), _masked(2 * step + 1 < TILES, is_read)
    first_a = tl.load(places + a * (16 * TILES), mask=first)
    first_b = tl.load(places + b * (16 * TILES), mask=first)
    second_a = tl.load(places + a * (16 * TILES) + 16, mask=second)
    second_b = tl.load(places + b * (16 * TILES) + 16, mask=second)
    # By a minimum that the compiler does not see through: of neighbours it would load two at once,
    # and threads would exchange them by way of shared memory.
    own = scale_ptr + step * 4 + tl.minimum(t, 3)
    of_group = _masked(2 * step + t // 2 < TILES, is_read)
    scales = tl.load(own + _of_sides(a, b) * (2 * TILES), mask=of_group, other=0)
    return first_a, first_b, second_a, second_b, scales


@triton.jit
def _of_sides(a, b):
    """[1, 8, warps or 1, 2]."""
    return tl.where(tl.arange(0, 2)[None, None, None, :] == 0, a, b)


@triton.jit
def _first_words(
    word_ptr, scale_ptr, a, b, part, is_read, TILES: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr
):
    """What a warp asks for before it computes: a tuple of AHEAD steps."""
    words = ()
    for number in tl.static_range(AHEAD):
        words = words + (_step_words(word_ptr, scale_ptr, a, b, number * PARTS + part, is_read, TILES),)
    return words


@triton.jit
def _step_numbers(ptr, part, is_read, K: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """Numbers of a warp's steps, a tuple of [4, 8, warps, 8], of K numbers in a row.

    ptr points to them, one or [1, 1, warps, 1].
    """
    t, g = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    numbers = ()
    for number in tl.static_range(STEPS):
        k = (number * PARTS + part) * 256 + g * 32 + t * 8 + tl.arange(0, 8)[None, None, None, :]
        numbers = numbers + (tl.load(ptr + k, mask=_masked(k < K, is_read), other=0.0),)
    return numbers


@triton.jit
def _columns(xs, factors, PLAIN: tl.constexpr):
    """A warp's numbers as products take them, with those of a norm's weights, and its squares of x.

    The first are a tuple of what `columns_for_products` returns for each step.
    """
    squares, columns = tl.zeros(xs[0].shape, tl.float32), ()
    for number in tl.static_range(len(xs)):
        x = xs[number].to(tl.float32)
        if factors is not None:
            squares += x * x
            x = x * factors[number].to(tl.float32)
        columns = columns + (columns_for_products(x, PLAIN),)
    return columns, squares


@triton.jit
def _warp_sums(
    columns, words, word_ptr, scale_ptr, rows, next_rows, part, is_read, is_next,
    TILES: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, STREAMS: tl.constexpr, IN_ORDER: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """A warp's share of two sides' products [4, 8, warps, 2], and the first words of the next rows.

    A step is 256 inputs; the warp has those that are its `part` of PARTS. Rows are those of sides a
    and b. Unless the program STREAMS there are no next ones.
    """
    STEPS: tl.constexpr = len(columns)
    a, b = rows
    next_a, next_b = next_rows
    next_words = ()
    totals = tl.zeros([4, 8, part.shape[2], 4], tl.float32)
    for number in tl.static_range(STEPS):
        x, undone = columns[number]
        first_a, first_b, second_a, second_b, scales = words[number]
        # One turn, of which the assembler does not know. It keeps loads between such loops where
        # they are; else it would put off all that the next rows need until the last product.
        turns = tl.num_programs(2) if IN_ORDER else 1
        for turn in tl.range(0, turns):
            totals += tile_pair_products(first_a, first_b, second_a, second_b, scales, x, turn, PLAIN) * undone
        if number + AHEAD < STEPS:
            step = (number + AHEAD) * PARTS + part
            words = words + (_step_words(word_ptr, scale_ptr, a, b, step, is_read, TILES),)
        elif STREAMS:
            step = (number + AHEAD - STEPS) * PARTS + part
            next_words = next_words + (_step_words(word_ptr, scale_ptr, next_a, next_b, step, is_next, TILES),)
    even, odd = tl.split(tl.reshape(totals, (4, 8, part.shape[2], 2, 2)))
    return even + odd, next_words


@triton.jit
def _over_warps(totals):
    """[4, 8, warps, 2] -> [8, 2]."""
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
        factors = _step_numbers(norm_ptr, part, None, K, PARTS, STEPS)
    if EARLY:
        grid_before_is_done()
    xs = _step_numbers(x_ptr + (pair // PER_TOKEN).to(tl.int64) * K, part, None, K, PARTS, STEPS)
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    a, b = _gate_up_rows(expert, first_block, N)
    words = _first_words(word_ptr, scale_ptr, a, b, part, None, TILES, PARTS, AHEAD)
    biases = _gate_up_biases(bias_ptr, expert, first_block, True, N)
    if EARLY:
        # The compiler keeps what comes before this call before it.
        grid_behind_may_start()
    columns, squares = _columns(xs, factors, PLAIN)
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
            columns, words, word_ptr, scale_ptr, rows, next_rows, part, None, is_next,
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


@triton.jit
def _down_rows(expert, block, N: tl.constexpr):
    """Rows of a block's first eight outputs and of its next eight, [1, 8, warps, 1] each.

    Outputs beyond the end repeat the last one.
    """
    first = block * 16 + tl.arange(0, 8)[None, :, None, None]
    return expert * N + tl.minimum(first, N - 1), expert * N + tl.minimum(first + 8, N - 1)


@triton.jit
def _down_biases(bias_ptr, rows, is_read):
    """Biases of both sides' rows [4, 8, warps, 2] where they are read, or nothing."""
    biases = ()
    if bias_ptr is not None:
        a, b = rows
        biases = (tl.load(bias_ptr + _of_sides(a, b), mask=is_read, other=0.0),)
    return biases


@triton.jit(do_not_specialize=["first_expert"])
def _few_down_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, STREAMS: tl.constexpr, IN_ORDER: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (block, token): the weighted sum over the token's experts for 16 outputs.

    It has those of each so many blocks further too. Sides are eight outputs and the next eight. The
    token's experts are SLOTS times PARTS warps, a power of two; those that it does not have, or
    that are not here, are not read.
    """
    TILES: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = ((TILES + 1) // 2 + PARTS - 1) // PARTS
    BLOCKS: tl.constexpr = (N + 15) // 16
    first_block, stride, token = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    warp = tl.arange(0, SLOTS * PARTS)[None, None, :, None]
    slot, part = warp // PARTS, warp % PARTS
    pairs = token * PER_TOKEN + tl.minimum(slot, PER_TOKEN - 1)
    expert, is_here = own_expert(experts_ptr, pairs, first_expert, NUM_EXPERTS)
    is_own = is_here & (slot < PER_TOKEN)
    # One thread of an expert's counts a bias.
    is_first = is_own & (part == 0) & (tl.arange(0, 4)[:, None, None, None] == 0)
    rows = _down_rows(expert, first_block, N)
    words = _first_words(word_ptr, scale_ptr, rows[0], rows[1], part, is_own, TILES, PARTS, AHEAD)
    biases = _down_biases(bias_ptr, rows, is_first)
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    xs = _step_numbers(x_ptr + pairs * K, part, is_own, K, PARTS, STEPS)
    factors = tl.load(weights_ptr + pairs, mask=is_own, other=0.0)
    columns, _ = _columns(xs, None, PLAIN)
    for block in tl.range(first_block, BLOCKS, stride):
        n = block * 16 + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 2)[None, :]
        places = out_ptr + token * N + n
        y = tl.zeros([8, 2], tl.float32)
        if ADD:
            y = tl.load(places, mask=n < N, other=0.0).to(tl.float32)
        following = block + stride
        is_next = following < BLOCKS
        rows, next_rows = _down_rows(expert, block, N), _down_rows(expert, following, N)
        if STREAMS:
            next_biases = _down_biases(bias_ptr, next_rows, is_first & is_next)
        totals, next_words = _warp_sums(
            columns, words, word_ptr, scale_ptr, rows, next_rows, part, is_own, is_own & is_next,
            TILES, PARTS, AHEAD, STREAMS, IN_ORDER, PLAIN,
        )  # fmt: skip
        if bias_ptr is not None:
            totals += biases[0].to(tl.float32)
        y += _over_warps(totals * factors)
        tl.store(places, y.to(out_ptr.dtype.element_ty), mask=n < N)
        if STREAMS:
            words, biases = next_words, next_biases


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
        **_few_options(gate_up, tiles[0], 1),
    )  # fmt: skip
    _few_down_kernel[(triton.cdiv(down.num_outputs, BLOCK_OUTPUTS * tiles[1].loops), num_tokens)](
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
        "STREAMS": tile.loops > 1,
        "IN_ORDER": tile.in_order,
        "EARLY": early,
        "num_warps": slots * parts,
        "launch_pdl": early,
    }
