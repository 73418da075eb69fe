"""Outputs of a token's experts that are not added up yet, and the norm that adds them up.

    outputs [num_tokens * per_token, hidden], residual [num_tokens, hidden]
        -> residual += the sum of each token's outputs, norm of that

Behind a mixture whose output is whole stands the norm of the residual stream. A launch for the sum
would read all outputs to store a few numbers that the norm reads again. Here the norm's program of
a token adds its outputs in order, and rounds the sum to the model's type as a launch of its own
would, so that the bits are the same.

Launch rule: as the norms', a token a program from 2,048 numbers on. Not measured on a card.
"""

# Triton's decorator has no types, a kernel's arguments differ here and in the compiler, and its
# tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.mixture_kernels import combine_pairs
from headrace_kernels.experts.routing import Choice
from headrace_kernels.rms_norm import add_rms_norm, launch_rule, rounded_add_rms_norm, store_added_norm, takes_sum
from headrace_kernels.rounded_tokens import Activations, RoundedTokens


@dataclasses.dataclass(slots=True, frozen=True)
class PairOutputs:
    """What a mixture's experts gave, of all experts that there are."""

    # [num_tokens * per_token, hidden] in the model's type, times the pairs' weights.
    outputs: Tensor
    choice: Choice
    # The weights of which they are products.
    down: ExpertWeights

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.choice.experts)

    def total(self) -> Tensor:
        """The sum of each token's outputs, [num_tokens, hidden], in a launch of its own."""
        out = self.outputs.new_empty(len(self), self.outputs.shape[1])
        combine_pairs(self.outputs, self.choice, self.down, out)
        return out


# The output of a layer that is not yet in the residual stream.
Pending: TypeAlias = Tensor | PairOutputs


def summed(pending: Pending) -> Tensor:
    """A layer's output, [num_tokens, hidden]."""
    return pending if isinstance(pending, Tensor) else pending.total()


@triton.jit(do_not_specialize=["num_rows"])
def _add_pairs_rms_norm_kernel(
    pairs_ptr, residual, weight, out, scales, unrounded, num_rows, eps,
    SIZE: tl.constexpr, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (rows): the sums of some tokens' outputs, in the stream, and its norm."""
    if EARLY:
        grid_behind_may_start()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (offs < SIZE)
    places = rows[:, None] * SIZE + offs
    # Parameters: read before the kernel ahead has ended, and in the rows' own shape.
    factors = tl.load(weight + offs + rows[:, None] * 0, mask=mask, other=0.0)
    if EARLY:
        grid_before_is_done()
    # Backwards, and in this order: so all are asked for before the first can be added. Left to
    # itself the compiler has five loads under way, for few registers.
    outputs = ()
    for back in tl.static_range(PER_TOKEN):
        pair = (rows * PER_TOKEN + (PER_TOKEN - 1 - back))[:, None] * SIZE + offs
        outputs = outputs + (tl.load(pairs_ptr + pair, mask=mask, other=0.0, volatile=True),)
    stream = tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        total += outputs[PER_TOKEN - 1 - slot].to(tl.float32)
    added = total.to(residual.dtype.element_ty).to(tl.float32)
    store_added_norm(added, stream, factors, residual, out, scales, places, mask, rows, num_rows, eps, SIZE, unrounded)


def add_pairs_rms_norm(
    pairs: PairOutputs,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    keeps: bool = False,
) -> Activations:
    """Adds the tokens' outputs to the residual stream in place, and normalizes the sum.

    Args:
        pairs: Outputs of the tokens' experts.
        residual: [num_tokens, size] the residual stream; holds the sum afterwards.
        weight: [size].
        eps: Added to the mean square.
        dtype: 8-bit dtype to round the norm to, as `round_tokens` takes it; None: the model's.
        keeps: Whether a rounded norm is stored in the model's type too, as `unrounded`.

    Returns:
        [num_tokens, size]: the bits of `add_rms_norm` or `rounded_add_rms_norm` of the total.
    """
    if not takes_sum(pairs.outputs, residual, dtype is not None) or pairs.down.part is not None:
        added = pairs.total()
        if dtype is None:
            return add_rms_norm(added, residual, weight, eps)
        return rounded_add_rms_norm(added, residual, weight, eps, dtype, keeps)
    (num_rows, size), early = residual.shape, card.launches_early(residual.device)
    to: Activations = torch.empty_like(residual)
    out, scales, kept = to, None, None
    if dtype is not None:
        to = RoundedTokens.empty(residual.shape, dtype, residual.device, residual.dtype if keeps else None)
        out, scales, kept = to.numbers, to.scales, to.unrounded
    rows, block, num_warps = launch_rule(size)
    _add_pairs_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        pairs.outputs, residual, weight, out, scales, kept, num_rows, eps,
        SIZE=size, PER_TOKEN=pairs.choice.experts.shape[1], ROWS=rows, BLOCK=block, EARLY=early,
        num_warps=num_warps, launch_pdl=early,
    )  # fmt: skip
    return to
