"""Which experts compute a token, and in which order pairs of token and expert are computed.

    logits [num_tokens, num_experts] -choose_experts-> Choice -sort_pairs-> SortedPairs
                                      (or -choose_scored_experts->, `scored_routing`)

Pair `token * per_token + slot` is a token's slot-th choice. Sorted by expert, the pairs of one
expert are neighbours, so that a tile of rows meets one expert's weights.

Launch rules. A program of one warp chooses for one token, launched early (`early_launch`): a step
of Qwen3-30B-A3B for one token takes an H200 3% less than with a search by index, launched late
(docs/experiments.md, "rows of one token's experts as streams"). Of up to 8,192 pairs a program
sorts for one expert, reading the choices of all tokens: no atomics, one launch, early too, the same
order every time. How many choices it reads at a time is not measured. More pairs are sorted in
chunks (`chunked_sort`).
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.chunked_sort import chosen_experts, sort_in_chunks
from headrace_kernels.triton_runtime import uses_triton

# Choices that a sorting program reads at a time, and how many are sorted so.
_SORTED, _MOST_SORTED_WHOLE = 2048, 8192


class Choice(NamedTuple):
    """The experts of each token, the likeliest first."""

    # [num_tokens, per_token] int32, no expert twice in a row.
    experts: Tensor
    # [num_tokens, per_token] fp32, what each expert's output is multiplied by. NaN for a token
    # whose logits are not finite, whose output is then NaN.
    weights: Tensor


class SortedPairs(NamedTuple):
    """Pairs of token and expert, those of an expert together."""

    # [num_pairs] int32, the pair at each place; anything behind the last expert's pairs.
    order: Tensor
    # [num_experts + 1] int32, the place of each expert's first pair, and the number of their pairs.
    starts: Tensor


def choose_experts_reference(logits: Tensor, per_token: int, renormalized: bool) -> Choice:
    """Specification of `choose_experts`, in plain PyTorch."""
    probabilities, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = probabilities[:, :per_token]
    if renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts[:, :per_token].to(torch.int32), weights.contiguous())


@triton.jit
def _ranks(logits, e, NUM_EXPERTS: tl.constexpr):
    """Logits as integers in the order of the choice, each with its expert e in the lowest 16 bits.

    The larger logit has the larger integer, of equal ones the lower expert's; not a number is less
    than any number, and what is no expert less than that. Zeros of both signs are equal.
    """
    BITS: tl.constexpr = logits.dtype.primitive_bitwidth
    # A warp finds the largest of 32 bits in one instruction; logits of 32 bits take more.
    INTEGER: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    bits = logits.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(INTEGER)
    # Of negative numbers the larger bits are the smaller number.
    order = tl.where(logits == 0.0, 0, bits ^ ((bits >> (BITS - 1)) & ((1 << (BITS - 1)) - 1)))
    order = tl.where(logits == logits, order, -(1 << (BITS - 1)))
    return tl.where(e < NUM_EXPERTS, (order << 16) | (0xFFFF - e), -(1 << (2 * BITS - 1)))


@triton.jit
def _logits_of(ranks, DTYPE: tl.constexpr):
    """The logits of `_ranks`, fp32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    order = ranks >> 16
    # What is not a number becomes all ones, which is none.
    bits = order ^ ((order >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))
    return bits.to(tl.int16 if BITS == 16 else tl.int32).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _choose_kernel(
    logits_ptr, experts_ptr, weights_ptr,
    NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, RENORMALIZED: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Takes the largest rank PER_TOKEN times."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    token = tl.program_id(0).to(tl.int64)
    e, slots = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_SLOTS)
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=float("-inf"))
    left = _ranks(logits, e, NUM_EXPERTS)
    chosen = tl.zeros([BLOCK_SLOTS], left.dtype)
    for slot in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        chosen = tl.where(slots == slot, best, chosen)
        left = tl.where(left == best, -(1 << (left.dtype.primitive_bitwidth - 1)), left)
    logits = logits.to(tl.float32)
    peak = tl.max(logits, 0)
    # NaN where any logit is, and so are all weights.
    mass = tl.sum(tl.exp(logits - peak), 0)
    weights = tl.exp(_logits_of(chosen, logits_ptr.dtype.element_ty) - peak) / mass
    if RENORMALIZED:
        weights = weights / tl.sum(tl.where(slots < PER_TOKEN, weights, 0.0), 0)
    places = token * PER_TOKEN + slots
    tl.store(experts_ptr + places, (0xFFFF - (chosen & 0xFFFF)).to(tl.int32), mask=slots < PER_TOKEN)
    tl.store(weights_ptr + places, weights, mask=slots < PER_TOKEN)


def _choose_experts_triton(logits: Tensor, per_token: int, renormalized: bool) -> Choice:
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, per_token, dtype=torch.float32, device=logits.device)
    early = card.launches_early(logits.device)
    if num_tokens:
        _choose_kernel[(num_tokens,)](
            logits.contiguous(), experts, weights,
            NUM_EXPERTS=num_experts, PER_TOKEN=per_token, RENORMALIZED=renormalized,
            BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_SLOTS=triton.next_power_of_2(per_token),
            EARLY=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return Choice(experts, weights)


def choose_experts(logits: Tensor, per_token: int, renormalized: bool) -> Choice:
    """Chooses the experts that compute each token.

    Args:
        logits: [num_tokens, num_experts] of the router.
        per_token: Experts of a token, at most num_experts.
        renormalized: Whether a token's weights are divided by their sum.

    Returns:
        The likeliest experts by a softmax over all; of equally likely ones the lowest.
    """
    choose = _choose_experts_triton if uses_triton(logits) else choose_experts_reference
    return choose(logits, per_token, renormalized)


@triton.jit
def own_expert(experts_ptr, pairs, first_expert, NUM_EXPERTS: tl.constexpr):
    """The number, among the experts here, of a pair's expert, or 0; and whether it is here.

    It is read past the first cache, where an earlier choice may still be.
    """
    expert = tl.load(experts_ptr + pairs, cache_modifier=".cg").to(tl.int64)
    if first_expert is not None:
        expert -= first_expert
    is_here = (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(is_here, expert, 0), is_here


def sort_pairs_reference(experts: Tensor, num_experts: int, first: int | None = None) -> SortedPairs:
    """Specification of `sort_pairs`, in plain PyTorch."""
    numbers = experts.flatten() - (first or 0)
    found, order = numbers.where((numbers >= 0) & (numbers < num_experts), num_experts).sort(stable=True)
    starts = torch.searchsorted(found, torch.arange(num_experts + 1, dtype=found.dtype, device=found.device))
    return SortedPairs(order.to(torch.int32), starts.to(torch.int32))


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _sort_kernel(
    experts_ptr, order_ptr, starts_ptr, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (expert): counts pairs of the experts before it, then places its own in order."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    # Added up behind the loop alone, so that no block waits for the sum of the one before.
    before = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        chosen = chosen_experts(experts_ptr, first + block, num_pairs, first_expert, NUM_EXPERTS)
        before += (chosen < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts_ptr + expert, place)
    for first in tl.range(0, num_pairs, BLOCK):
        pairs = first + block
        chosen = chosen_experts(experts_ptr, pairs, num_pairs, first_expert, NUM_EXPERTS)
        # The program behind the last expert has no pairs.
        is_own = (chosen == expert) & (pairs < num_pairs)
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + place + rank - 1, pairs, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


def _sort_pairs_triton(experts: Tensor, num_experts: int, first: int | None) -> SortedPairs:
    num_pairs, device = experts.numel(), experts.device
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    if num_pairs > _MOST_SORTED_WHOLE:
        sort_in_chunks(experts.contiguous(), num_experts, first, order, starts)
        return SortedPairs(order, starts)
    early = card.launches_early(device)
    _sort_kernel[(num_experts + 1,)](
        experts, order, starts, num_pairs, first,
        NUM_EXPERTS=num_experts, BLOCK=_SORTED, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return SortedPairs(order, starts)


def sort_pairs(experts: Tensor, num_experts: int, first: int | None = None) -> SortedPairs:
    """Sorts pairs of token and expert by expert; those of one expert keep their order.

    Args:
        experts: [num_tokens, per_token] int32, numbers of experts.
        num_experts: Number of experts whose pairs are sorted.
        first: The first of those; pairs of all others are left out. None: they are all experts that
            there are.
    """
    sort = _sort_pairs_triton if uses_triton(experts) else sort_pairs_reference
    return sort(experts, num_experts, first)
