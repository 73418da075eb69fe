"""Drafts from a row's own tokens: what followed its last ones where they stood before.

Owns the lookup (prompt lookup decoding) over a history of each row's tokens, and how settled tokens
get there. Of all places where the row's last tokens stood before, the one with the longest equal
run wins (up to MAX_RUN tokens), and of equally long runs the latest. What followed there is
drafted; a draft beyond the row's end repeats from the place on, as periodic text does.

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
MAX_RUN = 8
MIN_RUN = 1
_PROGRAMS = 16
_BLOCK = 1024
# A place of a run is below this.
_RUN_BITS = 32


def append_tokens_reference(history: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Specification of `append_tokens`, in plain PyTorch."""
    places = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    fits = places < history.shape[1]
    flat = rows.long()[:, None] * history.shape[1] + places
    history.view(-1)[flat[fits]] = tokens[fits].int()


def propose_ngram_reference(history: Tensor, rows: Tensor, lengths: Tensor, num_drafts: int) -> Tensor:
    """Specification of `propose_ngram`, in plain PyTorch."""
    lengths = lengths.clamp(max=history.shape[1])
    longest = int(lengths.max()) if lengths.numel() else 0
    known = history[rows.long(), :longest].long()
    places = torch.arange(longest, device=history.device)
    last = (lengths.long() - 1)[:, None]
    runs = torch.zeros_like(known)
    alive = places[None] < last
    for back in range(MAX_RUN):
        # The row's token so many before its last one, and the one as many before each place.
        wanted = known.gather(1, (last - back).clamp(min=0))
        shifted = known.roll(back, dims=1)
        alive = alive & (places[None] >= back) & (last >= back) & (shifted == wanted)
        runs += alive
    keys = torch.where(runs >= MIN_RUN, (runs << _RUN_BITS) + places, -1)
    best = keys.max(dim=1, keepdim=True).values if longest else keys.new_full((rows.shape[0], 1), -1)
    place = best & ((1 << _RUN_BITS) - 1)
    steps = torch.arange(num_drafts, device=history.device)[None]
    distance = torch.where(best < 0, 1, last - place)
    source = torch.where(best < 0, last, place + 1 + steps % distance)
    return known.gather(1, source).int() if longest else history.new_zeros(rows.shape[0], num_drafts)


_POINTERS = ["rows", "lengths", "positions"]


@triton.jit(do_not_specialize=_POINTERS, do_not_specialize_on_alignment=_POINTERS)
def append_tokens_kernel(
    history, rows, positions, tokens, NUM_PLACES: tl.constexpr, NUM_TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (sample). Arguments as those of `append_tokens`, both matrices contiguous."""
    sample = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    place = tl.load(positions + sample) + offs
    mask = (offs < NUM_TOKENS) & (place < NUM_PLACES)
    token = tl.load(tokens + sample * NUM_TOKENS + offs, mask=mask, other=0)
    row = tl.load(rows + sample).to(tl.int64)
    tl.store(history + row * NUM_PLACES + place, token.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=_POINTERS, do_not_specialize_on_alignment=_POINTERS)
def find_runs_kernel(
    history,
    rows,
    lengths,
    best,
    NUM_PLACES: tl.constexpr,
    MAX_RUN: tl.constexpr,
    MIN_RUN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sample, part): the best place of every PROGRAMS-th block, as run << 32 | place.

    `best` is int64 [num_samples, PROGRAMS], out: -1 where no run is long enough.
    """
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = history + tl.load(rows + sample).to(tl.int64) * NUM_PLACES
    last = tl.minimum(tl.load(lengths + sample), NUM_PLACES) - 1
    found = tl.full((BLOCK,), -1, tl.int64)
    for start in range(part * BLOCK, last, PROGRAMS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        alive = place < last
        run = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(MAX_RUN):
            alive = alive & (place >= back) & (last >= back)
            wanted = tl.load(tokens + last - back, mask=last >= back, other=0)
            alive = alive & (tl.load(tokens + place - back, mask=alive, other=-1) == wanted)
            run += alive.to(tl.int32)
        key = (run.to(tl.int64) << 32) + place
        found = tl.maximum(found, tl.where(run >= MIN_RUN, key, -1))
    tl.store(best + sample * PROGRAMS + part, tl.max(found, axis=0))


@triton.jit(do_not_specialize=_POINTERS, do_not_specialize_on_alignment=_POINTERS)
def copy_runs_kernel(
    history,
    rows,
    lengths,
    best,
    drafts,
    NUM_PLACES: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sample): what followed the best place, int32 [num_samples, NUM_DRAFTS] out."""
    sample = tl.program_id(0).to(tl.int64)
    tokens = history + tl.load(rows + sample).to(tl.int64) * NUM_PLACES
    last = (tl.minimum(tl.load(lengths + sample), NUM_PLACES) - 1).to(tl.int64)
    key = tl.max(tl.load(best + sample * PROGRAMS + tl.arange(0, PROGRAMS)), axis=0)
    place = key & 0xFFFFFFFF
    offs = tl.arange(0, BLOCK)
    distance = tl.where(key < 0, 1, last - place)
    source = tl.where(key < 0, last, place + 1 + offs % distance)
    mask = offs < NUM_DRAFTS
    tl.store(drafts + sample * NUM_DRAFTS + offs, tl.load(tokens + source, mask=mask, other=0), mask=mask)


def append_tokens(history: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Writes settled tokens behind those that rows have.

    What is written behind the last settled one is overwritten by later calls, before anybody looks
    there.

    Args:
        history: int32 [num_rows, num_places] contiguous, changed in place.
        rows: int32 [num_samples], each at most once.
        positions: int64 [num_samples] places of the first tokens. Tokens beyond the last place are
            left out.
        tokens: int64 [num_samples, num_tokens] contiguous.
    """
    if not uses_triton(history):
        append_tokens_reference(history, rows, positions, tokens)
    elif rows.shape[0]:
        num_tokens = tokens.shape[1]
        constants = {"NUM_PLACES": history.shape[1], "NUM_TOKENS": num_tokens}
        constants["BLOCK"] = triton.next_power_of_2(num_tokens)
        append_tokens_kernel[(rows.shape[0],)](history, rows, positions, tokens, **constants, num_warps=1)


def propose_ngram(history: Tensor, rows: Tensor, lengths: Tensor, num_drafts: int) -> Tensor:
    """What followed the rows' last tokens where these stood before.

    Args:
        history: int32 [num_rows, num_places] contiguous.
        rows: int32 [num_samples].
        lengths: int64 [num_samples] tokens of each row, at least 1; those beyond the last place do
            not count.
        num_drafts: Tokens to propose.

    Returns:
        int32 [num_samples, num_drafts]; the row's last token, repeated, where its last MIN_RUN
        tokens never stood before.
    """
    if not uses_triton(history):
        return propose_ngram_reference(history, rows, lengths, num_drafts)
    num_samples, num_places = rows.shape[0], history.shape[1]
    best = torch.empty(num_samples, _PROGRAMS, dtype=torch.int64, device=history.device)
    drafts = torch.empty(num_samples, num_drafts, dtype=torch.int32, device=history.device)
    if num_samples:
        find_runs_kernel[num_samples, _PROGRAMS](
            history, rows, lengths, best, num_places, MAX_RUN, MIN_RUN, _PROGRAMS, _BLOCK, num_warps=4
        )
        block = triton.next_power_of_2(num_drafts)
        copy_runs_kernel[(num_samples,)](
            history, rows, lengths, best, drafts, num_places, num_drafts, _PROGRAMS, block, num_warps=1
        )
    return drafts
