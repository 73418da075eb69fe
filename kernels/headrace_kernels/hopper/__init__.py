"""What kernels for sm_90 (Hopper) in Gluon begin with.

A kernel that orders its own copies and products has the same frame whatever it multiplies: a ring
of slots in shared memory, which the copy engine fills some steps ahead of the tensor cores, a
barrier for each slot, and a launch with descriptors of what is copied.

| file | owns |
|---|---|
| `ring` | in the kernel: barriers, slots and phases, products that begin at 0, early launches |
| `launch` | on the host: descriptors, alignment, how many programs a multiprocessor holds |
| `row_streams` | few rows and a weight that streams by: copies of steps in boxes, and results |
| `stream_k` | products whose steps are shared out equally among programs (stream-K) |

The frame of a kernel, in the order of its code::

    arrived = new_barriers(SLOTS)                     # beside the slots' tiles
    publish_barriers()
    for place in gl.static_range(SLOTS - 1):          # the first steps
        ...                                           # mbarrier.expect, tma.async_copy_...
    slot = 0
    phase = 0
    for step in range(first, last):
        mbarrier.wait(arrived.index(slot), phase)     # the step is here
        gl.thread_barrier()                           # all warps are through with the step before
        if step + (SLOTS - 1) < last:
            ...                                       # copy that step into slot_before(slot, SLOTS)
        ...                                           # multiply slot `slot`
        slot, phase = advance(slot, phase, SLOTS)

Tests run such kernels without a card (`tests/support/gluon_emulation.py`), compile them for sm_90
(`tests/support/compiled_kernels.py`), and compare their code between two states of the tree
(`tests/support/kernel_code.py`).
"""
