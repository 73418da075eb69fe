"""The kernel that adds larger tensors of several GPUs up by reading each other's memory, in two shots.

Every rank copies its tensor to where others can read it, all meet, every rank adds one of as many shares as there are ranks and leaves the sum to be read, all meet once more, every rank reads all sums.

Owns how programs meet. Program i of a rank meets program i of the others and reads only what those have written, so programs of one rank never wait for each other, and a kernel is one launch. A launch has always
`PROGRAMS` programs, which all take part, so that a call has one number everywhere: a program counts its calls, on its own card, and nothing is ever set back, by the host or by others. In a graph it counts on.

Why nobody reads too early: a program writes its call's mark into the flag that it has with each other rank (release, after all its threads' stores), and waits until the others' marks are there (acquire). Why nobody
overwrites what is still read: calls take turns between two halves of the memory. A program that is in call n + 2 has met the others in call n + 1, which they began after their whole kernel of call n had ended. Marks wrap
around; they are compared by their difference.

Sums are taken in fp32 in the order of the ranks and rounded once, so that all ranks have the same bits, and neither shape nor path matters. NVLink multicast is not used. Not measured yet.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_RUN_TIME = {"do_not_specialize": ["rank", "num_vectors"]}


@triton.jit
def _memory_of(addresses, rank, TYPE: tl.constexpr):
    """A rank's memory. All of it begins at a multiple of 16 bytes, which an address that was loaded does not say."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _meet(flags, rank, mark, WORLD: tl.constexpr, PROGRAMS: tl.constexpr):
    """Returns when program i of every rank has come here with this mark. What they stored before can be read."""
    program = tl.program_id(0)
    # All threads' stores come before the one thread's release.
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + rank * PROGRAMS + program
        tl.atomic_xchg(theirs, mark, sem="release", scope="sys")
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program
    for peer in tl.static_range(WORLD):
        seen = tl.atomic_add(own + peer * PROGRAMS, 0, sem="acquire", scope="sys")
        while seen - mark < 0:
            seen = tl.atomic_add(own + peer * PROGRAMS, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _sum_of_ranks(addresses, offs, mask, WORLD: tl.constexpr, TYPE: tl.constexpr):
    """fp32, in the order of the ranks."""
    total = tl.load(_memory_of(addresses, 0, TYPE) + offs, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(1, WORLD):
        total += tl.load(_memory_of(addresses, peer, TYPE) + offs, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(**_RUN_TIME)
def two_shot_kernel(
    x,
    out,
    addresses,
    flags,
    calls,
    rank,
    num_vectors,
    CAPACITY: tl.constexpr,
    VECTOR: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Makes out the sum of the ranks' x, num_vectors * VECTOR numbers, at most CAPACITY; each rank adds one of WORLD shares."""
    TYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    # A multiple that the compiler knows of, so that masks cut whole vectors.
    num_elements = num_vectors * VECTOR
    # Of a rank; the last ones may have less, or nothing.
    share = tl.cdiv(num_vectors, WORLD) * VECTOR
    call = tl.load(calls + program) + 1
    half = (call & 1) * CAPACITY
    own = _memory_of(addresses, rank, TYPE) + half
    for first in range(program * BLOCK, share, PROGRAMS * BLOCK):
        within = first + tl.arange(0, BLOCK)
        for peer in tl.static_range(WORLD):
            offs = peer * share + within
            mask = (within < share) & (offs < num_elements)
            tl.store(own + offs, tl.load(x + offs, mask=mask), mask=mask)
    _meet(flags, rank, 2 * call - 1, WORLD, PROGRAMS)
    # Sums lie behind both halves of what was copied.
    sums = 2 * CAPACITY + half
    for first in range(program * BLOCK, share, PROGRAMS * BLOCK):
        within = first + tl.arange(0, BLOCK)
        offs = rank * share + within
        mask = (within < share) & (offs < num_elements)
        total = _sum_of_ranks(addresses, half + offs, mask, WORLD, TYPE).to(TYPE)
        tl.store(_memory_of(addresses, rank, TYPE) + sums + offs, total, mask=mask)
    _meet(flags, rank, 2 * call, WORLD, PROGRAMS)
    for first in range(program * BLOCK, share, PROGRAMS * BLOCK):
        within = first + tl.arange(0, BLOCK)
        for peer in tl.static_range(WORLD):
            offs = peer * share + within
            mask = (within < share) & (offs < num_elements)
            tl.store(out + offs, tl.load(_memory_of(addresses, peer, TYPE) + sums + offs, mask=mask), mask=mask)
    tl.store(calls + program, call)
