"""Token embedding: rows of a table, also of one rank's part of a table that is split over the vocabulary."""

from __future__ import annotations

from torch import Tensor


def embedding_reference(token_ids: Tensor, weight: Tensor, first_token: int = 0) -> Tensor:
    """See `embedding`."""
    local = token_ids - first_token if first_token else token_ids
    outside = (local < 0) | (local >= weight.shape[0])
    return weight.index_select(0, local.masked_fill(outside, 0)).masked_fill_(outside[:, None], 0)


def embedding(token_ids: Tensor, weight: Tensor, first_token: int = 0, whole: bool = True) -> Tensor:
    """Looks tokens up.

    Args:
        token_ids: [num_tokens] int64.
        weight: [rows, size], the rows of tokens first_token, first_token + 1, ...
        first_token: The token of row 0.
        whole: The table holds every token that can occur, so that nothing has to be masked.

    Returns:
        [num_tokens, size]; zeros for tokens whose row another rank holds, so that the ranks' sum is the embedding.
    """
    if whole:
        return weight.index_select(0, token_ids)
    return embedding_reference(token_ids, weight, first_token)
