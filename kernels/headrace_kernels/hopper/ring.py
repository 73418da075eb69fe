"""The ring of slots in shared memory that the copy engine fills ahead of the tensor cores.

Owns its barriers, the order of slots and phases, products that begin at 0, and early launches of
kernels in Gluon. What a slot holds, and its copies, are each kernel's own.

A ring has SLOTS slots, and a step's tiles are copied into one of them, SLOTS - 1 steps before they
are multiplied. Each slot has a barrier (mbarrier) with a phase bit, which turns whenever all bytes
that the slot expects have come. A kernel waits for the phase of the round that it is in: 0 for the
first step in a slot, 1 for the second, and so on in turn.
"""

# Gluon's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma


@gluon.jit
def new_barriers(SLOTS: gl.constexpr):
    """Barriers of a ring, [SLOTS, 1], of which each waits for one arrival and the bytes it expects.

    They may be used behind `publish_barriers`.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(place), count=1)
    return barriers


@gluon.jit
def publish_barriers():
    """Lets the copy engine and all warps of the program see the barriers made so far."""
    # The copy engine reads shared memory past the order in which threads write it.
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def next_slot(slot, SLOTS: gl.constexpr):
    """The slot of the step behind the one in `slot`."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1)


@gluon.jit
def slot_before(slot, SLOTS: gl.constexpr):
    """The slot of the step before the one in `slot`: free once all warps are at `slot`."""
    return gl.where(slot == 0, SLOTS - 1, slot - 1)


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """Slot and phase of the next step; the phase turns where the ring begins anew."""
    phase = gl.where(slot == SLOTS - 1, 1 - phase, phase)
    return next_slot(slot, SLOTS), phase


@gluon.jit
def begin_product(left, right, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins left @ right, fp32 [ROWS, COLUMNS] in LAYOUT; `warpgroup_mma_wait` gives the sums."""
    # Not read: with use_acc=False the first instruction of a product begins at 0.
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def grid_before_is_done():
    """`early_launch.grid_before_is_done` for kernels in Gluon."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_behind_may_start():
    """`early_launch.grid_behind_may_start` for kernels in Gluon."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
