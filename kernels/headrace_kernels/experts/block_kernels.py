"""Products of experts whose weights are in a file's blocks (GGUF's K types among them).

    W of one expert, blocks; pairs of token and expert, sorted -> gated inner elements, or outputs

A tile has pairs of one expert, as in `mixture_kernels`, and few tokens are tiles that are not full:
a weight is read once for them. The inputs of a part of a tile of blocks have one scale, so that
what is multiplied are the small integers themselves, exact in any type, and scales and minimums
meet the sums, as in `linear.block_quantized_kernels`. Sums are fp32.

A tile has at most 32 pairs, before sm_90 16: larger ones spill registers. Rules of cards before
sm_90 were guessed.
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
from headrace_kernels.experts.routing import Choice, SortedPairs
from headrace_kernels.experts.tile_table import most_tiles
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.block_numbers import (
    block_layout,
    block_planes,
    number_tables,
    part_numbers,
    tile_scales,
)
from headrace_kernels.weight_formats.block_weight import BlockWeight
from headrace_kernels.weight_formats.columns import four_columns

_LEAST_PAIRS, _MOST_PAIRS = 16, 32


class BlockTile(NamedTuple):
    """How a product of many pairs by weights in blocks is cut."""

    # Outputs of one program (of gate and up as many again).
    block_n: int
    # Pairs of one program.
    block_m: int
    num_warps: int
    num_stages: int


def block_rule(num_pairs: int, weights: ExpertWeights, gated: bool) -> BlockTile:
    """The tile of a product of so many pairs by weights in blocks.

    From sm_90 on those that took an H200 least, or 4% more, for 1 to 2,048 tokens of Qwen3-30B-A3B
    in Q4_K and Q6_K, of 7 to 9 (docs/experiments.md, "experts of few tokens in tiles").
    """
    if not card.has_warpgroup_products(weights.storage.device):
        return BlockTile(32, _LEAST_PAIRS, num_warps=4, num_stages=3)
    average = triton.next_power_of_2(triton.cdiv(num_pairs, weights.total_experts))
    if average <= (_LEAST_PAIRS // 2 if gated else _LEAST_PAIRS // 4):
        return BlockTile(32, _LEAST_PAIRS // 2, num_warps=2, num_stages=4)
    return BlockTile(64, min(max(average, _LEAST_PAIRS), _MOST_PAIRS), num_warps=4, num_stages=3)


@triton.jit
def _dot(w, x, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    return tl.dot(w, x)


@triton.jit
def _scaled(part, inputs, scale, low, LAYOUT: tl.constexpr, SHIFT: tl.constexpr):
    """A part's products [BLOCK_N, BLOCK_M] with scales and minimums; `inputs` are the sums of x."""
    if SHIFT != 0:
        part -= SHIFT * inputs
    part *= scale
    if LAYOUT.has_mins:
        part -= inputs * low
    return part


@triton.jit
def _block_tile_kernel(
    x_ptr, nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr, group_min_ptr,
    table_ptr, code_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATED: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (n, tile): Y^T = W X^T for BLOCK_N outputs and BLOCK_M pairs of one expert.

    Rows of x and of the results are those of `mixture_kernels._tile_kernel`.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Taken off the numbers that are multiplied.
    IS_RAISED: tl.constexpr = DTYPE == tl.bfloat16 and octet_ptr is None and table_ptr is None
    SHIFT: tl.constexpr = LAYOUT.offset + (128 if IS_RAISED else 0)
    expert, number = early_tile(starts_ptr, tl.program_id(1), NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_M, GATED, EARLY)
    if expert >= NUM_EXPERTS:
        return
    end = tl.load(starts_ptr + expert + 1)
    m = tl.load(starts_ptr + expert) + number * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Pairs and outputs beyond the end repeat the last one, and are not stored.
    m_read = tl.minimum(m, end - 1)
    HALVES: tl.constexpr = 2 if GATED else 1
    NUM_ROWS: tl.constexpr = N * HALVES * NUM_EXPERTS
    rows = (expert.to(tl.int64) * (HALVES * N) + tl.minimum(n, N - 1))[:, None]
    x_row = m_read
    if GATED:
        x_row = tl.load(order_ptr + m_read) // PER_TOKEN
    x_rows = x_ptr + x_row.to(tl.int64)[None, :] * LAYOUT.num_inputs
    j, parts = tl.arange(0, LAYOUT.plane), tl.arange(0, 4)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    inputs = total
    ones = tl.full([BLOCK_N, LAYOUT.plane], 1.0, tl.float32 if WIDE else DTYPE)
    ahead = tile_scales(scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, rows, parts, NUM_ROWS, LAYOUT)
    if GATED:
        up_ahead = tile_scales(
            scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, rows + N, parts, NUM_ROWS, LAYOUT
        )
    for tile in tl.range(0, LAYOUT.num_tiles):
        # Those of the tile behind the last one are the last one's.
        parts += 4
        scales, mins = four_columns(ahead[0]), four_columns(ahead[1])
        ahead = tile_scales(scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, rows, parts, NUM_ROWS, LAYOUT)
        if GATED:
            up_scales, up_mins = four_columns(up_ahead[0]), four_columns(up_ahead[1])
            up_ahead = tile_scales(
                scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, rows + N, parts, NUM_ROWS, LAYOUT
            )
        for part in tl.static_range(4):
            k = (tile * 4 + part) * LAYOUT.plane + j[:, None]
            x = tl.load(x_rows + k, mask=k < LAYOUT.num_inputs, other=0.0)
            if SHIFT != 0 or LAYOUT.has_mins:
                # A product with ones has the sums of x where those of W x are.
                inputs = _dot(ones, x, WIDE)
            w = part_numbers(
                nibble_ptr, pair_ptr, single_ptr, octet_ptr, table_ptr,
                rows, tile, j[None, :], rows >= 0, part, LAYOUT, DTYPE, WIDE,
            )  # fmt: skip
            total += _scaled(_dot(w, x, WIDE), inputs, scales[part], mins[part], LAYOUT, SHIFT)
            if GATED:
                w_up = part_numbers(
                    nibble_ptr, pair_ptr, single_ptr, octet_ptr, table_ptr,
                    rows + N, tile, j[None, :], rows >= 0, part, LAYOUT, DTYPE, WIDE,
                )  # fmt: skip
                up_total += _scaled(_dot(w_up, x, WIDE), inputs, up_scales[part], up_mins[part], LAYOUT, SHIFT)
    if GATED:
        y = gated(total, up_total, GATING)
        out_rows = m
    else:
        pairs = tl.load(order_ptr + m_read)
        y = total * tl.load(weights_ptr + pairs)[None, :]
        out_rows = pairs
    places = out_ptr + out_rows.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=(m < end)[None, :] & (n < N)[:, None])


def multiply_blocks(
    x: Tensor, choice: Choice, pairs: SortedPairs, weights: ExpertWeights, out: Tensor, gating: Gating | None
) -> None:
    """Multiplies all pairs of token and expert by weights in blocks.

    Args:
        x: [num_tokens, hidden] with a gating; without [num_pairs, inner], a row for each place.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        weights: Gates and ups with a gating, or down projections; in blocks, without biases.
        out: With a gating [num_pairs, inner], a row for each place; without [num_pairs, hidden], a
            row for each pair, times the pair's weight. Written, but for pairs of experts elsewhere.
        gating: What is between gate-up and down; None: the product alone.
    """
    weight = weights.weight
    assert isinstance(weight, BlockWeight) and weights.bias is None, "a file's experts have no biases"
    num_experts, num_pairs = weights.num_experts, len(pairs.order)
    tile, early = block_rule(num_pairs, weights, gating is not None), card.launches_early(out.device)
    grid = (triton.cdiv(out.shape[1], tile.block_n), most_tiles(num_pairs, num_experts, tile.block_m))
    _block_tile_kernel[grid](
        x, *block_planes(weight), *number_tables(weight, x.dtype), *pairs, choice.weights, out,
        N=out.shape[1], LAYOUT=block_layout(weight), NUM_EXPERTS=num_experts, PER_TOKEN=choice.experts.shape[1],
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), GATED=gating is not None, GATING=gating or SILU,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, EARLY=early, WIDE=INTERPRETED or x.dtype == torch.float32,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=early,
    )  # fmt: skip
