"""Kernels that add small tensors of several GPUs up by writing them into each other's memory, alone or with the residual stream and the norm behind it: one trip between cards, and nothing to meet for.

Owns the *slots*: of every rank's memory three buffers with a slot for each rank. A call uses one buffer. A rank writes its tensor into its slot of all others' buffer, and waits until none of the words in its own buffer is blank
(`all_reduce_words`): a word is its own flag, so stores need no order, fence or mark. What a call has read the next call makes blank again, so that a buffer is blank when its turn comes.

Why that holds, whatever sizes, types and kernels of this file follow each other, with whatever else between them, as long as all ranks have the same calls in the same order and a rank's calls run one after the other:

- A rank that has ended call n has words of call n from every other rank, in all sizes but zero, which is not called. So all others had begun call n, and all of their programs had ended call n - 1: a kernel begins when the one before it has ended, and
  what that one stored is there.
- Nobody reads too early: what is in a slot is blank or of this call. Buffer n % 3 was last used in call n - 3, whose words a rank's own call n - 2 made blank. The first word of call n comes from a rank that has ended call n - 1; so this rank had begun n - 1 and ended n - 2.
- Nobody overwrites what is still read: words of call n + 3 come from ranks that have ended call n + 2. So this rank had ended call n + 1, hence n, which read the buffer, and n + 1, which made it blank.
- No word comes late: a vector is stored once, by one thread, and has been seen in all its words before the reader ends its call. No word of call n is under way when it is made blank in call n + 1.
- What is made blank is what was written: a program keeps how many vectors the call before had, beside the buffer of its next call. All launches have `PROGRAMS` programs, so that all programs count all calls; in a graph they count on.
- A buffer of the second card's cache cannot be read out of date: words are stored and looked at past the first cache, as what any processor of the system may change (`relaxed.sys`). Vectors may be torn, words are not.

Programs of one rank never wait for each other. With the norm, the first half of the programs sends and the second waits, so that even programs that run one after the other get on: a row needs one program (its sum of squares), but
its way to the other cards is shared out over many.

Sums are taken in fp32 in the order of the ranks and rounded once, this rank's own part in its place and with the same NaNs as it is sent: all ranks have the same bits, and neither shape nor path matters. Not measured yet.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.all_reduce_words import await_sum, blank_vectors, load_vectors, send_vectors
from headrace_kernels.rms_norm import scaled_by_rms

_RUN_TIME = {"do_not_specialize": ["rank", "num_vectors", "num_rows"]}
# Vectors that lie side by side for a program go in whole warps' stores.
_WARP = tl.constexpr(32)
_BUFFERS = tl.constexpr(3)


@triton.jit
def _share(num_vectors, part, PARTS: tl.constexpr):
    """The part's vectors, as the first and the one behind the last: whole warps'; the last parts may have fewer, or none."""
    share = tl.cdiv(num_vectors, PARTS * _WARP) * _WARP
    first = part * share
    return first, tl.minimum(first + share, num_vectors)


@triton.jit
def _blank(slots, turn, rank, num_vectors, SLOT_BYTES: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Makes this program's share of what the call before has read blank: so many vectors of each of the others."""
    before = slots + tl.where(turn == 0, _BUFFERS - 1, turn - 1) * (WORLD * SLOT_BYTES)
    first, end = _share(num_vectors, tl.program_id(0), PROGRAMS)
    for start in range(first, end, BLOCK):
        vectors = start + tl.arange(0, BLOCK)
        for slot in tl.static_range(WORLD):
            blank_vectors(before + slot * SLOT_BYTES, vectors, (vectors < end) & (rank != slot))


@triton.jit
def _count(own_state, turn, num_vectors):
    """Leaves the next call's turn, and what it is to make blank."""
    # All threads have read before one writes.
    tl.debug_barrier()
    tl.store(own_state, tl.where(turn == _BUFFERS - 1, 0, turn + 1))
    tl.store(own_state + 1, num_vectors)


@triton.jit(**_RUN_TIME)
def push_kernel(
    x,
    out,
    slots,
    others,
    state,
    rank,
    num_vectors,
    SLOT_BYTES: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Makes out the sum of the ranks' x, num_vectors times 16 bytes: at most SLOT_BYTES, and PROGRAMS * BLOCK vectors.

    `slots` is the address of this rank's slots, `others` those of its own first slot in the others' memory. BLOCK: one vector for each thread.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    NUMBERS: tl.constexpr = 16 // (TYPE.primitive_bitwidth // 8)
    own_state = state + 2 * tl.program_id(0)
    turn = tl.load(own_state)
    num_before = tl.load(own_state + 1)
    first, end = _share(num_vectors, tl.program_id(0), PROGRAMS)
    vectors = first + tl.arange(0, BLOCK)
    mask = vectors < end
    w0, w1, w2, w3 = load_vectors(x, vectors, mask)
    buffer = turn * (WORLD * SLOT_BYTES)
    for other in tl.static_range(WORLD - 1):
        send_vectors(others[other] + buffer, vectors, w0, w1, w2, w3, mask)
    _blank(slots, turn, rank, num_before, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
    total = await_sum(slots + buffer, vectors, mask, rank, w0, w1, w2, w3, SLOT_BYTES, WORLD, TYPE)
    offs = vectors[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    tl.store(out + offs, total.to(TYPE), mask=mask[:, None])
    _count(own_state, turn, num_vectors)


@triton.jit(**_RUN_TIME)
def push_norm_kernel(
    x,
    residual,
    weight,
    out,
    slots,
    others,
    state,
    rank,
    num_rows,
    eps,
    SLOT_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the sum of the ranks' x to the residual stream and makes out its norm; [num_rows, SIZE] each, at most SLOT_BYTES.

    At most PROGRAMS / 2 rows, each of at most BLOCK whole vectors. The rest as `push_kernel`'s.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    NUMBERS: tl.constexpr = 16 // (TYPE.primitive_bitwidth // 8)
    SENDERS: tl.constexpr = PROGRAMS // 2
    program = tl.program_id(0)
    own_state = state + 2 * program
    turn = tl.load(own_state)
    num_before = tl.load(own_state + 1)
    num_vectors = num_rows * (SIZE // NUMBERS)
    if program < SENDERS:
        first, end = _share(num_vectors, program, SENDERS)
        vectors = first + tl.arange(0, BLOCK)
        mask = vectors < end
        w0, w1, w2, w3 = load_vectors(x, vectors, mask)
        for other in tl.static_range(WORLD - 1):
            send_vectors(others[other] + turn * (WORLD * SLOT_BYTES), vectors, w0, w1, w2, w3, mask)
        _blank(slots, turn, rank, num_before, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
    else:
        row = program - SENDERS
        columns = tl.arange(0, BLOCK)
        vectors = row * (SIZE // NUMBERS) + columns
        mask = (columns < SIZE // NUMBERS) & (row < num_rows)
        numbers = tl.arange(0, NUMBERS)[None, :]
        offs = vectors[:, None] * NUMBERS + numbers
        # What is there already comes while the rest is waited for.
        w0, w1, w2, w3 = load_vectors(x, vectors, mask)
        stream = tl.load(residual + offs, mask=mask[:, None], other=0.0).to(tl.float32)
        factors = tl.load(weight + columns[:, None] * NUMBERS + numbers, mask=mask[:, None], other=0.0)
        _blank(slots, turn, rank, num_before, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
        buffer = turn * (WORLD * SLOT_BYTES)
        added = await_sum(slots + buffer, vectors, mask, rank, w0, w1, w2, w3, SLOT_BYTES, WORLD, TYPE)
        # Rounded where the two operations by themselves round: the sum, the stream, the norm.
        total = (stream + added.to(TYPE).to(tl.float32)).to(TYPE)
        tl.store(residual + offs, total, mask=mask[:, None])
        wide = total.to(tl.float32)
        mean_square = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / SIZE
        normed = scaled_by_rms(wide, mean_square + tl.zeros((BLOCK,), tl.float32), factors, eps, TYPE)
        tl.store(out + offs, normed.to(TYPE), mask=mask[:, None])
    _count(own_state, turn, num_vectors)
