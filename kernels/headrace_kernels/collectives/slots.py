"""How ranks write to each other's memory without meeting.

The file has slots, whose turn they are, and what is reset.

Owns the *slots*. A rank's memory has three buffers, each of two slots for every rank: one for the
rank's own tensor, or the part of it that is added up here, and one for a sum of the rank's. A call
uses one buffer: a rank writes into its slots of the others' buffers, and waits until no word that
must come is the sentinel in its own (`collectives.words`). A word is its own flag, so stores need
no order, no fence and no mark. What one call has read the next resets to the sentinel.

Why that holds, whatever sizes, types and kernels follow each other, with whatever else between
them, as long as all ranks have the same calls in the same order, and a rank's calls run one after
the other:

- A rank that has ended call n has seen words of call n from every other rank. (There are no calls
  of nothing.) So all others had begun call n, and had ended call n - 1 with all its programs and
  stores: a call begins when the kernel before it in its stream or graph has ended. Where its
  programs start earlier (`early_launch`), it begins behind their wait for that end, which every
  kernel between two calls has waited for in the same way; nothing is read, sent, reset or counted
  before.
- Nobody reads too early: what is in a buffer is the sentinel or of this call. Buffer n % 3 was used
  in call n - 3, and this rank reset it in its call n - 2. The first word of call n comes from a
  rank that has ended its call n - 1, for which this rank had to begin its call n - 1, so it had
  ended n - 2.
- Nobody overwrites what is still read: the first word of call n + 3 comes from a rank that has
  ended call n + 2. So this rank had begun n + 2, and ended n, which read the buffer, and n + 1,
  which reset it.
- No word comes late: a vector is stored once, by one thread, and all four words of it are seen
  before its reader ends the call. So no word of call n is under way when call n + 1 resets it.
- What is reset is what was written: a program keeps, beside the next call's turn, how many
  vectors the slots of this one hold. Every launch has the same number of programs, so all of them
  count all calls; in a graph they count on.
- Nothing is read out of a cache that others do not see: words are stored and looked at as what any
  processor of the system may change (`relaxed.sys`, past the first cache). Vectors may be torn,
  words are not.

At first all words are the sentinel on all ranks, before any rank's first call. A group of which a
rank was lost is not used again: its processes end, and their memory with them.

Program i of a rank waits for programs up to i of other ranks and for none of its own rank, and what
it waits for is sent before those wait for the same. So it does not matter whether all programs of a
launch run at once, as long as they begin in their order. The kernel behind may take what room is
left only once all of them have started.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.collectives.words import reset_vectors

BUFFERS = 3
# Kinds of slots that each rank has in a buffer.
KINDS = 2
# int32 of each program: the next call's buffer; vectors that slots of either kind hold of the call
# before.
STATE_SIZE = 3
_BUFFERS = tl.constexpr(BUFFERS)
_KINDS = tl.constexpr(KINDS)
_STATE_SIZE = tl.constexpr(STATE_SIZE)
# Vectors that lie side by side for a program go in whole warps' stores.
_WARP = tl.constexpr(32)


@triton.jit
def share_of(num_vectors, part, PARTS: tl.constexpr):
    """First vector of the part, and the one behind its last.

    Parts are whole warps'; the last ones may have fewer vectors, or none.
    """
    share = tl.cdiv(num_vectors, PARTS * _WARP) * _WARP
    first = part * share
    return first, tl.minimum(first + share, num_vectors)


@triton.jit
def load_state(state):
    """This program's: the call's turn, and vectors of both kinds of the call before."""
    own = state + _STATE_SIZE * tl.program_id(0)
    return tl.load(own), tl.load(own + 1), tl.load(own + 2)


@triton.jit
def buffer_at(turn, SLOT_BYTES: tl.constexpr, WORLD: tl.constexpr):
    """The byte at which a buffer begins.

    First come the slots of all ranks' tensors, then those of their sums.
    """
    return turn.to(tl.int64) * (_KINDS * WORLD * SLOT_BYTES)


@triton.jit
def reset_before(
    slots, now, rank, SLOT_BYTES: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Resets this program's share of what the call before has read.

    `now`: from `load_state`.
    """
    before = tl.where(now[0] == 0, _BUFFERS - 1, now[0] - 1)
    buffer = slots + buffer_at(before, SLOT_BYTES, WORLD)
    for kind in tl.static_range(_KINDS):
        first, end = share_of(now[1 + kind], tl.program_id(0), PROGRAMS)
        for start in range(first, end, BLOCK):
            vectors = start + tl.arange(0, BLOCK)
            for slot in tl.static_range(WORLD):
                address = buffer + (kind * WORLD + slot) * SLOT_BYTES
                reset_vectors(address, vectors, (vectors < end) & (rank != slot))


@triton.jit
def count_call(state, turn, num_vectors, num_sums):
    """Leaves the next call's turn, and how much it is to reset."""
    own = state + _STATE_SIZE * tl.program_id(0)
    # All threads have read before one writes.
    tl.debug_barrier()
    tl.store(own, tl.where(turn == _BUFFERS - 1, 0, turn + 1))
    tl.store(own + 1, num_vectors)
    tl.store(own + 2, num_sums)
