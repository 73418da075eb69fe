"""Norm and gate of the heads' outputs of a linear attention: norm(x) * weight * silu(gate).

The norm is over each head. It is rounded to the model's type before its weight, and all once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.rms_norm import rms_norm


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norms each head's output and multiplies it by silu of its gate.

    Args:
        x: [num_tokens, num_heads, head_dim].
        gate: [num_tokens, num_heads, head_dim] in the same type.
        weight: [head_dim] in the same type.
        eps: Added to the mean square.

    Returns:
        [num_tokens, num_heads, head_dim] in the type of x.
    """
    normed = rms_norm(x, weight, eps)
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)
