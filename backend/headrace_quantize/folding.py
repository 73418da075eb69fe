"""Scales that are multiplied into a layer's tensors so that they cancel.

A product's inputs are multiplied by s, what makes them by 1 / s.

Owns what a tensor becomes; `awq` finds the scales, `stages` says where they go.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from headrace_model_folder import ModelConfig
from headrace_quantize.stages import Stage, of_source


@dataclasses.dataclass(slots=True)
class Folding:
    """Scales that are folded into one layer.

    Names are those of projections and norms, without ".weight".
    """

    # Projection -> [inputs] what its columns are multiplied by.
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    # Projection or norm -> [outputs] what its rows, its bias or its weight are multiplied by.
    outputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def add(self, prefix: str, stage: Stage, scales: Tensor, config: ModelConfig) -> None:
        """Notes the scales of a stage's inputs, [inputs]."""
        for projection in stage.projections:
            self.inputs[prefix + projection] = scales
        self.outputs[prefix + stage.source] = 1 / of_source(stage, config, scales)

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the layer with its scales, in its own type; itself if it has none.

        Args:
            name: With ".weight" or ".bias".
            tensor: On any device.
        """
        owner, _, kind = name.rpartition(".")
        inputs, outputs = self.inputs.get(owner) if kind == "weight" else None, self.outputs.get(owner)
        if tensor.dim() == 1:
            return tensor if outputs is None else (tensor.float() * outputs.to(tensor.device)).to(tensor.dtype)
        scaled = tensor if inputs is None else tensor.float() * inputs.to(tensor.device)
        scaled = scaled if outputs is None else scaled.float() * outputs.to(tensor.device)[:, None]
        return scaled.to(tensor.dtype)

    def undone(self, name: str, weight: Tensor) -> Tensor:
        """A projection's scaled weight [outputs, inputs] as it was before scaling."""
        inputs, outputs = self.inputs.get(name), self.outputs.get(name)
        weight = weight if inputs is None else weight / inputs
        return weight if outputs is None else weight / outputs[:, None]

    def gram(self, name: str, gram: Tensor) -> Tensor:
        """The Gram matrix of a projection's inputs after scaling, [inputs, inputs]."""
        inputs = self.inputs.get(name)
        return gram if inputs is None else gram / inputs / inputs[:, None]
