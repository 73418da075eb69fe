"""The Triton kernels of `mixture` for few tokens and experts in MXFP4.

Each pair of token and expert reads its expert's weights for itself (`mxfp4_products` says how a
warp multiplies them). `_few_gate_up_kernel` computes some inner elements of one pair, with the norm
before and the gating behind; a warp has some of the inputs. `_few_down_kernel` computes some
outputs of one token over all of its experts, added to the residual stream or not; a warp has some
of the inputs of one expert. A program asks for the weights of some steps before it computes, and
for one more whenever it is through with one.

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


class FewTile(NamedTuple):
    """How a product of few tokens is cut."""

    # Warps that share the inputs of an expert, a power of two.
    parts: int
    # Steps of 256 inputs whose weights are asked for ahead.
    ahead: int


@triton.jit
def _masked(mask, is_read):
    """Narrows a mask to where something is read; None: everywhere."""
    if is_read is not None:
        mask = mask & is_read
    return mask


@triton.jit
def _step_words(word_ptr, scale_ptr, a, b, step, is_read, TILES: tl.constexpr):
    """Words and scales of two tiles for `tile_pair_products`, of rows a and b.

    They are [1, 8, warps or 1, 1], step and is_read [1, 1, warps, 1].
    """
    t = tl.arange(0, 4)[:, None, None, None]
    places = word_ptr + step * 64 + t * 8 + tl.arange(0, 8)[None, None, None, :]
    first, second = _masked(2 * step < TILES, is_read), _masked(2 * step + 1 < TILES, is_read)
    first_a = tl.load(places + a * (32 * TILES), mask=first, other=0)
    first_b = tl.load(places + b * (32 * TILES), mask=first, other=0)
    second_a = tl.load(places + a * (32 * TILES) + 32, mask=second, other=0)
    second_b = tl.load(places + b * (32 * TILES) + 32, mask=second, other=0)
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
def _token_inputs(x_rows, norm_ptr, part, is_read, K: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """A token's numbers for each of a warp's steps, and the norm's weights for them.

    They are a tuple of two of [4, 8, warps, 8] each.

    x_rows points to the warp's token [1, 1, warps, 1].
    """
    t, g = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    inputs = ()
    for number in tl.static_range(STEPS):
        k = (number * PARTS + part) * 256 + g * 32 + t * 8 + tl.arange(0, 8)[None, None, None, :]
        x = tl.load(x_rows + k, mask=_masked(k < K, is_read), other=0.0)
        factors = x
        if norm_ptr is not None:
            factors = tl.load(norm_ptr + k, mask=k < K, other=0.0)
        inputs = inputs + ((x, factors),)
    return inputs


@triton.jit
def _warp_sums(
    inputs, words, word_ptr, scale_ptr, a, b, part, is_read,
    TILES: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, NORMED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """A warp's share of two sides' products [4, 8, warps, 2], and of squares of x.

    A step is 256 inputs; the warp has those that are its `part` of PARTS.
    """
    WARPS: tl.constexpr = part.shape[2]
    totals = tl.zeros([4, 8, WARPS, 4], tl.float32)
    squares = tl.zeros([4, 8, WARPS, 8], tl.float32)
    for number in tl.static_range(STEPS):
        x = inputs[number][0].to(tl.float32)
        if NORMED:
            squares += x * x
            x = x * inputs[number][1].to(tl.float32)
        columns, undone = columns_for_products(x, PLAIN)
        first_a, first_b, second_a, second_b, scales = words[number]
        totals += tile_pair_products(first_a, first_b, second_a, second_b, scales, columns, PLAIN) * undone
        if number + AHEAD < STEPS:
            following = (number + AHEAD) * PARTS + part
            words = words + (_step_words(word_ptr, scale_ptr, a, b, following, is_read, TILES),)
    even, odd = tl.split(tl.reshape(totals, (4, 8, WARPS, 2, 2)))
    return even + odd, squares


@triton.jit
def _over_warps(totals):
    """[4, 8, warps, 2] -> [8, 2]."""
    return tl.sum(tl.sum(totals, 0), 1)


@triton.jit(do_not_specialize=["first_expert"])
def _few_gate_up_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr,
    eps, first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATING: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (n, pair): eight inner elements n of one pair, gated. Sides are gates and ups.

    With norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums.
    """
    TILES: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = ((TILES + 1) // 2 + PARTS - 1) // PARTS
    pair = tl.program_id(1)
    part = tl.arange(0, PARTS)[None, None, :, None]
    if EARLY:
        grid_before_is_done()
    x_rows = x_ptr + (pair // PER_TOKEN).to(tl.int64) * K + part * 0
    inputs = _token_inputs(x_rows, norm_ptr, part, None, K, PARTS, STEPS)
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    n = tl.program_id(0) * 8 + tl.arange(0, 8)
    # Elements beyond the end repeat the last one, and are not stored.
    gates = expert * (2 * N) + tl.minimum(n, N - 1)
    a = (expert * (2 * N) + tl.minimum(tl.program_id(0) * 8 + tl.arange(0, 8), N - 1))[None, :, None, None]
    words = _first_words(word_ptr, scale_ptr, a, a + N, part, None, TILES, PARTS, AHEAD)
    if bias_ptr is not None:
        gate_bias, up_bias = tl.load(bias_ptr + gates), tl.load(bias_ptr + gates + N)
    if EARLY:
        # The compiler keeps what comes before this call before it.
        grid_behind_may_start()
    totals, squares = _warp_sums(
        inputs, words, word_ptr, scale_ptr, a, a + N, part, None, TILES, PARTS, STEPS, AHEAD,
        norm_ptr is not None, PLAIN,
    )  # fmt: skip
    sums = _over_warps(totals)
    if norm_ptr is not None:
        sums = sums * tl.rsqrt(tl.sum(squares) / K + eps)
    gate, up = tl.split(sums)
    if bias_ptr is not None:
        gate, up = gate + gate_bias.to(tl.float32), up + up_bias.to(tl.float32)
    inner = gated(gate, up, GATING)
    tl.store(out_ptr + pair.to(tl.int64) * N + n, inner.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["first_expert"])
def _few_down_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (n, token): the weighted sum over the token's experts for 16 outputs n.

    Sides are eight outputs and the next eight. The token's experts are SLOTS times PARTS warps, a
    power of two; those that it does not have, or that are not here, are not read.
    """
    TILES: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = ((TILES + 1) // 2 + PARTS - 1) // PARTS
    token = tl.program_id(1).to(tl.int64)
    warp = tl.arange(0, SLOTS * PARTS)[None, None, :, None]
    slot, part = warp // PARTS, warp % PARTS
    pairs = token * PER_TOKEN + tl.minimum(slot, PER_TOKEN - 1)
    expert, is_here = own_expert(experts_ptr, pairs, first_expert, NUM_EXPERTS)
    is_own = is_here & (slot < PER_TOKEN)
    n = tl.program_id(0) * 16 + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 2)[None, :]
    first = tl.program_id(0) * 16 + tl.arange(0, 8)[None, :, None, None]
    a, b = expert * N + tl.minimum(first, N - 1), expert * N + tl.minimum(first + 8, N - 1)
    words = _first_words(word_ptr, scale_ptr, a, b, part, is_own, TILES, PARTS, AHEAD)
    biases = tl.zeros([4, 8, SLOTS * PARTS, 2], tl.float32)
    if bias_ptr is not None:
        # One thread of an expert's counts it.
        is_first = is_own & (part == 0) & (tl.arange(0, 4)[:, None, None, None] == 0)
        biases += tl.load(bias_ptr + _of_sides(a, b), mask=is_first, other=0.0).to(tl.float32)
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    inputs = _token_inputs(x_ptr + pairs * K, None, part, is_own, K, PARTS, STEPS)
    places = out_ptr + token * N + n
    residual = tl.zeros([8, 2], tl.float32)
    if ADD:
        residual = tl.load(places, mask=n < N, other=0.0).to(tl.float32)
    factors = tl.load(weights_ptr + pairs, mask=is_own, other=0.0)
    totals, _ = _warp_sums(
        inputs, words, word_ptr, scale_ptr, a, b, part, is_own, TILES, PARTS, STEPS, AHEAD, False, PLAIN
    )
    y = _over_warps((totals + biases) * factors) + residual
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=n < N)


def _bits(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, two scales in a word each, and biases."""
    assert isinstance(weights.weight, Mxfp4Weight)
    return weights.weight.packed, weights.weight.scales.view(torch.int16), weights.bias


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
    _few_gate_up_kernel[(triton.cdiv(down.num_inputs, 8), len(inner))](
        x, norm_weight, *_bits(gate_up), choice.experts, inner, eps,
        gate_up.first_expert, N=down.num_inputs, K=gate_up.num_inputs, **shared, GATING=gating,
        **_few_options(gate_up, tiles[0], 1),
    )  # fmt: skip
    _few_down_kernel[(triton.cdiv(down.num_outputs, 16), num_tokens)](
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
        "EARLY": early,
        "num_warps": slots * parts,
        "launch_pdl": early,
    }
