"""The kernel of 2 to 16 rows for weights of 8 and 4 bits, on sm_90, with all that is fused.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying; which
product it takes is `linear.launch_rules`'. It is written in Gluon, because the order of copies,
conversions and products is what it is about.

It is `linear.dense_small_batch_sm90`'s kernel, whose slices, copies, norm and early launch are the
same, with the left operand in registers: a step's words come to shared memory, and each warp reads
its own there, makes numbers of them and multiplies those. Inputs are multiplied in an order in
which no number changes its thread on the way, which the warps give x in shared memory while the
step before is multiplied (`operands`).

Scales of outputs multiply the sums in the end. INT4 has scales and zero points of groups of 128
inputs, which come with a step's words: 512 inputs, four groups. Its numbers are rounded as
`dequantize` rounds them.
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
from headrace_kernels.linear.few_bits.operands import begin_products, prepare_x
from headrace_kernels.weight_formats.kernel_layout import bits_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# More were slower than by kernels for more rows (docs/experiments.md, "few rows of few bits").
MAX_BIT_STREAM_ROWS = 16
# Bytes of a part, which the copy engine's widest pattern has, and inputs of a piece of x.
_PART_BYTES = 128
_PIECE_INPUTS = 64
# Inputs of a step, at least: of 8 bits a part's, of INT4 those of a tile of words, two parts.
_STEP_INPUTS = {QuantKind.FP8: 128, QuantKind.INT8: 128, QuantKind.INT4: 512}
# INT4: inputs of a group, which are those of a plane, and bytes of its scale and zero point.
_GROUP_INPUTS, _GROUP_BYTES = 128, 3
# Steps of _STEP_INPUTS of all slices together that every weight of 8 bits has.
_MOST_PARTS = 4
# Outputs that a warp multiplies, of all slices together.
_WARP_OUTPUTS = 16


class BitStreamTile(NamedTuple):
    """How a product is cut."""

    # Parts of the inputs that a program multiplies side by side: 1, 2 or 4.
    slices: int
    # Of 8 bits, parts of 128 inputs of a slice that are multiplied at a time; of INT4, of 512.
    subs: int
    # Steps in shared memory, at least 2.
    slots: int
    # 4 or 8: as many outputs of all slices together as 16 times that. More warps hide more of each
    # other's waits, where outputs are too few for two programs on each multiprocessor.
    num_warps: int = 4

    @property
    def block_n(self) -> int:
        """Outputs of a program (with SwiGLU as many again, for the gate)."""
        return _WARP_OUTPUTS * self.num_warps // self.slices

    def shared_bytes(self, kind: QuantKind, num_rows: int, gated: bool, norm_itemsize: int = 0) -> int:
        """Shared memory of a program, without barriers.

        Args:
            kind: The weight's.
            num_rows: Rows of x.
            gated: SwiGLU of the two halves of a weight.
            norm_itemsize: Bytes of a number of the norm's weight; 0: there is no norm.
        """
        return self.slots * _step_bytes(self, kind, num_rows, gated, norm_itemsize)


def _step_bytes(tile: BitStreamTile, kind: QuantKind, num_rows: int, gated: bool, norm_itemsize: int) -> int:
    """Bytes that the copy engine brings for a step: of the weight, x, and the norm's weight."""
    inputs, outputs = tile.subs * _STEP_INPUTS[kind], (2 if gated else 1) * _WARP_OUTPUTS * tile.num_warps
    words = inputs * outputs
    if kind is QuantKind.INT4:
        words = words // 2 + inputs // _GROUP_INPUTS * outputs * _GROUP_BYTES
    return words + inputs * tile.slices * (2 * rows_class(num_rows) + norm_itemsize)


@gluon.jit
def _copy_norm(norm_desc, arrived, norm_smem, slot, step, PIECES: gl.constexpr):
    """A step's numbers of the norm's weight."""
    tma.async_copy_global_to_shared(norm_desc, [step * PIECES, 0, 0], arrived.index(slot), norm_smem.index(slot))


@gluon.jit
def _copy_groups(desc, arrived, smem, slot, first_n, step, GROUPS: gl.constexpr):
    """Scales or zero points of a step's groups, of the outputs from `first_n` on."""
    tma.async_copy_global_to_shared(desc, [step * GROUPS, 0, 0, first_n], arrived.index(slot), smem.index(slot))


@gluon.jit(do_not_specialize=["M"])
def _bit_stream_kernel(
    word_desc, x_desc, norm_desc, scale_desc, zero_desc, scale_ptr, bias_ptr, out_ptr, M, eps,
    N: gl.constexpr, STEPS: gl.constexpr, KIND: gl.constexpr, SLICES: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, STEP_BYTES: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for 16 / SLICES outputs of each warp and ROWS rows, with what is fused.

    With a norm's weight g, x is x g / rms(x). A step has PARTS of 128 bytes of each output's words.
    """
    DTYPE: gl.constexpr = x_desc.dtype
    WORD: gl.constexpr = word_desc.dtype
    INT4: gl.constexpr = KIND == "int4"
    WIDTH: gl.constexpr = 64 if INT4 else 128
    OUTPUTS: gl.constexpr = 16 * gl.num_warps()
    BLOCK_N: gl.constexpr = OUTPUTS // SLICES
    SIDES: gl.constexpr = 2 if GATED else 1
    NORMED: gl.constexpr = norm_desc is not None
    PIECES: gl.constexpr = (4 if INT4 else 2) * PARTS
    GROUPS: gl.constexpr = PIECES // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICES * ROWS, 16])
    first_n = gl.program_id(0) * BLOCK_N
    word_smem = gl.allocate_shared_memory(WORD, [SLOTS, PARTS, SIDES, SLICES, BLOCK_N, WIDTH], word_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, PIECES, SLICES, ROWS, 64], x_desc.layout)
    # Slices side by side, as the instruction takes them.
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 16 if INT4 else 8, 2)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    X_STEP: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    words = word_smem._reinterpret(WORD, [SLOTS * PARTS * SIDES, OUTPUTS, WIDTH], WORDS)
    rights = x_smem._reinterpret(DTYPE, [SLOTS * PIECES, SLICES * ROWS, 64], X)
    x_steps = x_smem._reinterpret(DTYPE, [SLOTS, PIECES * SLICES, ROWS, 64], X_STEP)
    norm_steps = x_steps
    if NORMED:
        norm_smem = gl.allocate_shared_memory(norm_desc.dtype, [SLOTS, PIECES, SLICES, 64], norm_desc.layout)
        ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        norm_steps = norm_smem._reinterpret(norm_desc.dtype, [SLOTS, PIECES * SLICES, 64], ROW_MAJOR)
    scales = words
    zeros = words
    if INT4:
        scale_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, GROUPS, SIDES, SLICES, BLOCK_N], scale_desc.layout)
        zero_smem = gl.allocate_shared_memory(gl.uint8, [SLOTS, GROUPS, SIDES, SLICES, BLOCK_N], zero_desc.layout)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = scale_smem._reinterpret(DTYPE, [SLOTS * GROUPS * SIDES, OUTPUTS], FLAT)
        zeros = zero_smem._reinterpret(gl.uint8, [SLOTS * GROUPS * SIDES, OUTPUTS], FLAT)
    arrived = new_barriers(SLOTS)
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            mbarrier.expect(arrived.index(place), STEP_BYTES)
            copy_weight(word_desc, arrived, word_smem, place, first_n, place, PARTS)
            if INT4:
                _copy_groups(scale_desc, arrived, scale_smem, place, first_n, place, GROUPS)
                _copy_groups(zero_desc, arrived, zero_smem, place, first_n, place, GROUPS)
            if NORMED:
                _copy_norm(norm_desc, arrived, norm_smem, place, place, PIECES)
    grid_behind_may_start()
    grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            copy_x(x_desc, arrived, x_smem, place, place, PIECES)
    n, places, mask = result_places(out_ptr, first_n, M, N, BLOCK_N, ROWS)
    # Scales of outputs.
    factors = ()
    up_factors = ()
    if not INT4:
        factors = factors + (gl.load(scale_ptr + n, mask=n < N, other=0.0),)
        if GATED:
            up_factors = up_factors + (gl.load(scale_ptr + N + n, mask=n < N, other=0.0),)
    added = asked_for(bias_ptr, n, places, mask, N, GATED, ADD)
    y = gl.zeros([OUTPUTS, SLICES * ROWS], gl.float32, layout=MMA)
    up = gl.zeros([OUTPUTS, SLICES * ROWS], gl.float32, layout=MMA)
    slot = 0
    phase = 0
    mbarrier.wait(arrived.index(slot), phase)
    squares = prepare_x(x_steps, norm_steps, slot, SLICES, PIECES, ROWS, INT4, NORMED)
    # A step's x is prepared while the step before is multiplied. So the last step follows the loop:
    # the assembler crashes on a branch, or a fence, while products are under way.
    for step in range(0, STEPS - 1):
        # The tensor cores read shared memory past the order in which threads write it.
        fence_async_shared()
        # All warps are through with the slot before this one, and have prepared their part of x.
        gl.thread_barrier()
        free_slot = slot_before(slot, SLOTS)
        ahead = step + (SLOTS - 1)
        if ahead < STEPS:
            mbarrier.expect(arrived.index(free_slot), STEP_BYTES)
            copy_weight(word_desc, arrived, word_smem, free_slot, first_n, ahead, PARTS)
            copy_x(x_desc, arrived, x_smem, free_slot, ahead, PIECES)
            if INT4:
                _copy_groups(scale_desc, arrived, scale_smem, free_slot, first_n, ahead, GROUPS)
                _copy_groups(zero_desc, arrived, zero_smem, free_slot, first_n, ahead, GROUPS)
            if NORMED:
                _copy_norm(norm_desc, arrived, norm_smem, free_slot, ahead, PIECES)
        y, up = begin_products(words, rights, scales, zeros, slot, y, up, PARTS, SIDES, KIND, DTYPE, MMA)
        slot, phase = advance(slot, phase, SLOTS)
        mbarrier.wait(arrived.index(slot), phase)
        squares += prepare_x(x_steps, norm_steps, slot, SLICES, PIECES, ROWS, INT4, NORMED)
        y = warpgroup_mma_wait(0, deps=[y])
        if GATED:
            up = warpgroup_mma_wait(0, deps=[up])
    fence_async_shared()
    gl.thread_barrier()
    y, up = begin_products(words, rights, scales, zeros, slot, y, up, PARTS, SIDES, KIND, DTYPE, MMA)
    y = warpgroup_mma_wait(0, deps=[y])
    if GATED:
        up = warpgroup_mma_wait(0, deps=[up])
    if NORMED:
        of_rows = rms_factors(gl.sum(gl.sum(squares, 2), 0), STEPS * PIECES * SLICES * 64, eps)
        factors = factors + (of_rows,)
        up_factors = up_factors + (of_rows,)
    store_results(y, up, factors, up_factors, added, out_ptr, places, mask, SLICES, BLOCK_N, ROWS, GATED)


def takes_bit_streams(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes 8 bits with scales of outputs, and INT4 in groups of 128, with whole steps of inputs.
    """
    is_int4 = weight.kind is QuantKind.INT4
    if is_int4:
        # Zero points of a group lie at multiples of 16 bytes, of both halves too.
        has_scales = weight.is_grouped and weight.group_size == _GROUP_INPUTS and weight.num_outputs % 32 == 0
    else:
        has_scales = not weight.is_grouped
    return (
        card.has_warpgroup_instructions(weight.device)
        and has_scales
        and weight.dtype.itemsize == 2
        and weight.num_inputs % (_MOST_PARTS * _PART_BYTES) == 0
        and all(part is None or part.data_ptr() % 16 == 0 for part in bits_of(weight))
        # Places in a result are 32 bits.
        and weight.num_outputs * MAX_BIT_STREAM_ROWS < 1 << 31
    )


def takes_tile(weight: QuantizedWeight, tile: BitStreamTile) -> bool:
    """Whether the inputs are whole steps of the tile."""
    return weight.num_inputs % (tile.slices * tile.subs * _STEP_INPUTS[weight.kind]) == 0


def _norm_descriptor(norm_weight: Tensor, tile: BitStreamTile, pieces: int) -> TensorDescriptor:
    """Steps of a norm's weight: [64 inputs, slice, input], in the order of x."""
    view = norm_weight.view(tile.slices, -1, _PIECE_INPUTS).permute(1, 0, 2)
    return box_descriptor(view, [pieces, tile.slices, _PIECE_INPUTS], swizzled=False)


def _group_descriptor(numbers: Tensor, tile: BitStreamTile, groups: int, gated: bool) -> TensorDescriptor:
    """Steps of scales or zero points: [group, gate or up, slice, output]."""
    sides = 2 if gated else 1
    view = numbers.view(tile.slices, -1, sides, numbers.shape[1] // sides).permute(1, 2, 0, 3)
    return box_descriptor(view, [groups, sides, tile.slices, tile.block_n], swizzled=False)


def multiply_bit_streams(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: BitStreamTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Some rows times a weight such that `takes_bit_streams(weight)`.

    Args:
        x: [num_rows, K], at most MAX_BIT_STREAM_ROWS of them.
        weight: N outputs, or 2 N with the gate first.
        bias: One per output of the weight.
        out: [num_rows, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x, in bf16 alone: products of x and the norm's
            weight may leave fp16's range.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert 1 <= num_rows <= MAX_BIT_STREAM_ROWS and num_inputs == weight.num_inputs and x.dtype == weight.dtype
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    assert takes_tile(weight, tile) and tile.slots >= 2
    assert norm is None or (x.dtype == torch.bfloat16 and norm[0].shape == (num_inputs,))
    rows, is_int4 = rows_class(num_rows), weight.kind is QuantKind.INT4
    words, scales, zeros = bits_of(weight)
    norm_weight, eps = (None, 0.0) if norm is None else (aligned(norm[0]), norm[1])
    step_inputs = tile.subs * _STEP_INPUTS[weight.kind]
    pieces, parts = step_inputs // _PIECE_INPUTS, 2 * tile.subs if is_int4 else tile.subs
    group_descs = (None, None)
    if zeros is not None:
        group_descs = tuple(_group_descriptor(each, tile, step_inputs // 128, gated) for each in (scales, zeros))
    _bit_stream_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        weight_descriptor(words, tile.slices, parts, tile.block_n, gated),
        x_descriptor(aligned(x), tile.slices, pieces, rows),
        None if norm_weight is None else _norm_descriptor(norm_weight, tile, pieces), *group_descs,
        None if is_int4 else scales, bias, out, num_rows, eps,
        N=num_outputs, STEPS=num_inputs // (tile.slices * step_inputs), KIND=weight.kind.value, SLICES=tile.slices,
        PARTS=parts, SLOTS=tile.slots, ROWS=rows,
        STEP_BYTES=_step_bytes(tile, weight.kind, num_rows, gated, 0 if norm_weight is None else norm_weight.itemsize),
        GATED=gated, ADD=add,
        num_warps=tile.num_warps, maxnreg=None, launch_pdl=True,
    )  # fmt: skip


# Slices, parts of 128 inputs, slots, warps.
_VARIANTS: tuple[tuple[int, ...], ...] = ((1, 1, 8), (1, 2, 4), (1, 2, 6), (2, 1, 5), (2, 2, 4), (2, 2, 6), (4, 1, 6))
_VARIANTS += ((4, 1, 4), (1, 2, 4, 8), (2, 1, 6, 8), (2, 2, 4, 8), (4, 1, 4, 8), (4, 1, 6, 8))
_GATED_VARIANTS: tuple[tuple[int, ...], ...] = ((1, 1, 5), (1, 2, 3), (1, 2, 5), (2, 1, 3), (2, 1, 5), (2, 2, 3))
_GATED_VARIANTS += ((4, 1, 3), (1, 1, 4, 8), (1, 1, 6, 8), (2, 1, 3, 8), (2, 1, 5, 8), (4, 1, 4, 8))
_INT4_VARIANTS: tuple[tuple[int, ...], ...] = ((1, 1, 2), (1, 1, 3), (1, 1, 5), (2, 1, 2), (2, 1, 3), (2, 1, 5))
_INT4_VARIANTS += ((4, 1, 2), (1, 1, 3, 8), (2, 1, 2, 8), (2, 1, 3, 8), (2, 1, 4, 8), (4, 1, 2, 8), (4, 1, 3, 8))
# Columns of a side's sums, rows of each slice, from which those of both sides leave no registers.
_MOST_GATED_COLUMNS = 64


def stream_bits_variants(kind: QuantKind, num_rows: int, gated: bool) -> list[BitStreamTile]:
    """Tiles that are worth timing, and fit sm_90's shared memory with as many rows and a norm."""
    sizes = _INT4_VARIANTS if kind is QuantKind.INT4 else _GATED_VARIANTS if gated else _VARIANTS
    return [
        tile
        for tile in (BitStreamTile(*each) for each in sizes)
        if tile.shared_bytes(kind, num_rows, gated, norm_itemsize=4) <= MOST_SLOT_BYTES
        and not (gated and tile.slices * tile.subs * rows_class(num_rows) > _MOST_GATED_COLUMNS)
    ]
