"""Log probabilities of sampled tokens and of the most likely ones.

Owns the arithmetic. The logits it is given decide what the numbers mean: the sampler passes them
after bias, bans and penalties and before temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace_kernels.sampling.logprobs_triton import token_logprobs_triton
from headrace_kernels.sampling.ordering import top_tokens_reference
from headrace_kernels.triton_runtime import uses_triton


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, per row.

    Of a row that is not finite they mean nothing.
    """

    # [num_rows] float32, of the sampled tokens.
    sampled: torch.Tensor
    # [num_rows] int32: 1 for the most likely token; equal logits rank by id.
    ranks: torch.Tensor
    # [num_rows, num_top] int64, most likely first.
    top_ids: torch.Tensor
    # [num_rows, num_top] float32; -inf for tokens that are banned.
    top: torch.Tensor


def token_logprobs_reference(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
    """Log probabilities of one token per row and of the `num_top` most likely ones.

    Args:
        logits: bf16, fp16 or fp32 [num_rows, vocab_size].
        tokens: int64 [num_rows], the sampled tokens.
        num_top: How many most likely tokens to report, 0 to vocab_size.
    """
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logits.gather(1, tokens[:, None])
    lower_ids = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & lower_ids)).sum(dim=1, dtype=torch.int32)
    if num_top:
        top_ids = top_tokens_reference(logits, num_top)
    else:
        top_ids = tokens.new_empty((tokens.shape[0], 0))
    return TokenLogprobs(logprobs.gather(1, tokens[:, None])[:, 0], ranks, top_ids, logprobs.gather(1, top_ids))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
    """`token_logprobs_reference`, by the best implementation for the device."""
    if uses_triton(logits):
        return TokenLogprobs(*token_logprobs_triton(logits, tokens, num_top))
    return token_logprobs_reference(logits, tokens, num_top)
