"""Sorts many pairs of token and expert by expert, a chunk of pairs to a program.

Owns the two kernels of more pairs than a program per expert sorts quickly (`routing.sort_pairs`).
The first counts each chunk's pairs of each expert. In the second a program adds up these counts:
its pairs of an expert lie behind those of all experts before it, and behind those of the chunks
before its own. It sorts numbers of which each is an expert and, below that, a pair's number within
the chunk, so that pairs of one expert keep their order: no atomics, the same order every time.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start

# Pairs of a chunk, and chunks whose counts a program adds up at a time.
CHUNK, _COUNTED = 1024, 16
# Experts that a program counts at least: a warp has as many threads.
_LEAST_BINS = 32
_WARPS = 4


@triton.jit
def chosen_experts(experts_ptr, pairs, num_pairs, first_expert, NUM_EXPERTS: tl.constexpr):
    """Experts of some pairs, counted from the first one; of all others a number behind the last."""
    chosen = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
    if first_expert is not None:
        chosen -= first_expert
        chosen = tl.where((chosen >= 0) & (chosen < NUM_EXPERTS) & (pairs < num_pairs), chosen, NUM_EXPERTS + 1)
    return chosen


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (chunk): counts its pairs of each expert, [BLOCK_EXPERTS]."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    chunk = tl.program_id(0)
    chosen = chosen_experts(experts_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, first_expert, NUM_EXPERTS)
    counts = tl.histogram(tl.minimum(chosen, BLOCK_EXPERTS - 1), BLOCK_EXPERTS, mask=chosen < NUM_EXPERTS)
    tl.store(counts_ptr + chunk * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS), counts)


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_chunks"])
def _place_kernel(
    experts_ptr, counts_ptr, order_ptr, starts_ptr, num_pairs, first_expert, num_chunks,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (chunk): places its pairs in order; the first one says where experts begin, too."""
    if EARLY:
        grid_behind_may_start()
    chunk = tl.program_id(0)
    e, rank = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, CHUNK)
    if EARLY:
        grid_before_is_done()
    chosen = chosen_experts(experts_ptr, chunk * CHUNK + rank, num_pairs, first_expert, NUM_EXPERTS)
    ordered = tl.sort(tl.minimum(chosen, NUM_EXPERTS) * CHUNK + rank)
    own = tl.load(counts_ptr + chunk * BLOCK_EXPERTS + e)
    before = tl.zeros([BLOCK_EXPERTS], tl.int32)
    total = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for first in tl.range(0, num_chunks, COUNTED):
        chunks = first + tl.arange(0, COUNTED)[:, None]
        counts = tl.load(counts_ptr + chunks * BLOCK_EXPERTS + e[None, :], mask=chunks < num_chunks, other=0)
        before += tl.sum(tl.where(chunks < chunk, counts, 0), 0)
        total += tl.sum(counts, 0)
    starts = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(starts_ptr + e, starts, mask=e < NUM_EXPERTS)
        tl.store(starts_ptr + NUM_EXPERTS, tl.sum(total, 0))
    # Where an expert's first pair of this chunk goes, less its place within the sorted chunk.
    offsets = starts + before - (tl.cumsum(own, 0) - own)
    expert = ordered // CHUNK
    places = tl.gather(offsets, tl.minimum(expert, BLOCK_EXPERTS - 1), 0) + rank
    tl.store(order_ptr + places, chunk * CHUNK + ordered % CHUNK, mask=expert < NUM_EXPERTS)


def sort_in_chunks(experts: Tensor, num_experts: int, first: int | None, order: Tensor, starts: Tensor) -> None:
    """Sorts pairs of token and expert by expert; those of one expert keep their order.

    Args:
        experts: [num_tokens, per_token] int32, contiguous.
        num_experts: Number of experts whose pairs are sorted.
        first: The first of those; None: they are all that there are.
        order: [num_pairs] int32, written.
        starts: [num_experts + 1] int32, written.
    """
    num_pairs, early = experts.numel(), card.launches_early(experts.device)
    num_chunks, block = triton.cdiv(num_pairs, CHUNK), max(_LEAST_BINS, triton.next_power_of_2(num_experts))
    counts = torch.empty(num_chunks, block, dtype=torch.int32, device=experts.device)
    _count_kernel[(num_chunks,)](
        experts, counts, num_pairs, first,
        NUM_EXPERTS=num_experts, BLOCK_EXPERTS=block, CHUNK=CHUNK, EARLY=early, num_warps=_WARPS, launch_pdl=early,
    )  # fmt: skip
    _place_kernel[(num_chunks,)](
        experts, counts, order, starts, num_pairs, first, num_chunks,
        NUM_EXPERTS=num_experts, BLOCK_EXPERTS=block, CHUNK=CHUNK, COUNTED=_COUNTED, EARLY=early,
        num_warps=_WARPS, launch_pdl=early,
    )  # fmt: skip
