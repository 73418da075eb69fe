"""The kernel of 2 to 64 rows for weights of 8 bits with scales of outputs, on sm_90.

Bytes become numbers in the registers that the tensor cores read them from, and nothing is
exchanged between threads.

Owns the kernels, their launch, which weights they take, and the tiles that are worth trying; which
runs when is `linear.quantized`'s. They are written in Gluon, because the order of copies and
products is what they are about:

Y^T = W X^T by instructions of 16 outputs x 16 inputs x 8 rows. Which 16 inputs an instruction takes
is free, as long as they are the same ones of the weight and of x. So of 64 inputs in a row thread t
of four has inputs 16 t to 16 t + 15 of both sides, four for each of four instructions: 16 bytes of
a weight in one load from shared memory, 32 of x in two, all as they lie in memory and in the
registers that instructions take together (`_held`). Rows of both tiles are swizzled such that no
load waits for a bank. Dequantizing takes 2 instructions for each weight of a thread, all else 1.2
at 32 rows.

A step is 128 inputs: words of all outputs of a program and x of all rows are copied ahead by
`cp.async`, SLOTS - 1 steps, which is what is under way from memory. Warps have outputs of their own
and share x: the more outputs a program has, the less often x is read, which adds up in the cache (x
of 32 rows is half as many bytes as the words of 128 outputs). Outputs come in sides, which are
dequantized one after the other to save registers; with SwiGLU the first of two is the gate's and
the second the other half's. Sums are fp32 in an order that depends on the tile alone: no atomics,
the same bits every time. With several splits of the inputs they go to memory, where `_end_kernel`
adds them; bias, SwiGLU and residual stream come in whichever kernel is last.

A program starts while the kernel before still runs, and has its first steps' words copied before it
waits for what that kernel writes (`dense_small_batch_sm90`): no kernel writes a weight's words.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from headrace_kernels import card, early_launch
from headrace_kernels.hopper.launch import aligned
from headrace_kernels.hopper.ring import grid_before_is_done, grid_behind_may_start, next_slot, slot_before
from headrace_kernels.linear.dense_small_batch_kernels import finish
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.weight_formats.conversions import byte_assembly
from headrace_kernels.weight_formats.kernel_layout import bits_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Rows of a program, at most.
MAX_SMALL_BATCH_8BIT_ROWS = 64
# Inputs that are copied at a time: the least that four threads with 16 in a row, twice, can share.
_STEP_INPUTS = 128
# Outputs of a program of the kernel that ends a product of several splits.
_END_OUTPUTS = 512


class SmallBatch8BitTile(NamedTuple):
    """How a product is cut."""

    # Outputs of a side: 16 or more for every warp.
    side_n: int
    # 1, 2 or 4; with SwiGLU 2.
    sides: int
    num_warps: int
    # Steps in shared memory, at least 2.
    slots: int
    # Programs among which the inputs are split.
    splits: int = 1
    # Most registers of a thread, so that more programs run at a time; None: as the compiler likes.
    max_registers: int | None = None

    def shared_bytes(self, num_rows: int) -> int:
        """Shared memory of a program."""
        return self.slots * _STEP_INPUTS * (self.sides * self.side_n + 2 * rows_of(num_rows))


def rows_of(num_rows: int) -> int:
    """Rows that a program multiplies: the class of a number of rows."""
    return max(8, triton.next_power_of_2(num_rows))


@gluon.jit
def _copy_words(
    word_smem, word_ptr, slot, step, first_n,
    AWAY: gl.constexpr, LAST_N: gl.constexpr, WORDS: gl.constexpr, SIDE_N: gl.constexpr, SIDES: gl.constexpr,
):  # fmt: skip
    """A step's 128 words of each output of all sides."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, SIDES * SIDE_N, layout=gl.SliceLayout(1, LAYOUT))
    # Outputs beyond the end repeat the last one, and are not stored.
    outputs = gl.minimum(first_n + i + i // SIDE_N * (AWAY - SIDE_N), LAST_N) - first_n
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    places = word_ptr + step * 128 + (gl.expand_dims(outputs, 1) * WORDS + gl.expand_dims(j, 0))
    async_copy.async_copy_global_to_shared(word_smem.index(slot), places)


@gluon.jit
def _copy_x(x_smem, x_ptr, slot, step, M, K: gl.constexpr, ROWS: gl.constexpr):
    """A step's inputs of all rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    k = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)), 0)
    # Rows beyond the end are not read: sums of theirs are not stored.
    async_copy.async_copy_global_to_shared(x_smem.index(slot), x_ptr + step * 128 + (m * K + k), mask=m < M)


@gluon.constexpr_function
def _held(num_others, is_words, num_warps):
    """Which thread holds which words [outputs, 128 inputs], or which x [128 inputs, rows].

    Thread 4 g + t of a warp holds inputs 16 t to 16 t + 15 of each half, of every eighth output or
    row from g on.

    Warps have outputs 16 apart, and all of x.
    """
    inputs, beyond = [1, 2, 4, 8, 64], [1 << bit for bit in range(3, num_others.bit_length() - 1)]
    bits = num_warps.bit_length() - 1
    warps = beyond[1 : 1 + bits] if is_words else [0] * bits
    others = beyond[:1] + beyond[1 + bits :] if is_words else beyond

    def place(other, k):
        return [other, k] if is_words else [k, other]

    return gl.DistributedLinearLayout(
        [place(0, k) for k in inputs] + [place(other, 0) for other in others],
        [place(0, 16), place(0, 32), place(1, 0), place(2, 0), place(4, 0)],
        [place(other, 0) for other in warps],
        [],
        place(num_others, 128),
    )


@gluon.jit
def _products(
    x_smem, word_smem, totals, slot,
    MMA: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, SIDE_N: gl.constexpr, SIDES: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Adds a step's products to the sums of all sides."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS_HELD: gl.constexpr = _held(SIDE_N, True, gl.num_warps())
    X_HELD: gl.constexpr = _held(ROWS, False, gl.num_warps())
    x = x_smem.index(slot).permute((1, 0)).load(X_HELD)
    # From (half, thread, instruction, which eight of its inputs, pair) to the order of an
    # instruction: no number changes its thread.
    x = x.reshape((2, 4, 4, 2, 2, ROWS)).permute((0, 2, 3, 1, 4, 5)).reshape((128, ROWS))
    x = gl.convert_layout(x, RIGHT)
    BYTES: gl.constexpr = byte_assembly(KIND, DTYPE == gl.bfloat16)
    added = ()
    for side in gl.static_range(SIDES):
        words = word_smem.index(slot).slice(side * SIDE_N, SIDE_N, 0).load(WORDS_HELD)
        w = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=4)
        w = w.reshape((SIDE_N, 2, 4, 4, 2, 2)).permute((0, 1, 3, 4, 2, 5)).reshape((SIDE_N, 128))
        added = added + (mma_v2(gl.convert_layout(w, LEFT), x, totals[side]),)
    return added


@gluon.jit(do_not_specialize=["M", "share"])
def _small_batch_8bit_kernel(
    x_ptr, word_ptr, scale_ptr, bias_ptr, out_ptr,
    M, share,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, SIDE_N: gl.constexpr, SIDES: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for SIDES SIDE_N outputs, ROWS rows and `share` steps of the inputs.

    N: of the result. If inputs are SPLIT, `out` is fp32 [splits, M, outputs of the weight] of sums.
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    # Eight threads load at a time: four neighbours of two rows.
    WORD_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [1, 0])
    X_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 2, [1, 0])
    split = gl.program_id(1)
    first = split * share
    last = gl.minimum(first + share, K // 128)
    WEIGHT_N: gl.constexpr = N * 2 if GATED else N
    AWAY: gl.constexpr = N if GATED else SIDE_N
    first_n = gl.program_id(0) * (SIDE_N if GATED else SIDES * SIDE_N)
    word_ptr += first_n.to(gl.int64) * K
    x_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, 128], X_LAYOUT)
    word_smem = gl.allocate_shared_memory(gl.int8, [SLOTS, SIDES * SIDE_N, 128], WORD_LAYOUT)
    for place in gl.static_range(SLOTS - 1):
        if first + place < last:
            _copy_words(word_smem, word_ptr, place, first + place, first_n, AWAY, WEIGHT_N - 1, K, SIDE_N, SIDES)
    grid_behind_may_start()
    grid_before_is_done()
    # The first group has the words of all steps so far: they have been under way for longer.
    for place in gl.static_range(SLOTS - 1):
        if first + place < last:
            _copy_x(x_smem, x_ptr, place, first + place, M, K, ROWS)
        async_copy.commit_group()
    totals = ()
    for _side in gl.static_range(SIDES):
        totals = totals + (gl.zeros([SIDE_N, ROWS], gl.float32, layout=MMA),)
    slot = 0
    for step in range(first, last):
        async_copy.wait_group(SLOTS - 2)
        # All warps see the copies of all, and are through with the slot before this one.
        gl.thread_barrier()
        free_slot = slot_before(slot, SLOTS)
        ahead = step + (SLOTS - 1)
        if ahead < last:
            _copy_words(word_smem, word_ptr, free_slot, ahead, first_n, AWAY, WEIGHT_N - 1, K, SIDE_N, SIDES)
            _copy_x(x_smem, x_ptr, free_slot, ahead, M, K, ROWS)
        async_copy.commit_group()
        totals = _products(x_smem, word_smem, totals, slot, MMA, KIND, DTYPE, SIDE_N, SIDES, ROWS)
        slot = next_slot(slot, SLOTS)
    async_copy.wait_group(0)
    for side in gl.static_range(SIDES):
        n = gl.expand_dims(first_n + side * AWAY + gl.arange(0, SIDE_N, layout=gl.SliceLayout(1, MMA)), 1)
        scaled = totals[side] * gl.load(scale_ptr + gl.minimum(n, WEIGHT_N - 1))
        if SPLIT:
            m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)), 0)
            places = out_ptr + split.to(gl.int64) * M * WEIGHT_N + (m * WEIGHT_N + n)
            gl.store(places, scaled, mask=(m < M) & (n < WEIGHT_N))
        elif GATED:
            if side == 0:
                gate = scaled
            else:
                _finish(gate, scaled, bias_ptr, out_ptr, first_n, M, N, SIDE_N, ROWS, MMA, True, ADD)
        else:
            _finish(scaled, scaled, bias_ptr, out_ptr, first_n + side * SIDE_N, M, N, SIDE_N, ROWS, MMA, False, ADD)


@gluon.jit
def _finish(
    y, up, bias_ptr, out_ptr, first_n, M,
    N: gl.constexpr, SIDE_N: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Bias, SwiGLU or residual stream, one rounding, store: `finish` in Gluon."""
    n = gl.expand_dims(first_n + gl.arange(0, SIDE_N, layout=gl.SliceLayout(1, MMA)), 1)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    if GATED:
        if bias_ptr is not None:
            up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)
        y = y / (1.0 + gl.exp(-y)) * up
    # Eight outputs of a row in a thread.
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [gl.num_warps(), 1], [0, 1])
    n_out = gl.expand_dims(first_n + gl.arange(0, SIDE_N, layout=gl.SliceLayout(1, STORE)), 1)
    m_out = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORE)), 0)
    places = out_ptr + (m_out * N + n_out)
    mask = (m_out < M) & (n_out < N)
    y = gl.convert_layout(y, STORE)
    if ADD:
        y += gl.load(places, mask=mask, other=0.0).to(gl.float32)
    gl.store(places, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "N"])
def _end_kernel(
    sums_ptr, bias_ptr, out_ptr, M, N,
    SPLITS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds [SPLITS, M, N, or 2 N if GATED] in order."""
    if EARLY:
        early_launch.grid_behind_may_start()
        early_launch.grid_before_is_done()
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total, up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    weight_n = N * 2 if GATED else N
    for split in tl.static_range(SPLITS):
        places = sums_ptr + (split * M + row).to(tl.int64) * weight_n + n
        total += tl.load(places, mask=n < N, other=0.0)
        if GATED:
            up += tl.load(places + N, mask=n < N, other=0.0)
    finish(total, up, row, n, bias_ptr, out_ptr, M, N, GATED, ADD)


def takes_small_batch_8bit(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes 8 bits with scales of outputs, and inputs of whole steps.
    """
    return (
        card.has_warpgroup_instructions(weight.device)
        and weight.kind is not QuantKind.INT4
        and weight.dtype.itemsize == 2
        and not weight.is_grouped
        and weight.num_inputs % _STEP_INPUTS == 0
        # Places in a weight are 32 bits.
        and weight.num_outputs * weight.num_inputs < 1 << 31
    )


def multiply_small_batch_8bit(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: SmallBatch8BitTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Multiplies 2 to 64 rows by a weight of 8 bits.

    Args:
        x: [num_rows, K], at most MAX_SMALL_BATCH_8BIT_ROWS of them.
        weight: N outputs, or 2 N with the gate first, such that `takes_small_batch_8bit(weight)`.
        bias: One per output of the weight.
        out: [num_rows, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x, by a kernel of its own.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert num_rows <= MAX_SMALL_BATCH_8BIT_ROWS and num_inputs == weight.num_inputs and x.dtype == weight.dtype
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous()
    assert num_inputs % _STEP_INPUTS == 0 and tile.side_n % (16 * tile.num_warps) == 0 and tile.slots >= 2
    x = aligned(x if norm is None else rms_norm(x, *norm))
    splits, sides = tile.splits, 2 if gated else tile.sides
    target = out if splits == 1 else out.new_empty(splits, num_rows, weight.num_outputs, dtype=torch.float32)
    words, scales, _ = bits_of(weight)
    programs = triton.cdiv(num_outputs, tile.side_n * (1 if gated else sides))
    _small_batch_8bit_kernel[(programs, splits)](
        x, words, scales, bias, target, num_rows, triton.cdiv(num_inputs, _STEP_INPUTS * splits),
        N=num_outputs, K=num_inputs, KIND=weight.kind.value, SIDE_N=tile.side_n, SIDES=sides,
        ROWS=rows_of(num_rows), SLOTS=tile.slots,
        GATED=gated, ADD=add and splits == 1, SPLIT=splits > 1, num_warps=tile.num_warps, maxnreg=tile.max_registers,
        launch_pdl=True,
    )  # fmt: skip
    if splits > 1:
        early = card.launches_early(x.device)
        _end_kernel[(triton.cdiv(num_outputs, _END_OUTPUTS), num_rows)](
            target, bias, out, num_rows, num_outputs, SPLITS=splits, GATED=gated, ADD=add, BLOCK=_END_OUTPUTS,
            EARLY=early, launch_pdl=early,
        )  # fmt: skip


# Outputs of a side, sides, warps, slots, by the most rows that they are for.
_VARIANTS = {
    16: [(64, 2, 4, 4), (64, 2, 4, 3), (64, 1, 4, 5), (32, 2, 2, 6), (128, 2, 8, 3)],
    32: [(64, 2, 4, 4), (64, 2, 4, 3), (64, 1, 4, 4), (128, 2, 8, 4), (128, 1, 8, 4)],
    64: [(64, 2, 4, 3), (64, 1, 4, 3), (128, 2, 8, 4), (128, 1, 8, 4)],
}


def small_batch_8bit_variants(
    num_rows: int, num_outputs: int, num_inputs: int, gated: bool
) -> list[SmallBatch8BitTile]:
    """Tiles that are worth timing for up to 64 rows.

    They have splits for half a wave to some waves of programs on 132 multiprocessors.
    """
    sizes = _VARIANTS[min(most for most in _VARIANTS if most >= num_rows)]
    tiles = [SmallBatch8BitTile(*size) for size in sizes if not gated or size[1] == 2]
    found = []
    for tile, splits in itertools.product(tiles, (1, 2, 3, 4, 6, 8, 12, 16)):
        programs = splits * triton.cdiv(num_outputs, tile.side_n * (1 if gated else tile.sides))
        is_busy = programs >= 100 and (programs <= 600 or splits == 1)
        if is_busy and num_inputs // (_STEP_INPUTS * splits) >= tile.slots:
            found.append(tile._replace(splits=splits))
    # Small weights fill no wave.
    return found or tiles
