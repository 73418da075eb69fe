"""Penalties on tokens that a sequence already contains: repetition, presence, frequency.

Owns the arithmetic on logits. Does not own the counts: the worker keeps them, for those rows that
have penalties.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace_kernels.sampling.parameters import FREQUENCY, PRESENCE, REPETITION, read_floats
from headrace_kernels.sampling.penalties_triton import penalize_rows_triton
from headrace_kernels.triton_runtime import uses_triton


class Penalties(NamedTuple):
    """Strengths per row, all float32 [num_rows]."""

    # Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 does
    # nothing.
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


def penalize_rows_reference(
    logits: torch.Tensor,
    samples: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    prompt_masks: torch.Tensor,
    output_counts: torch.Tensor,
    parameters: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> None:
    """Penalizes some rows of a batch, in place.

    Args:
        logits: float32 [num_samples, vocab_size].
        samples: int64 [num_penalized], which rows of `logits`, each at most once.
        slots: int64 [num_penalized], which row of the masks and counts belongs to each.
        rows: int64 [num_penalized], which row of the parameters.
        prompt_masks: bool [num_slots, vocab_size], see `apply_penalties_reference`.
        output_counts: int32 [num_slots, vocab_size], likewise.
        parameters: int32 [num_rows + 1, 16], see `sampling.parameters`.
        drafts: int64 [num_penalized, num_drafts], tokens that count as output too, -1 for none;
            None: no row has any.
    """
    chosen = parameters.index_select(0, rows)
    penalties = Penalties(*(read_floats(chosen, column) for column in (REPETITION, PRESENCE, FREQUENCY)))
    counts = output_counts[slots]
    if drafts is not None:
        counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).to(counts.dtype))
    logits[samples] = apply_penalties_reference(logits[samples], prompt_masks[slots], counts, penalties)


def penalize_rows(
    logits: torch.Tensor,
    samples: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    prompt_masks: torch.Tensor,
    output_counts: torch.Tensor,
    parameters: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> None:
    """`penalize_rows_reference`, by the best implementation for the device."""
    penalize = penalize_rows_triton if uses_triton(logits) else penalize_rows_reference
    penalize(logits, samples, slots, rows, prompt_masks, output_counts, parameters, drafts)
