"""The choice of experts for few tokens in one launch: norm, the router's product, softmax, top k.

    x [num_tokens, hidden] -> norm -> logits [num_tokens, num_experts] -> Choice

Apart these are two launches that compute next to nothing, each of which the memory waits for. Here
each program has the logits of one expert for all tokens. It stores them and adds 1 to a counter;
who finds that all others have done so chooses for all, and sets the counter back to 0. As in
`attention.decode`, nothing can leave the counter behind. It may be launched early (`early_launch`),
and then has its router's weights on their way while the product before it ends.

Owns that operation and the rule of when it pays (`chooses_at_once`). Logits are rounded to the
model's type before the choice, as a product of many tokens rounds them, and of equal ones the
lowest expert is first. How often a logit is beaten is an expert's rank, which all experts find at
once: a program of several warps would wait for itself in each of PER_TOKEN searches for the
largest.
"""

# Triton's decorator has no types, a kernel's arguments differ here and in the compiler, and its
# tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.routing import Choice, choose_experts_reference
from headrace_kernels.rms_norm import rms_norm_reference
from headrace_kernels.triton_runtime import uses_triton

# Experts up to which one launch pays: the last program compares each with each, for one token after
# the other. A layer without attention of gpt-oss-20b, which has 32, takes 48.0 us for one token on
# an H200 and 49.6 with two launches; one of Qwen3-30B-A3B, which has 128, 46.1 and 46.0
# (docs/experiments.md, "kernels that begin before the one ahead has ended").
_MOST_EXPERTS = 32
# Tokens up to which a program has the products of all in registers.
_MOST_TOKENS = 4
# Inputs that a program multiplies at a time, and its warps.
_BLOCK_INPUTS, _NUM_WARPS = 2048, 8


def chooses_at_once(num_tokens: int, router: Tensor) -> bool:
    """Whether `choose_after_norm` is faster than a product and a choice by themselves.

    Args:
        num_tokens: Tokens of the step, padding included.
        router: [num_experts, hidden].
    """
    return num_tokens <= _MOST_TOKENS and len(router) <= _MOST_EXPERTS


def choose_after_norm_reference(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, bias: Tensor | None, per_token: int, renormalized: bool
) -> Choice:
    """Specification of `choose_after_norm`, in plain PyTorch."""
    logits = functional.linear(rms_norm_reference(x, norm_weight, eps), router, bias)
    return choose_experts_reference(logits, per_token, renormalized)


@triton.jit
def _add_two(a, b, x, y):
    """Adds two sums at a time, for which warps meet once."""
    return a + x, b + y


@triton.jit
def _strength(logits, exists):
    """What experts are ranked by: not a number is less than any number, and more than no expert."""
    return tl.where(exists, tl.where(logits == logits, tl.maximum(logits, -1e38), -1e38), float("-inf"))


@triton.jit
def _choose_for(
    logits_ptr, experts_ptr, weights_ptr,
    NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, RENORMALIZED: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Chooses for one token, whose logits other programs may have stored just now."""
    e, slots = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_SLOTS)
    logits = tl.load(logits_ptr + e, mask=e < NUM_EXPERTS, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    strength = _strength(logits, e < NUM_EXPERTS)
    # The same once more, in the order of the comparisons' other side.
    rivals = tl.load(logits_ptr + e, mask=e < NUM_EXPERTS, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    rivals = _strength(rivals, e < NUM_EXPERTS)[None, :]
    is_before = (rivals == strength[:, None]) & (e[None, :] < e[:, None])
    rank = tl.sum(((rivals > strength[:, None]) | is_before).to(tl.int32), 1)
    is_chosen = (rank[:, None] == slots[None, :]) & (e < NUM_EXPERTS)[:, None]
    odds = tl.exp(logits - tl.max(logits, 0))
    weights = tl.where(is_chosen, (odds / tl.sum(odds, 0))[:, None], 0.0)
    experts, weights = tl.reduce((tl.where(is_chosen, e[:, None], 0), weights), 0, _add_two)
    if RENORMALIZED:
        weights = weights / tl.sum(tl.where(slots < PER_TOKEN, weights, 0.0), 0)
    tl.store(experts_ptr + slots, experts, mask=slots < PER_TOKEN)
    tl.store(weights_ptr + slots, weights, mask=slots < PER_TOKEN)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    x_ptr, norm_ptr, router_ptr, bias_ptr, logits_ptr, done_ptr, experts_ptr, weights_ptr,
    num_tokens, eps,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    RENORMALIZED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (expert): its logits of all tokens. The last to end chooses for all."""
    expert = tl.program_id(0)
    m = tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    # Tokens beyond the end repeat the last one, and are not stored.
    offs_x = tl.minimum(m, num_tokens - 1)[:, None] * HIDDEN + offs_k
    # Parameters: read before the kernel ahead has ended.
    ahead = ()
    for k in tl.static_range(0, HIDDEN, BLOCK_K):
        mask = k + offs_k < HIDDEN
        w = tl.load(router_ptr + expert * HIDDEN + k + offs_k, mask=mask, other=0.0)
        ahead = ahead + ((w, tl.load(norm_ptr + k + offs_k, mask=mask, other=0.0)),)
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for k in tl.static_range(0, HIDDEN, BLOCK_K):
        w, g = ahead[k // BLOCK_K]
        x = tl.load(x_ptr + offs_x + k, mask=k + offs_k < HIDDEN, other=0.0).to(tl.float32)
        squares += x * x
        products += x * g.to(tl.float32) * w.to(tl.float32)
    logits, square = tl.reduce((products, squares), 1, _add_two)
    logits = logits * tl.rsqrt(square / HIDDEN + eps)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert).to(tl.float32)
    places = logits_ptr + m * NUM_EXPERTS + expert
    tl.store(places, logits.to(logits_ptr.dtype.element_ty), mask=m < num_tokens)
    # All warps have stored; then one thread releases it for the card.
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(done_ptr, 0)
        for token in tl.range(0, num_tokens):
            _choose_for(
                logits_ptr + token * NUM_EXPERTS, experts_ptr + token * PER_TOKEN, weights_ptr + token * PER_TOKEN,
                NUM_EXPERTS, PER_TOKEN, RENORMALIZED, BLOCK_EXPERTS, BLOCK_SLOTS,
            )  # fmt: skip


def _choose_after_norm_triton(
    x: Tensor, norm: tuple[Tensor, float], router: Tensor, bias: Tensor | None, per_token: int, renormalized: bool,
    done: Tensor,
) -> Choice:  # fmt: skip
    num_tokens, num_experts = len(x), len(router)
    logits = x.new_empty(num_tokens, num_experts)
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, per_token, dtype=torch.float32, device=x.device)
    early = card.launches_early(x.device)
    _route_kernel[(num_experts,)](
        x, norm[0], router, bias, logits, done, experts, weights, num_tokens, norm[1],
        HIDDEN=router.shape[1], NUM_EXPERTS=num_experts, PER_TOKEN=per_token,
        RENORMALIZED=renormalized, ROWS=triton.next_power_of_2(num_tokens),
        BLOCK_K=min(_BLOCK_INPUTS, triton.next_power_of_2(router.shape[1])),
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_SLOTS=triton.next_power_of_2(per_token), EARLY=early,
        num_warps=_NUM_WARPS, launch_pdl=early,
    )  # fmt: skip
    return Choice(experts, weights)


def choose_after_norm(
    x: Tensor,
    norm: tuple[Tensor, float],
    router: Tensor,
    bias: Tensor | None,
    per_token: int,
    renormalized: bool,
    done: Tensor,
) -> Choice:
    """Chooses the experts of a few tokens from their RMS norm.

    Args:
        x: [num_tokens, hidden], contiguous; at least one token.
        norm: Weight [hidden] and epsilon of the norm.
        router: [num_experts, hidden], contiguous; `chooses_at_once` holds for it and the tokens.
        bias: [num_experts].
        per_token: Experts of a token, at most num_experts.
        renormalized: Whether a token's weights are divided by their sum.
        done: [1] int32 on the device of x, 0 before and after; no other stream uses it meanwhile.
    """
    if not uses_triton(x):
        return choose_after_norm_reference(x, *norm, router, bias, per_token, renormalized)
    return _choose_after_norm_triton(x, norm, router, bias, per_token, renormalized, done)
