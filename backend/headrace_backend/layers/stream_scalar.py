"""A learned number of a layer that multiplies the residual stream behind it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_model_folder.description import Vector


class StreamScalar(ShardedModule):
    """The number, the same on every rank."""

    def __init__(self, vector: Vector, placement: Placement) -> None:
        super().__init__()
        self._name = vector.name
        self.factor = placement.empty(1)

    def scale(self, residual: Tensor, pending: Tensor) -> Tensor:
        """Multiplies the stream and what is still to be added to it, both in place.

        Args:
            residual: [num_tokens, hidden_size].
            pending: [num_tokens, hidden_size] the whole output of the layer.

        Returns:
            `pending`.
        """
        residual.mul_(self.factor)
        return pending.mul_(self.factor)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The number."""
        yield CheckpointPart(self._name, WeightTarget.of(self.factor, range(1)))
