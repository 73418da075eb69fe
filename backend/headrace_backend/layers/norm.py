"""RMS norm with its weight, alone or fused with the residual addition. Every rank holds the whole weight.

A norm behind a projection whose inputs are shared out takes the ranks' partial outputs and adds them up first: `residual_norm` makes the right kind.
"""

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


class SummingRmsNorm(RmsNorm):
    """The norm where outputs of several ranks meet the residual stream."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__(size, eps, placement)
        self._shard = placement.shard

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """As RmsNorm's, of the sum of all ranks' x. x may be overwritten."""
        return self._shard.together.add_rms_norm(x, residual, self.weight, self.eps)


def residual_norm(size: int, eps: float, placement: Placement) -> RmsNorm:
    """The norm that adds a `RowLinear`'s output to the residual stream, for one rank or several."""
    kind = RmsNorm if placement.shard.world_size == 1 else SummingRmsNorm
    return kind(size, eps, placement)
