"""The grouped GEMM of many pairs of token and expert on sm_90, by its copy engine.

Owns the kernel, its launch and which weights it takes; which sizes take it is `launch_rules`'. It
computes what `mixture_kernels`' tiles do, for plain weights of 16 bits, and for FP8 that multiplies
rounded rows, with a scale for each output or in blocks. It is written in Gluon, because the order
of copies and products is what it is about.

Y = X W^T for BLOCK_M pairs of one expert and BLOCK_N of its outputs, of gate and up as many of
each, side by side in shared memory. A step is 128 bytes of inputs. The copy engine brings its
weight, and rows of x that are in the order of the pairs; rows of tokens, which are gathered, are
copied by the threads, 16 bytes each. All of it comes SLOTS - 1 steps ahead (`hopper.ring`), past
the end of a program's tile into its next one, so that the next tile's first steps come while
results are stored. As many programs run as the card holds. They take tiles in turn, all blocks of
outputs of a tile behind one another, so that its rows are in the second cache, and so is the weight
of an expert's next tile. Which tiles those are, which rows they have and what their sums are
multiplied by is asked for a tile ahead (`tile_table`).

Sums are fp32, in the order of the inputs: no atomics, the same bits every time. Of FP8 tensor cores
add up alone, in blocks 128 inputs, whose sums fp32 adds up with their scales. Nothing else is to be
multiplied meanwhile, so two such programs share a multiprocessor.
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

# Bytes of a row in a step: the copy engine's widest pattern. Of FP8 they are a block's inputs.
_STEP_BYTES = 128
# Results of a row that change threads at a time, on their way to stores of 16 bytes.
_STORED = 64
# Registers of a thread at most.
_REGISTERS, _SWAPPED_REGISTERS = 255, 160
# Results of a row that are stored, at least, in multiples of which copies begin.
_ALIGNMENT = 16


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

    def shared_bytes(self, is_gated: bool) -> int:
        """Shared memory of a program without barriers."""
        slot = _STEP_BYTES * (self.block_m + self.block_n * (2 if is_gated else 1))
        return self.slots * slot + self.block_m * min(_STORED, self.block_n) * 2


@gluon.constexpr_function
def _of_rows(itemsize, num_warps):
    """Sixteen bytes of a row in a thread, eight threads a row."""
    return gl.BlockedLayout([1, 16 // itemsize], [4, 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _of_outputs(num_warps):
    """An output in a thread."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def _located(starts_ptr, experts_ptr, firsts_ptr, work, total, COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr):
    """A piece of work: its expert, its first pair, where that expert's pairs end, its first output.

    Behind the last piece it is that one again.
    """
    work = gl.minimum(work, total - 1)
    expert = gl.load(experts_ptr + work // COLUMNS)
    first = gl.load(firsts_ptr + work // COLUMNS)
    return expert, first, gl.load(starts_ptr + expert + 1), work % COLUMNS * BLOCK_N


@gluon.jit
def _pairs_of(order_ptr, here, BLOCK_M: gl.constexpr, ROWS: gl.constexpr):
    """The pairs of a piece of work, [BLOCK_M]; beyond the end its expert's last one."""
    _, first, end, _ = here
    return gl.load(order_ptr + gl.minimum(first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS)), end - 1))


@gluon.jit
def _rows_of(here, pairs, PER_TOKEN: gl.constexpr, BLOCK_M: gl.constexpr, GATED: gl.constexpr):
    """Rows of x of a piece of work, [BLOCK_M]: tokens', or those at the places of the pairs."""
    _, first, end, _ = here
    if GATED:
        rows = pairs // PER_TOKEN
    else:
        rows = gl.minimum(first + gl.arange(0, BLOCK_M, layout=pairs.type.layout), end - 1)
    return rows


@gluon.jit
def _factors_of(
    x_scale_ptr, scale_ptr, weights_ptr, here, pairs,
    N: gl.constexpr, PER_TOKEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """What sums are multiplied by: weights of pairs, scales of rows, of outputs, and of ups.

    Each is a tuple, empty where there is nothing. They are spread over threads, and asked for a
    piece of work ahead, so that nothing waits for them behind the products.
    """
    expert, _, _, first_n = here
    of_pairs = ()
    of_rows = ()
    of_outputs = ()
    of_ups = ()
    if not GATED:
        of_pairs = of_pairs + (gl.load(weights_ptr + pairs),)
    if x_scale_ptr is not None and not BLOCKS:
        of_rows = of_rows + (gl.load(x_scale_ptr + _rows_of(here, pairs, PER_TOKEN, BLOCK_M, GATED)),)
    if scale_ptr is not None and not BLOCKS:
        n = first_n + gl.arange(0, BLOCK_N, layout=_of_outputs(gl.num_warps()))
        places = scale_ptr + expert * (2 * N if GATED else N) + n
        of_outputs = of_outputs + (gl.load(places, mask=n < N, other=0.0),)
        if GATED:
            of_ups = of_ups + (gl.load(places + N, mask=n < N, other=0.0),)
    return of_pairs, of_rows, of_outputs, of_ups


@gluon.jit
def _block_places(
    here, pairs, N: gl.constexpr, PER_TOKEN: gl.constexpr, BLOCK_M: gl.constexpr, PART_N: gl.constexpr,
    GATED: gl.constexpr, BLOCKS: gl.constexpr, SCALE_OUTPUTS: gl.constexpr, SCALE_ROOM: gl.constexpr,
    BESIDE: gl.constexpr,
):  # fmt: skip
    """Places at which scales of blocks begin: of rows of x, and of both parts of the outputs."""
    places = ()
    if BLOCKS:
        expert, _, _, first_n = here
        rows = gl.convert_layout(_rows_of(here, pairs, PER_TOKEN, BLOCK_M, GATED), BESIDE)
        output = expert * (2 * N if GATED else N) + first_n
        other = output + (N if GATED else PART_N)
        places = (rows, output // SCALE_OUTPUTS * SCALE_ROOM, other // SCALE_OUTPUTS * SCALE_ROOM)
    return places


@gluon.jit
def _block_scales(x_scale_ptr, scale_ptr, x_room, places, step, BLOCKS: gl.constexpr):
    """What a step's sums in blocks are multiplied by: of rows, and of both parts of outputs."""
    scales = ()
    if BLOCKS:
        rows, output, other = places
        scales = (
            gl.load(x_scale_ptr + step * x_room + rows), gl.load(scale_ptr + output + step),
            gl.load(scale_ptr + other + step),
        )  # fmt: skip
    return scales


@gluon.jit
def _copy_step(
    x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, slot, here, pairs, k,
    K: gl.constexpr, PER_TOKEN: gl.constexpr, SIDES: gl.constexpr, STEP: gl.constexpr, ARRIVING: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Copies a step: the inputs from k on of a piece of work's pairs and of its outputs."""
    expert, first, _, first_n = here
    mbarrier.expect(arrived.index(slot), ARRIVING)
    tma.async_copy_global_to_shared(w_desc, [expert * SIDES, first_n, k], arrived.index(slot), w_smem.index(slot))
    if x_desc is not None:
        tma.async_copy_global_to_shared(x_desc, [first, k], arrived.index(slot), x_smem.index(slot))
    else:
        inputs = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, ROWS)), 0)
        rows = gl.expand_dims(pairs // PER_TOKEN * K, 1)
        async_copy.async_copy_global_to_shared(x_smem.index(slot), x_ptr + (rows + (k + inputs)))
    # One group a step, with copies of threads or without, by which they are counted.
    async_copy.commit_group()


@gluon.jit
def _no_sums(
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, PART_N: gl.constexpr, SWAPPED: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Sums of no steps, of each part."""
    SHAPE: gl.constexpr = [PART_N, BLOCK_M] if SWAPPED else [BLOCK_M, PART_N]
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros(SHAPE, gl.float32, layout=MMA),)
    return sums


@gluon.jit
def _product(x, w, sums, SWAPPED: gl.constexpr, BEGINS: gl.constexpr):
    """Begins to add a step's product of rows and a part of the outputs to sums, or to nothing."""
    if SWAPPED:
        running = warpgroup_mma(w, x.permute((1, 0)), sums, use_acc=not BEGINS, is_async=True)
    else:
        running = warpgroup_mma(x, w.permute((1, 0)), sums, use_acc=not BEGINS, is_async=True)
    return running


@gluon.jit
def _add_step(
    x, w, sums, scales,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, PART_N: gl.constexpr, BLOCKS: gl.constexpr, SWAPPED: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Sums with a step's products, which run on but for those in blocks; those before are done."""
    running = ()
    for part in gl.static_range(PARTS):
        outputs = w.slice(part * PART_N, PART_N, 0)
        if BLOCKS:
            # Not read: the first instruction of a product begins at 0.
            nothing = _no_sums(BLOCK_M, 1, PART_N, SWAPPED, MMA)
            running = running + (_product(x, outputs, nothing[0], SWAPPED, True),)
        else:
            running = running + (_product(x, outputs, sums[part], SWAPPED, False),)
    if BLOCKS:
        added = ()
        for part in gl.static_range(PARTS):
            product = warpgroup_mma_wait(PARTS - 1 - part, deps=[running[part]])
            factors = gl.expand_dims(scales[0] * scales[1 + part], 0 if SWAPPED else 1)
            added = added + (added_here(sums[part], product, factors),)
    else:
        added = _waited(running, PARTS, PARTS)
    return added


@gluon.jit
def _waited(running, under_way: gl.constexpr, PARTS: gl.constexpr):
    """Sums of products, of which so many may run on."""
    if PARTS == 2:
        sums = warpgroup_mma_wait(under_way, deps=[running[0], running[1]])
    else:
        sums = (warpgroup_mma_wait(under_way, deps=[running[0]]),)
    return sums


@gluon.jit
def _whole(sums, PARTS: gl.constexpr, BLOCKS: gl.constexpr, SWAPPED: gl.constexpr):
    """The sums of all steps, [pairs, outputs] of each part."""
    if not BLOCKS:
        sums = _waited(sums, 0, PARTS)
    if SWAPPED:
        transposed = ()
        for part in gl.static_range(PARTS):
            transposed = transposed + (sums[part].permute((1, 0)),)
        sums = transposed
    return sums


@gluon.jit
def _gated(gate, up, GATING: gl.constexpr):
    """`gating.gated` for kernels in Gluon."""
    if GATING.is_clamped:
        gate = gl.where(gate > GATING.limit, GATING.limit, gate)
        up = gl.where(up > GATING.limit, GATING.limit, gl.where(up < -GATING.limit, -GATING.limit, up)) + 1.0
        slope = GATING.alpha * gate
    elif GATING.is_gelu:
        # 2 sqrt(2 / pi) before the bracket.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    return gate / (1.0 + gl.exp(-slope)) * up


@gluon.jit
def _scaled(sums, of_rows, of_outputs, bias_ptr, first_output, left, WIDTH: gl.constexpr):
    """Sums times factors of rows and of outputs, plus the bias of `left` outputs."""
    LAYOUT: gl.constexpr = sums.type.layout
    for each in gl.static_range(len(of_outputs)):
        sums *= gl.expand_dims(gl.convert_layout(of_outputs[each], gl.SliceLayout(0, LAYOUT)), 0)
    for each in gl.static_range(len(of_rows)):
        sums *= gl.expand_dims(gl.convert_layout(of_rows[each], gl.SliceLayout(1, LAYOUT)), 1)
    if bias_ptr is not None:
        n = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        bias = gl.load(bias_ptr + first_output + n, mask=n < left, other=0.0).to(gl.float32)
        sums += gl.expand_dims(bias, 0)
    return sums


@gluon.jit
def _store(y, out_ptr, rows, is_row, first_n, N: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr):
    """Stores [BLOCK_M, WIDTH] results, 16 bytes at a time."""
    if WIDTH > 64:
        low, high = gl.split(y.reshape((BLOCK_M, 2, WIDTH // 2)).permute((0, 2, 1)))
        _store(low, out_ptr, rows, is_row, first_n, N, BLOCK_M, WIDTH // 2)
        _store(high, out_ptr, rows, is_row, first_n + WIDTH // 2, N, BLOCK_M, WIDTH // 2)
    else:
        LAYOUT: gl.constexpr = _of_rows(2, gl.num_warps())
        n = gl.expand_dims(first_n + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
        places = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT)), 1).to(gl.int64) * N + n
        mask = gl.expand_dims(gl.convert_layout(is_row, gl.SliceLayout(1, LAYOUT)), 1) & (n < N)
        gl.store(out_ptr + places, gl.convert_layout(y, LAYOUT), mask=mask)


@gluon.jit
def _finish(
    sums, bias_ptr, out_ptr, here, pairs, factors,
    N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, GATING: gl.constexpr,
):  # fmt: skip
    """Stores what becomes of sums, those of gate and up in one or in two parts."""
    expert, first, end, first_n = here
    of_pairs, of_rows, of_outputs, of_ups = factors
    place = first + gl.arange(0, BLOCK_M, layout=pairs.type.layout)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    if GATING is not None:
        if PARTS == 2:
            gate, up = sums
        else:
            gate, up = gl.split(sums[0].reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)))
        output = expert * (2 * N) + first_n
        gate = _scaled(gate, of_rows, of_outputs, bias_ptr, output, N - first_n, BLOCK_N)
        up = _scaled(up, of_rows, of_ups, bias_ptr, output + N, N - first_n, BLOCK_N)
        _store(_gated(gate, up, GATING).to(DTYPE), out_ptr, place, place < end, first_n, N, BLOCK_M, BLOCK_N)
    else:
        WIDTH: gl.constexpr = BLOCK_N // PARTS
        for part in gl.static_range(PARTS):
            n = first_n + part * WIDTH
            y = _scaled(sums[part], of_rows, of_outputs, bias_ptr, expert * N + n, N - n, WIDTH)
            y = _scaled(y, of_pairs, (), None, 0, 0, WIDTH)
            _store(y.to(DTYPE), out_ptr, pairs, place < end, n, N, BLOCK_M, WIDTH)


@gluon.jit(do_not_specialize=["x_room"])
def _grouped_gemm_kernel(
    x_ptr, x_desc, x_scale_ptr, w_desc, scale_ptr, bias_ptr, order_ptr, starts_ptr, count_ptr, experts_ptr,
    firsts_ptr, weights_ptr, out_ptr, x_room,
    N: gl.constexpr, K: gl.constexpr, PER_TOKEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr, GATING: gl.constexpr, BLOCKS: gl.constexpr, SCALE_OUTPUTS: gl.constexpr,
    SCALE_ROOM: gl.constexpr, SWAPPED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program's tiles, of BLOCK_M pairs and BLOCK_N outputs each, behind one another.

    GATING is not None: x has a row for each token, and the inner elements of the pair at place m
    are row m of the results. Otherwise x has a row for each place, and the product times the pair's
    weight is the row of the pair. BLOCKS: weights have a scale for SCALE_OUTPUTS outputs and a
    step's inputs, SCALE_ROOM numbers further for the next outputs, and rows of x one for a step's,
    x_room numbers further for the next step. Otherwise an output and a row have one, if any.
    """
    DTYPE: gl.constexpr = w_desc.dtype
    ITEM: gl.constexpr = DTYPE.primitive_bitwidth // 8
    STEP: gl.constexpr = 128 // ITEM
    STEPS: gl.constexpr = K // STEP
    GATED: gl.constexpr = GATING is not None
    SIDES: gl.constexpr = 2 if GATED else 1
    WIDTH: gl.constexpr = SIDES * BLOCK_N
    PARTS: gl.constexpr = 2 if BLOCKS or (SWAPPED and GATED) else 1
    PART_N: gl.constexpr = WIDTH // PARTS
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ARRIVING: gl.constexpr = 128 * (WIDTH + (0 if x_desc is None else BLOCK_M))
    ROWS: gl.constexpr = _of_rows(ITEM, gl.num_warps())
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * ITEM, rank=2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_M if SWAPPED else PART_N, 32 // ITEM]
    )
    # Of one number for each pair beside sums.
    BESIDE: gl.constexpr = gl.SliceLayout(0 if SWAPPED else 1, MMA)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, STEP], SHARED)
    w_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, SIDES, BLOCK_N, STEP], w_desc.layout)
    sides = w_smem._reinterpret(DTYPE, [SLOTS, WIDTH, STEP], SHARED)
    arrived = new_barriers(SLOTS)
    publish_barriers()
    if EARLY:
        grid_before_is_done()
        grid_behind_may_start()
    total = gl.load(count_ptr) * COLUMNS
    work = gl.program_id(0)
    stride = gl.num_programs(0)
    if work < total:
        here = _located(starts_ptr, experts_ptr, firsts_ptr, work, total, COLUMNS, BLOCK_N)
        pairs = _pairs_of(order_ptr, here, BLOCK_M, ROWS)
        for early in gl.static_range(SLOTS - 1):
            _copy_step(
                x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, early, here, pairs, early * STEP,
                K, PER_TOKEN, SIDES, STEP, ARRIVING, ROWS,
            )  # fmt: skip
        factors = _factors_of(
            x_scale_ptr, scale_ptr, weights_ptr, here, pairs, N, PER_TOKEN, BLOCK_M, BLOCK_N, GATED, BLOCKS
        )  # fmt: skip
        places = _block_places(
            here, pairs, N, PER_TOKEN, BLOCK_M, PART_N, GATED, BLOCKS, SCALE_OUTPUTS, SCALE_ROOM, BESIDE
        )  # fmt: skip
        scales = _block_scales(x_scale_ptr, scale_ptr, x_room, places, 0, BLOCKS)
        following = _located(starts_ptr, experts_ptr, firsts_ptr, work + stride, total, COLUMNS, BLOCK_N)
        next_pairs = _pairs_of(order_ptr, following, BLOCK_M, ROWS)
        later = _located(starts_ptr, experts_ptr, firsts_ptr, work + 2 * stride, total, COLUMNS, BLOCK_N)
        async_copy.wait_group(SLOTS - 2)
        fence_async_shared()
        gl.thread_barrier()
        slot = 0
        phase = 0
        while work < total:
            sums = _no_sums(BLOCK_M, PARTS, PART_N, SWAPPED, MMA)
            for step in range(0, STEPS):
                mbarrier.wait(arrived.index(slot), phase)
                next_scales = _block_scales(
                    x_scale_ptr, scale_ptr, x_room, places, gl.minimum(step + 1, STEPS - 1), BLOCKS
                )  # fmt: skip
                sums = _add_step(
                    x_smem.index(slot), sides.index(slot), sums, scales, BLOCK_M, PARTS, PART_N, BLOCKS, SWAPPED, MMA
                )  # fmt: skip
                scales = next_scales
                # Each thread's copies of the next step are here; all warps are through with the
                # step before.
                async_copy.wait_group(SLOTS - 3)
                fence_async_shared()
                gl.thread_barrier()
                ahead = step + (SLOTS - 1)
                free = slot_before(slot, SLOTS)
                if ahead < STEPS:
                    _copy_step(
                        x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, free, here, pairs, ahead * STEP,
                        K, PER_TOKEN, SIDES, STEP, ARRIVING, ROWS,
                    )  # fmt: skip
                elif work + stride < total:
                    _copy_step(
                        x_ptr, x_desc, w_desc, arrived, x_smem, w_smem, free, following, next_pairs,
                        (ahead - STEPS) * STEP, K, PER_TOKEN, SIDES, STEP, ARRIVING, ROWS,
                    )  # fmt: skip
                else:
                    async_copy.commit_group()
                slot, phase = advance(slot, phase, SLOTS)
            sums = _whole(sums, PARTS, BLOCKS, SWAPPED)
            # Asked for before results are stored: it has come when they are.
            next_factors = _factors_of(
                x_scale_ptr, scale_ptr, weights_ptr, following, next_pairs, N, PER_TOKEN, BLOCK_M, BLOCK_N, GATED,
                BLOCKS,
            )  # fmt: skip
            places = _block_places(
                following, next_pairs, N, PER_TOKEN, BLOCK_M, PART_N, GATED, BLOCKS, SCALE_OUTPUTS, SCALE_ROOM, BESIDE
            )  # fmt: skip
            scales = _block_scales(x_scale_ptr, scale_ptr, x_room, places, 0, BLOCKS)
            later_pairs = _pairs_of(order_ptr, later, BLOCK_M, ROWS)
            last = _located(starts_ptr, experts_ptr, firsts_ptr, work + 3 * stride, total, COLUMNS, BLOCK_N)
            _finish(sums, bias_ptr, out_ptr, here, pairs, factors, N, BLOCK_M, BLOCK_N, PARTS, GATING)
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
    num_outputs, step = weights.num_outputs // (2 if is_gated else 1), _STEP_BYTES // storage.element_size()
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
    return is_taken and fits and is_full and storage.data_ptr() % 16 == 0


def multiply_grouped_gemm(
    x: Activations,
    choice: Choice,
    pairs: SortedPairs,
    table: TileTable,
    weights: ExpertWeights,
    out: Tensor,
    tile: GroupedTile,
    gating: Gating | None,
) -> None:
    """One product of all pairs.

    Args:
        x: [num_tokens, num_inputs] if gated, or [num_pairs, num_inputs] in the order of the pairs,
            contiguous; rounded or not, as `takes_grouped_gemm` was asked.
        choice: Experts and weights of the tokens.
        pairs: The choice's pairs, sorted.
        table: Their tiles of `tile.block_m` pairs.
        weights: Weights that the kernel takes.
        out: [num_pairs, num_outputs], written, in the order of the pairs if gated; num_outputs are
            inner elements then.
        tile: The sizes.
        gating: What is between gate and up; None: outputs are no gates and ups.
    """
    rows, x_scales, room = (x.numbers, x.scales, x.scales.stride(1)) if isinstance(x, RoundedTokens) else (x, None, 0)
    words, scales, _ = weights.bits()
    rows = aligned(rows)
    scale_room = scales.stride(1) if scales is not None and scales.dim() == 2 else 0
    layout, is_gated, step = weights.layout(), gating is not None, _STEP_BYTES // rows.element_size()
    sides = words.view(rows.dtype).view(-1, out.shape[1], weights.num_inputs)
    # Places in x are 32 bits.
    assert rows.numel() < 1 << 31 and tile.slots >= 3
    assert (tile.block_n if tile.is_swapped else tile.block_m) % (16 * tile.num_warps) == 0
    registers = _SWAPPED_REGISTERS if tile.is_swapped else _REGISTERS
    held = programs_at_a_time(tile.num_warps, registers, tile.shared_bytes(is_gated))
    num_work = len(table.experts) * triton.cdiv(out.shape[1], tile.block_n)
    early = card.launches_early(out.device)
    _grouped_gemm_kernel[(min(held * card.multiprocessors(out.device), num_work),)](
        rows, None if is_gated else tile_descriptor(rows, tile.block_m, step), x_scales,
        box_descriptor(sides, [2 if is_gated else 1, tile.block_n, step]), scales, weights.bias, pairs.order,
        pairs.starts, *table, choice.weights, out, room,
        N=out.shape[1], K=weights.num_inputs, PER_TOKEN=choice.experts.shape[1], BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, SLOTS=tile.slots, GATING=gating, BLOCKS=layout.is_grouped,
        SCALE_OUTPUTS=layout.scale_outputs, SCALE_ROOM=scale_room, SWAPPED=tile.is_swapped, EARLY=early,
        num_warps=tile.num_warps, maxnreg=None, launch_pdl=early,
    )  # fmt: skip
