"""The Triton kernel of `mixture` for many tokens and experts in MXFP4, on the tensor cores.

Numbers become bf16 or fp16 in registers, without rounding, and are one side of a product
(`weight_formats.mxfp4`). The four groups of a tile of 128 inputs lie side by side in one product.
`_many_kernel` multiplies pairs of one expert as `mixture_kernels` does, and is launched early as
its kernels are; on sm_90 many pairs of an expert have a grouped GEMM (`mxfp4_gemm_sm90`), and
everywhere few tokens kernels of their own (`mxfp4_gemv`).
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
from headrace_kernels.experts.mixture_kernels import early_tile
from headrace_kernels.experts.mxfp4_gemm_sm90 import Mxfp4Tile, multiply_mxfp4_gemm
from headrace_kernels.experts.routing import Choice, SortedPairs
from headrace_kernels.experts.tile_table import most_tiles, tile_table
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.mxfp4 import Mxfp4Weight, mxfp4_numbers


class ManyTile(NamedTuple):
    """How a product of many pairs is cut."""

    # Outputs of one program (of gate and up as many again).
    block_n: int
    # Pairs of one program.
    block_m: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile_numbers(words, scales, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Numbers [BLOCK_N, 128] of a tile's words [BLOCK_N, 32], in DTYPE, or fp32 if PLAIN."""
    first = mxfp4_numbers(words, scales, 0, DTYPE, PLAIN)
    second = mxfp4_numbers(words, scales, 1, DTYPE, PLAIN)
    third = mxfp4_numbers(words, scales, 2, DTYPE, PLAIN)
    fourth = mxfp4_numbers(words, scales, 3, DTYPE, PLAIN)
    # [BLOCK_N, 32, second or not, later two or not]
    groups = tl.join(tl.join(first, second), tl.join(third, fourth))
    return tl.reshape(tl.permute(groups, (0, 3, 2, 1)), (words.shape[0], 128))


@triton.jit
def _product(w, x, total, PLAIN: tl.constexpr):
    if PLAIN:
        return total + tl.dot(w, x.to(tl.float32))
    return tl.dot(w, x, total)


@triton.jit
def _many_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATED: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (tile, n): Y^T = W X^T for BLOCK_N outputs and BLOCK_M pairs of one expert.

    GATED: x has a row for each token, and the gated elements of the pair at place m are row m of
    the results. Otherwise x has a row for each place, and the product times the pair's weight is
    the row of the pair.
    """
    TILES: tl.constexpr = (K + 127) // 128
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    expert, number = early_tile(starts_ptr, tl.program_id(0), NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_M, GATED, EARLY)
    if expert >= NUM_EXPERTS:
        return
    end = tl.load(starts_ptr + expert + 1)
    m = tl.load(starts_ptr + expert) + number * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j, i = tl.arange(0, 32)[None, :], tl.arange(0, 128)[:, None]
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
        k = tile * 128 + i
        x = tl.load(x_rows + k, mask=k < K, other=0.0)
        total = _product(_tile_numbers(words, scales, DTYPE, PLAIN), x, total, PLAIN)
        if GATED:
            up_total = _product(_tile_numbers(up_words, up_scales, DTYPE, PLAIN), x, up_total, PLAIN)
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


def multiply_many(
    x: Tensor, choice: Choice, pairs: SortedPairs, gate_up: ExpertWeights, down: ExpertWeights,
    tiles: tuple[ManyTile | Mxfp4Tile, ManyTile | Mxfp4Tile], gating: Gating = SILU,
) -> Tensor:  # fmt: skip
    """Computes many tokens, whose pairs are sorted by expert.

    Args:
        x: [num_tokens, hidden], contiguous, in 16 bits.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        tiles: Tile of the gate-up product, and of the down product, each of the kernel that runs.
        gating: What is between gate-up and down.

    Returns:
        What `mixture_kernels.multiply_pairs` returns.
    """
    num_pairs = len(pairs.order)
    inner, outputs = x.new_empty(num_pairs, down.num_inputs), x.new_empty(num_pairs, down.num_outputs)
    # Both before the first product, which starts early behind what it needs.
    sizes = {tile.block_m for tile in tiles if isinstance(tile, Mxfp4Tile)}
    tables = {block_m: tile_table(pairs, block_m) for block_m in sizes}
    for rows, weights, results, tile, own in (
        (x, gate_up, inner, tiles[0], gating),
        (inner, down, outputs, tiles[1], None),
    ):
        if isinstance(tile, Mxfp4Tile):
            multiply_mxfp4_gemm(rows, choice, pairs, tables[tile.block_m], weights, results, tile, own)
        else:
            _launch_many(rows, choice, pairs, weights, results, tile, own)
    return outputs


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
    num_tiles, early = most_tiles(len(pairs.order), num_experts, tile.block_m), card.launches_early(out.device)
    _many_kernel[(num_tiles, triton.cdiv(out.shape[1], tile.block_n))](
        x, *_bits(weights), *pairs, choice.weights, out,
        N=out.shape[1], K=weights.num_inputs, NUM_EXPERTS=num_experts, PER_TOKEN=choice.experts.shape[1],
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), GATED=gating is not None, GATING=gating or SILU,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, EARLY=early, PLAIN=INTERPRETED,
        num_warps=tile.num_warps, num_stages=_stages(tile, gating is not None, x), launch_pdl=early,
    )  # fmt: skip


def _stages(tile: ManyTile, gated: bool, x: Tensor) -> int:
    """Stages that fit the shared memory: words, scales and tokens of 128 inputs each."""
    stage_bytes = tile.block_n * (2 if gated else 1) * (64 + 4) + 128 * tile.block_m * x.element_size()
    return max(1, min(tile.num_stages, card.shared_bytes(x.device) // stage_bytes))
