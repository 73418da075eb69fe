"""The grouped GEMM of many pairs of token and expert on sm_90 for weights in MXFP4.

Owns the kernel, its launch and which weights it takes; which sizes take it is `launch_rules`', what
a step does `mxfp4_step_sm90`'s, and what a tile is to know `grouped_work_sm90`'s. It computes what
`mxfp4_kernels`' tiles do, and is written in Gluon, because the order of copies, conversions and
products is what it is about.

Y^T = W X^T for BLOCK_N outputs of one expert, of gate and up as many each, and BLOCK_M of its
pairs. So outputs are the rows of an instruction, whose numbers the tensor cores read from the
registers in which they are made, and pairs are its columns in shared memory. Steps of 128 inputs
come SLOTS - 1 ahead (`hopper.ring`), past the end of a program's tile into its next one, and
persistent programs take tiles in turn, as in `grouped_gemm_sm90`. The last step may have fewer
groups of 32 inputs.

Sums are fp32, in the order of the inputs: no atomics, the same bits every time.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from headrace_kernels import card
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import Gating
from headrace_kernels.experts.grouped_work_sm90 import (
    CHANGED,
    GroupedSizes,
    factors_of,
    gated_here,
    located,
    no_sums,
    pairs_of,
    store_results,
    waited,
)
from headrace_kernels.experts.mxfp4_step_sm90 import (
    add_last_step,
    add_step,
    begin_step,
    copy_rows,
    copy_words,
    expect_step,
    scale_places,
    step_scales,
)
from headrace_kernels.experts.routing import Choice, SortedPairs
from headrace_kernels.experts.tile_table import TileTable
from headrace_kernels.hopper.launch import aligned, box_descriptor, programs_at_a_time, tile_descriptor
from headrace_kernels.hopper.ring import grid_before_is_done, grid_behind_may_start, new_barriers, publish_barriers
from headrace_kernels.weight_formats.mxfp4 import GROUP, TILE_INPUTS, Mxfp4Weight

# Registers of a thread at most.
_REGISTERS = 255
# Results of a row that are stored, at least, in multiples of which copies begin.
_ALIGNMENT = 16


class Mxfp4Tile(NamedTuple):
    """How a product of many pairs is cut."""

    # Pairs of a tile, a power of two.
    block_m: int
    # Outputs of a tile, of gate and up as many each: 64 for every four warps, or more.
    block_n: int
    num_warps: int
    # Steps of 128 inputs in shared memory, at least 3.
    slots: int

    def shared_bytes(self, is_gated: bool) -> int:
        """Shared memory of a program without barriers."""
        words = 2 * GROUP * self.block_n * (2 if is_gated else 1)
        results = min(CHANGED, self.block_m * self.block_n)
        return self.slots * (words + 2 * TILE_INPUTS * self.block_m) + 2 * results


@gluon.jit
def _biases(bias_ptr, here, SIZES: gl.constexpr, MMA: gl.constexpr):
    """The bias of each part's outputs, or nothing."""
    expert, _, _, first_n = here
    N: gl.constexpr = SIZES.num_outputs
    PARTS: gl.constexpr = SIZES.parts
    biases = ()
    if bias_ptr is not None:
        n = first_n + gl.arange(0, SIZES.part_n, layout=gl.SliceLayout(1, MMA))
        for part in gl.static_range(PARTS):
            places = bias_ptr + (expert * (SIZES.sides * N) + part * N + n)
            biases = biases + (gl.load(places, mask=n < N, other=0.0),)
    return biases


@gluon.jit
def _finish(sums, biases, out_ptr, here, pairs, factors, SIZES: gl.constexpr, GATING: gl.constexpr, MMA: gl.constexpr):
    """Stores what becomes of sums, [outputs, pairs] of each part."""
    _, first, end, first_n = here
    PARTS: gl.constexpr = SIZES.parts
    place = first + gl.arange(0, SIZES.block_m, layout=pairs.type.layout)
    totals = sums
    if len(biases) > 0:
        totals = ()
        for part in gl.static_range(PARTS):
            totals = totals + (sums[part] + gl.expand_dims(biases[part].to(gl.float32), 1),)
    if SIZES.is_gated:
        y = gated_here(totals[0], totals[1], GATING)
        rows = place
    else:
        y = totals[0] * gl.expand_dims(gl.convert_layout(factors[0][0], gl.SliceLayout(0, MMA)), 0)
        rows = pairs
    y = y.to(out_ptr.dtype.element_ty).permute((1, 0))
    store_results(y, out_ptr, rows, place < end, first_n, SIZES.num_outputs, SIZES.block_m, SIZES.block_n, True)


@gluon.jit
def _mxfp4_gemm_kernel(
    x_ptr, x_desc, word_desc, scale_ptr, bias_ptr, order_ptr, starts_ptr, count_ptr, experts_ptr, firsts_ptr,
    weights_ptr, out_ptr,
    SIZES: gl.constexpr, SLOTS: gl.constexpr, GATING: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program's tiles behind one another.

    GATING is not None: x has a row for each token, and the inner elements of the pair at place m
    are row m of the results. Otherwise x has a row for each place, and the product times the pair's
    weight is the row of the pair.
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = SIZES.block_m
    GROUPS: gl.constexpr = SIZES.num_inputs // 32
    STEPS: gl.constexpr = (GROUPS + 3) // 4
    # Groups of the last step.
    LAST: gl.constexpr = GROUPS - 4 * (STEPS - 1)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, 128], SHARED)
    word_smem = gl.allocate_shared_memory(gl.int16, [SLOTS, SIZES.sides, SIZES.block_n, 32], word_desc.layout)
    arrived = new_barriers(SLOTS)
    given = (x_ptr, x_desc, word_desc, scale_ptr)
    rings = (arrived, x_smem, word_smem, word_smem._reinterpret(gl.int16, [SLOTS, SIZES.width, 32], WORDS))
    publish_barriers()
    # As in `grouped_gemm_sm90`: the kernel of gates and ups has waited for tables and order.
    AHEAD: gl.constexpr = EARLY and not SIZES.is_gated
    if EARLY and not AHEAD:
        grid_before_is_done()
        grid_behind_may_start()
    total = gl.load(count_ptr, cache_modifier=".cg" if AHEAD else "") * SIZES.columns
    work = gl.program_id(0)
    stride = gl.num_programs(0)
    if AHEAD:
        if work >= total:
            grid_before_is_done()
            return
    if work < total:
        here = located(starts_ptr, experts_ptr, firsts_ptr, work, total, SIZES, AHEAD)
        pairs = pairs_of(order_ptr, here, SIZES, AHEAD)
        for early in gl.static_range(SLOTS - 1):
            expect_step(arrived, early, True, SIZES)
            copy_words(given, rings, early, here, early, True, SIZES)
        if AHEAD:
            grid_before_is_done()
            grid_behind_may_start()
        for early in gl.static_range(SLOTS - 1):
            copy_rows(given, rings, early, here, pairs, early, True, SIZES)
        factors = factors_of(None, None, weights_ptr, here, pairs, SIZES)
        places = scale_places(here, SIZES, LEFT)
        scales = step_scales(scale_ptr, places, 0)
        following = located(starts_ptr, experts_ptr, firsts_ptr, work + stride, total, SIZES)
        next_pairs = pairs_of(order_ptr, following, SIZES)
        later = located(starts_ptr, experts_ptr, firsts_ptr, work + 2 * stride, total, SIZES)
        if SIZES.is_gated:
            async_copy.wait_group(SLOTS - 2)
            fence_async_shared()
            gl.thread_barrier()
        slot = 0
        phase = 0
        while work < total:
            words, numbers = begin_step(rings, slot, phase, scales, SIZES, DTYPE, LEFT)
            pieces = (places, here, pairs, following, next_pairs, work + stride < total)
            state = (no_sums(SIZES, MMA), words, scales, numbers, slot, phase)
            for step in range(0, STEPS - 1):
                state = add_step(given, rings, state, step, pieces, SIZES, SLOTS, STEPS, LEFT)
                # A last step of one group makes no numbers. The assembler would then doubt which
                # registers products read that run on, and wait for each of their parts.
                if LAST == 1:
                    running, words, scales, numbers, slot, phase = state
                    state = (waited(running, 0, SIZES.parts), words, scales, numbers, slot, phase)
            biases = _biases(bias_ptr, here, SIZES, MMA)
            sums, slot, phase = add_last_step(given, rings, state, pieces, LAST, SIZES, SLOTS)
            # Asked for before results are stored: it has come when they are.
            next_factors = factors_of(None, None, weights_ptr, following, next_pairs, SIZES)
            places = scale_places(following, SIZES, LEFT)
            scales = step_scales(scale_ptr, places, 0)
            later_pairs = pairs_of(order_ptr, later, SIZES)
            last = located(starts_ptr, experts_ptr, firsts_ptr, work + 3 * stride, total, SIZES)
            _finish(sums, biases, out_ptr, here, pairs, factors, SIZES, GATING, MMA)
            work += stride
            here = following
            pairs = next_pairs
            factors = next_factors
            following = later
            next_pairs = later_pairs
            later = last


def takes_mxfp4_gemm(weights: ExpertWeights, tile: Mxfp4Tile, is_gated: bool) -> bool:
    """Whether the kernel multiplies by these weights in such tiles, on their GPU.

    Args:
        weights: Weights of a product.
        tile: The sizes.
        is_gated: Whether outputs are gates and as many ups.
    """
    weight, storage = weights.weight, weights.storage
    if not card.has_warpgroup_instructions(storage.device) or not isinstance(weight, Mxfp4Weight):
        return False
    num_outputs, steps = weights.num_outputs // (2 if is_gated else 1), triton.cdiv(weights.num_inputs, TILE_INPUTS)
    fits = steps >= tile.slots - 1 and num_outputs % _ALIGNMENT == 0 and weights.dtype.itemsize == 2
    # A tile that has few of its outputs multiplies zeros as long.
    is_full = 8 * triton.cdiv(num_outputs, tile.block_n) * tile.block_n <= 9 * num_outputs
    return fits and is_full and storage.data_ptr() % 16 == 0


def multiply_mxfp4_gemm(
    x: Tensor,
    choice: Choice,
    pairs: SortedPairs,
    table: TileTable,
    weights: ExpertWeights,
    out: Tensor,
    tile: Mxfp4Tile,
    gating: Gating | None,
) -> None:
    """One product of all pairs.

    Without gating it is behind the gated one, which has waited for the sort and the table.

    Args:
        x: [num_tokens, num_inputs] if gated, or [num_pairs, num_inputs] in the order of the pairs,
            contiguous, in the weights' type.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        table: Their tiles of `tile.block_m` pairs.
        weights: Weights that the kernel takes.
        out: [num_pairs, num_outputs], written, in the order of the pairs if gated; num_outputs are
            inner elements then.
        tile: The sizes.
        gating: What is between gate and up; None: outputs are no gates and ups.
    """
    weight, rows, is_gated = weights.weight, aligned(x), gating is not None
    assert isinstance(weight, Mxfp4Weight) and rows.dtype == weight.dtype
    # Places in x and among scales are 32 bits.
    assert max(rows.numel(), weight.scales.numel()) < 1 << 31
    assert tile.slots >= 3 and tile.block_n % (16 * tile.num_warps) == 0
    sizes = GroupedSizes(
        num_outputs=out.shape[1], num_inputs=weights.num_inputs, per_token=choice.experts.shape[1],
        block_m=tile.block_m, block_n=tile.block_n, item=rows.element_size(), is_gated=is_gated,
        in_blocks=False, scale_outputs=1, scale_room=0, is_swapped=True,
        rounds=False, is_bf16=weights.dtype is torch.bfloat16, in_turn=False, runs_on=False,
    )  # fmt: skip
    words = weight.packed.view(-1, out.shape[1], weight.packed.shape[1])
    held = programs_at_a_time(tile.num_warps, _REGISTERS, tile.shared_bytes(is_gated))
    num_work = len(table.experts) * sizes.columns
    early = card.launches_early(out.device)
    _mxfp4_gemm_kernel[(min(held * card.multiprocessors(out.device), num_work),)](
        rows, None if is_gated else tile_descriptor(rows, tile.block_m, TILE_INPUTS),
        box_descriptor(words, [2 if is_gated else 1, tile.block_n, GROUP]), weight.scales.view(torch.int32),
        weights.bias, pairs.order, pairs.starts, *table, choice.weights, out,
        SIZES=sizes, SLOTS=tile.slots, GATING=gating, EARLY=early,
        num_warps=tile.num_warps, maxnreg=None, launch_pdl=early,
    )  # fmt: skip
