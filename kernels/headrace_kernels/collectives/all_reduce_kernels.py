"""Kernels that add tensors of several GPUs up by writing into each other's memory.

    one shot   every rank sends its tensor to all others, waits for theirs, and adds them all up
      with norm  the same, with the residual stream and the norm behind it, whole rows in registers
    two shots  a rank sends each other rank its share, waits for all parts of its own, adds them up,
               sends the sum to all others, and waits for theirs
      with norm  the same, with the residual stream and the norm behind it, which every rank has of
               all rows; a program has one row of each share

`collectives.slots` has how they go without meeting each other, and why that is safe.

Programs of one rank never wait for each other. With the norm, the first half of the programs of one
shot sends and the second waits: a row needs one program (its sum of squares), but its way to the
other cards is shared out over many.

On cards that can (EARLY, see `early_launch`) programs start while the kernel before them still
runs, and wait for its end before they read, send or count anything. They let the kernel behind them
start at once: a product asks for its weights while ranks wait for each other.

Sums are taken in fp32 in the order of the ranks and rounded once, this rank's own part in its place
and with the same NaNs as it is sent: all ranks have the same bits, and neither shape nor path
matters. NVLink multicast is not used.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.collectives.slots import buffer_at, count_call, load_state, reset_before, share_of
from headrace_kernels.collectives.words import (
    await_vectors,
    load_vectors,
    numbers_of,
    send_vectors,
    store_vectors,
    sum_of,
    words_of,
)
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.rms_norm import scaled_by_rms, store_added_norm

_RUN_TIME = {"do_not_specialize": ["rank", "num_vectors", "num_rows"]}


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Lets the kernel behind start, and waits for the one before to end."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()


@triton.jit(**_RUN_TIME)
def one_shot_kernel(
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
    EARLY: tl.constexpr,
):
    """Stores the all-reduce of x in `out`.

    x has num_vectors times 16 bytes: at most SLOT_BYTES, and PROGRAMS * BLOCK vectors.

    `slots` is the address of this rank's slots, `others` those of its own first slot in the others'
    memory, beginning with the rank behind it. BLOCK: one vector for each thread.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    _begin(EARLY)
    now = load_state(state)
    first, end = share_of(num_vectors, tl.program_id(0), PROGRAMS)
    vectors = first + tl.arange(0, BLOCK)
    mask = vectors < end
    own = load_vectors(x, vectors, mask)
    buffer = buffer_at(now[0], SLOT_BYTES, WORLD)
    for other in tl.static_range(WORLD - 1):
        send_vectors(others[other] + buffer, vectors, own, mask)
    reset_before(slots, now, rank, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
    found = await_vectors(slots + buffer, vectors, mask, rank, own, SLOT_BYTES, WORLD)
    store_vectors(out, vectors, words_of(sum_of(found, TYPE, WORLD).to(TYPE)), mask)
    count_call(state, now[0], num_vectors, 0)


@triton.jit(**_RUN_TIME)
def one_shot_norm_kernel(
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
    EARLY: tl.constexpr,
):
    """Adds the all-reduce of x to the residual stream and stores its norm in `out`.

    All are [num_rows, SIZE], at most SLOT_BYTES.

    At most PROGRAMS / 2 rows, each of at most BLOCK whole vectors. The rest as `one_shot_kernel`'s.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    NUMBERS: tl.constexpr = 16 // (TYPE.primitive_bitwidth // 8)
    SENDERS: tl.constexpr = PROGRAMS // 2
    program = tl.program_id(0)
    _begin(EARLY)
    now = load_state(state)
    num_vectors = num_rows * (SIZE // NUMBERS)
    if program < SENDERS:
        first, end = share_of(num_vectors, program, SENDERS)
        vectors = first + tl.arange(0, BLOCK)
        mask = vectors < end
        own = load_vectors(x, vectors, mask)
        for other in tl.static_range(WORLD - 1):
            send_vectors(others[other] + buffer_at(now[0], SLOT_BYTES, WORLD), vectors, own, mask)
        reset_before(slots, now, rank, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
    else:
        row = program - SENDERS
        columns = tl.arange(0, BLOCK)
        vectors = row * (SIZE // NUMBERS) + columns
        mask = (columns < SIZE // NUMBERS) & (row < num_rows)
        numbers = tl.arange(0, NUMBERS)[None, :]
        offs = vectors[:, None] * NUMBERS + numbers
        # What is there already comes while the rest is waited for.
        own = load_vectors(x, vectors, mask)
        stream = tl.load(residual + offs, mask=mask[:, None], other=0.0).to(tl.float32)
        factors = tl.load(weight + columns[:, None] * NUMBERS + numbers, mask=mask[:, None], other=0.0)
        reset_before(slots, now, rank, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
        buffer = slots + buffer_at(now[0], SLOT_BYTES, WORLD)
        added = sum_of(await_vectors(buffer, vectors, mask, rank, own, SLOT_BYTES, WORLD), TYPE, WORLD)
        # Rounded where the two operations by themselves round: the sum, the stream, the norm.
        total = (stream + added.to(TYPE).to(tl.float32)).to(TYPE)
        tl.store(residual + offs, total, mask=mask[:, None])
        wide = total.to(tl.float32)
        mean_square = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / SIZE
        normed = scaled_by_rms(wide, mean_square + tl.zeros((BLOCK,), tl.float32), factors, eps)
        tl.store(out + offs, normed.to(TYPE), mask=mask[:, None])
    count_call(state, now[0], num_vectors, 0)


@triton.jit(**_RUN_TIME)
def two_shot_kernel(
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
    EARLY: tl.constexpr,
):
    """Does `one_shot_kernel` for num_vectors of which each rank reduces a share.

    The share of each of WORLD ranks has at most SLOT_BYTES.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    _begin(EARLY)
    now = load_state(state)
    # Of a rank; the last ones may have less, or nothing. Whole shares are sent nevertheless.
    share = tl.cdiv(num_vectors, WORLD)
    first, end = share_of(share, tl.program_id(0), PROGRAMS)
    buffer = buffer_at(now[0], SLOT_BYTES, WORLD)
    for start in range(first, end, BLOCK):
        vectors = start + tl.arange(0, BLOCK)
        # All loads are under way before the first store.
        parts = ()
        for other in tl.static_range(1, WORLD):
            places = (rank + other) % WORLD * share + vectors
            parts = parts + load_vectors(x, places, (vectors < end) & (places < num_vectors))
        for other in tl.static_range(WORLD - 1):
            words = parts[4 * other], parts[4 * other + 1], parts[4 * other + 2], parts[4 * other + 3]
            send_vectors(others[other] + buffer, vectors, words, vectors < end)
    reset_before(slots, now, rank, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
    for start in range(first, end, BLOCK):
        vectors = start + tl.arange(0, BLOCK)
        places = rank * share + vectors
        mask = vectors < end
        own = load_vectors(x, places, mask & (places < num_vectors))
        found = await_vectors(slots + buffer, vectors, mask, rank, own, SLOT_BYTES, WORLD)
        total = words_of(sum_of(found, TYPE, WORLD).to(TYPE))
        for other in tl.static_range(WORLD - 1):
            send_vectors(others[other] + buffer + WORLD * SLOT_BYTES, vectors, total, mask)
        store_vectors(out, places, total, mask & (places < num_vectors))
    sums = slots + buffer + WORLD * SLOT_BYTES
    for start in range(first, end, BLOCK):
        vectors = start + tl.arange(0, BLOCK)
        mask = vectors < end
        zeros = tl.zeros((BLOCK,), tl.int32)
        found = await_vectors(sums, vectors, mask, rank, (zeros, zeros, zeros, zeros), SLOT_BYTES, WORLD)
        for slot in tl.static_range(WORLD):
            places = slot * share + vectors
            words = found[4 * slot], found[4 * slot + 1], found[4 * slot + 2], found[4 * slot + 3]
            store_vectors(out, places, words, mask & (places < num_vectors) & (rank != slot))
    count_call(state, now[0], share, share)


@triton.jit(**_RUN_TIME)
def two_shot_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    slots,
    others,
    state,
    rank,
    num_rows,
    eps,
    room,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Does `one_shot_norm_kernel` for at most PROGRAMS rows a share, at most SLOT_BYTES.

    Norms are as `store_added_norm` stores them: of 16 bits, or with `scales` of 8, in groups if
    `room`, GROUP and GROUPS say so.

    Rows lie in threads as the norm's own kernel has them, so that the two, one after the other,
    give the same bits.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    NUMBERS: tl.constexpr = 16 // (TYPE.primitive_bitwidth // 8)
    VECTORS: tl.constexpr = SIZE // NUMBERS
    program = tl.program_id(0)
    _begin(EARLY)
    now = load_state(state)
    buffer = buffer_at(now[0], SLOT_BYTES, WORLD)
    # Rows of a rank; the last ones may have fewer, or none. Whole shares are sent nevertheless.
    share = tl.cdiv(num_rows, WORLD)
    columns = tl.arange(0, BLOCK)
    mask = (columns < VECTORS) & (program < share)
    # In a slot.
    vectors = program * VECTORS + columns
    # All loads are under way before the first store.
    parts = ()
    for other in tl.static_range(1, WORLD):
        row = (rank + other) % WORLD * share + program
        parts = parts + load_vectors(x, row * VECTORS + columns, mask & (row < num_rows))
    for other in tl.static_range(WORLD - 1):
        words = parts[4 * other], parts[4 * other + 1], parts[4 * other + 2], parts[4 * other + 3]
        send_vectors(others[other] + buffer, vectors, words, mask)
    # What is there already comes while the rest is waited for.
    row = rank * share + program
    own = load_vectors(x, row * VECTORS + columns, mask & (row < num_rows))
    offs = tl.arange(0, BLOCK * NUMBERS)[None, :]
    factors = tl.load(weight + offs, mask=offs < SIZE, other=0.0)
    # Of programs without a row of a share, none is left.
    num_left = tl.where(program < share, num_rows, 0)
    reset_before(slots, now, rank, SLOT_BYTES, WORLD, PROGRAMS, BLOCK)
    found = await_vectors(slots + buffer, vectors, mask, rank, own, SLOT_BYTES, WORLD)
    sums = buffer + WORLD * SLOT_BYTES
    words = words_of(sum_of(found, TYPE, WORLD).to(TYPE))
    for other in tl.static_range(WORLD - 1):
        send_vectors(others[other] + sums, vectors, words, mask)
    # Its own row first, while the others' are under way.
    for other in tl.static_range(WORLD):
        slot = (rank + other) % WORLD
        rows = slot * share + program + tl.arange(0, 1)
        places = rows[:, None] * SIZE + offs
        is_number = (rows < num_left)[:, None] & (offs < SIZE)
        stream = tl.load(residual + places, mask=is_number, other=0.0).to(tl.float32)
        if other > 0:
            # Of one slot, which is nobody's own.
            words = await_vectors(slots + sums + slot * SLOT_BYTES, vectors, mask, -1, words, SLOT_BYTES, 1)
        added = tl.reshape(numbers_of(words[0], words[1], words[2], words[3], TYPE), (1, BLOCK * NUMBERS))
        store_added_norm(
            added, stream, factors, residual, out, scales, places, is_number, rows, num_left, eps, SIZE,
            room, GROUP, GROUPS,
        )  # fmt: skip
    count_call(state, now[0], share * VECTORS, share * VECTORS)
