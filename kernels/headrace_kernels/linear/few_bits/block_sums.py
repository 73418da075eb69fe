"""Sums in blocks of 128 inputs, each with a scale, of `linear.few_bits.stream_sm90`.

Owns where a program keeps its blocks' scales, and how a step's sums are added to the running ones.

A program's outputs lie in one block of the weight, of each half with SwiGLU. So each 128 inputs of
a slice have one scale, and as a warp's outputs are of one slice, the warp has one too. A program
reads all its scales before it waits for the kernel before, and keeps them in shared memory, a
warp's beside the other warps': no step waits for memory because of them.

Products of 128 inputs begin at 0, and fp32 adds their sums, times the scale, to the running ones
(of slices also those beside the diagonal, which nobody reads).
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from headrace_kernels.linear.few_bits.operands import numbers


@gluon.constexpr_function
def scales_room(groups, sides):
    """Scales of a warp, of so many groups of each side, that there is room for: a power of two."""
    return 1 << (groups * sides - 1).bit_length()


@gluon.jit
def ask_for_scales(
    scale_ptr, first_n, N: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr, SIDES: gl.constexpr
):  # fmt: skip
    """Scales of a program's blocks: [group of a slice and side, warp].

    Args:
        scale_ptr: Pointer to scales, those of the same outputs side by side.
        first_n: The program's first output.
        N: Outputs of each half.
        GROUPS: Blocks along a slice's inputs.
        SLICES: Parts of the inputs side by side.
        SIDES: 2 with SwiGLU, else 1.
    """
    WARPS: gl.constexpr = gl.num_warps()
    HELD: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WARPS, WARPS], [WARPS, 1], [1, 0])
    place = gl.expand_dims(gl.arange(0, scales_room(GROUPS, SIDES), layout=gl.SliceLayout(1, HELD)), 1)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, HELD)), 0)
    block = first_n // 128 + place % SIDES * (N // 128)
    group = warp // (WARPS // SLICES) * GROUPS + place // SIDES
    return gl.load(scale_ptr + (block * (SLICES * GROUPS) + group), mask=place < GROUPS * SIDES, other=0.0)


@gluon.jit
def keep_scales(found, GROUPS: gl.constexpr, SIDES: gl.constexpr):
    """Puts scales that were asked for into shared memory, to be read behind a barrier."""
    ROOM: gl.constexpr = scales_room(GROUPS, SIDES)
    ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.float32, [ROOM, gl.num_warps()], ROW_MAJOR)
    smem.store(found)
    return smem._reinterpret(gl.float32, [ROOM, gl.num_warps()], FLAT)


@gluon.jit
def by_warps(sums, COLUMNS: gl.constexpr):
    """Sums [outputs, COLUMNS] as [warp, 16 outputs, COLUMNS]: no number changes its thread."""
    return sums.reshape((gl.num_warps(), 16, COLUMNS))


@gluon.jit
def _begin_sums(
    words, x, other_x,
    COLUMNS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Begins the product of a part's 128 inputs alone."""
    w, other_w = numbers(words, KIND, DTYPE, gl.DotOperandLayout(0, MMA, 2))
    # Not read: the first instruction begins at 0.
    sums = gl.zeros([16 * gl.num_warps(), COLUMNS], gl.float32, layout=MMA)
    sums = warpgroup_mma(w, x, sums, use_acc=False, is_async=True)
    return warpgroup_mma(other_w, other_x, sums, is_async=True)


@gluon.jit
def begin_block_products(
    words, rights, scales, slot, step, HELD: gl.constexpr,
    PARTS: gl.constexpr, SIDES: gl.constexpr, COLUMNS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Begins a step's products, and reads its scales: a tuple of both for each part and side.

    Of both sides, some are over before others begin, so that threads need fewer registers.

    HELD: layout of the running sums by warps.
    """
    OF_WARPS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, HELD))
    factors = ()
    for place in gl.static_range(PARTS * SIDES):
        factors = factors + (scales.index(step * (PARTS * SIDES) + place).load(OF_WARPS),)
    begun = ()
    for place in gl.static_range(PARTS):
        part = slot * PARTS + place
        x = rights.index(part * 2).permute((1, 0))
        other_x = rights.index(part * 2 + 1).permute((1, 0))
        sums = _begin_sums(words.index(part * SIDES), x, other_x, COLUMNS, KIND, DTYPE, MMA)
        if SIDES == 2:
            up_sums = _begin_sums(words.index(part * SIDES + 1), x, other_x, COLUMNS, KIND, DTYPE, MMA)
            if place < PARTS - 1:
                sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
            begun = begun + (sums, up_sums)
        else:
            begun = begun + (sums,)
    return begun, factors


@gluon.jit
def _scaled(sums, factor, COLUMNS: gl.constexpr):
    """A block's sums times its scale."""
    return by_warps(sums, COLUMNS) * gl.expand_dims(gl.expand_dims(factor, 1), 2)


@gluon.jit
def add_block_products(step, y, up, PARTS: gl.constexpr, SIDES: gl.constexpr, COLUMNS: gl.constexpr):
    """Waits for what `begin_block_products` began, and adds it to y and, of two sides, to up."""
    begun, factors = step
    if PARTS * SIDES == 1:
        sums = (warpgroup_mma_wait(0, deps=begun),)
    else:
        sums = warpgroup_mma_wait(0, deps=begun)
    for place in gl.static_range(PARTS):
        y += _scaled(sums[place * SIDES], factors[place * SIDES], COLUMNS)
        if SIDES == 2:
            up += _scaled(sums[place * SIDES + 1], factors[place * SIDES + 1], COLUMNS)
    return y, up
