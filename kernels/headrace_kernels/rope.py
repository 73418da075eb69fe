"""Rotary position embedding of queries and keys, in the half-split layout of Hugging Face checkpoints.

Dimension i of the first half and dimension i of the second half form a plane, which turns by the angle of the token's position. The step's rows of the table are
taken once (`rope_rows`) and serve every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_rows(table: Tensor, positions: Tensor) -> Tensor:
    """The step's rotations.

    Args:
        table: [max_position, 2, head_dim / 2] fp32 of `rope_table`.
        positions: [num_tokens] int64.

    Returns:
        [num_tokens, 3, head_dim / 2] fp32: cosine, minus sine, sine. The two signs belong to the plane's two halves.
    """
    cosine, sine = table.index_select(0, positions).unbind(1)
    return torch.stack((cosine, -sine, sine), dim=1)


def rope_reference(x: Tensor, rows: Tensor) -> Tensor:
    """See `rope`."""
    halves = x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
    wide = halves.float()
    turned = wide * rows[:, None, :1]
    turned.addcmul_(wide.flip(-2), rows[:, None, 1:])
    return turned.view(x.shape).to(x.dtype)


def rope(x: Tensor, rows: Tensor) -> Tensor:
    """Turns every head of every token.

    Args:
        x: [num_tokens, num_heads, head_dim], queries or keys or both; may be a view with strides.
        rows: [num_tokens, 3, head_dim / 2] fp32 of `rope_rows`.

    Returns:
        [num_tokens, num_heads, head_dim] contiguous, in the type of x.
    """
    return rope_reference(x, rows)
