"""What all layers with weights have in common: they say which part of which checkpoint tensor fills
which of their parameters.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from headrace_backend.weights.placement import WeightTarget


class CheckpointPart(NamedTuple):
    """One checkpoint tensor of a layer."""

    # `weight` or `bias`.
    parameter: str
    # Which of the projections that share the parameter; 0 if there is one.
    part: int
    target: WeightTarget


class ShardedModule(nn.Module, abc.ABC):
    """A module whose weights are filled from checkpoint tensors."""

    @abc.abstractmethod
    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Every checkpoint tensor that goes into this module's own parameters, each entry of them
        covered exactly once.
        """
