"""RMS norm with its weight, alone or fused with the residual addition. Every rank holds the whole weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.rms_norm import add_rms_norm, rms_norm


class RmsNorm(ShardedModule):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place and gives the norm of the sum, all [num_tokens, size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight."""
        yield CheckpointPart("weight", 0, WeightTarget.of(self.weight, range(self.weight.shape[0])))
