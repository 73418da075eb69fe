"""The kernel of 2 to 32 rows for plain weights of 16 bits, on sm_90.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying; which rows
take it is `linear.dense_small_batch`'s. It is written in Gluon, because the order of copies and
products is what it is about.

Y^T = W X^T by warp groups, whose instruction takes 64 outputs, 16 inputs and some columns. With 64
outputs a program many products would have fewer programs than a card has multiprocessors. So a
program has 64 / SLICES outputs, and the inputs are cut into as many slices: slice s of the weight
lies in rows s BN to (s + 1) BN of the left operand, slice s of x in columns s ROWS to (s + 1) ROWS
of the right one. Of the sums, blocks on the diagonal are those of a slice by itself; they are added
up in the end, and the others are left out. Tensor cores so do SLICES times the work, which costs
nothing where the weight's way from memory does.

A step is 64 SUBS inputs of each slice, which the copy engine brings to shared memory SLOTS - 1
steps ahead, outputs and rows beyond the end as zeros. It brings a step's weight in one copy, and x
in another: the compiler puts a barrier before each copy, so that a copy for each tile of 64 inputs
took longer to ask for than the products take, and kept x from the first of them. Sums are fp32 in
an order that depends on the tile alone.

**The norm.** A program reads all inputs of its rows anyway, so it can norm them without a launch
before it: with the norm's weight g, y = (W (g x)) / rms(x). The copy engine brings g with the
weight. While the tensor cores multiply a step, the warps multiply the next step's x by g where it
lies in shared memory, and add up the squares of x; the sums of each row are divided by its rms in
the end. Warps do not load x from global memory themselves: such loads would have to be several
steps ahead, each in registers of its own, to be in time. As g x is rounded before anything divides
it, it may leave fp16's range, so fp16 has a norm of its own before the product.

**Launched early.** A program starts while the kernel before it still runs (programmatic dependent
launch), has its first steps of the weight copied, and only then waits for what that kernel writes:
x, and the residual stream. Kernels that start early follow each other so closely that a weight may
be read while the second or third kernel before still writes; so a weight that any kernel writes,
such as a buffer of dequantized numbers, is not multiplied by a kernel that is launched early.
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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace_kernels import card
from headrace_kernels.hopper.launch import MOST_SLOT_BYTES, aligned, box_descriptor
from headrace_kernels.hopper.ring import (
    advance,
    grid_before_is_done,
    grid_behind_may_start,
    new_barriers,
    publish_barriers,
    slot_before,
)
from headrace_kernels.hopper.row_streams import (
    MAX_WARPGROUP_ROWS,
    asked_for,
    copy_weight,
    copy_x,
    result_places,
    rms_factors,
    rows_class,
    store_results,
    weight_descriptor,
    x_descriptor,
)

# Outputs of an instruction, and inputs that the copy engine's widest pattern has.
_WIDTH = 64
_NUM_WARPS = 4


class StreamTile(NamedTuple):
    """How a product is cut."""

    # Parts of the inputs that a program multiplies side by side: 1, 2 or 4. It has 64 / slices
    # outputs.
    slices: int
    # Parts of 64 inputs of a slice that are multiplied at a time.
    subs: int
    # Steps in shared memory, at least 2.
    slots: int

    @property
    def block_n(self) -> int:
        """Outputs of a program (with SwiGLU as many again, for the gate)."""
        return _WIDTH // self.slices

    def shared_bytes(self, num_rows: int, gated: bool, norm_itemsize: int = 0) -> int:
        """Shared memory of a program, without barriers.

        Args:
            num_rows: Rows of x.
            gated: SwiGLU of the two halves of a weight.
            norm_itemsize: Bytes of a number of the norm's weight; 0: there is no norm.
        """
        return self.slots * _step_bytes(self, num_rows, gated, norm_itemsize)


def _step_bytes(tile: StreamTile, num_rows: int, gated: bool, norm_itemsize: int) -> int:
    """Bytes that the copy engine brings for a step: of the weight, x, and the norm's weight."""
    sides = 2 if gated else 1
    numbers = sides * _WIDTH + tile.slices * rows_class(num_rows)
    return tile.subs * _WIDTH * (2 * numbers + tile.slices * norm_itemsize)


@gluon.jit
def _copy_norm(norm_desc, arrived, norm_smem, slot, step, SUBS: gl.constexpr):
    """A step's numbers of the norm's weight."""
    tma.async_copy_global_to_shared(norm_desc, [0, step * SUBS * 64], arrived.index(slot), norm_smem.index(slot))


@gluon.jit
def _scale_x(
    x_parts, norm_smem, slot, squares,
    SLICES: gl.constexpr, SUBS: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiplies a step's x by the norm's weight where it lies, and adds up the squares of x.

    The step's bytes have come, and no product reads its slot before the next fence and barrier.
    """
    scaled = ()
    for sub in gl.static_range(SUBS):
        for part in gl.static_range(SLICES):
            x = x_parts.index((slot * SUBS + sub) * SLICES + part).load(LAYOUT).to(gl.float32)
            g = norm_smem.index(slot).slice(part, 1, 0).slice(sub * 64, 64, 1).load(LAYOUT).to(gl.float32)
            squares += x * x
            scaled = scaled + ((x * g).to(DTYPE),)
    # All loads come before the first store, because the compiler puts a barrier between them.
    for part in gl.static_range(SUBS * SLICES):
        x_parts.index(slot * (SUBS * SLICES) + part).store(scaled[part])
    return squares


@gluon.jit
def _begin_products(lefts, rights, slot, y, up, SUBS: gl.constexpr, SIDES: gl.constexpr):
    """Begins a step's products, which are added to y and, of two sides, to up."""
    for sub in gl.static_range(SUBS):
        part = slot * SUBS + sub
        x = rights.index(part).permute((1, 0))
        y = warpgroup_mma(lefts.index(part * SIDES), x, y, is_async=True)
        if SIDES == 2:
            up = warpgroup_mma(lefts.index(part * SIDES + 1), x, up, is_async=True)
    return y, up


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    weight_desc, x_desc, norm_desc, bias_ptr, out_ptr, M, eps,
    N: gl.constexpr, K: gl.constexpr, SLICES: gl.constexpr, SUBS: gl.constexpr, SLOTS: gl.constexpr,
    ROWS: gl.constexpr, STEP_BYTES: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for 64 / SLICES outputs and ROWS rows, with bias, SwiGLU or residual stream.

    With a norm's weight g, x is x g / rms(x).
    """
    DTYPE: gl.constexpr = weight_desc.dtype
    BLOCK_N: gl.constexpr = 64 // SLICES
    SIDES: gl.constexpr = 2 if GATED else 1
    NORMED: gl.constexpr = norm_desc is not None
    SHARE: gl.constexpr = K // SLICES
    STEPS: gl.constexpr = SHARE // (64 * SUBS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICES * ROWS, 16])
    first_n = gl.program_id(0) * BLOCK_N
    weight_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, SUBS, SIDES, SLICES, BLOCK_N, 64], weight_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, SUBS, SLICES, ROWS, 64], x_desc.layout)
    if NORMED:
        norm_smem = gl.allocate_shared_memory(norm_desc.dtype, [SLOTS, SLICES, 64 * SUBS], norm_desc.layout)
        # Of a row, a thread has as many bytes as there are rows.
        X: gl.constexpr = gl.BlockedLayout([1, ROWS // 2], [ROWS // 4, 128 // ROWS], [gl.num_warps(), 1], [1, 0])
        squares = gl.zeros([ROWS, 64], gl.float32, layout=X)
    arrived = new_barriers(SLOTS)
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            mbarrier.expect(arrived.index(place), STEP_BYTES)
            copy_weight(weight_desc, arrived, weight_smem, place, first_n, place, SUBS)
            if NORMED:
                _copy_norm(norm_desc, arrived, norm_smem, place, place, SUBS)
    grid_behind_may_start()
    grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            copy_x(x_desc, arrived, x_smem, place, place, SUBS)
    n, places, mask = result_places(out_ptr, first_n, M, N, BLOCK_N, ROWS)
    added = asked_for(bias_ptr, n, places, mask, N, GATED, ADD)
    # Slices side by side, as the instruction takes them.
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    lefts = weight_smem._reinterpret(DTYPE, [SLOTS * SUBS * SIDES, 64, 64], TILE)
    rights = x_smem._reinterpret(DTYPE, [SLOTS * SUBS, SLICES * ROWS, 64], TILE)
    if NORMED:
        x_parts = x_smem._reinterpret(DTYPE, [SLOTS * SUBS * SLICES, ROWS, 64], TILE)
    y = gl.zeros([64, SLICES * ROWS], gl.float32, layout=MMA)
    up = gl.zeros([64, SLICES * ROWS], gl.float32, layout=MMA)
    slot = 0
    phase = 0
    if NORMED:
        mbarrier.wait(arrived.index(slot), phase)
        squares = _scale_x(x_parts, norm_smem, slot, squares, SLICES, SUBS, DTYPE, X)
    # With a norm, a step's x is scaled while the step before is multiplied. So the last step has
    # nothing to scale, and follows the loop: the assembler crashes on a branch, or a fence, while
    # products are under way.
    for step in range(0, STEPS - 1 if NORMED else STEPS):
        if not NORMED:
            mbarrier.wait(arrived.index(slot), phase)
        else:
            # The tensor cores read shared memory past the order in which threads write it.
            fence_async_shared()
        # All warps are through with the slot before this one, and have scaled their part of x.
        gl.thread_barrier()
        free_slot = slot_before(slot, SLOTS)
        ahead = step + (SLOTS - 1)
        if ahead < STEPS:
            mbarrier.expect(arrived.index(free_slot), STEP_BYTES)
            copy_weight(weight_desc, arrived, weight_smem, free_slot, first_n, ahead, SUBS)
            copy_x(x_desc, arrived, x_smem, free_slot, ahead, SUBS)
            if NORMED:
                _copy_norm(norm_desc, arrived, norm_smem, free_slot, ahead, SUBS)
        y, up = _begin_products(lefts, rights, slot, y, up, SUBS, SIDES)
        slot, phase = advance(slot, phase, SLOTS)
        if NORMED:
            mbarrier.wait(arrived.index(slot), phase)
            squares = _scale_x(x_parts, norm_smem, slot, squares, SLICES, SUBS, DTYPE, X)
        y = warpgroup_mma_wait(0, deps=[y])
        if GATED:
            up = warpgroup_mma_wait(0, deps=[up])
    if NORMED:
        fence_async_shared()
        gl.thread_barrier()
        y, up = _begin_products(lefts, rights, slot, y, up, SUBS, SIDES)
        y = warpgroup_mma_wait(0, deps=[y])
        if GATED:
            up = warpgroup_mma_wait(0, deps=[up])
    factors = ()
    if NORMED:
        factors = factors + (rms_factors(gl.sum(squares, 1), K, eps),)
    store_results(y, up, factors, factors, added, out_ptr, places, mask, SLICES, BLOCK_N, ROWS, GATED)


def takes_streams(weight: Tensor) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes 16 bits, and inputs of which four slices are whole steps of two parts.
    """
    return (
        card.has_warpgroup_instructions(weight.device)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % (4 * 2 * _WIDTH) == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        # Places in a result are 32 bits.
        and weight.shape[0] * MAX_WARPGROUP_ROWS < 1 << 31
    )


def _norm_descriptor(norm_weight: Tensor, tile: StreamTile) -> TensorDescriptor:
    """Steps of a norm's weight: [slice, input]."""
    return box_descriptor(norm_weight.view(tile.slices, -1), [tile.slices, tile.subs * _WIDTH], swizzled=False)


def multiply_streams(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: StreamTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
    is_parameter: bool = True,
) -> None:
    """Some rows times a weight that the kernel `takes_streams`.

    Args:
        x: [num_rows, K], at most MAX_WARPGROUP_ROWS of them.
        weight: [N, K], or [2 N, K] with the gate first.
        bias: One per row of weight.
        out: [num_rows, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x, in bf16 alone: products of x and the norm's
            weight may leave fp16's range.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
        is_parameter: No kernel writes the weight. Otherwise the kernel waits for all before it.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert 1 <= num_rows <= MAX_WARPGROUP_ROWS and weight.shape == (num_outputs * (2 if gated else 1), num_inputs)
    assert num_inputs % (tile.slices * tile.subs * _WIDTH) == 0 and tile.slots >= 2 and out.is_contiguous()
    assert norm is None or (x.dtype == torch.bfloat16 and norm[0].shape == (num_inputs,))
    rows = rows_class(num_rows)
    norm_weight, eps = (None, 0.0) if norm is None else (aligned(norm[0]), norm[1])
    _stream_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        weight_descriptor(weight, tile.slices, tile.subs, tile.block_n, gated),
        x_descriptor(aligned(x), tile.slices, tile.subs, rows),
        None if norm_weight is None else _norm_descriptor(norm_weight, tile), bias, out, num_rows, eps,
        N=num_outputs, K=num_inputs, SLICES=tile.slices, SUBS=tile.subs, SLOTS=tile.slots, ROWS=rows,
        STEP_BYTES=_step_bytes(tile, num_rows, gated, 0 if norm_weight is None else norm_weight.itemsize),
        GATED=gated, ADD=add,
        num_warps=_NUM_WARPS, maxnreg=None, launch_pdl=is_parameter,
    )  # fmt: skip


# Slices, parts of 64 inputs, slots.
_VARIANTS = ((1, 2, 4), (1, 2, 5), (1, 2, 8), (1, 2, 10), (1, 4, 4), (1, 4, 5))
_VARIANTS += ((2, 2, 4), (2, 2, 6), (2, 2, 8), (2, 4, 4), (4, 2, 3), (4, 2, 6))
_GATED_VARIANTS = ((1, 1, 12), (1, 2, 5), (1, 2, 6), (1, 4, 3), (2, 1, 5), (2, 1, 10), (2, 2, 3), (4, 1, 5))


def stream_variants(num_rows: int, gated: bool) -> list[StreamTile]:
    """Tiles that are worth timing, and fit sm_90's shared memory with as many rows and a norm."""
    tiles = (StreamTile(*sizes) for sizes in (_GATED_VARIANTS if gated else _VARIANTS))
    return [tile for tile in tiles if tile.shared_bytes(num_rows, gated, norm_itemsize=4) <= MOST_SLOT_BYTES]
