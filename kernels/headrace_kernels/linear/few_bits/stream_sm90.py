"""The kernel of 2 to 16 rows for weights of 8 and 4 bits, on sm_90, with all that is fused.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying; which
product it takes is `linear.launch_rules`'. It is written in Gluon, because the order of copies,
conversions and products is what it is about.

It is `linear.dense_small_batch_sm90`'s kernel, whose slices, copies, norm and early launch are the
same, with the left operand in registers: a step's words come to shared memory, and each warp reads
its own there, makes numbers of them and multiplies those. Inputs are multiplied in an order in
which no number changes its thread on the way, which the warps give x in shared memory while the
step before is multiplied (`operands`).

Scales of outputs multiply the sums in the end, those of FP8's blocks of 128 by 128 the sums of 128
inputs (`block_sums`). INT4 has scales and zero points of groups of 128 inputs, which come with a
step's words: 512 inputs, four groups. Its numbers are rounded as `dequantize` rounds them.
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
from headrace_kernels.linear.few_bits.block_sums import (
    add_block_products,
    ask_for_scales,
    begin_block_products,
    by_warps,
    keep_scales,
    scales_room,
)
from headrace_kernels.linear.few_bits.operands import begin_products, prepare_x
from headrace_kernels.weight_formats.kernel_layout import bits_of
from headrace_kernels.weight_formats.quantized_weight import BLOCK_SIZE, QuantizedWeight, QuantKind

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
        """Shared memory of a program, without barriers and blocks' scales.

        Args:
            kind: The weight's.
            num_rows: Rows of x.
            gated: SwiGLU of the two halves of a weight.
            norm_itemsize: Bytes of a number of the norm's weight; 0: there is no norm.
        """
        return self.slots * _step_bytes(self, kind, num_rows, gated, norm_itemsize)

    def scale_bytes(self, num_inputs: int, gated: bool) -> int:
        """Shared memory of a program's scales, of a weight in blocks."""
        return 4 * self.num_warps * scales_room(num_inputs // (self.slices * BLOCK_SIZE), 2 if gated else 1)


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


@gluon.jit
def _slots(
    descs, SLOTS: gl.constexpr, PARTS: gl.constexpr, SIDES: gl.constexpr, SLICES: gl.constexpr, BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr, INT4: gl.constexpr,
):  # fmt: skip
    """Shared memory of all steps: as it is copied to, and as it is read.

    A tuple of the first by descriptors (`_copy_step`), then words, x by slices, x as the warps put
    it in order, the norm's weight, scales and zero points.
    """
    word_desc, x_desc, norm_desc, scale_desc, zero_desc = descs
    DTYPE: gl.constexpr = x_desc.dtype
    WORD: gl.constexpr = word_desc.dtype
    WIDTH: gl.constexpr = 64 if INT4 else 128
    PIECES: gl.constexpr = (4 if INT4 else 2) * PARTS
    GROUPS: gl.constexpr = PIECES // 2
    word_smem = gl.allocate_shared_memory(WORD, [SLOTS, PARTS, SIDES, SLICES, BLOCK_N, WIDTH], word_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, PIECES, SLICES, ROWS, 64], x_desc.layout)
    # Slices side by side, as the instruction takes them.
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 16 if INT4 else 8, 2)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    X_STEP: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    words = word_smem._reinterpret(WORD, [SLOTS * PARTS * SIDES, SLICES * BLOCK_N, WIDTH], WORDS)
    rights = x_smem._reinterpret(DTYPE, [SLOTS * PIECES, SLICES * ROWS, 64], X)
    x_steps = x_smem._reinterpret(DTYPE, [SLOTS, PIECES * SLICES, ROWS, 64], X_STEP)
    norm_smem = x_smem
    norm_steps = x_steps
    if norm_desc is not None:
        norm_smem = gl.allocate_shared_memory(norm_desc.dtype, [SLOTS, PIECES, SLICES, 64], norm_desc.layout)
        ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        norm_steps = norm_smem._reinterpret(norm_desc.dtype, [SLOTS, PIECES * SLICES, 64], ROW_MAJOR)
    scale_smem = word_smem
    zero_smem = word_smem
    scales = words
    zeros = words
    if INT4:
        scale_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, GROUPS, SIDES, SLICES, BLOCK_N], scale_desc.layout)
        zero_smem = gl.allocate_shared_memory(gl.uint8, [SLOTS, GROUPS, SIDES, SLICES, BLOCK_N], zero_desc.layout)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = scale_smem._reinterpret(DTYPE, [SLOTS * GROUPS * SIDES, SLICES * BLOCK_N], FLAT)
        zeros = zero_smem._reinterpret(gl.uint8, [SLOTS * GROUPS * SIDES, SLICES * BLOCK_N], FLAT)
    smem = (word_smem, x_smem, norm_smem, scale_smem, zero_smem)
    return smem, words, rights, x_steps, norm_steps, scales, zeros


@gluon.jit
def _copy_step(
    descs, smem, arrived, slot, first_n, step,
    PARTS: gl.constexpr, PIECES: gl.constexpr, INT4: gl.constexpr, STEP_BYTES: gl.constexpr, WITH_X: gl.constexpr,
):  # fmt: skip
    """A step's words and what belongs to them, and with WITH_X its inputs of all rows.

    Descriptors and shared memory are of words, x, the norm's weight (None: there is none), scales
    and zero points.
    """
    word_desc, x_desc, norm_desc, scale_desc, zero_desc = descs
    word_smem, x_smem, norm_smem, scale_smem, zero_smem = smem
    mbarrier.expect(arrived.index(slot), STEP_BYTES)
    copy_weight(word_desc, arrived, word_smem, slot, first_n, step, PARTS)
    if WITH_X:
        copy_x(x_desc, arrived, x_smem, slot, step, PIECES)
    if INT4:
        _copy_groups(scale_desc, arrived, scale_smem, slot, first_n, step, PIECES // 2)
        _copy_groups(zero_desc, arrived, zero_smem, slot, first_n, step, PIECES // 2)
    if norm_desc is not None:
        _copy_norm(norm_desc, arrived, norm_smem, slot, step, PIECES)


@gluon.jit
def _begin_step(
    words, rights, scales, zeros, slot, step, y, up,
    PARTS: gl.constexpr, SIDES: gl.constexpr, COLUMNS: gl.constexpr, KIND: gl.constexpr, IN_BLOCKS: gl.constexpr,
    DTYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Begins a step's products, of y and up themselves or, in blocks, of what is added to them."""
    begun = ()
    if IN_BLOCKS:
        HELD: gl.constexpr = y.type.layout
        begun = begin_block_products(
            words, rights, scales, slot, step, HELD, PARTS, SIDES, COLUMNS, KIND, DTYPE, MMA
        )  # fmt: skip
    else:
        y, up = begin_products(words, rights, scales, zeros, slot, y, up, PARTS, SIDES, KIND, DTYPE, MMA)
    return y, up, begun


@gluon.jit
def _end_step(
    y, up, begun, PARTS: gl.constexpr, SIDES: gl.constexpr, COLUMNS: gl.constexpr, IN_BLOCKS: gl.constexpr
):  # fmt: skip
    """Waits for a step's products: the sums, with it, of both sides."""
    if IN_BLOCKS:
        y, up = add_block_products(begun, y, up, PARTS, SIDES, COLUMNS)
    else:
        y = warpgroup_mma_wait(0, deps=[y])
        if SIDES == 2:
            up = warpgroup_mma_wait(0, deps=[up])
    return y, up


@gluon.jit(do_not_specialize=["M"])
def _bit_stream_kernel(
    word_desc, x_desc, norm_desc, scale_desc, zero_desc, scale_ptr, bias_ptr, out_ptr, M, eps,
    N: gl.constexpr, STEPS: gl.constexpr, KIND: gl.constexpr, SLICES: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, STEP_BYTES: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
    IN_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for 16 / SLICES outputs of each warp and ROWS rows, with what is fused.

    With a norm's weight g, x is x g / rms(x). A step has PARTS of 128 bytes of each output's words.
    """
    DTYPE: gl.constexpr = x_desc.dtype
    INT4: gl.constexpr = KIND == "int4"
    OUTPUTS: gl.constexpr = 16 * gl.num_warps()
    BLOCK_N: gl.constexpr = OUTPUTS // SLICES
    COLUMNS: gl.constexpr = SLICES * ROWS
    SIDES: gl.constexpr = 2 if GATED else 1
    NORMED: gl.constexpr = norm_desc is not None
    PIECES: gl.constexpr = (4 if INT4 else 2) * PARTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    first_n = gl.program_id(0) * BLOCK_N
    descs = (word_desc, x_desc, norm_desc, scale_desc, zero_desc)
    smem, words, rights, x_steps, norm_steps, scales, zeros = _slots(
        descs, SLOTS, PARTS, SIDES, SLICES, BLOCK_N, ROWS, INT4
    )  # fmt: skip
    x_smem = smem[1]
    arrived = new_barriers(SLOTS)
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            _copy_step(descs, smem, arrived, place, first_n, place, PARTS, PIECES, INT4, STEP_BYTES, False)
    if IN_BLOCKS:
        # No kernel writes them, so that they may be read before the wait.
        found = ask_for_scales(scale_ptr, first_n, N, STEPS * PARTS, SLICES, SIDES)
    grid_behind_may_start()
    grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            copy_x(x_desc, arrived, x_smem, place, place, PIECES)
    n, places, mask = result_places(out_ptr, first_n, M, N, BLOCK_N, ROWS)
    # Scales of outputs.
    factors = ()
    up_factors = ()
    if not INT4 and not IN_BLOCKS:
        factors = factors + (gl.load(scale_ptr + n, mask=n < N, other=0.0),)
        if GATED:
            up_factors = up_factors + (gl.load(scale_ptr + N + n, mask=n < N, other=0.0),)
    added = asked_for(bias_ptr, n, places, mask, N, GATED, ADD)
    y = gl.zeros([OUTPUTS, COLUMNS], gl.float32, layout=MMA)
    up = gl.zeros([OUTPUTS, COLUMNS], gl.float32, layout=MMA)
    if IN_BLOCKS:
        scales = keep_scales(found, STEPS * PARTS, SIDES)
        y = by_warps(y, COLUMNS)
        up = by_warps(up, COLUMNS)
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
            _copy_step(descs, smem, arrived, free_slot, first_n, ahead, PARTS, PIECES, INT4, STEP_BYTES, True)
        y, up, begun = _begin_step(
            words, rights, scales, zeros, slot, step, y, up, PARTS, SIDES, COLUMNS, KIND, IN_BLOCKS, DTYPE, MMA
        )  # fmt: skip
        slot, phase = advance(slot, phase, SLOTS)
        mbarrier.wait(arrived.index(slot), phase)
        squares += prepare_x(x_steps, norm_steps, slot, SLICES, PIECES, ROWS, INT4, NORMED)
        y, up = _end_step(y, up, begun, PARTS, SIDES, COLUMNS, IN_BLOCKS)
    fence_async_shared()
    gl.thread_barrier()
    y, up, begun = _begin_step(
        words, rights, scales, zeros, slot, STEPS - 1, y, up, PARTS, SIDES, COLUMNS, KIND, IN_BLOCKS, DTYPE, MMA
    )  # fmt: skip
    y, up = _end_step(y, up, begun, PARTS, SIDES, COLUMNS, IN_BLOCKS)
    if IN_BLOCKS:
        y = y.reshape((OUTPUTS, COLUMNS))
        up = up.reshape((OUTPUTS, COLUMNS))
    if NORMED:
        of_rows = rms_factors(gl.sum(gl.sum(squares, 2), 0), STEPS * PIECES * SLICES * 64, eps)
        factors = factors + (of_rows,)
        up_factors = up_factors + (of_rows,)
    store_results(y, up, factors, up_factors, added, out_ptr, places, mask, SLICES, BLOCK_N, ROWS, GATED)


def takes_bit_streams(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes 8 bits with scales of outputs, FP8 in blocks of 128 by 128 that are whole, and INT4 in
    groups of 128, with whole steps of inputs.
    """
    is_int4 = weight.kind is QuantKind.INT4
    if is_int4:
        # Zero points of a group lie at multiples of 16 bytes, of both halves too.
        has_scales = weight.is_grouped and weight.group_size == _GROUP_INPUTS and weight.num_outputs % 32 == 0
    else:
        is_in_blocks = weight.scale_outputs == BLOCK_SIZE and weight.num_outputs % BLOCK_SIZE == 0
        has_scales = not weight.is_grouped or is_in_blocks
    return (
        card.has_warpgroup_instructions(weight.device)
        and has_scales
        and weight.dtype.itemsize == 2
        and weight.num_inputs % (_MOST_PARTS * _PART_BYTES) == 0
        and all(part is None or part.data_ptr() % 16 == 0 for part in bits_of(weight))
        # Places in a result are 32 bits.
        and weight.num_outputs * MAX_BIT_STREAM_ROWS < 1 << 31
    )


def takes_tile(weight: QuantizedWeight, tile: BitStreamTile, gated: bool = False) -> bool:
    """Whether the inputs are whole steps of the tile, and each half's outputs whole blocks."""
    has_whole_halves = weight.scale_outputs == 1 or not gated or weight.num_outputs % (2 * BLOCK_SIZE) == 0
    return has_whole_halves and weight.num_inputs % (tile.slices * tile.subs * _STEP_INPUTS[weight.kind]) == 0


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
    assert takes_tile(weight, tile, gated) and tile.slots >= 2
    assert norm is None or (x.dtype == torch.bfloat16 and norm[0].shape == (num_inputs,))
    rows, is_int4 = rows_class(num_rows), weight.kind is QuantKind.INT4
    words, scales, zeros = bits_of(weight)
    in_blocks = weight.scale_outputs > 1
    if in_blocks:
        # As they lie: of whole steps there are as many as there is room for.
        scales = scales.t()
        assert scales.is_contiguous()
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
        GATED=gated, ADD=add, IN_BLOCKS=in_blocks,
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


def stream_bits_variants(kind: QuantKind, num_rows: int, gated: bool, block_inputs: int = 0) -> list[BitStreamTile]:
    """Tiles that are worth timing, and fit sm_90's shared memory with as many rows and a norm.

    Args:
        kind: The weight's.
        num_rows: Rows of x.
        gated: SwiGLU of the two halves of a weight.
        block_inputs: Inputs of a weight in blocks; 0: its scales are of outputs or groups.
    """
    sizes = _INT4_VARIANTS if kind is QuantKind.INT4 else _GATED_VARIANTS if gated else _VARIANTS
    return [
        tile
        for tile in (BitStreamTile(*each) for each in sizes)
        if tile.shared_bytes(kind, num_rows, gated, norm_itemsize=4)
        + (tile.scale_bytes(block_inputs, gated) if block_inputs else 0)
        <= MOST_SLOT_BYTES
        and not (gated and tile.slices * tile.subs * rows_class(num_rows) > _MOST_GATED_COLUMNS)
    ]
