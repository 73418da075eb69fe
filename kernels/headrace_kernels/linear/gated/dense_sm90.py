"""The gate and up products of an MLP with SwiGLU in them, for plain weights of 16 bits, on sm_90.

Owns the kernel, its launch and which weights it takes; which rows take it, and by which tile, is
`gated.dense`'s. It is written in Gluon, because the order of copies and products is what it is
about.

Y = X W^T by warp groups, whose instruction takes 64 rows, 16 inputs and some outputs. A program has
BLOCK_M rows and as many outputs as make one even wave of all programs, so that no multiprocessor
waits for the last few. As a tensor's sizes are powers of two, its outputs are three pieces of such
widths. A piece is so many outputs of the gate with the same ones of up side by side in shared
memory, so that one thread has both sums of an output, and results alone are written. A step is 64
inputs, which the copy engine brings to shared memory SLOTS - 1 steps ahead, outputs and rows beyond
the end as zeros. A step's products are begun before those of the step before are waited for: the
tensor cores have always some to do. Sums are fp32, in the order of the inputs, and rounded once,
behind the activation.

A program starts while the kernel before still runs, and has its first steps of the weight copied
before it waits for what that kernel writes (`dense_small_batch_sm90`).
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
from headrace_kernels.hopper.launch import aligned, box_descriptor, tile_descriptor
from headrace_kernels.hopper.ring import (
    advance,
    grid_before_is_done,
    grid_behind_may_start,
    new_barriers,
    publish_barriers,
    slot_before,
)
from headrace_kernels.swiglu import Activation

# Inputs of a step: what the copy engine's widest pattern has.
_STEP_INPUTS = 64


class GatedTile(NamedTuple):
    """How the products are cut."""

    # Rows of a program: 64 for every four warps, or a multiple.
    block_m: int
    # Outputs of the three pieces, powers of two from 16 on; 0 for no piece, but for the first.
    widths: tuple[int, int, int]
    num_warps: int
    # Steps in shared memory, at least 2.
    slots: int

    @property
    def block_n(self) -> int:
        """Outputs of a program, each of them with its gate."""
        return sum(self.widths)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step in shared memory."""
        return _STEP_INPUTS * 2 * (self.block_m + 2 * self.block_n)


@gluon.jit
def _copy_piece(desc, arrived, smem, slot, first_n, k):
    """A piece's gate and up."""
    tma.async_copy_global_to_shared(desc, [0, first_n, k], arrived.index(slot), smem.index(slot))


@gluon.jit
def _copy_weight(
    desc_0, desc_1, desc_2, arrived, smem_0, smem_1, smem_2, slot, first_n, k,
    W_0: gl.constexpr, W_1: gl.constexpr, W_2: gl.constexpr, STEP_BYTES: gl.constexpr,
):  # fmt: skip
    """A step's weight: 64 inputs from k on."""
    mbarrier.expect(arrived.index(slot), STEP_BYTES)
    _copy_piece(desc_0, arrived, smem_0, slot, first_n, k)
    if W_1:
        _copy_piece(desc_1, arrived, smem_1, slot, first_n + W_0, k)
    if W_2:
        _copy_piece(desc_2, arrived, smem_2, slot, first_n + (W_0 + W_1), k)


@gluon.jit
def _pairs(smem, x_desc, WIDTH: gl.constexpr, SLOTS: gl.constexpr):
    """A piece's slots, each with gate and up as one operand, which lies as tiles of x do."""
    return smem._reinterpret(x_desc.dtype, [SLOTS, 2 * WIDTH, 64], x_desc.layout)


@gluon.jit
def _finish(
    sums, bias_ptr, out_ptr, first_m, first_n, M,
    N: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, IS_GELU: gl.constexpr,
):  # fmt: skip
    """Stores activation(gate) * up of [BLOCK_M, 2 WIDTH] sums, the gate's first."""
    gate, up = gl.split(sums.reshape((BLOCK_M, 2, WIDTH)).permute((0, 2, 1)))
    LAYOUT: gl.constexpr = gate.type.layout
    m = gl.expand_dims(first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT)), 1)
    n = gl.expand_dims(first_n + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
    if bias_ptr is not None:
        gate += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        up += gl.load(bias_ptr + (N + n), mask=n < N, other=0.0).to(gl.float32)
    if IS_GELU:
        # 2 sqrt(2 / pi) before the bracket.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    y = gate / (1.0 + gl.exp(-slope)) * up
    # Half sectors, which the cache puts together.
    gl.store(out_ptr + (m * N + n), y.to(out_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@gluon.jit(do_not_specialize=["M"])
def _gated_kernel(
    desc_0, desc_1, desc_2, x_desc, bias_ptr, out_ptr, M,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, W_0: gl.constexpr, W_1: gl.constexpr,
    W_2: gl.constexpr, SLOTS: gl.constexpr, STEP_BYTES: gl.constexpr, IS_GELU: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of X W^T, for BLOCK_M rows and W_0 + W_1 + W_2 outputs."""
    DTYPE: gl.constexpr = x_desc.dtype
    STEPS: gl.constexpr = K // 64
    PIECES: gl.constexpr = 1 + (W_1 > 0) + (W_2 > 0)
    first_m = gl.program_id(0) * BLOCK_M
    first_n = gl.program_id(1) * (W_0 + W_1 + W_2)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, 64], x_desc.layout)
    smem_0 = gl.allocate_shared_memory(DTYPE, [SLOTS, 2, W_0, 64], desc_0.layout)
    smem_1 = smem_0
    smem_2 = smem_0
    if W_1:
        smem_1 = gl.allocate_shared_memory(DTYPE, [SLOTS, 2, W_1, 64], desc_1.layout)
    if W_2:
        smem_2 = gl.allocate_shared_memory(DTYPE, [SLOTS, 2, W_2, 64], desc_2.layout)
    arrived = new_barriers(SLOTS)
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            _copy_weight(
                desc_0, desc_1, desc_2, arrived, smem_0, smem_1, smem_2, place, first_n, place * 64,
                W_0, W_1, W_2, STEP_BYTES,
            )  # fmt: skip
    grid_behind_may_start()
    grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            tma.async_copy_global_to_shared(x_desc, [first_m, place * 64], arrived.index(place), x_smem.index(place))
    MMA_0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * W_0, 16])
    pairs_0 = _pairs(smem_0, x_desc, W_0, SLOTS)
    sums_0 = gl.zeros([BLOCK_M, 2 * W_0], gl.float32, layout=MMA_0)
    if W_1:
        MMA_1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * W_1, 16])
        pairs_1 = _pairs(smem_1, x_desc, W_1, SLOTS)
        sums_1 = gl.zeros([BLOCK_M, 2 * W_1], gl.float32, layout=MMA_1)
    if W_2:
        MMA_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * W_2, 16])
        pairs_2 = _pairs(smem_2, x_desc, W_2, SLOTS)
        sums_2 = gl.zeros([BLOCK_M, 2 * W_2], gl.float32, layout=MMA_2)
    slot = 0
    phase = 0
    for step in range(0, STEPS):
        mbarrier.wait(arrived.index(slot), phase)
        x = x_smem.index(slot)
        sums_0 = warpgroup_mma(x, pairs_0.index(slot).permute((1, 0)), sums_0, is_async=True)
        if W_1:
            sums_1 = warpgroup_mma(x, pairs_1.index(slot).permute((1, 0)), sums_1, is_async=True)
        if W_2:
            sums_2 = warpgroup_mma(x, pairs_2.index(slot).permute((1, 0)), sums_2, is_async=True)
        # The step before is multiplied, this one is under way.
        if W_2:
            sums_0, sums_1, sums_2 = warpgroup_mma_wait(PIECES, deps=[sums_0, sums_1, sums_2])
        elif W_1:
            sums_0, sums_1 = warpgroup_mma_wait(PIECES, deps=[sums_0, sums_1])
        else:
            sums_0 = warpgroup_mma_wait(PIECES, deps=[sums_0])
        # All warps are through with the slot before this one.
        gl.thread_barrier()
        free_slot = slot_before(slot, SLOTS)
        ahead = step + (SLOTS - 1)
        if ahead < STEPS:
            _copy_weight(
                desc_0, desc_1, desc_2, arrived, smem_0, smem_1, smem_2, free_slot, first_n, ahead * 64,
                W_0, W_1, W_2, STEP_BYTES,
            )  # fmt: skip
            free = x_smem.index(free_slot)
            tma.async_copy_global_to_shared(x_desc, [first_m, ahead * 64], arrived.index(free_slot), free)
        slot, phase = advance(slot, phase, SLOTS)
    if W_2:
        sums_0, sums_1, sums_2 = warpgroup_mma_wait(0, deps=[sums_0, sums_1, sums_2])
    elif W_1:
        sums_0, sums_1 = warpgroup_mma_wait(0, deps=[sums_0, sums_1])
    else:
        sums_0 = warpgroup_mma_wait(0, deps=[sums_0])
    _finish(sums_0, bias_ptr, out_ptr, first_m, first_n, M, N, BLOCK_M, W_0, IS_GELU)
    if W_1:
        _finish(sums_1, bias_ptr, out_ptr, first_m, first_n + W_0, M, N, BLOCK_M, W_1, IS_GELU)
    if W_2:
        _finish(sums_2, bias_ptr, out_ptr, first_m, first_n + (W_0 + W_1), M, N, BLOCK_M, W_2, IS_GELU)


def takes_gated(weight: Tensor) -> bool:
    """Whether the kernel multiplies by this weight, gate and up in one, on its GPU."""
    return (
        card.has_warpgroup_instructions(weight.device)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] % 2 == 0
        and weight.shape[1] % _STEP_INPUTS == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def multiply_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: GatedTile, activation: Activation = "silu"
) -> None:
    """activation(gate) * up of the halves of X W^T + b.

    Args:
        x: [num_rows, K] in the type of the weight.
        weight: [2 N, K] with the gate first, which the kernel `takes_gated` and no kernel writes.
        bias: [2 N].
        out: [num_rows, N], written.
        tile: The sizes.
        activation: What the gate passes through.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert weight.shape == (2 * num_outputs, num_inputs) and out.shape[0] == num_rows and out.is_contiguous()
    assert num_inputs % _STEP_INPUTS == 0 and tile.block_m % (16 * tile.num_warps) == 0 and tile.slots >= 2
    assert tile.widths[0] and x.dtype == weight.dtype
    # Places in a result are 32 bits.
    assert (num_rows + tile.block_m) * num_outputs < 1 << 31
    sides = weight.view(2, num_outputs, num_inputs)
    # Programs of the same outputs follow each other, so that their weight is read from memory once.
    _gated_kernel[(triton.cdiv(num_rows, tile.block_m), triton.cdiv(num_outputs, tile.block_n))](
        *(box_descriptor(sides, [2, width or tile.widths[0], _STEP_INPUTS]) for width in tile.widths),
        tile_descriptor(aligned(x), tile.block_m, _STEP_INPUTS), bias, out, num_rows,
        N=num_outputs, K=num_inputs, BLOCK_M=tile.block_m, W_0=tile.widths[0], W_1=tile.widths[1],
        W_2=tile.widths[2], SLOTS=tile.slots, STEP_BYTES=tile.step_bytes, IS_GELU=activation == "gelu_tanh",
        num_warps=tile.num_warps, maxnreg=None, launch_pdl=True,
    )  # fmt: skip
