"""A step of the grouped GEMM of sm_90 for weights in MXFP4: its copies, numbers and products.

Owns what happens between two slots of the ring; tiles, steps in their order and results are
`mxfp4_gemm_sm90`'s. A step is a tile of 128 inputs, group after group: a word's four nibbles are
inputs of four groups of 32 (`weight_formats.mxfp4`). Words lie in a thread's registers as the
tensor cores read numbers from them, two neighbours of a row side by side, so that shifts, a mask
and a product make numbers of a group and move none of them between threads. While one group is
multiplied, numbers of the next one are made.

The copy engine brings words, and rows of x that are in the order of the pairs; rows of tokens,
which are gathered, are copied by the threads, 16 bytes each. The scales of a step are a word for
each output, which its threads ask for a step ahead: rows of scales begin where the copy engine
can't read.

Functions take `given`: x, its descriptor if its rows are in order, the words' descriptor, and
scales; and `rings`: barriers, and slots of x, of words, and of words with all parts in one.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from headrace_kernels.experts.grouped_work_sm90 import of_rows, waited
from headrace_kernels.hopper.ring import advance, slot_before
from headrace_kernels.weight_formats.mxfp4_operands import group_numbers


@gluon.jit
def expect_step(arrived, slot, is_copied, SIZES: gl.constexpr):
    """Says which bytes a slot waits for, where a step is copied to it by the copy engine."""
    X_BYTES: gl.constexpr = 0 if SIZES.is_gated else 256 * SIZES.block_m
    mbarrier.expect(arrived.index(slot), 64 * SIZES.width + X_BYTES, pred=is_copied)


@gluon.jit
def meet(arrived, slot, is_copied, under_way: gl.constexpr, SIZES: gl.constexpr):
    """All warps are through with the step before, and each thread's copies of the next are here.

    So a step may be copied to the slot of the step before, behind so many that are under way.
    """
    if SIZES.is_gated:
        async_copy.wait_group(under_way)
    expect_step(arrived, slot, is_copied, SIZES)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def copy_step(given, rings, slot, here, pairs, step, is_copied, SIZES: gl.constexpr):
    """Copies a step of a piece of work, if it `is_copied`: words of outputs, numbers of pairs.

    Words of outputs behind an expert's last one, and numbers behind the last row of x, are 0.
    """
    copy_words(given, rings, slot, here, step, is_copied, SIZES)
    copy_rows(given, rings, slot, here, pairs, step, is_copied, SIZES)


@gluon.jit
def copy_words(given, rings, slot, here, step, is_copied, SIZES: gl.constexpr):
    """Copies a step's words, which its slot expects already."""
    _, _, word_desc, _ = given
    arrived, _, word_smem, _ = rings
    expert, _, _, first_n = here
    corner = [expert * SIZES.sides, first_n, step * 32]
    words = word_smem.index(slot)
    tma.async_copy_global_to_shared(word_desc, corner, arrived.index(slot), words, pred=is_copied)


@gluon.jit
def copy_rows(given, rings, slot, here, pairs, step, is_copied, SIZES: gl.constexpr):
    """Copies a step's rows of x, which its slot expects already."""
    x_ptr, x_desc, _, _ = given
    arrived, x_smem, _, _ = rings
    _, first, _, _ = here
    if x_desc is not None:
        corner = [first, step * 128]
        tma.async_copy_global_to_shared(x_desc, corner, arrived.index(slot), x_smem.index(slot), pred=is_copied)
    else:
        ROWS: gl.constexpr = of_rows(SIZES.item, gl.num_warps())
        inputs = step * 128 + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS)), 0)
        places = gl.expand_dims(pairs // SIZES.per_token * SIZES.num_inputs, 1) + inputs
        # What is not copied, behind the last input, is not multiplied.
        mask = (inputs < SIZES.num_inputs) & is_copied
        async_copy.async_copy_global_to_shared(x_smem.index(slot), x_ptr + places, mask=mask)
        # One group a step, by which they are counted.
        async_copy.commit_group()


@gluon.jit
def _chosen(is_first, first, second):
    """One of two pieces of work, but for where its expert's pairs end."""
    return (
        gl.where(is_first, first[0], second[0]), gl.where(is_first, first[1], second[1]), 0,
        gl.where(is_first, first[3], second[3]),
    )  # fmt: skip


@gluon.jit
def scale_places(here, SIZES: gl.constexpr, LEFT: gl.constexpr):
    """Places of the first word of scales of each part's outputs, those beyond the last as its."""
    expert, _, _, first_n = here
    N: gl.constexpr = SIZES.num_outputs
    TILES: gl.constexpr = (SIZES.num_inputs + 127) // 128
    PARTS: gl.constexpr = SIZES.parts
    n = gl.minimum(first_n + gl.arange(0, SIZES.part_n, layout=gl.SliceLayout(1, LEFT)), N - 1)
    places = ()
    for part in gl.static_range(PARTS):
        places = places + ((expert * (SIZES.sides * N) + part * N + n) * TILES,)
    return places


@gluon.jit
def step_scales(scale_ptr, places, step):
    """A word of scales for each output of each part."""
    scales = ()
    for part in gl.static_range(len(places)):
        scales = scales + (gl.load(scale_ptr + (places[part] + step)),)
    return scales


@gluon.jit
def _numbers(words, scales, GROUP: gl.constexpr, DTYPE: gl.constexpr):
    """Numbers of a group of each part."""
    numbers = ()
    for part in gl.static_range(len(words)):
        numbers = numbers + (group_numbers(words[part], scales[part], GROUP, DTYPE),)
    return numbers


@gluon.jit
def begin_step(rings, slot, phase, scales, SIZES: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """A step's words where tensor cores read, and its first group's numbers, once they are here."""
    arrived, _, _, sides = rings
    PARTS: gl.constexpr = SIZES.parts
    mbarrier.wait(arrived.index(slot), phase)
    words = ()
    for part in gl.static_range(PARTS):
        words = words + (sides.index(slot).slice(part * SIZES.part_n, SIZES.part_n, 0).load(LEFT),)
    return words, _numbers(words, scales, 0, DTYPE)


@gluon.jit
def _begin_group(x, numbers, sums, GROUP: gl.constexpr):
    """Begins to add a group's products to the sums."""
    inputs = x.slice(GROUP * 32, 32, 1).permute((1, 0))
    running = ()
    for part in gl.static_range(len(numbers)):
        running = running + (warpgroup_mma(numbers[part], inputs, sums[part], is_async=True),)
    return running


@gluon.jit
def _add_group(x, words, scales, running, GROUP: gl.constexpr, SIZES: gl.constexpr, DTYPE: gl.constexpr):
    """Sums with a group's products, which run on; those of the group before are done."""
    numbers = _numbers(words, scales, GROUP, DTYPE)
    return waited(_begin_group(x, numbers, running, GROUP), SIZES.parts, SIZES.parts)


@gluon.jit
def add_step(
    given, rings, state, step, pieces,
    SIZES: gl.constexpr, SLOTS: gl.constexpr, STEPS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Adds a step, but for the last one, to sums, and makes numbers of the next one's first group.

    Args:
        given: Tensors and descriptors, as the module says.
        rings: Barriers and slots, as the module says.
        state: Products that run on, the step's words, scales, and numbers of its first group, its
            slot and phase; those of the next step are returned.
        step: The step.
        pieces: Places of scales; pieces of work and their pairs, this one's and the following
            one's; whether there is a following one.
        SIZES: Sizes.
        SLOTS: Slots.
        STEPS: Steps of a piece of work.
        LEFT: Layout of numbers.
    """
    x_ptr, _, _, scale_ptr = given
    arrived, x_smem, _, _ = rings
    running, words, scales, numbers, slot, phase = state
    places, here, pairs, following, next_pairs, has_following = pieces
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    next_scales = step_scales(scale_ptr, places, step + 1)
    x = x_smem.index(slot)
    running = _begin_group(x, numbers, running, 0)
    free = slot_before(slot, SLOTS)
    ahead = step + (SLOTS - 1)
    is_own = ahead < STEPS
    is_copied = is_own | has_following
    running = _add_group(x, words, scales, running, 1, SIZES, DTYPE)
    meet(arrived, free, is_copied, SLOTS - 3, SIZES)
    running = _add_group(x, words, scales, running, 2, SIZES, DTYPE)
    # Not at once behind the barrier, where less is under way than later.
    copy_step(
        given, rings, free, _chosen(is_own, here, following), gl.where(is_own, pairs, next_pairs),
        gl.where(is_own, ahead, ahead - STEPS), is_copied, SIZES,
    )  # fmt: skip
    running = _add_group(x, words, scales, running, 3, SIZES, DTYPE)
    slot, phase = advance(slot, phase, SLOTS)
    words, numbers = begin_step(rings, slot, phase, next_scales, SIZES, DTYPE, LEFT)
    return running, words, next_scales, numbers, slot, phase


@gluon.jit
def add_last_step(
    given, rings, state, pieces, GROUPS: gl.constexpr, SIZES: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Sums with the last step, which has so many groups; slot and phase of the following one."""
    x_ptr, _, _, _ = given
    arrived, x_smem, _, _ = rings
    running, words, scales, numbers, slot, phase = state
    _, _, _, following, next_pairs, has_following = pieces
    x = x_smem.index(slot)
    running = _begin_group(x, numbers, running, 0)
    free = slot_before(slot, SLOTS)
    # The step before may run on until here.
    running = waited(running, SIZES.parts, SIZES.parts)
    meet(arrived, free, has_following, SLOTS - 3, SIZES)
    copy_step(given, rings, free, following, next_pairs, SLOTS - 2, has_following, SIZES)
    for group in gl.static_range(1, GROUPS):
        running = _add_group(x, words, scales, running, group, SIZES, x_ptr.dtype.element_ty)
    slot, phase = advance(slot, phase, SLOTS)
    return waited(running, 0, SIZES.parts), slot, phase
