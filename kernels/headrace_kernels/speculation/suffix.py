"""Drafts from a row's own tokens and from a memory of earlier answers, whichever knows more of it.

Owns the lookup in both, and how an answer gets into the memory. A memory is a ring of tokens, the
answers side by side with SEPARATOR between; which rows read which memory is the caller's. The row's
last tokens are looked up as in `ngram`, up to MAX_SUFFIX of them: the place with the longest equal
run wins, and of equally long runs one of the row's own, which are about the same subject.

Launch rule: 16 programs a row, 1,024 places a pass, 4 warps. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

# Longest run of equal tokens that is told from a longer one, and the shortest that counts.
MAX_SUFFIX = 16
MIN_SUFFIX = 2
# Stands in a memory where no answer goes on: equals no token.
SEPARATOR = -1
_PROGRAMS = 16
_BLOCK = 1024
# A place of a run is below this.
_RUN_BITS = 32


def remember_reference(
    memory: Tensor, ends: Tensor, slots: Tensor, history: Tensor, rows: Tensor, firsts: Tensor, lengths: Tensor
) -> None:
    """Specification of `remember`, in plain PyTorch."""
    size = memory.shape[1]
    for slot, row, first in zip(slots.tolist(), rows.tolist(), firsts.tolist(), strict=True):
        answer = history[row, first : int(lengths[row])][-(size - 1) :]
        if not answer.numel():
            continue
        line = torch.cat((answer, answer.new_tensor([SEPARATOR])))
        places = (ends[slot] + torch.arange(line.numel(), device=memory.device)) % size
        memory[slot, places] = line
        ends[slot] += line.numel()


def propose_suffix_reference(
    history: Tensor, rows: Tensor, lengths: Tensor, memory: Tensor, slots: Tensor, num_drafts: int
) -> Tensor:
    """Specification of `propose_suffix`, in plain PyTorch."""
    drafts = torch.zeros(rows.shape[0], num_drafts, dtype=torch.int32, device=history.device)
    for index, (row, length, slot) in enumerate(zip(rows.tolist(), lengths.tolist(), slots.tolist(), strict=True)):
        own, suffix = history[row, :length], history[row, max(0, length - MAX_SUFFIX) : length]
        found, place = _longest_run(own[:-1], suffix)
        remembered, elsewhere = _longest_run(memory[slot], suffix)
        if max(found, remembered) < MIN_SUFFIX:
            drafts[index] = own[-1]
        elif found >= remembered:
            steps = torch.arange(num_drafts, device=history.device)
            drafts[index] = own[place + 1 + steps % (length - 1 - place)]
        else:
            line = memory[slot, (elsewhere + 1 + torch.arange(num_drafts, device=memory.device)) % memory.shape[1]]
            drafts[index] = torch.where((line == SEPARATOR).cumsum(0) > 0, own[-1], line)
    return drafts


def _longest_run(text: Tensor, suffix: Tensor) -> tuple[int, int]:
    """Length and last place of the longest run in `text` that ends as `suffix` does; the latest."""
    runs = torch.zeros_like(text)
    alive = torch.ones_like(text, dtype=torch.bool)
    places = torch.arange(text.numel(), device=text.device)
    for back in range(suffix.numel()):
        alive = alive & (places >= back) & (text.roll(back) == suffix[suffix.numel() - 1 - back])
        runs += alive
    if not text.numel():
        return 0, -1
    best = int(((runs.long() << _RUN_BITS) + places).max())
    return best >> _RUN_BITS, best & ((1 << _RUN_BITS) - 1)


@triton.jit(
    do_not_specialize=["history", "rows", "lengths", "memory", "slots", "best"],
    do_not_specialize_on_alignment=["history", "rows", "lengths", "memory", "slots", "best"],
)
def find_suffix_kernel(
    history,
    rows,
    lengths,
    memory,
    slots,
    best,
    NUM_PLACES: tl.constexpr,
    MEMORY_SIZE: tl.constexpr,
    MAX_SUFFIX: tl.constexpr,
    IN_MEMORY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sample, part): the best place of every PROGRAMS-th block, as run << 32 | place.

    `best` is int64 [num_samples, PROGRAMS], out. Looks in the row's own tokens, or IN_MEMORY.
    """
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = history + tl.load(rows + sample).to(tl.int64) * NUM_PLACES
    last = tl.load(lengths + sample) - 1
    if IN_MEMORY:
        text, size = memory + tl.load(slots + sample).to(tl.int64) * MEMORY_SIZE, last * 0 + MEMORY_SIZE
    else:
        text, size = tokens, last
    found = tl.zeros((BLOCK,), tl.int64)
    for start in range(part * BLOCK, size, PROGRAMS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        alive = place < size
        run = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(MAX_SUFFIX):
            alive = alive & (place >= back) & (last >= back)
            wanted = tl.load(tokens + last - back, mask=last >= back, other=0)
            alive = alive & (tl.load(text + place - back, mask=alive, other=-1) == wanted)
            run += alive.to(tl.int32)
        found = tl.maximum(found, (run.to(tl.int64) << 32) + place)
    tl.store(best + sample * PROGRAMS + part, tl.max(found, axis=0))


@triton.jit(
    do_not_specialize=["history", "rows", "lengths", "memory", "slots", "best", "drafts"],
    do_not_specialize_on_alignment=["history", "rows", "lengths", "memory", "slots", "best", "drafts"],
)
def copy_suffix_kernel(
    history,
    rows,
    lengths,
    memory,
    slots,
    best,
    drafts,
    NUM_PLACES: tl.constexpr,
    MEMORY_SIZE: tl.constexpr,
    MIN_SUFFIX: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sample): what followed the best place, int32 [num_samples, NUM_DRAFTS] out.

    `best` is int64 [2, num_samples, PROGRAMS]: of the row's own tokens, and of its memory.
    """
    sample, num_samples = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    tokens = history + tl.load(rows + sample).to(tl.int64) * NUM_PLACES
    text = memory + tl.load(slots + sample).to(tl.int64) * MEMORY_SIZE
    last = (tl.load(lengths + sample) - 1).to(tl.int64)
    parts = tl.arange(0, PROGRAMS)
    own = tl.max(tl.load(best + sample * PROGRAMS + parts), axis=0)
    other = tl.max(tl.load(best + (num_samples + sample) * PROGRAMS + parts), axis=0)
    offs = tl.arange(0, BLOCK)
    mask = offs < NUM_DRAFTS
    last_token = tl.load(tokens + last)
    # The row's own run: what lies behind it, again from its end on.
    place = own & 0xFFFFFFFF
    mask_own = mask & ((own >> 32) >= MIN_SUFFIX)
    repeated = tl.load(tokens + place + 1 + offs % tl.maximum(last - place, 1).to(tl.int32), mask=mask_own, other=0)
    # The memory's: as far as that answer goes.
    mask_memory = mask & ((other >> 32) >= MIN_SUFFIX)
    behind = ((other & 0xFFFFFFFF) + 1 + offs) % MEMORY_SIZE
    line = tl.load(text + behind, mask=mask_memory, other=-1)
    ended = tl.cumsum((line == -1).to(tl.int32), axis=0) > 0
    draft = tl.where((other >> 32) > (own >> 32), tl.where(ended, last_token, line), repeated)
    draft = tl.where(mask_own | mask_memory, draft, last_token)
    tl.store(drafts + sample * NUM_DRAFTS + offs, draft, mask=mask)


@triton.jit(
    do_not_specialize=["memory", "ends", "slots", "history", "rows", "firsts", "lengths", "num_answers"],
    do_not_specialize_on_alignment=["memory", "ends", "slots", "history", "rows", "firsts", "lengths"],
)
def remember_kernel(
    memory,
    ends,
    slots,
    history,
    rows,
    firsts,
    lengths,
    num_answers,
    NUM_PLACES: tl.constexpr,
    MEMORY_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, as answers of one memory follow each other. Arguments as those of `remember`."""
    for answer in range(0, num_answers):
        slot, row = tl.load(slots + answer).to(tl.int64), tl.load(rows + answer).to(tl.int64)
        length, end = tl.load(lengths + row), tl.load(ends + slot)
        first = tl.maximum(tl.load(firsts + answer), length - (MEMORY_SIZE - 1))
        count = tl.maximum(length - first, 0)
        for start in range(0, count + 1, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            token = tl.load(history + row * NUM_PLACES + first + offs, mask=offs < count, other=-1)
            mask = (offs <= count) & (count > 0)
            tl.store(memory + slot * MEMORY_SIZE + (end + offs) % MEMORY_SIZE, token, mask=mask)
        tl.store(ends + slot, end + tl.where(count > 0, count + 1, 0))
        tl.debug_barrier()


def remember(
    memory: Tensor, ends: Tensor, slots: Tensor, history: Tensor, rows: Tensor, firsts: Tensor, lengths: Tensor
) -> None:
    """Writes the answers of some rows behind what their memories have, over the oldest tokens.

    Args:
        memory: int32 [num_slots, memory_size] contiguous, changed in place.
        ends: int64 [num_slots] tokens and separators that each ever took, changed in place.
        slots: int32 [num_answers] the memory of each answer.
        history: int32 [num_rows, num_places] contiguous.
        rows: int32 [num_answers], each at most once.
        firsts: int64 [num_answers] places of the answers' first tokens, behind the prompts.
        lengths: int64 [num_rows] tokens of each row. Of an answer that is longer than a memory its
            end is kept.
    """
    if not uses_triton(memory):
        remember_reference(memory, ends, slots, history, rows, firsts, lengths)
    elif rows.shape[0]:
        sizes = {"NUM_PLACES": history.shape[1], "MEMORY_SIZE": memory.shape[1]}
        arguments = (memory, ends, slots, history, rows, firsts, lengths, rows.shape[0])
        remember_kernel[(1,)](*arguments, **sizes, BLOCK=_BLOCK, num_warps=4)


def propose_suffix(
    history: Tensor, rows: Tensor, lengths: Tensor, memory: Tensor, slots: Tensor, num_drafts: int
) -> Tensor:
    """What followed the rows' last tokens where these stood before, in the row or in its memory.

    Args:
        history: int32 [num_rows, num_places] contiguous.
        rows: int32 [num_samples].
        lengths: int64 [num_samples] tokens of each row, from 1 to num_places.
        memory: int32 [num_slots, memory_size] contiguous.
        slots: int32 [num_samples] the memory that each row reads.
        num_drafts: Tokens to propose.

    Returns:
        int32 [num_samples, num_drafts]; the row's last token, repeated, where its last MIN_SUFFIX
        tokens never stood before, and behind the end of a remembered answer.
    """
    if not uses_triton(history):
        return propose_suffix_reference(history, rows, lengths, memory, slots, num_drafts)
    num_samples = rows.shape[0]
    best = torch.empty(2, num_samples, _PROGRAMS, dtype=torch.int64, device=history.device)
    drafts = torch.empty(num_samples, num_drafts, dtype=torch.int32, device=history.device)
    if num_samples:
        sizes = {"NUM_PLACES": history.shape[1], "MEMORY_SIZE": memory.shape[1], "PROGRAMS": _PROGRAMS}
        columns = (history, rows, lengths, memory, slots)
        for is_memory in (0, 1):
            find_suffix_kernel[num_samples, _PROGRAMS](
                *columns, best[is_memory], MAX_SUFFIX=MAX_SUFFIX, IN_MEMORY=is_memory, BLOCK=_BLOCK, **sizes
            )
        block = triton.next_power_of_2(num_drafts)
        copy_suffix_kernel[(num_samples,)](
            *columns, best, drafts, MIN_SUFFIX=MIN_SUFFIX, NUM_DRAFTS=num_drafts, BLOCK=block, **sizes, num_warps=1
        )
    return drafts
