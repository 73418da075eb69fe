"""Masks of tokens: the logits of tokens that a row may not draw become -inf.

A mask is packed, one bit for each token, because it comes from the host while the device computes.
Owns the packing and what it does to logits. Does not own where masks come from: in Headrace,
grammars of structured output.
"""

from __future__ import annotations

import torch

from headrace_kernels.sampling.token_masks_triton import mask_rows_triton
from headrace_kernels.triton_runtime import uses_triton

BITS_PER_WORD = 32


def num_words(vocab_size: int) -> int:
    """Words of a row's mask over `vocab_size` tokens."""
    return -(-vocab_size // BITS_PER_WORD)


def mask_rows_reference(logits: torch.Tensor, samples: torch.Tensor, masks: torch.Tensor) -> None:
    """Bans, in some rows of a batch, each token whose bit is not set; in place.

    Args:
        logits: float32 [num_samples, vocab_size].
        samples: int32 [num_masked], which rows of `logits`, each at most once.
        masks: int32 [num_masked, num_words], the mask of each of those: token t may be drawn if bit
            t % 32 of word t // 32 is set.
    """
    bits = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]] != 0
    rows = samples.long()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def mask_rows(logits: torch.Tensor, samples: torch.Tensor, masks: torch.Tensor) -> None:
    """`mask_rows_reference`, by the best implementation for the device."""
    mask = mask_rows_triton if uses_triton(logits) else mask_rows_reference
    mask(logits, samples, masks)
