"""Values that a layer norms, or makes of its keys, before attention sees them."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from headrace_backend.weights.placement import Placement
from headrace_kernels.rms_norm import rms_norm
from headrace_model_folder import description


class ValueHeads(nn.Module):
    """RMS norm without factors of each head's values, which may be the keys as projected."""

    factors: Tensor

    def __init__(self, num_heads: int, head_dim: int, eps: float, are_keys: bool, device: torch.device) -> None:
        """Makes the norm.

        Args:
            num_heads: Key and value heads of this rank.
            head_dim: Elements of a head.
            eps: Added to the mean square.
            are_keys: Whether the projection has queries and keys alone.
            device: Device of the heads.
        """
        super().__init__()
        self._heads, self._eps, self._are_keys = (num_heads, head_dim), eps, are_keys
        # Of the kernel, which multiplies by them; in fp32, so that results are rounded once.
        self.register_buffer("factors", torch.ones(head_dim, device=device), persistent=False)

    @classmethod
    def of(cls, attention: description.Attention, num_heads: int, placement: Placement) -> Self | None:
        """What a layer needs with so many heads on this rank; None: values stay as projected."""
        if attention.value_norm_eps is None or attention.kv_source is not None:
            return None
        return cls(num_heads, attention.head_dim, attention.value_norm_eps, attention.value is None, placement.device)

    def forward(self, projected: Tensor) -> Tensor:
        """[num_tokens, queries, keys and perhaps values] -> queries, keys and normed values.

        What is given may be overwritten.
        """
        num_heads, head_dim = self._heads
        last = projected[:, -num_heads * head_dim :]
        normed = rms_norm(last.reshape(-1, num_heads, head_dim), self.factors, self._eps).flatten(1)
        if self._are_keys:
            return torch.cat((projected, normed), dim=1)
        last.copy_(normed)
        return projected
