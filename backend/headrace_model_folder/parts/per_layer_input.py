"""Per-layer embeddings: inputs that each layer has of each token, beside the residual stream.

Owns names and sizes. They are made of the tokens before the first layer (`PerLayerEmbedding`), and
each layer ends with its own (`PerLayerInput`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from headrace_model_folder.parts.named_tensors import Activation, Embedding, Linear, Norm, Shape


@dataclasses.dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """All layers' inputs of a token: (norm(projection(embedding)) + row of a table) * scale."""

    # Rows of all layers' inputs, side by side.
    table: Embedding
    # The scaled embedding -> all layers' inputs.
    projection: Linear
    # What multiplies the projection's outputs.
    projection_scale: float
    # Over one layer's inputs.
    norm: Norm
    # What multiplies the sum of both parts.
    scale: float

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of its tensors."""
        parts: tuple[Embedding | Linear | Norm, ...] = (self.table, self.projection, self.norm)
        return itertools.chain.from_iterable(part.tensors() for part in parts)


@dataclasses.dataclass(frozen=True, slots=True)
class PerLayerInput:
    """The end of a layer: adds norm(projection(activation(gate(x)) * input)) to the stream x."""

    # Residual stream -> as many elements as a layer's input has.
    gate: Linear
    # Those -> hidden state.
    projection: Linear
    norm: Norm
    activation: Activation = "gelu_tanh"

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """The projections in the order of a forward pass."""
        return self.gate, self.projection
