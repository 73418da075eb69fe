"""What all layers with weights have in common.

They say which part of which checkpoint tensor fills which of their parameters.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from headrace_backend.weights.placement import WeightTarget


class CheckpointPart(NamedTuple):
    """One checkpoint tensor of a layer."""

    # Whole, such as model.layers.0.self_attn.q_proj.bias.
    name: str
    target: WeightTarget


class ShardedModule(nn.Module, abc.ABC):
    """A module whose weights are filled from checkpoint tensors."""

    @abc.abstractmethod
    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Yields every checkpoint tensor that goes into this module's own parameters.

        Each entry of the parameters is covered exactly once, but for `num_padding` of them.
        """

    @property
    def num_padding(self) -> int:
        """Entries of its parameters that are no number of the model's."""
        return 0


def weight_targets(root: nn.Module) -> dict[str, WeightTarget]:
    """Returns, by checkpoint tensor name, the place in a parameter under `root` that it fills."""
    modules = (module for module in root.modules() if isinstance(module, ShardedModule))
    return {part.name: part.target for module in modules for part in module.checkpoint_parts()}
