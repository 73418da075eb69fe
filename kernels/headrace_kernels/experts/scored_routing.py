"""Which experts compute a token where each expert's score is a sigmoid of its own logit.

    logits -sigmoid-> scores -plus a correction-> the best groups -> the best experts in those
                        └-> the chosen experts' weights, normed and scaled

The correction is learned to spread the load: it changes who is chosen, and no weight. A group's
score is the sum of its two best experts'. DeepSeek-V3 and GLM-4.5 choose so.

Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), section 2.1.2.

Launch rule: a program chooses for one token, launched early (`early_launch`). Not measured.
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
from headrace_kernels.experts.routing import Choice
from headrace_kernels.triton_runtime import uses_triton

# Below the choice score of any expert that may be chosen.
_LEAST = -1e38
# Keeps weights finite whose scores are all 0.
_TINY = 1e-20


class Scoring(NamedTuple):
    """How scores become a choice: one constexpr of the kernel."""

    # Groups of as many experts each, at least two.
    num_groups: int
    # Groups that experts are chosen from.
    top_groups: int
    # Whether a token's weights are divided by their sum.
    renormalized: bool
    # What weights are multiplied by in the end.
    scale: float


def choose_scored_experts_reference(logits: Tensor, correction: Tensor, per_token: int, scoring: Scoring) -> Choice:
    """Specification of `choose_scored_experts`, in plain PyTorch."""
    num_tokens, num_experts = logits.shape
    scores = logits.float().sigmoid()
    ranked = (scores + correction).nan_to_num(nan=_LEAST).clamp(min=_LEAST).view(num_tokens, scoring.num_groups, -1)
    groups = ranked.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    others = groups[:, scoring.top_groups :, None].expand(-1, -1, ranked.shape[2])
    ranked = ranked.scatter(1, others, float("-inf")).view(num_tokens, num_experts)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :per_token]
    weights = scores.gather(1, experts)
    if scoring.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    # 0, or NaN where a logit is not finite.
    return Choice(experts.to(torch.int32), weights * scoring.scale + (logits - logits).float().sum(-1, keepdim=True))


@triton.jit
def _choose_scored_kernel(
    logits_ptr, correction_ptr, experts_ptr, weights_ptr,
    NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SCORING: tl.constexpr, LEAST: tl.constexpr,
    TINY: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Takes the best groups one by one, then the best experts; of equal ones the lowest."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = NUM_EXPERTS // SCORING.num_groups
    TOP_GROUPS: tl.constexpr = SCORING.top_groups
    g, s, slots = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_SLOTS)
    is_there = (g < SCORING.num_groups)[:, None] & (s < SIZE)[None, :]
    # Places without an expert have a number behind all.
    e = tl.where(is_there, g[:, None] * SIZE + s[None, :], NUM_EXPERTS)
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + e, mask=is_there, other=0.0).to(tl.float32)
    # 0, or NaN where a logit is not finite.
    poison = tl.sum(tl.sum(logits - logits, 1), 0)
    scores = tl.sigmoid(logits)
    ranked = scores + tl.load(correction_ptr + e, mask=is_there, other=0.0)
    ranked = tl.where(ranked == ranked, tl.maximum(ranked, LEAST), LEAST)
    ranked = tl.where(is_there, ranked, float("-inf"))

    # The two best of each group: without the first of the best ones.
    best = tl.max(ranked, 1)
    first = tl.min(tl.where(ranked == best[:, None], e, NUM_EXPERTS), 1)
    second = tl.max(tl.where(e == first[:, None], float("-inf"), ranked), 1)
    group_left = tl.where(g < SCORING.num_groups, best + second, float("-inf"))
    is_kept = tl.zeros([BLOCK_GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        is_best = g == tl.argmax(group_left, 0)
        is_kept = tl.where(is_best, 1, is_kept)
        group_left = tl.where(is_best, float("-inf"), group_left)

    left = tl.where((is_kept != 0)[:, None], ranked, float("-inf"))
    experts = tl.zeros([BLOCK_SLOTS], tl.int32)
    weights = tl.zeros([BLOCK_SLOTS], tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        most = tl.max(tl.max(left, 1), 0)
        expert = tl.min(tl.min(tl.where(left == most, e, NUM_EXPERTS), 1), 0)
        score = tl.sum(tl.sum(tl.where(e == expert, scores, 0.0), 1), 0)
        experts = tl.where(slots == slot, expert, experts)
        weights = tl.where(slots == slot, score, weights)
        left = tl.where(e == expert, float("-inf"), left)
    if SCORING.renormalized:
        weights = weights / (tl.sum(weights, 0) + TINY)
    weights = weights * SCORING.scale + poison
    places = token * PER_TOKEN + slots
    tl.store(experts_ptr + places, experts, mask=slots < PER_TOKEN)
    tl.store(weights_ptr + places, weights, mask=slots < PER_TOKEN)


def _choose_scored_experts_triton(logits: Tensor, correction: Tensor, per_token: int, scoring: Scoring) -> Choice:
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, per_token, dtype=torch.float32, device=logits.device)
    early = card.launches_early(logits.device)
    if num_tokens:
        _choose_scored_kernel[(num_tokens,)](
            logits.contiguous(), correction, experts, weights,
            NUM_EXPERTS=num_experts, PER_TOKEN=per_token, SCORING=scoring, LEAST=_LEAST, TINY=_TINY,
            BLOCK_GROUPS=triton.next_power_of_2(scoring.num_groups),
            BLOCK_SIZE=triton.next_power_of_2(num_experts // scoring.num_groups),
            BLOCK_SLOTS=triton.next_power_of_2(per_token), EARLY=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return Choice(experts, weights)


def choose_scored_experts(logits: Tensor, correction: Tensor, per_token: int, scoring: Scoring) -> Choice:
    """Chooses the experts that compute each token.

    Args:
        logits: [num_tokens, num_experts] of the router.
        correction: [num_experts] fp32, added to the scores to choose by.
        per_token: Experts of a token, at most those of `top_groups`.
        scoring: Groups, and how scores become weights.

    Returns:
        The experts with the largest corrected scores in the best groups; of equal ones the lowest.
    """
    choose = _choose_scored_experts_triton if uses_triton(logits) else choose_scored_experts_reference
    return choose(logits, correction, per_token, scoring)
