"""Gates of attention's heads, which a projection has beside each query.

    [num_tokens, num_heads, (query, gate)], keys and values -> queries, keys and values; gates

PyTorch's operations, which a graph may capture. Not fused with attention's kernels yet.
"""

from __future__ import annotations

import torch
from torch import Tensor


def without_gates(projected: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Takes the gates out of a projection.

    Args:
        projected: [num_tokens, 2 * num_heads * head_dim + keys and values]; behind each head's
            query stand as many elements of its gate.
        num_heads: Number of query heads.
        head_dim: Elements of a head.

    Returns:
        [num_tokens, queries, keys and values], contiguous, and [num_tokens, num_heads * head_dim]
        the gates.
    """
    size = num_heads * head_dim
    queries, gates = projected[:, : 2 * size].view(-1, num_heads, 2, head_dim).unbind(2)
    return torch.cat((queries.flatten(1), projected[:, 2 * size :]), dim=1), gates.reshape(-1, size)


def gate_heads(heads: Tensor, gates: Tensor) -> Tensor:
    """Multiplies heads [num_tokens, size] in place by the sigmoid of their gates; returns them."""
    return heads.mul_(gates.sigmoid())
