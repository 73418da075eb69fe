"""The order of tokens that sampling and log probabilities share.

Tokens are ordered by logit, and the lower id is first where logits are equal.

Owns that order only. A plain `torch.topk` leaves the choice among equals open; here a result must
not depend on the device or the batch.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def top_tokens_reference(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the highest logits, highest first.

    Rows in which equal logits meet, among the highest or at their border, are ordered exactly; the
    others, nearly all, take `torch.topk` as it is.

    Args:
        logits: float32 [num_rows, vocab_size].
        count: How many, 1 to vocab_size.

    Returns:
        int64 [num_rows, count].
    """
    if count == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices
    # One more than asked for shows whether equals meet at the border.
    values, ids = logits.topk(count + 1, dim=1)
    equal = (values[:, 1:] == values[:, :-1]).any(dim=1)
    ids = ids[:, :count]
    rows = equal.nonzero()[:, 0]
    if rows.numel():
        ids[rows] = _top_tokens_exact(logits[rows], count)
    return ids


def _top_tokens_exact(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The top tokens in that order, through integers of which no two are equal.

    The upper bits sort as the float does, the lower ones are the complemented id.
    """
    # Adding 0 turns -0.0, which would sort below 0.0, into 0.0.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last_id = logits.shape[1] - 1
    complements = torch.arange(last_id, -1, -1, device=logits.device)
    keys = ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(complements)
    return last_id - (keys.topk(count, dim=1).values & _LOW)
