"""Products of experts whose weights are in a file's blocks (GGUF's K types among them).

    W of one expert, blocks; pairs of token and expert, sorted -> gated inner elements, or outputs

A tile has pairs of one expert, as in `mixture_kernels`, and few tokens are tiles that are not full:
a weight is read once for them. The inputs of a part of a tile of blocks have one scale, so that
what is multiplied are the small integers themselves, exact in any type, and scales and minimums
meet the sums, as in `linear.block_quantized_kernels`. Sums are fp32.

Launch rules were guessed: 32 outputs and 16 pairs, or 32 where experts have as many. Tiles of 64
spill on sm_90. Not measured on a card.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated
from headrace_kernels.experts.mixture_kernels import expert_of_tile, most_tiles
from headrace_kernels.experts.routing import Choice, SortedPairs
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.block_numbers import (
    block_layout,
    block_planes,
    exact_numbers,
    integers,
    min_of,
    number_tables,
    scale_of,
)
from headrace_kernels.weight_formats.block_weight import BlockWeight

_BLOCK_N = 32
_LEAST_PAIRS, _MOST_PAIRS = 16, 32


@triton.jit
def _dot(w, x, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    return tl.dot(w, x)


@triton.jit
def _add_part(
    total, nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr, group_min_ptr,
    table_ptr, code_ptr, rows, tile, x, inputs, NUM_ROWS,
    PART: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr, SIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one part's product [BLOCK_N, BLOCK_M]; `inputs` [1, BLOCK_M] are the sums of x."""
    # Taken off the numbers that are multiplied.
    SHIFT: tl.constexpr = LAYOUT.offset + (128 if DTYPE == tl.bfloat16 and not SIGNED and table_ptr is None else 0)
    j = tl.arange(0, LAYOUT.plane)[None, :]
    q = integers(nibble_ptr, pair_ptr, single_ptr, octet_ptr, rows, tile, j, rows >= 0, PART, LAYOUT)
    first = tl.minimum((tile * 4 + PART) * LAYOUT.plane, LAYOUT.num_inputs - 1)
    part = _dot(exact_numbers(q, table_ptr, DTYPE, SIGNED, WIDE), x, WIDE)
    if SHIFT != 0:
        part -= SHIFT * inputs
    total += part * scale_of(scale_ptr, min_ptr, group_scale_ptr, code_ptr, first, rows, NUM_ROWS, LAYOUT)
    if LAYOUT.has_mins:
        total -= inputs * min_of(min_ptr, group_scale_ptr, group_min_ptr, first, rows, NUM_ROWS, LAYOUT)
    return total


@triton.jit
def _block_tile_kernel(
    x_ptr, nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr, group_min_ptr,
    table_ptr, code_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATED: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (n, tile): Y^T = W X^T for BLOCK_N outputs and BLOCK_M pairs of one expert.

    Rows of x and of the results are those of `mixture_kernels._tile_kernel`.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SIGNED: tl.constexpr = octet_ptr is not None
    expert, number = expert_of_tile(starts_ptr, tl.program_id(1), NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_M)
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
    j = tl.arange(0, LAYOUT.plane)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(0, LAYOUT.num_tiles):
        for part in tl.static_range(4):
            k = (tile * 4 + part) * LAYOUT.plane + j
            x = tl.load(x_rows + k, mask=k < LAYOUT.num_inputs, other=0.0)
            inputs = tl.sum(x.to(tl.float32), 0)[None, :]
            total = _add_part(
                total, nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr,
                group_min_ptr, table_ptr, code_ptr, rows, tile, x, inputs, NUM_ROWS, part, LAYOUT, DTYPE, SIGNED, WIDE,
            )  # fmt: skip
            if GATED:
                up_total = _add_part(
                    up_total, nibble_ptr, pair_ptr, single_ptr, octet_ptr, scale_ptr, min_ptr, group_scale_ptr,
                    group_min_ptr, table_ptr, code_ptr, rows + N, tile, x, inputs, NUM_ROWS, part, LAYOUT, DTYPE,
                    SIGNED, WIDE,
                )  # fmt: skip
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
    average = triton.next_power_of_2(triton.cdiv(num_pairs, weights.total_experts))
    block_m = min(max(average, _LEAST_PAIRS), _MOST_PAIRS)
    is_wide = INTERPRETED or x.dtype == torch.float32
    grid = (triton.cdiv(out.shape[1], _BLOCK_N), most_tiles(num_pairs, num_experts, block_m))
    _block_tile_kernel[grid](
        x, *block_planes(weight), *number_tables(weight, x.dtype), *pairs, choice.weights, out,
        N=out.shape[1], LAYOUT=block_layout(weight), NUM_EXPERTS=num_experts, PER_TOKEN=choice.experts.shape[1],
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), GATED=gating is not None, GATING=gating or SILU,
        BLOCK_N=_BLOCK_N, BLOCK_M=block_m, WIDE=is_wide, num_warps=4,
    )  # fmt: skip
