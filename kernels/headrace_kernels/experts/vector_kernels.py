"""The Triton kernels behind `mixture` for few tokens, on the ordinary cores.

The time there is the weights' way from memory. Owns the kernels and their launch; which run when is
`mixture`'s. Pairs and weights are those of `mixture_kernels`.

`_vector_gate_up_kernel` computes some inner elements of one pair, with the norm before and SwiGLU
behind. `_vector_down_kernel` computes some outputs of one token over all of its experts, whose
weighted sum ends in registers, and may add it to the residual stream. Sums are fp32 in an order
that depends on the tile alone.
"""

# Triton's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated
from headrace_kernels.experts.mixture_kernels import block_words, byte_scales
from headrace_kernels.experts.routing import Choice, own_expert
from headrace_kernels.weight_formats.conversions import numbers_of, wide_bytes

# Words that a warp loads at once, at least 8 bytes a thread in 16 bits.
_WARP_WORDS = 128


class VectorTile(NamedTuple):
    """How a product of few tokens is cut."""

    # Outputs of one program (of gate and up as many again).
    block_n: int
    # Words of a row that are loaded at a time, at most a piece of the layout.
    block_words: int
    num_warps: int


@triton.jit
def _wide_numbers(
    words, scale_ptr, zero_ptr, rows, group, NUM_ROWS: tl.constexpr, PART: tl.constexpr, LAYOUT: tl.constexpr
):
    """Numbers of words in fp32, with scales of groups or blocks times them, others without."""
    KIND: tl.constexpr = LAYOUT.kind
    PLAIN: tl.constexpr = LAYOUT.is_plain
    if KIND == "plain":
        numbers = words.to(tl.float32)
    elif KIND == "int4":
        places = group * NUM_ROWS + rows
        zeros, scales = tl.load(zero_ptr + places).to(tl.float32), tl.load(scale_ptr + places).to(tl.float32)
        numbers = numbers_of(words, PART, KIND, tl.float32, PLAIN).to(tl.float32)
        numbers = (numbers - zeros) * scales
    else:
        numbers = wide_bytes(words, KIND, False, PLAIN)
        if LAYOUT.is_grouped:
            if zero_ptr is not None:
                numbers -= tl.load(zero_ptr + group * NUM_ROWS + rows).to(tl.float32)
            numbers *= byte_scales(scale_ptr, rows, group, NUM_ROWS, LAYOUT)
    return numbers


@triton.jit
def _add_three(a, b, c, x, y, z):
    """Adds three sums at a time, for which warps meet once."""
    return a + x, b + y, c + z


@triton.jit
def _row_block(row_ptr, k, mask, BLOCK_N: tl.constexpr):
    """Elements k [1, BLOCK] of one row, once for each of BLOCK_N outputs: [BLOCK_N, BLOCK].

    Threads load what they multiply; one copy would go to them by way of shared memory.
    """
    places = tl.broadcast_to(row_ptr + k, [BLOCK_N, k.shape[1]])
    return tl.load(places, mask=tl.broadcast_to(mask, [BLOCK_N, k.shape[1]]), other=0.0)


@triton.jit(do_not_specialize=["first_expert"])
def _vector_gate_up_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, experts_ptr, out_ptr,
    eps, first_expert,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    GATING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Program (pair, n): BLOCK_N inner elements n of one pair, gated.

    With norm_ptr = g, x is x g / rms(x), whose divisor is applied to the sums.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    PARTS: tl.constexpr = 4 if LAYOUT.kind == "int4" else 1
    BLOCKS: tl.constexpr = LAYOUT.plane // BLOCK_WORDS
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_WORDS)[None, :]
    x_row = x_ptr + (pair // PER_TOKEN).to(tl.int64) * K
    expert, is_here = own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)
    if not is_here:
        return
    NUM_ROWS: tl.constexpr = N * 2 * NUM_EXPERTS
    # Elements beyond the end repeat the last one, and are not stored.
    gates = (expert * (2 * N) + tl.minimum(n, N - 1))[:, None]
    ups = gates + N
    gate_sums = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
    # Unrolled, so that the loads of several blocks are under way at once.
    for first in tl.static_range(0, WORDS, BLOCK_WORDS):
        mask = first + j < WORDS
        gate_words = tl.load(word_ptr + gates * WORDS + first + j, mask=mask, other=0)
        up_words = tl.load(word_ptr + ups * WORDS + first + j, mask=mask, other=0)
        for part in tl.static_range(PARTS):
            piece = (first // BLOCK_WORDS // BLOCKS * PARTS + part) * LAYOUT.plane
            k = piece + first // BLOCK_WORDS % BLOCKS * BLOCK_WORDS + j
            x = _row_block(x_row, k, k < K, BLOCK_N).to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                x = x * _row_block(norm_ptr, k, k < K, BLOCK_N).to(tl.float32)
            group = tl.minimum(piece, K - 1) // LAYOUT.group
            gate_sums += x * _wide_numbers(gate_words, scale_ptr, zero_ptr, gates, group, NUM_ROWS, part, LAYOUT)
            up_sums += x * _wide_numbers(up_words, scale_ptr, zero_ptr, ups, group, NUM_ROWS, part, LAYOUT)
    gate, up, square = tl.reduce((gate_sums, up_sums, squares), 1, _add_three)
    gate, up = gate[:, None], up[:, None]
    if scale_ptr is not None:
        if not LAYOUT.is_grouped:
            gate, up = gate * tl.load(scale_ptr + gates), up * tl.load(scale_ptr + ups)
    if norm_ptr is not None:
        rstd = tl.rsqrt(square[:, None] / K + eps)
        gate, up = gate * rstd, up * rstd
    if bias_ptr is not None:
        gate, up = gate + tl.load(bias_ptr + gates).to(tl.float32), up + tl.load(bias_ptr + ups).to(tl.float32)
    inner = gated(gate, up, GATING)
    places = out_ptr + pair.to(tl.int64) * N + n[:, None]
    tl.store(places, inner.to(out_ptr.dtype.element_ty), mask=n[:, None] < N)


@triton.jit(do_not_specialize=["first_expert"])
def _vector_down_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Program (token, n): the weighted sum over the token's experts for BLOCK_N outputs n."""
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    PARTS: tl.constexpr = 4 if LAYOUT.kind == "int4" else 1
    BLOCKS: tl.constexpr = LAYOUT.plane // BLOCK_WORDS
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, N - 1)[:, None]
    j = tl.arange(0, BLOCK_WORDS)[None, :]
    NUM_ROWS: tl.constexpr = N * NUM_EXPERTS
    # Asked for all experts at once: a program would wait for each number between two products.
    owned = ()
    for slot in tl.static_range(PER_TOKEN):
        owned = owned + (own_expert(experts_ptr, token * PER_TOKEN + slot, first_expert, NUM_EXPERTS),)
    places = out_ptr + token * N + n
    residual = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        residual = tl.load(places, mask=n < N, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
    biases = tl.zeros([BLOCK_N, 1], tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        expert, is_here = owned[slot]
        factor = tl.load(weights_ptr + pair, mask=is_here, other=0.0)
        rows = expert * N + n_read
        if bias_ptr is not None:
            biases += factor * tl.load(bias_ptr + rows).to(tl.float32)
        if scale_ptr is not None:
            if not LAYOUT.is_grouped:
                factor = factor * tl.load(scale_ptr + rows)
        sums = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
        for first in tl.static_range(0, WORDS, BLOCK_WORDS):
            word = first + j
            words = tl.load(word_ptr + rows * WORDS + word, mask=(word < WORDS) & is_here, other=0)
            for part in tl.static_range(PARTS):
                piece = (first // BLOCK_WORDS // BLOCKS * PARTS + part) * LAYOUT.plane
                k = piece + first // BLOCK_WORDS % BLOCKS * BLOCK_WORDS + j
                x = _row_block(x_ptr + pair * K, k, (k < K) & is_here, BLOCK_N).to(tl.float32)
                group = tl.minimum(piece, K - 1) // LAYOUT.group
                sums += x * _wide_numbers(words, scale_ptr, zero_ptr, rows, group, NUM_ROWS, part, LAYOUT)
        total += sums * factor
    y = tl.sum(total, 1) + residual
    if bias_ptr is not None:
        y += tl.sum(biases, 1)
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=n < N)


def multiply_vectors(
    x: Tensor,
    choice: Choice,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    out: Tensor,
    tiles: tuple[VectorTile, VectorTile],
    norm: tuple[Tensor, float] | None,
    add: bool,
    gating: Gating = SILU,
) -> None:
    """Computes the experts of few tokens, each pair by itself.

    Args:
        x: [num_tokens, hidden], contiguous.
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
    grid = (len(inner), triton.cdiv(down.num_inputs, tiles[0].block_n))
    _vector_gate_up_kernel[grid](
        x, norm_weight, *gate_up.bits(), gate_up.bias, choice.experts, inner, eps, gate_up.first_expert,
        N=down.num_inputs, **shared, GATING=gating, **_vector_options(gate_up, tiles[0]),
    )  # fmt: skip
    grid = (num_tokens, triton.cdiv(down.num_outputs, tiles[1].block_n))
    _vector_down_kernel[grid](
        inner, *down.bits(), down.bias, choice.experts, choice.weights, out, down.first_expert, N=down.num_outputs,
        **shared, ADD=add, **_vector_options(down, tiles[1]),
    )  # fmt: skip


def _vector_options(weights: ExpertWeights, tile: VectorTile) -> dict[str, object]:
    """Layout, tile and warps of a launch."""
    layout = weights.layout()
    words = block_words(tile.block_words, layout)
    num_warps = min(tile.num_warps, max(1, tile.block_n * words // _WARP_WORDS))
    return {"LAYOUT": layout, "BLOCK_N": tile.block_n, "BLOCK_WORDS": words, "num_warps": num_warps}
