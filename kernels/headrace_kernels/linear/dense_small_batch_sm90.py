"""The kernel of 2 to 16 rows for plain weights of 16 bits, on sm_90.

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
steps ahead, outputs and rows beyond the end as zeros. Sums are fp32 in an order that depends on the
tile alone.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from headrace_kernels import card
from headrace_kernels.hopper.launch import aligned, tile_descriptor
from headrace_kernels.hopper.ring import (
    advance,
    grid_before_is_done,
    grid_behind_may_start,
    new_barriers,
    publish_barriers,
    slot_before,
)

# Rows of a program, at most.
MAX_WARPGROUP_ROWS = 16
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

    def shared_bytes(self, num_rows: int, gated: bool) -> int:
        """Shared memory of a program, without barriers."""
        return self.slots * _step_bytes(self, num_rows, gated)


def _rows_of(num_rows: int) -> int:
    """Rows that a program multiplies: the class of a number of rows."""
    return 8 if num_rows <= 8 else MAX_WARPGROUP_ROWS


def _step_bytes(tile: StreamTile, num_rows: int, gated: bool) -> int:
    sides = 2 if gated else 1
    return tile.subs * _WIDTH * 2 * (sides * _WIDTH + tile.slices * _rows_of(num_rows))


@gluon.jit
def _copy_weight(
    weight_desc, arrived, weight_smem, slot, first_n, k,
    AWAY: gl.constexpr, SHARE: gl.constexpr, SLICES: gl.constexpr, SUBS: gl.constexpr, SIDES: gl.constexpr,
    STEP_BYTES: gl.constexpr,
):  # fmt: skip
    """A step's weight: of each slice the inputs from its k-th on."""
    mbarrier.expect(arrived.index(slot), STEP_BYTES)
    for sub in gl.static_range(SUBS):
        for side in gl.static_range(SIDES):
            for part in gl.static_range(SLICES):
                place = weight_smem.index(((slot * SUBS + sub) * SIDES + side) * SLICES + part)
                corner = [first_n + side * AWAY, k + part * SHARE + sub * 64]
                tma.async_copy_global_to_shared(weight_desc, corner, arrived.index(slot), place)


@gluon.jit
def _copy_x(
    x_desc, arrived, x_smem, slot, k,
    SHARE: gl.constexpr, SLICES: gl.constexpr, SUBS: gl.constexpr,
):  # fmt: skip
    """A step's inputs of all rows, the same as of the weight."""
    for sub in gl.static_range(SUBS):
        for part in gl.static_range(SLICES):
            place = x_smem.index((slot * SUBS + sub) * SLICES + part)
            tma.async_copy_global_to_shared(x_desc, [0, k + part * SHARE + sub * 64], arrived.index(slot), place)


@gluon.jit
def _diagonal(sums, MMA: gl.constexpr, SLICES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """Adds up the blocks on the diagonal: [BLOCK_N, ROWS] of [SLICES BLOCK_N, SLICES ROWS]."""
    if SLICES > 1:
        of_output = gl.arange(0, SLICES * BLOCK_N, layout=gl.SliceLayout(1, MMA)) // BLOCK_N
        of_row = gl.arange(0, SLICES * ROWS, layout=gl.SliceLayout(0, MMA)) // ROWS
        own = gl.where(gl.expand_dims(of_output, 1) == gl.expand_dims(of_row, 0), sums, 0.0)
        FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [gl.num_warps(), 1], [1, 0])
        blocks = gl.convert_layout(own, FLAT).reshape((SLICES, BLOCK_N, SLICES, ROWS))
        added = gl.sum(gl.sum(blocks, 2), 0)
    else:
        added = sums
    return added


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    weight_desc, x_desc, bias_ptr, out_ptr, M,
    N: gl.constexpr, K: gl.constexpr, SLICES: gl.constexpr, SUBS: gl.constexpr, SLOTS: gl.constexpr,
    ROWS: gl.constexpr, STEP_BYTES: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for 64 / SLICES outputs and ROWS rows, with bias, SwiGLU or residual stream."""
    DTYPE: gl.constexpr = weight_desc.dtype
    BLOCK_N: gl.constexpr = 64 // SLICES
    SIDES: gl.constexpr = 2 if GATED else 1
    SHARE: gl.constexpr = K // SLICES
    STEPS: gl.constexpr = SHARE // (64 * SUBS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICES * ROWS, 16])
    first_n = gl.program_id(0) * BLOCK_N
    weight_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * SUBS * SIDES * SLICES, BLOCK_N, 64], weight_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * SUBS * SLICES, ROWS, 64], x_desc.layout)
    arrived = new_barriers(SLOTS)
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            _copy_weight(
                weight_desc, arrived, weight_smem, place, first_n, place * 64 * SUBS,
                N, SHARE, SLICES, SUBS, SIDES, STEP_BYTES,
            )  # fmt: skip
    grid_behind_may_start()
    grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            _copy_x(x_desc, arrived, x_smem, place, place * 64 * SUBS, SHARE, SLICES, SUBS)
    # Slices side by side, as the instruction takes them.
    lefts = weight_smem._reinterpret(DTYPE, [SLOTS * SUBS * SIDES, 64, 64], weight_desc.layout)
    rights = x_smem._reinterpret(DTYPE, [SLOTS * SUBS, SLICES * ROWS, 64], x_desc.layout)
    y = gl.zeros([64, SLICES * ROWS], gl.float32, layout=MMA)
    up = gl.zeros([64, SLICES * ROWS], gl.float32, layout=MMA)
    slot = 0
    phase = 0
    for step in range(0, STEPS):
        mbarrier.wait(arrived.index(slot), phase)
        # All warps are through with the slot before this one.
        gl.thread_barrier()
        free_slot = slot_before(slot, SLOTS)
        ahead = step + (SLOTS - 1)
        if ahead < STEPS:
            _copy_weight(
                weight_desc, arrived, weight_smem, free_slot, first_n, ahead * 64 * SUBS,
                N, SHARE, SLICES, SUBS, SIDES, STEP_BYTES,
            )  # fmt: skip
            _copy_x(x_desc, arrived, x_smem, free_slot, ahead * 64 * SUBS, SHARE, SLICES, SUBS)
        for sub in gl.static_range(SUBS):
            part = slot * SUBS + sub
            x = rights.index(part).permute((1, 0))
            y = warpgroup_mma(lefts.index(part * SIDES), x, y, is_async=True)
            if GATED:
                up = warpgroup_mma(lefts.index(part * SIDES + 1), x, up, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        if GATED:
            up = warpgroup_mma_wait(0, deps=[up])
        slot, phase = advance(slot, phase, SLOTS)
    # Four outputs of a row in a thread.
    STORE: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(_diagonal(y, MMA, SLICES, BLOCK_N, ROWS), STORE)
    n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORE)), 0)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    if GATED:
        up = gl.convert_layout(_diagonal(up, MMA, SLICES, BLOCK_N, ROWS), STORE)
        if bias_ptr is not None:
            up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)
        y = y / (1.0 + gl.exp(-y)) * up
    places = out_ptr + (m * N + n)
    mask = (m < M) & (n < N)
    if ADD:
        y += gl.load(places, mask=mask, other=0.0).to(gl.float32)
    gl.store(places, y.to(out_ptr.dtype.element_ty), mask=mask)


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


def multiply_streams(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: StreamTile,
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
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
        is_parameter: No kernel writes the weight. Otherwise the kernel waits for all before it.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert 1 <= num_rows <= MAX_WARPGROUP_ROWS and weight.shape == (num_outputs * (2 if gated else 1), num_inputs)
    assert num_inputs % (tile.slices * tile.subs * _WIDTH) == 0 and tile.slots >= 2 and out.is_contiguous()
    rows = _rows_of(num_rows)
    _stream_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        tile_descriptor(weight, tile.block_n, _WIDTH), tile_descriptor(aligned(x), rows, _WIDTH), bias, out, num_rows,
        N=num_outputs, K=num_inputs, SLICES=tile.slices, SUBS=tile.subs, SLOTS=tile.slots, ROWS=rows,
        STEP_BYTES=_step_bytes(tile, num_rows, gated), GATED=gated, ADD=add,
        num_warps=_NUM_WARPS, maxnreg=None, launch_pdl=is_parameter,
    )  # fmt: skip


# Slices, parts of 64 inputs, slots.
_VARIANTS = ((1, 2, 5), (1, 2, 10), (1, 4, 5), (2, 1, 9), (2, 2, 4), (2, 2, 8), (2, 4, 4), (4, 2, 3), (4, 2, 6))
_GATED_VARIANTS = ((1, 1, 6), (1, 1, 12), (1, 2, 6), (2, 1, 5), (2, 1, 10), (2, 2, 5), (4, 1, 5))


def stream_variants(gated: bool) -> list[StreamTile]:
    """Tiles that are worth timing, which all fit sm_90's shared memory."""
    return [StreamTile(*sizes) for sizes in (_GATED_VARIANTS if gated else _VARIANTS)]
