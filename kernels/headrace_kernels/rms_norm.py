"""Root mean square norm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension. See `rms_norm`."""
    wide = x.float()
    # One reduction instead of square and mean: the mean square is the norm squared over the size.
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()
    # Rounding to the storage type happens before the weight is applied, as in the models' training code.
    normed: Tensor = (wide * inverse).to(x.dtype)
    return normed.mul_(weight)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then the norm of the sum. See `add_rms_norm`."""
    return rms_norm_reference(residual.add_(x), weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes the last dimension.

    Args:
        x: [..., size] in any floating type.
        weight: [size] in the type of x.
        eps: Added to the mean square.

    Returns:
        [..., size] in the type of x.
    """
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to the residual stream, which is changed in place, and normalizes the sum.

    Args:
        x: [num_tokens, size] a layer's output.
        residual: [num_tokens, size] the residual stream; holds the sum afterwards.
        weight: [size].
        eps: Added to the mean square.

    Returns:
        [num_tokens, size] the normalized sum.
    """
    return add_rms_norm_reference(x, residual, weight, eps)
