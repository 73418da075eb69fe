"""The kernel of 2 to 32 rows for weights of 8 bits with scales of outputs, on sm_90, in one launch.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying; which
product it takes is `linear.launch_rules`'. It is written in Gluon, because the order of copies,
conversions and products is what it is about.

It is `linear.dense_small_batch_sm90`'s kernel, whose slices, copies, norm and early launch are the
same, with the left operand in registers: a step's bytes come to shared memory, and each warp group
reads them there, makes numbers of them and multiplies those. Scales multiply the sums in the end.

**Which inputs an instruction takes** is free, as long as they are the same ones of the weight and
of x. Of 128 inputs in a row, thread t of four has inputs 32 t to 32 t + 31 of an output: two loads
of 16 bytes, for which no thread waits for a bank, and bytes become numbers in the registers that
instructions take (`_words_held`). An instruction's 16 inputs are then four of each thread. So x has
to lie in shared memory in that order. The copy engine can't write it so, since neighbours that stay
neighbours are two inputs, 4 bytes. The warps put it in order where it lies (`_prepare_x`), while
the step before is multiplied; a norm's weight multiplies it on the way.

A thread of `_prepare_x` holds 32 inputs of a row, 8 from each of four places, which are 8 in a row
at four other places afterwards: nothing is exchanged but through the loads and stores. Eight
threads that access shared memory at a time have the same place of eight rows, which the copy
engine's pattern puts into different banks.
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
    copy_weight,
    copy_x,
    diagonal,
    rows_class,
    weight_descriptor,
    x_descriptor,
)
from headrace_kernels.weight_formats.conversions import bf16_product_assembly, byte_assembly
from headrace_kernels.weight_formats.kernel_layout import bits_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Inputs of a part, the bytes of the copy engine's widest pattern, and of a piece of x.
_PART_INPUTS = 128
_PIECE_INPUTS = 64
# Parts of a step, of all slices together, at most.
_MOST_PARTS = 4
# Outputs that a warp multiplies, of all slices together.
_WARP_OUTPUTS = 16


class Stream8BitTile(NamedTuple):
    """How a product is cut."""

    # Parts of the inputs that a program multiplies side by side: 1, 2 or 4.
    slices: int
    # Parts of 128 inputs of a slice that are multiplied at a time.
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

    def shared_bytes(self, num_rows: int, gated: bool, norm_itemsize: int = 0) -> int:
        """Shared memory of a program, without barriers.

        Args:
            num_rows: Rows of x.
            gated: SwiGLU of the two halves of a weight.
            norm_itemsize: Bytes of a number of the norm's weight; 0: there is no norm.
        """
        return self.slots * _step_bytes(self, num_rows, gated, norm_itemsize)


def _step_bytes(tile: Stream8BitTile, num_rows: int, gated: bool, norm_itemsize: int) -> int:
    """Bytes that the copy engine brings for a step: of the weight, x, and the norm's weight."""
    words = (2 if gated else 1) * _WARP_OUTPUTS * tile.num_warps
    return tile.subs * _PART_INPUTS * (words + tile.slices * (2 * rows_class(num_rows) + norm_itemsize))


@gluon.jit
def _copy_norm(norm_desc, arrived, norm_smem, slot, step, SUBS: gl.constexpr):
    """A step's numbers of the norm's weight."""
    tma.async_copy_global_to_shared(norm_desc, [step * SUBS * 2, 0, 0], arrived.index(slot), norm_smem.index(slot))


@gluon.constexpr_function
def _words_held(num_warps):
    """Which thread holds which bytes of [16 num_warps outputs, 128 inputs].

    Thread 4 g + t of a warp holds inputs 32 t to 32 t + 31 of outputs g and g + 8 of the warp's 16.
    """
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]][: num_warps.bit_length() - 1],
        [],
        [16 * num_warps, 128],
    )


@gluon.constexpr_function
def _x_held(slices, subs, rows, num_warps):
    """Which thread holds which inputs of [2 subs slices, rows, 64].

    A thread holds eight inputs in a row at four places of a row: at two of each piece of a part. A
    warp has eight rows, and all inputs of theirs in a part. Warps share out parts and slices first,
    whose numbers of a norm's weight are different ones.
    """
    shared = [[1 << bit, 0, 0] for bit in range((2 * subs * slices).bit_length() - 1) if 1 << bit != slices]
    shared += [[0, 1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    bits = num_warps.bit_length() - 1
    warps = (shared + [[0, 0, 0]] * bits)[:bits]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], [slices, 0, 0]] + shared[bits:],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16]],
        warps,
        [],
        [2 * subs * slices, rows, 64],
    )


@gluon.jit
def _prepare_x(
    x_steps, norm_steps, slot,
    SLICES: gl.constexpr, SUBS: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr, NORMED: gl.constexpr,
):  # fmt: skip
    """Puts a step's x in the order of the weight's registers, where it lies.

    With a norm it multiplies x by the norm's weight, and returns sums of squares of x, eight for a
    row's piece, which add up to the row's.

    The step's bytes have come, and no product reads its slot before the next fence and barrier.
    """
    PIECES: gl.constexpr = 2 * SUBS * SLICES
    HELD: gl.constexpr = _x_held(SLICES, SUBS, ROWS, gl.num_warps())
    x = x_steps.index(slot).load(HELD)
    if NORMED:
        wide = x.to(gl.float32)
        # Over what a thread holds in a row.
        squares = gl.sum((wide * wide).reshape((PIECES, ROWS, 8, 8)), 3)
        g = gl.expand_dims(norm_steps.index(slot).load(gl.SliceLayout(1, HELD)), 1)
        if g.dtype == gl.bfloat16:
            PRODUCT: gl.constexpr = bf16_product_assembly()
            x = gl.inline_asm_elementwise(PRODUCT, "=r,r,r", [x, g], dtype=gl.bfloat16, is_pure=True, pack=2)
        else:
            x = (wide * g).to(DTYPE)
    # From (part, piece, slice and row, thread's lower bit, chunk's upper bit, pair, which of it),
    # where the piece is the thread's upper bit, to (part, piece, slice and row, pair, thread, which
    # of it): 16 inputs of an instruction are two pairs of each thread.
    x = x.reshape((SUBS, 2, SLICES * ROWS, 2, 2, 8, 2)).permute((0, 4, 2, 5, 1, 3, 6))
    x_steps.index(slot).store(x.reshape((PIECES, ROWS, 64)))
    if NORMED:
        found = squares
    else:
        found = 0
    return found


@gluon.jit
def _numbers(words, KIND: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """The left operands of a part's two pieces, of bytes: no number changes its thread."""
    OUTPUTS: gl.constexpr = 16 * gl.num_warps()
    BYTES: gl.constexpr = byte_assembly(KIND, DTYPE == gl.bfloat16)
    held = words.load(_words_held(gl.num_warps()))
    w = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [held], dtype=DTYPE.value, is_pure=True, pack=4)
    # From (thread, piece, instruction, which eight of its inputs, which of a pair) to (instruction,
    # which eight, thread, which of a pair, piece).
    w = w.reshape((OUTPUTS, 4, 2, 4, 2, 2)).permute((0, 3, 4, 1, 5, 2)).reshape((OUTPUTS, 64, 2))
    first, second = gl.split(w)
    return gl.convert_layout(first, LEFT), gl.convert_layout(second, LEFT)


@gluon.jit
def _begin_products(
    words, rights, slot, y, up,
    SUBS: gl.constexpr, SIDES: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Begins a step's products, which are added to y and, of two sides, to up."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    for sub in gl.static_range(SUBS):
        part = slot * SUBS + sub
        x = rights.index(part * 2).permute((1, 0))
        other_x = rights.index(part * 2 + 1).permute((1, 0))
        w, other_w = _numbers(words.index(part * SIDES), KIND, DTYPE, LEFT)
        y = warpgroup_mma(w, x, y, is_async=True)
        y = warpgroup_mma(other_w, other_x, y, is_async=True)
        if SIDES == 2:
            w, other_w = _numbers(words.index(part * SIDES + 1), KIND, DTYPE, LEFT)
            up = warpgroup_mma(w, x, up, is_async=True)
            up = warpgroup_mma(other_w, other_x, up, is_async=True)
    return y, up


@gluon.jit
def _side(sums, factors, scale, SLICES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STORE: gl.constexpr):
    """A side's sums [BLOCK_N, ROWS] times scales of outputs and a norm's factors of rows, if any."""
    y = diagonal(sums, SLICES, BLOCK_N, ROWS, STORE) * scale
    if factors is not None:
        y *= gl.expand_dims(factors, 0)
    return y


@gluon.jit(do_not_specialize=["M"])
def _stream_8bit_kernel(
    word_desc, x_desc, norm_desc, scale_ptr, bias_ptr, out_ptr, M, eps,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, SLICES: gl.constexpr, SUBS: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, STEP_BYTES: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for 16 / SLICES outputs of each warp and ROWS rows, with bias, SwiGLU or residual stream.

    With a norm's weight g, x is x g / rms(x).
    """
    DTYPE: gl.constexpr = x_desc.dtype
    OUTPUTS: gl.constexpr = 16 * gl.num_warps()
    BLOCK_N: gl.constexpr = OUTPUTS // SLICES
    SIDES: gl.constexpr = 2 if GATED else 1
    NORMED: gl.constexpr = norm_desc is not None
    PIECES: gl.constexpr = 2 * SUBS
    STEPS: gl.constexpr = K // (SLICES * 128 * SUBS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICES * ROWS, 16])
    first_n = gl.program_id(0) * BLOCK_N
    word_smem = gl.allocate_shared_memory(gl.int8, [SLOTS, SUBS, SIDES, SLICES, BLOCK_N, 128], word_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, PIECES, SLICES, ROWS, 64], x_desc.layout)
    # Slices side by side, as the instruction takes them.
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    X_STEP: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    words = word_smem._reinterpret(gl.int8, [SLOTS * SUBS * SIDES, OUTPUTS, 128], WORDS)
    rights = x_smem._reinterpret(DTYPE, [SLOTS * PIECES, SLICES * ROWS, 64], X)
    x_steps = x_smem._reinterpret(DTYPE, [SLOTS, PIECES * SLICES, ROWS, 64], X_STEP)
    if NORMED:
        norm_smem = gl.allocate_shared_memory(norm_desc.dtype, [SLOTS, PIECES, SLICES, 64], norm_desc.layout)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        norm_steps = norm_smem._reinterpret(norm_desc.dtype, [SLOTS, PIECES * SLICES, 64], FLAT)
    else:
        norm_steps = x_steps
    arrived = new_barriers(SLOTS)
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            mbarrier.expect(arrived.index(place), STEP_BYTES)
            copy_weight(word_desc, arrived, word_smem, place, first_n, place, SUBS)
            if NORMED:
                _copy_norm(norm_desc, arrived, norm_smem, place, place, SUBS)
    grid_behind_may_start()
    grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if place < STEPS:
            copy_x(x_desc, arrived, x_smem, place, place, PIECES)
    # Four outputs of a row in a thread. What sums are multiplied by and what is added to them is
    # asked for before the products, so that nothing waits for it behind them.
    STORE: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORE)), 0)
    places = out_ptr + (m * N + n)
    mask = (m < M) & (n < N)
    scale = gl.load(scale_ptr + n, mask=n < N, other=0.0)
    if GATED:
        up_scale = gl.load(scale_ptr + N + n, mask=n < N, other=0.0)
    if ADD:
        residual = gl.load(places, mask=mask, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)
    y = gl.zeros([OUTPUTS, SLICES * ROWS], gl.float32, layout=MMA)
    up = gl.zeros([OUTPUTS, SLICES * ROWS], gl.float32, layout=MMA)
    slot = 0
    phase = 0
    mbarrier.wait(arrived.index(slot), phase)
    squares = _prepare_x(x_steps, norm_steps, slot, SLICES, SUBS, ROWS, DTYPE, NORMED)
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
            copy_weight(word_desc, arrived, word_smem, free_slot, first_n, ahead, SUBS)
            copy_x(x_desc, arrived, x_smem, free_slot, ahead, PIECES)
            if NORMED:
                _copy_norm(norm_desc, arrived, norm_smem, free_slot, ahead, SUBS)
        y, up = _begin_products(words, rights, slot, y, up, SUBS, SIDES, KIND, DTYPE, MMA)
        slot, phase = advance(slot, phase, SLOTS)
        mbarrier.wait(arrived.index(slot), phase)
        squares += _prepare_x(x_steps, norm_steps, slot, SLICES, SUBS, ROWS, DTYPE, NORMED)
        y = warpgroup_mma_wait(0, deps=[y])
        if GATED:
            up = warpgroup_mma_wait(0, deps=[up])
    fence_async_shared()
    gl.thread_barrier()
    y, up = _begin_products(words, rights, slot, y, up, SUBS, SIDES, KIND, DTYPE, MMA)
    y = warpgroup_mma_wait(0, deps=[y])
    if GATED:
        up = warpgroup_mma_wait(0, deps=[up])
    factors = None
    if NORMED:
        of_rows = gl.sum(gl.sum(squares, 2), 0)
        factors = gl.convert_layout(gl.rsqrt(of_rows / K + eps), gl.SliceLayout(0, STORE))
    y = _side(y, factors, scale, SLICES, BLOCK_N, ROWS, STORE)
    if bias_ptr is not None:
        y += bias
    if GATED:
        up = _side(up, factors, up_scale, SLICES, BLOCK_N, ROWS, STORE)
        if bias_ptr is not None:
            up += up_bias
        y = y / (1.0 + gl.exp(-y)) * up
    if ADD:
        y += residual
    gl.store(places, y.to(out_ptr.dtype.element_ty), mask=mask)


def takes_8bit_streams(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes 8 bits with scales of outputs, and inputs that every tile's slices and parts divide.
    """
    return (
        card.has_warpgroup_instructions(weight.device)
        and weight.kind is not QuantKind.INT4
        and weight.dtype.itemsize == 2
        and not weight.is_grouped
        and weight.num_inputs % (_MOST_PARTS * _PART_INPUTS) == 0
        and weight.packed.data_ptr() % 16 == 0
        # Places in a result are 32 bits.
        and weight.num_outputs * MAX_WARPGROUP_ROWS < 1 << 31
    )


def _norm_descriptor(norm_weight: Tensor, tile: Stream8BitTile) -> TensorDescriptor:
    """Steps of a norm's weight: [64 inputs, slice, input], in the order of x."""
    view = norm_weight.view(tile.slices, -1, _PIECE_INPUTS).permute(1, 0, 2)
    return box_descriptor(view, [2 * tile.subs, tile.slices, _PIECE_INPUTS], swizzled=False)


def multiply_8bit_streams(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: Stream8BitTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Some rows times a weight such that `takes_8bit_streams(weight)`.

    Args:
        x: [num_rows, K], at most MAX_WARPGROUP_ROWS of them.
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
    assert 1 <= num_rows <= MAX_WARPGROUP_ROWS and num_inputs == weight.num_inputs and x.dtype == weight.dtype
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    assert num_inputs % (tile.slices * tile.subs * _PART_INPUTS) == 0 and tile.slots >= 2
    assert norm is None or (x.dtype == torch.bfloat16 and norm[0].shape == (num_inputs,))
    rows = rows_class(num_rows)
    words, scales, _ = bits_of(weight)
    norm_weight, eps = (None, 0.0) if norm is None else (aligned(norm[0]), norm[1])
    _stream_8bit_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        weight_descriptor(words, tile.slices, tile.subs, tile.block_n, gated),
        x_descriptor(aligned(x), tile.slices, 2 * tile.subs, rows),
        None if norm_weight is None else _norm_descriptor(norm_weight, tile), scales, bias, out, num_rows, eps,
        N=num_outputs, K=num_inputs, KIND=weight.kind.value, SLICES=tile.slices, SUBS=tile.subs, SLOTS=tile.slots,
        ROWS=rows, STEP_BYTES=_step_bytes(tile, num_rows, gated, 0 if norm_weight is None else norm_weight.itemsize),
        GATED=gated, ADD=add,
        num_warps=tile.num_warps, maxnreg=None, launch_pdl=True,
    )  # fmt: skip


# Slices, parts of 128 inputs, slots, warps.
_VARIANTS: tuple[tuple[int, ...], ...] = ((1, 1, 8), (1, 2, 4), (1, 2, 6), (2, 1, 8), (2, 2, 4), (2, 2, 6), (4, 1, 6))
_VARIANTS += ((1, 1, 6, 8), (1, 2, 4, 8), (2, 1, 6, 8), (2, 2, 4, 8), (4, 1, 4, 8), (4, 1, 6, 8))
_GATED_VARIANTS: tuple[tuple[int, ...], ...] = ((1, 1, 5), (1, 2, 3), (1, 2, 5), (2, 1, 3), (2, 1, 5), (2, 2, 3))
_GATED_VARIANTS += ((4, 1, 3), (1, 1, 4, 8), (1, 1, 6, 8), (2, 1, 3, 8), (2, 1, 5, 8), (4, 1, 4, 8))
# Columns of a side's sums, rows of each slice, from which those of both sides leave no registers.
_MOST_GATED_COLUMNS = 64


def stream_8bit_variants(num_rows: int, gated: bool) -> list[Stream8BitTile]:
    """Tiles that are worth timing, and fit sm_90's shared memory with as many rows and a norm."""
    tiles = (Stream8BitTile(*sizes) for sizes in (_GATED_VARIANTS if gated else _VARIANTS))
    return [
        tile
        for tile in tiles
        if tile.shared_bytes(num_rows, gated, norm_itemsize=4) <= MOST_SLOT_BYTES
        and not (gated and tile.slices * tile.subs * rows_class(num_rows) > _MOST_GATED_COLUMNS)
    ]
