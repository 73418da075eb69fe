"""Kernels that start while the one before them still runs (programmatic dependent launch, sm_90).

Owns the two instructions, for Triton kernels. A kernel launched with `launch_pdl` starts as soon as
every program of the one before has called `grid_behind_may_start` or ended, and reads what that one
writes behind `grid_before_is_done` only. Between short kernels that saves the time in which a
multiprocessor has nothing to do. Both do nothing in kernels that are launched as usual.

Every program of a kernel that is launched early waits, those without work too, and writes behind
its wait alone. So a kernel's end says that all before it have ended, and none overwrites what an
earlier one still reads. What no kernel writes (weights) may be read before the wait.
Most kernels call `grid_behind_may_start` first. One that waits first tells the kernel behind it
that all kernels before its own have ended: that one may read what those wrote before its wait, past
the first cache, whose lines are older.
"""

# Triton's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grid_behind_may_start():
    """Lets the programs of the next kernel start where there is room for them."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def grid_before_is_done():
    """Waits until the kernel before has ended, and what it wrote can be read."""
    tl.extra.cuda.gdc_wait()
