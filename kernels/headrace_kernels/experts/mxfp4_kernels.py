"""The Triton kernels of `mixture` for experts in MXFP4, on the tensor cores.

Numbers become bf16 or fp16 in registers, without rounding, and are one side of a product
(`weight_formats.mxfp4`). A tile of 128 inputs is four products of 32 inputs of one group each.

Few tokens: `_few_gate_up_kernel` computes some inner elements of one pair, with the norm before
and the gating behind; `_few_down_kernel` some outputs of one token over all of its experts, added
to the residual stream or not. A product has eight columns at least: they are eight groups of one
token, of which each product uses one. On the ordinary cores, numbers would take longer to make and
multiply than to read.

Many tokens: `_many_kernel` multiplies pairs of one expert as `mixture_kernels` does.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated
from headrace_kernels.experts.mixture_kernels import combine_pairs, expert_of_tile, most_tiles, own_expert
from headrace_kernels.experts.routing import Choice, SortedPairs
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.mxfp4 import Mxfp4Weight, mxfp4_numbers


class FewTile(NamedTuple):
    """How a product of few tokens is cut."""

    # Outputs of one program (of gate and up as many again), at least 16.
    block_n: int
    num_warps: int
    num_stages: int


class ManyTile(NamedTuple):
    """How a product of many pairs is cut."""

    # Outputs of one program (of gate and up as many again).
    block_n: int
    # Pairs of one program.
    block_m: int
    num_warps: int
    num_stages: int


@triton.jit
def _product(w, x, total, PLAIN: tl.constexpr):
    if PLAIN:
        return total + tl.dot(w, x.to(tl.float32))
    return tl.dot(w, x, total)


@triton.jit
def _few_sums(
    x_ptr, norm_ptr, word_ptr, scale_ptr, rows, is_read,
    K: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Products of tokens with rows of weights: sums [B, N, 1], and of squares of x [B, 1, 1].

    Product b is of the K numbers at x_ptr [B, 1, 1] (times norm_ptr's) and of rows [B, N, 1]. The
    columns are eight groups of x, so that x is one operand of eight products in a row: each has the
    numbers of one group, and only that column of it counts. Where is_read [B, 1, 1] is False,
    nothing is read and the sums are 0; None: all are read.
    """
    TILES: tl.constexpr = (K + 127) // 128
    COUNT: tl.constexpr = rows.shape[0]
    SIZE: tl.constexpr = rows.shape[1]
    j, i = tl.arange(0, 32)[None, None, :], tl.arange(0, 32)[None, :, None]
    group = tl.arange(0, 8)[None, None, :]
    sums = tl.zeros([COUNT, SIZE, 8], tl.float32)
    squares = tl.zeros([COUNT, 32, 8], tl.float32)
    for pair in tl.range(0, (TILES + 1) // 2):
        k = pair * 256 + group * 32 + i
        mask_x = k < K
        if is_read is not None:
            mask_x = mask_x & is_read
        x = tl.load(x_ptr + k, mask=mask_x, other=0.0)
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)).to(DTYPE)
        for half in tl.static_range(2):
            tile = pair * 2 + half
            mask_w = tile < TILES
            if is_read is not None:
                mask_w = mask_w & is_read
            words = tl.load(word_ptr + rows * (32 * TILES) + tile * 32 + j, mask=mask_w, other=0)
            scales = tl.load(scale_ptr + rows * TILES + tile, mask=mask_w, other=0)
            for part in tl.static_range(4):
                numbers = mxfp4_numbers(words, scales, part, DTYPE, PLAIN)
                products = _product(numbers, x, tl.zeros([COUNT, SIZE, 8], tl.float32), PLAIN)
                sums += tl.where(group == half * 4 + part, products, 0.0)
    return tl.sum(sums, 2, keep_dims=True), tl.sum(tl.sum(squares, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit(do_not_specialize=["first_expert"])
def _few_gate_up_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr,
    eps, first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (n, pair): BLOCK_N inner elements n of one pair, gated.

    With norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums. Gates and ups are
    two products side by side.
    """
    pair = tl.program_id(1)
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    is_up = tl.arange(0, 2)[:, None, None]
    # Elements beyond the end repeat the last one, and are not stored.
    rows = expert * (2 * N) + is_up * N + tl.minimum(n, N - 1)
    x_row = x_ptr + (pair // PER_TOKEN).to(tl.int64) * K + is_up * 0
    sums, squares = _few_sums(x_row, norm_ptr, word_ptr, scale_ptr, rows, None, K, x_ptr.dtype.element_ty, PLAIN)
    if norm_ptr is not None:
        sums = sums * tl.rsqrt(squares / K + eps)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + rows).to(tl.float32)
    gate, up = tl.sum(tl.where(is_up == 0, sums, 0.0), 0), tl.sum(tl.where(is_up == 1, sums, 0.0), 0)
    m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    places = out_ptr + pair.to(tl.int64) * N + m
    tl.store(places, gated(gate, up, GATING).to(out_ptr.dtype.element_ty), mask=m < N)


@triton.jit(do_not_specialize=["first_expert"])
def _few_down_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (n, token): the weighted sum over the token's experts for BLOCK_N outputs n.

    The token's experts are SLOTS products side by side, a power of two; those that it does not
    have, or that are not here, are not read.
    """
    token = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    slot = tl.arange(0, SLOTS)[:, None, None]
    pairs = token * PER_TOKEN + tl.minimum(slot, PER_TOKEN - 1)
    expert, is_here = own_expert(experts_ptr, pairs, first_expert, NUM_EXPERTS)
    is_own = is_here & (slot < PER_TOKEN)
    rows = expert * N + tl.minimum(n, N - 1)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    products, _ = _few_sums(x_ptr + pairs * K, None, word_ptr, scale_ptr, rows, is_own, K, DTYPE, PLAIN)
    if bias_ptr is not None:
        products += tl.load(bias_ptr + rows).to(tl.float32)
    weights = tl.load(weights_ptr + pairs)
    y = tl.sum(tl.where(is_own, products * weights, 0.0), 0)
    m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    places = out_ptr + token * N + m
    if ADD:
        y += tl.load(places, mask=m < N, other=0.0).to(tl.float32)
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=m < N)


@triton.jit
def _many_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATED: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (tile, n): Y^T = W X^T for BLOCK_N outputs and BLOCK_M pairs of one expert.

    GATED: x has a row for each token, and the gated elements of the pair at place m are row m of
    the results. Otherwise x has a row for each place, and the product times the pair's weight is
    the row of the pair.
    """
    TILES: tl.constexpr = (K + 127) // 128
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    expert, number = expert_of_tile(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    end = tl.load(starts_ptr + expert + 1)
    m = tl.load(starts_ptr + expert) + number * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j, i = tl.arange(0, 32)[None, :], tl.arange(0, 32)[:, None]
    # Pairs and outputs beyond the end repeat the last one, and are not stored.
    m_read = tl.minimum(m, end - 1)
    pairs = tl.load(order_ptr + m_read)
    HALVES: tl.constexpr = 2 if GATED else 1
    rows = (expert.to(tl.int64) * (HALVES * N) + tl.minimum(n, N - 1))[:, None]
    x_rows = x_ptr + (pairs // PER_TOKEN if GATED else m_read).to(tl.int64)[None, :] * K
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(0, TILES):
        words = tl.load(word_ptr + rows * (32 * TILES) + tile * 32 + j)
        scales = tl.load(scale_ptr + rows * TILES + tile)
        if GATED:
            up_words = tl.load(word_ptr + (rows + N) * (32 * TILES) + tile * 32 + j)
            up_scales = tl.load(scale_ptr + (rows + N) * TILES + tile)
        for part in tl.static_range(4):
            k = tile * 128 + part * 32 + i
            x = tl.load(x_rows + k, mask=k < K, other=0.0)
            total = _product(mxfp4_numbers(words, scales, part, DTYPE, PLAIN), x, total, PLAIN)
            if GATED:
                up_total = _product(mxfp4_numbers(up_words, up_scales, part, DTYPE, PLAIN), x, up_total, PLAIN)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows).to(tl.float32)
        if GATED:
            up_total += tl.load(bias_ptr + rows + N).to(tl.float32)
    if GATED:
        y = gated(total, up_total, GATING)
        out_rows = m
    else:
        y = total * tl.load(weights_ptr + pairs)[None, :]
        out_rows = pairs
    places = out_ptr + out_rows.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=(m < end)[None, :] & (n < N)[:, None])


def _bits(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, a word of scales for each tile, and biases."""
    assert isinstance(weights.weight, Mxfp4Weight)
    return weights.weight.packed, weights.weight.scales.view(torch.int32), weights.bias


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
    shared = {"NUM_EXPERTS": gate_up.num_experts, "PER_TOKEN": per_token}
    norm_weight, eps = norm or (None, 0.0)
    first, second = tiles
    _few_gate_up_kernel[(triton.cdiv(down.num_inputs, first.block_n), len(inner))](
        x, norm_weight, *_bits(gate_up), choice.experts, inner, eps, gate_up.first_expert,
        N=down.num_inputs, K=gate_up.num_inputs, **shared, GATING=gating,
        BLOCK_N=first.block_n, PLAIN=INTERPRETED, num_warps=first.num_warps, num_stages=first.num_stages,
    )  # fmt: skip
    _few_down_kernel[(triton.cdiv(down.num_outputs, second.block_n), num_tokens)](
        inner, *_bits(down), choice.experts, choice.weights, out, down.first_expert,
        N=down.num_outputs, K=down.num_inputs, **shared, SLOTS=triton.next_power_of_2(per_token), ADD=add,
        BLOCK_N=second.block_n, PLAIN=INTERPRETED, num_warps=second.num_warps, num_stages=second.num_stages,
    )  # fmt: skip


def multiply_many(
    x: Tensor, choice: Choice, pairs: SortedPairs, gate_up: ExpertWeights, down: ExpertWeights, out: Tensor,
    tiles: tuple[ManyTile, ManyTile], gating: Gating = SILU,
) -> None:  # fmt: skip
    """Computes many tokens, whose pairs are sorted by expert.

    Args:
        x: [num_tokens, hidden], contiguous, in 16 bits.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        out: [num_tokens, hidden], written.
        tiles: Tile of the gate-up product, and of the down product.
        gating: What is between gate-up and down.
    """
    num_pairs = len(pairs.order)
    inner, outputs = x.new_empty(num_pairs, down.num_inputs), x.new_empty(num_pairs, down.num_outputs)
    _launch_many(x, choice, pairs, gate_up, inner, tiles[0], gating)
    _launch_many(inner, choice, pairs, down, outputs, tiles[1], None)
    combine_pairs(outputs, choice, down, out)


def _launch_many(
    x: Tensor,
    choice: Choice,
    pairs: SortedPairs,
    weights: ExpertWeights,
    out: Tensor,
    tile: ManyTile,
    gating: Gating | None,
) -> None:
    num_experts = weights.num_experts
    num_tiles = most_tiles(len(pairs.order), num_experts, tile.block_m)
    _many_kernel[(num_tiles, triton.cdiv(out.shape[1], tile.block_n))](
        x, *_bits(weights), *pairs, choice.weights, out,
        N=out.shape[1], K=weights.num_inputs, NUM_EXPERTS=num_experts, PER_TOKEN=choice.experts.shape[1],
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), GATED=gating is not None, GATING=gating or SILU,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, PLAIN=INTERPRETED,
        num_warps=tile.num_warps, num_stages=_stages(tile, gating is not None, x),
    )  # fmt: skip


def _stages(tile: ManyTile, gated: bool, x: Tensor) -> int:
    """Stages that fit the shared memory: words, scales and tokens of 128 inputs each."""
    stage_bytes = tile.block_n * (2 if gated else 1) * (64 + 4) + 128 * tile.block_m * x.element_size()
    return max(1, min(tile.num_stages, card.shared_bytes(x.device) // stage_bytes))
