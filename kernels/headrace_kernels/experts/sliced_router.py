"""The choice of experts for some tens or hundreds of tokens: router's product, softmax, top k.

    x [num_tokens, hidden] -> sums [slices, num_tokens, num_experts] -> logits -> Choice

The product is as long as hidden and its result a few tiles, so that a library's programs are few
and each reads the whole router. Here the inputs are cut into slices: a program multiplies one slice
for a tile of tokens, with its weights on their way before the kernel ahead has ended
(`early_launch`), and stores fp32 sums. The choice adds a token's sums in the order of slices,
rounds them to the model's type, as a product of its own would, and chooses as `routing` does.

One launch for all would have programs of 16 tokens that read the router whole, 0.5 MB of 128
experts by 2,048 inputs: a multiprocessor takes 64 bytes of the second cache in a cycle, so that
alone is 4.7 us. Slices whose last program chooses would need counters.

Launch rule: `slice_rule`. Not measured on a card.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.routing import Choice, choose_experts_reference, store_choice
from headrace_kernels.triton_runtime import INTERPRETED, uses_triton

# Tokens and experts of which slices are multiplied. Fewer tokens have kernels that read the router
# once (`linear.dense_small_batch`); of more a library's programs are many.
_FEWEST_TOKENS, _MOST_TOKENS = 16, 256
_MOST_EXPERTS = 256
# Weights of a program, which lie in shared memory until the tokens are there: 64 KiB.
_SLICE_WEIGHTS = 32_768
_LONGEST_SLICE = 512
# Slices whose sums a choosing program asks for at once.
_MOST_SLICES = 64


class SliceTile(NamedTuple):
    """How the router's product is cut."""

    # Tokens of one program, at least 16.
    block_m: int
    # Inputs of one program, a power of two.
    block_k: int
    num_warps: int


def slice_rule(num_tokens: int, router: Tensor) -> SliceTile | None:
    """The tile in which a router's product of so many tokens is cut; None: it is not.

    All steps have the same slices, so that a token's sums do not depend on how many tokens there
    are. 256 tokens and 128 experts with 2,048 inputs are 128 programs.

    Args:
        num_tokens: Tokens of the step, padding included.
        router: [num_experts, hidden].
    """
    (num_experts, hidden), is_taken = router.shape, router.dtype.itemsize == 2 or INTERPRETED
    is_taken = is_taken and uses_triton(router) and router.is_contiguous() and num_experts <= _MOST_EXPERTS
    if not is_taken or not _FEWEST_TOKENS <= num_tokens <= _MOST_TOKENS:
        return None
    block_k = min(_LONGEST_SLICE, _SLICE_WEIGHTS // _block_experts(num_experts))
    return SliceTile(16, block_k, num_warps=8) if hidden <= _MOST_SLICES * block_k else None


def _block_experts(num_experts: int) -> int:
    """Experts rounded up to what a product of tensor cores has."""
    return max(16, int(triton.next_power_of_2(num_experts)))


def choose_in_slices_reference(
    x: Tensor, router: Tensor, bias: Tensor | None, per_token: int, renormalized: bool
) -> Choice:
    """Specification of `choose_in_slices`, in plain PyTorch."""
    return choose_experts_reference(functional.linear(x, router, bias), per_token, renormalized)


@triton.jit(do_not_specialize=["num_tokens"])
def _slice_kernel(
    x_ptr, router_ptr, sums_ptr, num_tokens,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (tile, slice): sums [BLOCK_EXPERTS, BLOCK_M] of one slice of the inputs."""
    if EARLY:
        grid_behind_may_start()
    e = tl.arange(0, BLOCK_EXPERTS)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    # Parameters: read before the kernel ahead has ended.
    is_weight = (e < NUM_EXPERTS)[:, None] & (k < HIDDEN)[None, :]
    w = tl.load(router_ptr + e[:, None] * HIDDEN + k[None, :], mask=is_weight, other=0.0)
    if EARLY:
        grid_before_is_done()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Tokens beyond the end repeat the last one, and are not stored.
    x_rows = tl.minimum(m, num_tokens - 1)[None, :] * HIDDEN
    x = tl.load(x_ptr + x_rows + k[:, None], mask=(k < HIDDEN)[:, None], other=0.0)
    if WIDE:
        # The interpreter has no products of bf16.
        w, x = w.to(tl.float32), x.to(tl.float32)
    sums = tl.dot(w, x)
    places = (tl.program_id(1) * num_tokens + m)[None, :] * NUM_EXPERTS + e[:, None]
    tl.store(sums_ptr + places, sums, mask=(m < num_tokens)[None, :] & (e < NUM_EXPERTS)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_of_slices_kernel(
    sums_ptr, bias_ptr, experts_ptr, weights_ptr, num_tokens,
    SLICES: tl.constexpr, DTYPE: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    RENORMALIZED: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (token): its logits, the sums of all slices in order, and its choice."""
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    token = tl.program_id(0)
    e = tl.arange(0, BLOCK_EXPERTS)
    total = tl.zeros([BLOCK_EXPERTS], tl.float32)
    for number in tl.static_range(SLICES):
        sums = sums_ptr + (number * num_tokens + token) * NUM_EXPERTS
        total += tl.load(sums + e, mask=e < NUM_EXPERTS, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + e, mask=e < NUM_EXPERTS, other=0.0).to(tl.float32)
    # Rounded as a product is that stores its logits.
    logits = tl.where(e < NUM_EXPERTS, total, float("-inf")).to(DTYPE)
    store_choice(
        logits, e, token.to(tl.int64), experts_ptr, weights_ptr,
        NUM_EXPERTS, PER_TOKEN, RENORMALIZED, BLOCK_SLOTS,
    )  # fmt: skip


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def choose_in_slices(
    x: Tensor, router: Tensor, bias: Tensor | None, per_token: int, renormalized: bool, tile: SliceTile
) -> Choice:
    """Chooses the experts of tokens by their products with the router.

    Args:
        x: [num_tokens, hidden], at least one token.
        router: [num_experts, hidden], contiguous, in the type of x.
        bias: [num_experts].
        per_token: Experts of a token, at most num_experts.
        renormalized: Whether a token's weights are divided by their sum.
        tile: What `slice_rule` names.
    """
    (num_tokens, hidden), num_experts = x.shape, len(router)
    slices, early = triton.cdiv(hidden, tile.block_k), card.launches_early(x.device)
    sums = torch.empty(slices, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, per_token, dtype=torch.float32, device=x.device)
    _slice_kernel[(triton.cdiv(num_tokens, tile.block_m), slices)](
        x.contiguous(), router, sums, num_tokens,
        HIDDEN=hidden, NUM_EXPERTS=num_experts, BLOCK_EXPERTS=_block_experts(num_experts), BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k, EARLY=early, WIDE=INTERPRETED, num_warps=tile.num_warps, launch_pdl=early,
    )  # fmt: skip
    _choose_of_slices_kernel[(num_tokens,)](
        sums, bias, experts, weights, num_tokens,
        SLICES=slices, DTYPE=_DTYPES[x.dtype], NUM_EXPERTS=num_experts, PER_TOKEN=per_token, RENORMALIZED=renormalized,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_SLOTS=triton.next_power_of_2(per_token),
        EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return Choice(experts, weights)
