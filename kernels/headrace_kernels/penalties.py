"""Penalties on tokens that a sequence already contains: repetition, presence, frequency.

Owns the arithmetic on logits. Does not own the counts: the worker keeps them, for those rows that have penalties.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Penalties(NamedTuple):
    """Strengths per row, all float32 [num_rows]."""

    # Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 does nothing.
    repetition: torch.Tensor
    # Subtracted once for tokens in the output; 0 does nothing.
    presence: torch.Tensor
    # Subtracted once for each time the token is in the output; 0 does nothing.
    frequency: torch.Tensor


def apply_penalties_reference(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_counts: torch.Tensor, penalties: Penalties
) -> torch.Tensor:
    """Applies the three in the order of their fields.

    Args:
        logits: float32 [num_rows, vocab_size].
        prompt_mask: bool [num_rows, vocab_size], whether the prompt contains the token.
        output_counts: int32 [num_rows, vocab_size], how often the output contains it.
        penalties: Strengths.

    Returns:
        float32 [num_rows, vocab_size]. A banned token (-inf) stays banned.
    """
    in_output = output_counts > 0
    repetition = penalties.repetition[:, None]
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(prompt_mask | in_output, penalized, logits)
    return logits - penalties.presence[:, None] * in_output - penalties.frequency[:, None] * output_counts


def apply_penalties(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_counts: torch.Tensor, penalties: Penalties
) -> torch.Tensor:
    """`apply_penalties_reference`, by the best implementation for the device."""
    return apply_penalties_reference(logits, prompt_mask, output_counts, penalties)
