"""The Triton kernels behind `mixture` for many tokens, on the tensor cores.

Owns the kernels and their launches; which kernels run when is `mixture`'s, and few tokens have
kernels of their own (`vector_kernels`). A pair is a token and one of its experts (`routing`).
Weights are those of `expert_weights`: a word is a number, or four of INT4.

`_tile_kernel` multiplies BLOCK_M pairs of one expert, which sorting made neighbours, by BLOCK_N of
its outputs, as Y^T = W X^T, where no grouped GEMM of the card's own takes them
(`grouped_gemm_sm90`). How many tiles there are is routing's, so the grid has room for the most
there can be, and a program finds its expert from the starts of all. Weights of FP8 multiply
rows of e4m3 (`rounded_tokens`) as they are, others rows in the model's type. `_combine_kernel` adds
up the outputs of a token's pairs in order, where no norm behind does (`rms_norm.summed`).

Early launches (`early_launch`). Which weights a tile multiplies is the sort's to say, so gate and
up wait first, and let the next kernel start behind their wait. Thus the sort has ended wherever
down runs, which finds its tile's expert before it waits. Programs of a kernel start when all of the
one before have started: those that wait take no room that those would need, and so all kernels let
the next one start at once.

Sums are fp32 in an order that depends on the tile alone: no atomics, the same bits every time.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating, gated
from headrace_kernels.experts.grouped_gemm_sm90 import GroupedTile, multiply_grouped_gemm
from headrace_kernels.experts.routing import Choice, SortedPairs, own_expert
from headrace_kernels.experts.tile_table import most_tiles, tile_table
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS, Activations, RoundedTokens, round_tokens
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_kernels.weight_formats.columns import four_columns
from headrace_kernels.weight_formats.conversions import dequantized_nibbles, numbers_of
from headrace_kernels.weight_formats.kernel_layout import WeightLayout
from headrace_kernels.weight_formats.scale_places import scale_places

# Outputs of a token that one program adds up.
_COMBINED = 1024
# Products of e4m3 that the tensor cores add up before fp32 takes their sum, of more inputs than
# those that they add up alone.
_ROUGH_SUMS, _MOST_FAST_INPUTS = tl.constexpr(128), tl.constexpr(MOST_FAST_INPUTS)


class PairTile(NamedTuple):
    """How a product of many pairs is cut."""

    # Outputs of one program (of gate and up as many again).
    block_n: int
    # Pairs of one program.
    block_m: int
    # Words of a row that are loaded at a time, at most a piece of the layout.
    block_words: int
    num_warps: int
    num_stages: int
    # Whether programs of one tile's outputs are neighbours, and so share its rows of x in the
    # second cache; otherwise those of one block of outputs are.
    outputs_first: bool = False


AnyTile: TypeAlias = PairTile | GroupedTile


@triton.jit
def byte_scales(scale_ptr, rows, group, NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """Scales of 8-bit numbers of some outputs in one group of inputs, fp32."""
    return tl.load(scale_ptr + scale_places(rows, group, NUM_ROWS, LAYOUT)).to(tl.float32)


@triton.jit
def _tile_numbers(
    words,
    constants,
    zero_ptr,
    rows,
    group,
    NUM_ROWS: tl.constexpr,
    PART: tl.constexpr,
    LAYOUT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Numbers of words in DTYPE: INT4's dequantized, others' without their scales, exactly.

    constants: INT4's, of `_split_constants`.
    """
    KIND: tl.constexpr = LAYOUT.kind
    PLAIN: tl.constexpr = LAYOUT.is_plain
    if DTYPE == tl.float8e4nv:
        numbers = words.to(tl.float8e4nv, bitcast=True)
        if PLAIN:
            numbers = numbers.to(tl.float32)
    elif KIND == "plain":
        numbers = words.to(tl.float32) if PLAIN else words
    elif KIND == "int4":
        scales, zeros = constants
        numbers = dequantized_nibbles(words, zeros[PART], scales[PART], PART, DTYPE, PLAIN)
    else:
        numbers = numbers_of(words, 0, KIND, DTYPE, PLAIN)
        if zero_ptr is not None:
            # At most 255 apart: exact in bf16 too.
            numbers -= tl.load(zero_ptr + group * NUM_ROWS + rows).to(numbers.dtype)
    return numbers


@triton.jit
def _step_constants(
    scale_ptr, zero_ptr, rows, step, NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr, BLOCKS: tl.constexpr
):
    """Scales and zero points of INT4's outputs in the four pieces of a step: [BLOCK_N, 4] each."""
    piece = (step // BLOCKS * 4 + tl.arange(0, 4)[None, :]) * LAYOUT.plane
    places = tl.minimum(piece, LAYOUT.num_inputs - 1) // LAYOUT.group * NUM_ROWS + rows
    return tl.load(scale_ptr + places), tl.load(zero_ptr + places)


@triton.jit
def _split_constants(constants):
    """What `_step_constants` returns, as four scales and four zero points of [BLOCK_N, 1]."""
    return four_columns(constants[0]), four_columns(constants[1])


@triton.jit
def _group_scales(
    scale_ptr, x_scale_ptr, rows, x_row, x_room, group,
    NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Scales of 8-bit numbers and of x in one group, fp32: of rows and [1, BLOCK_M]."""
    scales = byte_scales(scale_ptr, rows, group, NUM_ROWS, LAYOUT)
    if x_scale_ptr is not None:
        x_scales = tl.load(x_scale_ptr + group * x_room + x_row)
    else:
        x_scales = tl.full([BLOCK_M], 1.0, tl.float32)
    return scales, x_scales[None, :]


@triton.jit
def _asked_ahead(
    scale_ptr, zero_ptr, x_scale_ptr, rows, scale_rows, x_row, x_room, step, UPS: tl.constexpr,
    NUM_ROWS: tl.constexpr, LAYOUT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What a step's products take beside words and x: of outputs, and of those UPS rows further.

    Of INT4 these are scales and zero points, of other numbers in groups scales; of others they mean
    nothing. The compiler can't copy such loads ahead of their step (see `columns`), or doesn't,
    since no product takes what they bring: so a kernel asks for them a step before.
    """
    own = step
    ups = step
    if LAYOUT.kind == "int4":
        own = _step_constants(scale_ptr, zero_ptr, rows, step, NUM_ROWS, LAYOUT, BLOCKS)
        if GATED:
            ups = _step_constants(scale_ptr, zero_ptr, rows + UPS, step, NUM_ROWS, LAYOUT, BLOCKS)
    elif LAYOUT.is_grouped:
        group = step // BLOCKS * LAYOUT.plane // LAYOUT.group
        own = _group_scales(scale_ptr, x_scale_ptr, scale_rows, x_row, x_room, group, NUM_ROWS, LAYOUT, BLOCK_M)
        if GATED:
            ups = byte_scales(scale_ptr, scale_rows + UPS, group, NUM_ROWS, LAYOUT)
    return own, ups


@triton.jit
def _constants(asked, LAYOUT: tl.constexpr, GATED: tl.constexpr):
    """What was `_asked_ahead`, as `_tile_numbers` and `_dot` take it: of outputs, and of ups."""
    own, ups = asked
    if LAYOUT.kind == "int4":
        own = _split_constants(own)
        if GATED:
            ups = _split_constants(ups)
    elif LAYOUT.is_grouped:
        if GATED:
            ups = (ups, own[1])
    return own, ups


@triton.jit
def _dot(w, x, constants, total, LAYOUT: tl.constexpr):
    """Adds W X to the sums; of 8 bits in groups or blocks its sums, times the group's scales."""
    PLAIN: tl.constexpr = LAYOUT.is_plain
    if LAYOUT.is_grouped and LAYOUT.kind != "int4":
        sums = tl.dot(w, x.to(tl.float32)) if PLAIN else tl.dot(w, x)
        return total + sums * (constants[0] * constants[1])
    if PLAIN:
        return total + tl.dot(w, x.to(tl.float32))
    if x.dtype == tl.float8e4nv and LAYOUT.num_inputs > _MOST_FAST_INPUTS:
        return tl.dot(w, x, total, max_num_imprecise_acc=_ROUGH_SUMS)
    return tl.dot(w, x, total)


@triton.jit
def _with_scales_and_bias(
    total, scale_ptr, x_scale_ptr, bias_ptr, rows, x_row, LAYOUT: tl.constexpr
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_M] times the scales of outputs and of rows of x, plus the bias."""
    if not LAYOUT.is_grouped:
        if scale_ptr is not None:
            total *= tl.load(scale_ptr + rows)
        if x_scale_ptr is not None:
            total *= tl.load(x_scale_ptr + x_row)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows).to(tl.float32)
    return total


@triton.jit
def _load(ptrs, mask, WHOLE: tl.constexpr):
    """Loads a block, 0 where it has no place; WHOLE: it has all of them."""
    if WHOLE:
        block = tl.load(ptrs)
    elif ptrs.dtype.element_ty.is_floating():
        block = tl.load(ptrs, mask=mask, other=0.0)
    else:
        block = tl.load(ptrs, mask=mask, other=0)
    return block


@triton.jit
def expert_of_tile(
    starts_ptr, tile,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """A tile's expert (NUM_EXPERTS or more: there is no such tile), and its number among its tiles.

    An expert has as many tiles as hold its pairs, in the order of experts. AHEAD: starts are read
    before the kernel waits, past the first cache, where those of an earlier sort may still be.
    """
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    e = tl.arange(0, BLOCK_EXPERTS)
    begins = tl.load(starts_ptr + e, mask=e < NUM_EXPERTS, other=0, cache_modifier=CACHE)
    ends = tl.load(starts_ptr + e + 1, mask=e < NUM_EXPERTS, other=0, cache_modifier=CACHE)
    last = tl.cumsum((ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    is_before = last <= tile
    return tl.sum(is_before.to(tl.int32), 0), tile - tl.max(tl.where(is_before, last, 0), 0)


@triton.jit
def early_tile(
    starts_ptr, tile,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What `expert_of_tile` gives, behind the waits of a kernel that may be launched early."""
    AHEAD: tl.constexpr = EARLY and not GATED
    if EARLY:
        if GATED:
            # The sort may still run, and whatever is behind must not start before it has ended.
            grid_before_is_done()
        grid_behind_may_start()
    expert, number = expert_of_tile(starts_ptr, tile, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_M, AHEAD)
    if AHEAD:
        grid_before_is_done()
    return expert, number


@triton.jit
def _tile_kernel(
    x_ptr, x_scale_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, order_ptr, starts_ptr, weights_ptr, out_ptr,
    x_room,
    N: tl.constexpr, LAYOUT: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr, GATED: tl.constexpr,
    OUTPUTS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile, n): Y^T = W X^T for BLOCK_N outputs and BLOCK_M pairs of one expert.

    GATED: x has a row for each token, and the gated elements of the pair at place m are row m of
    the results. Otherwise x has a row for each place, and the product times the pair's weight is
    the row of the pair. x_scale_ptr: scales of the rows of x, which is e4m3, one of a row or of
    each group of its inputs, as the weights have them; None: there are none. x_room: rows between
    the scales of two groups.
    """
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    PARTS: tl.constexpr = 4 if LAYOUT.kind == "int4" else 1
    BLOCKS: tl.constexpr = LAYOUT.plane // BLOCK_WORDS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tile = tl.program_id(1 if OUTPUTS_FIRST else 0)
    expert, number = early_tile(starts_ptr, tile, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_M, GATED, EARLY)
    if expert >= NUM_EXPERTS:
        return
    end = tl.load(starts_ptr + expert + 1)
    m = tl.load(starts_ptr + expert) + number * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0 if OUTPUTS_FIRST else 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_WORDS)
    # Pairs and outputs beyond the end repeat the last one, and are not stored.
    m_read = tl.minimum(m, end - 1)
    HALVES: tl.constexpr = 2 if GATED else 1
    NUM_ROWS: tl.constexpr = N * HALVES * NUM_EXPERTS
    rows = (expert.to(tl.int64) * (HALVES * N) + tl.minimum(n, N - 1))[:, None]
    x_row = m_read
    if GATED:
        x_row = tl.load(order_ptr + m_read) // PER_TOKEN
    x_rows = x_ptr + x_row.to(tl.int64)[None, :] * K
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    STEPS: tl.constexpr = (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    scale_rows = rows
    if LAYOUT.scale_outputs % BLOCK_N == 0 and N % BLOCK_N == 0:
        # The outputs of a program are of one block.
        scale_rows = expert.to(tl.int64) * (HALVES * N) + tl.program_id(0 if OUTPUTS_FIRST else 1) * BLOCK_N
    asked = _asked_ahead(
        scale_ptr, zero_ptr, x_scale_ptr, rows, scale_rows, x_row, x_room, 0, N,
        NUM_ROWS, LAYOUT, BLOCKS, BLOCK_M, GATED,
    )  # fmt: skip
    for step in tl.range(0, STEPS):
        word = step * BLOCK_WORDS + j[None, :]
        words = _load(word_ptr + rows * WORDS + word, word < WORDS, WORDS % BLOCK_WORDS == 0)
        if GATED:
            up_words = _load(word_ptr + (rows + N) * WORDS + word, word < WORDS, WORDS % BLOCK_WORDS == 0)
        constants, up_constants = _constants(asked, LAYOUT, GATED)
        following = tl.minimum(step + 1, STEPS - 1)
        asked = _asked_ahead(
            scale_ptr, zero_ptr, x_scale_ptr, rows, scale_rows, x_row, x_room, following, N,
            NUM_ROWS, LAYOUT, BLOCKS, BLOCK_M, GATED,
        )  # fmt: skip
        for part in tl.static_range(PARTS):
            piece = (step // BLOCKS * PARTS + part) * LAYOUT.plane
            k = piece + step % BLOCKS * BLOCK_WORDS + j[:, None]
            x = _load(x_rows + k, k < K, PARTS == 1 and K == WORDS and K % BLOCK_WORDS == 0)
            group = tl.minimum(piece, K - 1) // LAYOUT.group
            w = _tile_numbers(words, constants, zero_ptr, rows, group, NUM_ROWS, part, LAYOUT, DTYPE)
            total = _dot(w, x, constants, total, LAYOUT)
            if GATED:
                w_up = _tile_numbers(up_words, up_constants, zero_ptr, rows + N, group, NUM_ROWS, part, LAYOUT, DTYPE)
                up_total = _dot(w_up, x, up_constants, up_total, LAYOUT)
    total = _with_scales_and_bias(total, scale_ptr, x_scale_ptr, bias_ptr, rows, x_row, LAYOUT)
    if GATED:
        up_total = _with_scales_and_bias(up_total, scale_ptr, x_scale_ptr, bias_ptr, rows + N, x_row, LAYOUT)
        y = gated(total, up_total, GATING)
        out_rows = m
    else:
        pairs = tl.load(order_ptr + m_read)
        y = total * tl.load(weights_ptr + pairs)[None, :]
        out_rows = pairs
    places = out_ptr + out_rows.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=(m < end)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["first_expert"])
def _combine_kernel(
    pairs_ptr, experts_ptr, out_ptr,
    first_expert,
    N: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (token, n): the sum of the token's pairs [PER_TOKEN, N] in order, of experts here."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        mask = n < N
        if first_expert is not None:
            mask = mask & own_expert(experts_ptr, pair, first_expert, NUM_EXPERTS)[1]
        total += tl.load(pairs_ptr + pair * N + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def block_words(most: int, layout: WeightLayout) -> int:
    """Words that are loaded at a time: no more than a row or a piece has."""
    return min(most, layout.plane, int(triton.next_power_of_2(layout.num_words)))


def multiply_pairs(
    x: Activations, choice: Choice, pairs: SortedPairs, gate_up: ExpertWeights, down: ExpertWeights,
    tiles: tuple[AnyTile, AnyTile], gating: Gating = SILU, rounds_inner: bool = False,
) -> Tensor:  # fmt: skip
    """Computes the experts of many tokens, whose pairs are sorted by expert.

    Args:
        x: [num_tokens, hidden], contiguous, or rounded to e4m3.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        gate_up: Gates and ups of all experts, `2 * inner` outputs each.
        down: Down projections of all experts, `inner` inputs each.
        tiles: Tile of the gate-up product, and of the down product, each of the kernel that runs.
        gating: What is between gate-up and down.
        rounds_inner: Whether inner elements are rounded to e4m3: by the gate-up product itself if
            its tile says so, or by a launch of its own.

    Returns:
        [num_pairs, hidden] in the model's type: what each pair adds to its token's output. Rows of
        pairs whose expert is not here are not written.
    """
    num_pairs = len(pairs.order)
    outputs = choice.weights.new_empty(num_pairs, down.num_outputs, dtype=down.dtype)
    if rounds_inner and isinstance(tiles[0], GroupedTile) and tiles[0].rounds:
        inner: Activations = RoundedTokens.empty((num_pairs, down.num_inputs), down.row_rounding, outputs.device)
    else:
        inner = outputs.new_empty(num_pairs, down.num_inputs)
    # Both before the first product, which starts early behind what it needs.
    sizes = {tile.block_m for tile in tiles if isinstance(tile, GroupedTile)}
    tables = {block_m: tile_table(pairs, block_m) for block_m in sizes}

    def multiply(
        rows: Activations, weights: ExpertWeights, results: Activations, tile: AnyTile, own: Gating | None
    ) -> None:
        if isinstance(tile, GroupedTile):
            multiply_grouped_gemm(rows, choice, pairs, tables[tile.block_m], weights, results, tile, own)
        else:
            assert isinstance(results, Tensor)
            multiply_tiles(rows, choice, pairs, weights, results, tile, own)

    multiply(x, gate_up, inner, tiles[0], gating)
    rows = round_rows(inner, down) if rounds_inner and isinstance(inner, Tensor) else inner
    multiply(rows, down, outputs, tiles[1], None)
    return outputs


def round_rows(x: Tensor, weights: ExpertWeights) -> RoundedTokens:
    """Rounds rows [num_rows, num_inputs] to e4m3, for weights that `takes_rounded_rows`."""
    return round_tokens(x, weights.row_rounding)


def combine_pairs(outputs: Tensor, choice: Choice, down: ExpertWeights, out: Tensor) -> None:
    """Adds up the outputs of each token's pairs.

    Args:
        outputs: [num_pairs, hidden] of the experts here, times the pairs' weights.
        choice: Experts of the tokens.
        down: The weights of which `outputs` are products.
        out: [num_tokens, hidden], written.
    """
    num_outputs, early = out.shape[1], card.launches_early(out.device)
    _combine_kernel[(len(out), triton.cdiv(num_outputs, _COMBINED))](
        outputs, choice.experts, out, down.first_expert,
        N=num_outputs, NUM_EXPERTS=down.num_experts, PER_TOKEN=choice.experts.shape[1], BLOCK=_COMBINED,
        EARLY=early, launch_pdl=early,
    )  # fmt: skip


def multiply_tiles(
    x: Activations,
    choice: Choice,
    pairs: SortedPairs,
    weights: ExpertWeights,
    out: Tensor,
    tile: PairTile,
    gating: Gating | None,
) -> None:
    """One product of all pairs: arguments of `multiply_pairs`, rows of `_tile_kernel`.

    Without gating it is behind the gated one, which has waited for what sorted the pairs.
    """
    rows, scales, room = (x.numbers, x.scales, x.scales.stride(1)) if isinstance(x, RoundedTokens) else (x, None, 0)
    assert INTERPRETED or rows.dtype != torch.float32, "tensor cores would cut fp32 to tf32"
    layout, num_experts = weights.layout(), weights.num_experts
    words_at_a_time = max(16, block_words(tile.block_words, layout))
    num_tiles = most_tiles(len(pairs.order), num_experts, tile.block_m)
    grid, early = (num_tiles, triton.cdiv(out.shape[1], tile.block_n)), card.launches_early(out.device)
    _tile_kernel[grid[::-1] if tile.outputs_first else grid](
        rows, scales, *weights.bits(), weights.bias, *pairs, choice.weights, out, room,
        N=out.shape[1], LAYOUT=layout, NUM_EXPERTS=num_experts, PER_TOKEN=choice.experts.shape[1],
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
        BLOCK_WORDS=words_at_a_time, GATED=gating is not None, GATING=gating or SILU, OUTPUTS_FIRST=tile.outputs_first,
        EARLY=early, num_warps=tile.num_warps, launch_pdl=early,
        num_stages=_stages(tile, weights, layout, words_at_a_time, gating is not None, rows),
    )  # fmt: skip


def _stages(
    tile: PairTile, weights: ExpertWeights, layout: WeightLayout, block_words: int, gated: bool, x: Tensor
) -> int:
    """Stages of the tile that fit the shared memory."""
    parts, num_outputs = 4 if layout.kind == "int4" else 1, tile.block_n * (2 if gated else 1)
    words = num_outputs * weights.storage.element_size()
    stage_bytes = block_words * (words + parts * tile.block_m * x.element_size())
    fitting = card.shared_bytes(x.device) // stage_bytes
    if layout.kind == "int8" and weights.bits()[2] is not None and not card.has_warpgroup_products(x.device):
        # Less their zero points, numbers change hands in shared memory before they are multiplied;
        # the stage that is multiplied lies in registers. On sm_89 four stages took 106,496 bytes of
        # 101,376.
        numbers_bytes = block_words * num_outputs * x.element_size()
        fitting = 1 + (card.shared_bytes(x.device) - numbers_bytes) // stage_bytes
    return max(1, min(tile.num_stages, fitting))
