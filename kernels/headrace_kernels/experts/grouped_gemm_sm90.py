"""The grouped GEMM of many pairs of token and expert on sm_90, by its copy engine.

Owns the kernel, its launch and which weights it takes; which sizes take it is `launch_rules`', what
a tile is to know and what becomes of its sums `grouped_work_sm90`'s. It computes what
`mixture_kernels`' tiles do, for plain weights of 16 bits, and for FP8 that multiplies rounded rows,
with a scale for each output or in blocks. It is written in Gluon, because the order of copies and
products is what it is about.

Y = X W^T for BLOCK_M pairs of one expert and BLOCK_N of its outputs, of gate and up as many of
each, side by side in shared memory. A step is 128 bytes of inputs. The copy engine brings its
weight, and rows of x that are in the order of the pairs; rows of tokens, which are gathered, are
copied by the threads, 16 bytes each. All of it comes SLOTS - 1 steps ahead (`hopper.ring`), past
the end of a program's tile into its next one, so that the next tile's first steps come while
results are stored. Outputs' first weights are asked for while gates and ups still run: which they
are was known before those began (`early_launch`). As many programs run as the card holds. They take
tiles in turn, all blocks of outputs of a tile behind one another, so that its rows are in the
second cache, and so is the weight of an expert's next tile. Which tiles those are, which rows they
have and what their sums are multiplied by is asked for a tile ahead (`tile_table`).

Sums are fp32, in the order of the inputs: no atomics, the same bits every time. Of FP8 tensor cores
add up alone, in blocks 128 inputs, whose sums fp32 adds up with their scales. Nothing else is to be
multiplied meanwhile, so two such programs share a multiprocessor. A larger tile's program has one
for itself: sums take most of its registers, so its products are of a quarter of the outputs each
and take turns, and of its two groups of warps one adds up while the other multiplies.

Inner elements of a tile of 128 gates and ups may be rounded to e4m3 before they are stored, with a
scale for each row of the tile, as `rounded_tokens` does. Then they are half the bytes, and no
launch behind reads and writes them. Groups of warps lie side by side where a tile has too few pairs
for all of them.
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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace_kernels import card
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import Gating
from headrace_kernels.experts.grouped_work_sm90 import (
    STEP_BYTES,
    STORED,
    GroupedSizes,
    block_places,
    block_scales,
    factors_of,
    finish,
    located,
    no_sums,
    of_rows,
    of_sums,
    pairs_of,
    places_in_x,
    waited,
)
from headrace_kernels.experts.routing import Choice, SortedPairs
from headrace_kernels.experts.tile_table import TileTable
from headrace_kernels.hopper.launch import aligned, box_descriptor, programs_at_a_time, tile_descriptor
from headrace_kernels.hopper.ring import (
    advance,
    grid_before_is_done,
    grid_behind_may_start,
    new_barriers,
    publish_barriers,
    slot_before,
)
from headrace_kernels.hopper.stream_k import added_here
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS, Activations, RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Registers of a thread at most.
_REGISTERS, _SWAPPED_REGISTERS = 255, 160
# Results of a row that are stored, at least, in multiples of which copies begin.
_ALIGNMENT = 16
# Sums of a thread above which registers hold no two products in blocks beside them.
_MOST_SUMS = 64


class GroupedTile(NamedTuple):
    """How a product of many pairs is cut."""

    # Pairs of a tile: 64 for every four warps, or a multiple; swapped a power of two from 16 on.
    block_m: int
    # Outputs of a tile, of gate and up as many of each; swapped 64 for every four warps, or more.
    block_n: int
    num_warps: int
    # Steps in shared memory, at least 3.
    slots: int
    # Whether outputs take the 64 rows of an instruction and pairs its columns, Y^T = W X^T: for so
    # few pairs that most of 64 rows would be empty.
    is_swapped: bool = False
    # Whether inner elements are rounded to e4m3, those of a pair in a tile, 128, by one scale.
    rounds: bool = False

    def sums(self, is_gated: bool) -> int:
        """Sums of a thread."""
        return self.block_m * self.block_n * (2 if is_gated else 1) // (32 * self.num_warps)

    def shared_bytes(self, is_gated: bool) -> int:
        """Shared memory of a program without barriers."""
        slot = STEP_BYTES * (self.block_m + self.block_n * (2 if is_gated else 1))
        row = self.block_n if self.rounds else 2 * min(STORED, self.block_n)
        return self.slots * slot + self.block_m * row


@gluon.jit
def _copy_step(
    x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, slot, here, pairs, k, SIZES: gl.constexpr
):  # fmt: skip
    """Copies a step: the inputs from k on of a piece of work's pairs and of its outputs."""
    _copy_weight(x_desc, w_desc, arrived, w_smem, slot, here, k, SIZES)
    _copy_rows(x_ptr, x_desc, arrived, x_smem, slot, here, pairs, k, SIZES)


@gluon.jit
def _copy_weight(x_desc, w_desc, arrived, w_smem, slot, here, k, SIZES: gl.constexpr):
    """Copies a step's weight; its slot expects the rows of x too, if the engine copies them."""
    expert, _, _, first_n = here
    mbarrier.expect(arrived.index(slot), 128 * (SIZES.width + (0 if x_desc is None else SIZES.block_m)))
    corner = [expert * SIZES.sides, first_n, k]
    tma.async_copy_global_to_shared(w_desc, corner, arrived.index(slot), w_smem.index(slot))


@gluon.jit
def _copy_rows(x_ptr, x_desc, arrived, x_smem, slot, here, pairs, k, SIZES: gl.constexpr):
    """Copies a step's rows of x, whose slot `_copy_weight` has prepared."""
    _, first, _, _ = here
    if x_desc is not None:
        tma.async_copy_global_to_shared(x_desc, [first, k], arrived.index(slot), x_smem.index(slot))
    else:
        ROWS: gl.constexpr = of_rows(SIZES.item, gl.num_warps())
        inputs = gl.expand_dims(gl.arange(0, SIZES.step, layout=gl.SliceLayout(0, ROWS)), 0)
        rows = gl.expand_dims(places_in_x(pairs, SIZES), 1)
        async_copy.async_copy_global_to_shared(x_smem.index(slot), x_ptr + (rows + (k + inputs)))
    # One group a step, with copies of threads or without, by which they are counted.
    async_copy.commit_group()


@gluon.jit
def _product(x, w, sums, SWAPPED: gl.constexpr, BEGINS: gl.constexpr):
    """Begins to add a step's product of rows and a part of the outputs to sums, or to nothing."""
    if SWAPPED:
        running = warpgroup_mma(w, x.permute((1, 0)), sums, use_acc=not BEGINS, is_async=True)
    else:
        running = warpgroup_mma(x, w.permute((1, 0)), sums, use_acc=not BEGINS, is_async=True)
    return running


@gluon.jit
def _begin_step(x, w, sums, scales, SIZES: gl.constexpr, MMA: gl.constexpr):
    """Begins a step's products: returns sums, and products that `_end_step` is to add to them.

    Those before are done. Sums are with all products, which run on. In blocks they are with those
    that have ended.
    """
    SWAPPED: gl.constexpr = SIZES.is_swapped
    PARTS: gl.constexpr = SIZES.parts
    SHAPE: gl.constexpr = SIZES.sums_shape
    running = ()
    added = ()
    for part in gl.static_range(PARTS):
        outputs = w.slice(part * SIZES.part_n, SIZES.part_n, 0)
        if SIZES.in_blocks:
            # Not read: the first instruction of a product begins at 0.
            nothing = gl.zeros(SHAPE, gl.float32, layout=MMA)
            product = _product(x, outputs, nothing, SWAPPED, True)
            if SIZES.in_turn and part < PARTS - 1:
                added = added + (_added(sums[part], product, scales, part, 0, SIZES),)
            else:
                running = running + (product,)
        else:
            running = running + (_product(x, outputs, sums[part], SWAPPED, False),)
    if not SIZES.in_blocks:
        added = waited(running, PARTS, PARTS)
        running = ()
    elif not SIZES.runs_on:
        added = _end_step(sums, added, running, scales, SIZES)
        running = ()
    return added, running


@gluon.jit
def _added(sums, product, scales, part: gl.constexpr, under_way: gl.constexpr, SIZES: gl.constexpr):
    """A part's sums with a product in blocks, while so many later ones run on."""
    product = warpgroup_mma_wait(under_way, deps=[product])
    # Scales are of both halves of the outputs.
    factors = gl.expand_dims(scales[0] * scales[1 + 2 * part // SIZES.parts], 0 if SIZES.is_swapped else 1)
    return added_here(sums, product, factors)


@gluon.jit
def _end_step(sums, added, running, scales, SIZES: gl.constexpr):
    """Sums with all of a step's products, of which `_begin_step` has added some."""
    LEFT: gl.constexpr = len(running)
    DONE: gl.constexpr = len(added)
    for each in gl.static_range(LEFT):
        added = added + (_added(sums[DONE + each], running[each], scales, DONE + each, LEFT - 1 - each, SIZES),)
    return added


@gluon.jit
def _whole(sums, SIZES: gl.constexpr):
    """The sums of all steps, [pairs, outputs] of each part."""
    PARTS: gl.constexpr = SIZES.parts
    if not SIZES.in_blocks:
        sums = waited(sums, 0, PARTS)
    if SIZES.is_swapped:
        transposed = ()
        for part in gl.static_range(PARTS):
            transposed = transposed + (sums[part].permute((1, 0)),)
        sums = transposed
    return sums


@gluon.jit(do_not_specialize=["x_room", "out_room"])
def _grouped_gemm_kernel(
    x_ptr, x_desc, x_scale_ptr, w_desc, scale_ptr, bias_ptr, order_ptr, starts_ptr, count_ptr, experts_ptr,
    firsts_ptr, weights_ptr, out_ptr, x_room, out_scale_ptr, out_room,
    SIZES: gl.constexpr, SLOTS: gl.constexpr, GATING: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program's tiles behind one another.

    GATING is not None: x has a row for each token, and the inner elements of the pair at place m
    are row m of the results. Otherwise x has a row for each place, and the product times the pair's
    weight is the row of the pair. x_room: numbers between the scales of two groups of x in blocks;
    out_room: between those of two groups of results that are rounded.
    """
    DTYPE: gl.constexpr = w_desc.dtype
    STEP: gl.constexpr = SIZES.step
    STEPS: gl.constexpr = SIZES.steps
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * SIZES.item, rank=2)
    MMA: gl.constexpr = of_sums(SIZES, gl.num_warps())
    # Of one number for each pair beside sums.
    BESIDE: gl.constexpr = gl.SliceLayout(0 if SIZES.is_swapped else 1, MMA)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, SIZES.block_m, STEP], SHARED)
    w_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, SIZES.sides, SIZES.block_n, STEP], w_desc.layout)
    sides = w_smem._reinterpret(DTYPE, [SLOTS, SIZES.width, STEP], SHARED)
    arrived = new_barriers(SLOTS)
    publish_barriers()
    # The kernel of gates and ups let this one start behind its own wait, so tables and order are
    # written; its results are not.
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
            _copy_weight(x_desc, w_desc, arrived, w_smem, early, here, early * STEP, SIZES)
        if AHEAD:
            grid_before_is_done()
            grid_behind_may_start()
        for early in gl.static_range(SLOTS - 1):
            _copy_rows(x_ptr, x_desc, arrived, x_smem, early, here, pairs, early * STEP, SIZES)
        factors = factors_of(x_scale_ptr, scale_ptr, weights_ptr, here, pairs, SIZES)
        places = block_places(here, pairs, SIZES, BESIDE)
        scales = block_scales(x_scale_ptr, scale_ptr, x_room, places, 0, SIZES)
        following = located(starts_ptr, experts_ptr, firsts_ptr, work + stride, total, SIZES)
        next_pairs = pairs_of(order_ptr, following, SIZES)
        later = located(starts_ptr, experts_ptr, firsts_ptr, work + 2 * stride, total, SIZES)
        async_copy.wait_group(SLOTS - 2)
        fence_async_shared()
        gl.thread_barrier()
        slot = 0
        phase = 0
        while work < total:
            sums = no_sums(SIZES, MMA)
            for step in range(0, STEPS):
                mbarrier.wait(arrived.index(slot), phase)
                next_step = gl.minimum(step + 1, STEPS - 1)
                next_scales = block_scales(x_scale_ptr, scale_ptr, x_room, places, next_step, SIZES)
                added, running = _begin_step(x_smem.index(slot), sides.index(slot), sums, scales, SIZES, MMA)
                # Each thread's copies of the next step are here; all warps are through with the
                # step before.
                async_copy.wait_group(SLOTS - 3)
                fence_async_shared()
                gl.thread_barrier()
                ahead = step + (SLOTS - 1)
                free = slot_before(slot, SLOTS)
                if ahead < STEPS:
                    _copy_step(
                        x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, free, here, pairs, ahead * STEP, SIZES
                    )  # fmt: skip
                elif work + stride < total:
                    _copy_step(
                        x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, free, following, next_pairs,
                        (ahead - STEPS) * STEP, SIZES,
                    )  # fmt: skip
                else:
                    async_copy.commit_group()
                sums = _end_step(sums, added, running, scales, SIZES)
                scales = next_scales
                slot, phase = advance(slot, phase, SLOTS)
            sums = _whole(sums, SIZES)
            # Asked for before results are stored: it has come when they are.
            next_factors = factors_of(x_scale_ptr, scale_ptr, weights_ptr, following, next_pairs, SIZES)
            places = block_places(following, next_pairs, SIZES, BESIDE)
            scales = block_scales(x_scale_ptr, scale_ptr, x_room, places, 0, SIZES)
            if SIZES.in_turn:
                # Not held in registers meanwhile. Copies need its pairs SLOTS - 1 steps before the
                # next piece ends.
                later = located(starts_ptr, experts_ptr, firsts_ptr, work + 2 * stride, total, SIZES)
                last = later
            else:
                later_pairs = pairs_of(order_ptr, later, SIZES)
                last = located(starts_ptr, experts_ptr, firsts_ptr, work + 3 * stride, total, SIZES)
            finish(sums, bias_ptr, out_ptr, out_scale_ptr, out_room, here, pairs, factors, SIZES, GATING)
            if SIZES.in_turn:
                later_pairs = pairs_of(order_ptr, later, SIZES)
            work += stride
            here = following
            pairs = next_pairs
            factors = next_factors
            following = later
            next_pairs = later_pairs
            later = last


def takes_grouped_gemm(weights: ExpertWeights, is_rounded: bool, tile: GroupedTile, is_gated: bool) -> bool:
    """Whether the kernel multiplies rows by these weights in such tiles, on their GPU.

    Args:
        weights: Weights of a product.
        is_rounded: Whether rows are rounded to e4m3, in blocks if the weights are.
        tile: The sizes.
        is_gated: Whether outputs are gates and as many ups.
    """
    weight, storage = weights.weight, weights.storage
    if not card.has_warpgroup_instructions(storage.device):
        return False
    num_outputs, step = weights.num_outputs // (2 if is_gated else 1), STEP_BYTES // storage.element_size()
    if isinstance(weight, Tensor):
        is_taken = not is_rounded and weight.dtype in (torch.bfloat16, torch.float16)
    elif not is_rounded or not isinstance(weight, QuantizedWeight) or weight.kind is not QuantKind.FP8:
        is_taken = False
    elif weight.is_grouped:
        part = tile.block_n if is_gated else tile.block_n // 2
        is_taken = weight.group_size == step and weight.scale_outputs % part == num_outputs % weight.scale_outputs == 0
    else:
        is_taken = weights.num_inputs <= MOST_FAST_INPUTS
    steps, rest = divmod(weights.num_inputs, step)
    fits = rest == 0 and steps >= tile.slots - 1 and num_outputs % _ALIGNMENT == 0 and weights.dtype.itemsize == 2
    # A tile that has few of its outputs multiplies zeros as long.
    is_full = 8 * triton.cdiv(num_outputs, tile.block_n) * tile.block_n <= 9 * num_outputs
    # Inner elements of a scale are a tile's, as many as a step of the product behind has inputs.
    can_round = is_gated and weights.layout().is_grouped and tile.block_n == STEP_BYTES and not tile.is_swapped
    return is_taken and fits and is_full and storage.data_ptr() % 16 == 0 and (can_round or not tile.rounds)


def multiply_grouped_gemm(
    x: Activations,
    choice: Choice,
    pairs: SortedPairs,
    table: TileTable,
    weights: ExpertWeights,
    out: Activations,
    tile: GroupedTile,
    gating: Gating | None,
) -> None:
    """One product of all pairs.

    Without gating it is behind the gated one, which has waited for the sort and the table.

    Args:
        x: [num_tokens, num_inputs] if gated, or [num_pairs, num_inputs] in the order of the pairs,
            contiguous; rounded or not, as `takes_grouped_gemm` was asked.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        table: Their tiles of `tile.block_m` pairs.
        weights: Weights that the kernel takes.
        out: [num_pairs, num_outputs], written, in the order of the pairs if gated; num_outputs are
            inner elements then, and rounded in groups of 128 if the tile `rounds`.
        tile: The sizes.
        gating: What is between gate and up; None: outputs are no gates and ups.
    """
    rows, x_scales, room = (x.numbers, x.scales, x.scales.stride(1)) if isinstance(x, RoundedTokens) else (x, None, 0)
    results, out_scales, out_room = out, None, None
    if isinstance(out, RoundedTokens):
        results, out_scales, out_room = out.numbers, out.scales, out.scales.stride(1)
    assert isinstance(results, Tensor) and tile.rounds is (out_scales is not None)
    words, scales, _ = weights.bits()
    rows = aligned(rows)
    scale_room = scales.stride(1) if scales is not None and scales.dim() == 2 else 0
    layout, is_gated, step = weights.layout(), gating is not None, STEP_BYTES // rows.element_size()
    in_turn = layout.is_grouped and tile.sums(is_gated) > _MOST_SUMS
    sides = words.view(rows.dtype).view(-1, results.shape[1], weights.num_inputs)
    # Places in x are 32 bits.
    assert rows.numel() < 1 << 31 and tile.slots >= 3
    assert (tile.block_n if tile.is_swapped else tile.block_m) % 64 == 0
    sizes = GroupedSizes(
        num_outputs=results.shape[1], num_inputs=weights.num_inputs, per_token=choice.experts.shape[1],
        block_m=tile.block_m, block_n=tile.block_n, item=rows.element_size(), is_gated=is_gated,
        in_blocks=layout.is_grouped, scale_outputs=layout.scale_outputs, scale_room=scale_room,
        is_swapped=tile.is_swapped, rounds=tile.rounds, is_bf16=weights.dtype is torch.bfloat16,
        in_turn=in_turn, runs_on=in_turn or layout.is_grouped and not is_gated and not tile.is_swapped or tile.rounds,
    )  # fmt: skip
    registers = _SWAPPED_REGISTERS if tile.is_swapped else _REGISTERS
    held = programs_at_a_time(tile.num_warps, registers, tile.shared_bytes(is_gated))
    num_work = len(table.experts) * sizes.columns
    early = card.launches_early(results.device)
    _grouped_gemm_kernel[(min(held * card.multiprocessors(results.device), num_work),)](
        rows, None if is_gated else tile_descriptor(rows, tile.block_m, step), x_scales,
        box_descriptor(sides, [2 if is_gated else 1, tile.block_n, step]), scales, weights.bias, pairs.order,
        pairs.starts, *table, choice.weights, results, room, out_scales, out_room,
        SIZES=sizes, SLOTS=tile.slots, GATING=gating, EARLY=early,
        num_warps=tile.num_warps, maxnreg=None, launch_pdl=early,
    )  # fmt: skip
