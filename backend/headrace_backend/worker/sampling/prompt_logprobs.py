"""Log probabilities of prompt tokens, from the hidden states before them.

Owns the way through the output layer, a piece of bounded size at a time: the logits of all tokens
of a long chunk at once would be gigabytes. The logits are the model's own, before bias, bans and
penalties. Does not own which tokens are reported (the plan) nor where hidden states come from (the
runners).

    hidden states of the runs --pieces--> output layer -> token_logprobs -> columns of the result
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from headrace_backend.step.plan import Int32Column, PromptLogprobPlan, StepResult
from headrace_backend.worker.device_copies import indices_on_device
from headrace_backend.worker.plan_columns import Int64Column, ranges
from headrace_kernels.sampling.logprobs import TokenLogprobs, token_logprobs

# Rows of a piece. On a GPU enough that the product is no longer the reading of the weight; not
# measured yet. On a CPU the memory plan counts on it.
CPU_PIECE_ROWS = 64
_GPU_PIECE_ROWS = 256


@dataclasses.dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of all tokens that a step's plan names, still on the device."""

    # [num_tokens] how many of the top tokens each one's run asks for.
    num_tops: Int32Column
    values: TokenLogprobs

    def fill(self, result: StepResult) -> None:
        """Waits for the device and writes the columns of a result."""
        reported = np.arange(self.values.top.shape[1]) < self.num_tops[:, None]
        result.prompt_sampled = self.values.sampled.cpu().numpy()
        result.prompt_ranks = self.values.ranks.cpu().numpy()
        result.prompt_top_token_ids = self.values.top_ids.cpu().numpy()[reported].astype(np.int32)
        result.prompt_top_logprobs = self.values.top.cpu().numpy()[reported]


def hidden_indices(plan: PromptLogprobPlan) -> Int64Column:
    """Indices of the step's hidden states that give the plan's prompt logprobs, [num_tokens].

    The plan has at least one run.
    """
    return ranges(plan.first_indices, plan.counts)


def prompt_logprobs(
    plan: PromptLogprobPlan, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> PromptLogprobs | None:
    """Launches what a plan asks for; None if that is nothing.

    Args:
        plan: The runs.
        hidden: [num_tokens, hidden_size] the hidden states before the plan's tokens.
        logits_of: The model's output layer.
    """
    if not plan.counts.size:
        return None
    assert hidden.shape[0] == plan.token_ids.size, "one hidden state for each token"
    num_top = int(plan.num_tops.max())
    rows = CPU_PIECE_ROWS if hidden.device.type == "cpu" else _GPU_PIECE_ROWS
    tokens = indices_on_device(plan.token_ids, hidden.device)
    # Copies of the ids, because a view in the middle may not be aligned as kernels were compiled
    # for.
    pieces = [
        token_logprobs(logits_of(piece).float(), ids.clone(), num_top)
        for piece, ids in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True)
    ]
    return PromptLogprobs(
        np.repeat(plan.num_tops, plan.counts),
        TokenLogprobs(*(torch.cat(columns) for columns in zip(*pieces, strict=True))),
    )
