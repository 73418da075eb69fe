"""RMS norm with its weight, alone or fused with the residual addition.

It returns the form that the product behind it takes.

Every rank holds the whole weight.

A norm behind a projection whose inputs are shared out takes the ranks' partial outputs and adds
them up first: `residual_norm` makes the right kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.rms_norm import add_rms_norm, rms_norm, rounded_add_rms_norm, rounded_rms_norm
from headrace_kernels.rounded_tokens import Activations
from headrace_model_folder.description import Norm


class RmsNorm(ShardedModule):
    """RMS norm over the last dimension."""

    def __init__(self, norm: Norm, placement: Placement) -> None:
        super().__init__()
        self._name = norm.name
        self.weight = placement.empty(norm.size)
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place and returns the norm of the sum.

        All are [num_tokens, size].
        """
        return add_rms_norm(x, residual, self.weight, self.eps)

    def of_stream(self, pending: Tensor | None, residual: Tensor, number: torch.dtype | None) -> Activations:
        """The norm of the residual stream, to which `pending` is added first in place.

        Args:
            pending: [num_tokens, size] the output of the projection before, of several ranks this
                one's part of it, which may be overwritten; None: nothing is added.
            residual: [num_tokens, size].
            number: The 8-bit type to round to; None: the model's type.
        """
        return self.of_sum(pending, residual, number)

    def of_sum(self, added: Tensor | None, residual: Tensor, number: torch.dtype | None) -> Activations:
        """Returns the norm of `added`, which is already the whole output."""
        about = (residual, self.weight, self.eps)
        if added is None:
            return rms_norm(*about) if number is None else rounded_rms_norm(*about, number)
        return add_rms_norm(added, *about) if number is None else rounded_add_rms_norm(added, *about, number)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight."""
        yield CheckpointPart(f"{self._name}.weight", WeightTarget.of(self.weight, range(self.weight.shape[0])))


class SummingRmsNorm(RmsNorm):
    """The norm where outputs of several ranks meet the residual stream."""

    def __init__(self, norm: Norm, placement: Placement) -> None:
        super().__init__(norm, placement)
        self._shard = placement.shard

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """All-reduces x, adds it to the residual stream in place and returns the norm of that.

        All are [num_tokens, size]; x may be overwritten.
        """
        return self._shard.together.add_rms_norm(x, residual, self.weight, self.eps)

    def of_stream(self, pending: Tensor | None, residual: Tensor, number: torch.dtype | None) -> Activations:
        """Returns the norm of the residual stream after adding the all-reduced `pending` to it.

        `pending` may be overwritten.
        """
        if pending is None:
            return self.of_sum(None, residual, number)
        if number is None:
            return self.add(pending, residual)
        return self._shard.together.rounded_add_rms_norm(pending, residual, self.weight, self.eps, number)


def residual_norm(norm: Norm, placement: Placement) -> RmsNorm:
    """The norm that adds a `RowLinear`'s output to the residual stream, for one rank or several."""
    kind = RmsNorm if placement.shard.world_size == 1 else SummingRmsNorm
    return kind(norm, placement)
