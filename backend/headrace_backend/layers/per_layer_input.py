"""Per-layer inputs: what each layer has of each token beside the residual stream.

`PerLayerInputs` makes all layers' before the first one; a layer ends with its own
(`PerLayerResidual`). Both are whole on every rank but for the table, whose tokens ranks share as
the embedding's.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from torch.nn import functional

from headrace_backend.layers.embedding import TokenEmbedding
from headrace_backend.layers.linear import ColumnLinear
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.weights.placement import Placement
from headrace_model_folder.description import Linear, PerLayerEmbedding, PerLayerInput


class PerLayerInputs(nn.Module):
    """(norm(projection(embedding)) + row of a table) * scale, for all layers together."""

    def __init__(self, inputs: PerLayerEmbedding, placement: Placement) -> None:
        super().__init__()
        self.table = TokenEmbedding(inputs.table, placement)
        self.projection = _whole(inputs.projection, placement)
        self.norm = RmsNorm(inputs.norm, placement)
        self._size = inputs.norm.size
        self._projection_scale, self._scale = inputs.projection_scale, inputs.scale

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Makes the inputs of a step's tokens.

        Args:
            token_ids: [num_tokens] int64.
            embedded: [num_tokens, hidden_size] the tokens' scaled embeddings.

        Returns:
            [num_tokens, num_layers, size of an input].
        """
        projected: Tensor = self.projection(embedded).mul_(self._projection_scale)
        normed: Tensor = self.norm(projected.view(len(embedded), -1, self._size))
        return normed.add_(self.table(token_ids).view_as(normed)).mul_(self._scale)


class PerLayerResidual(nn.Module):
    """norm(projection(activation(gate(x)) * input)), which is added to the residual stream x."""

    def __init__(self, inputs: PerLayerInput, placement: Placement) -> None:
        super().__init__()
        assert inputs.activation == "gelu_tanh", inputs.activation
        self.gate = _whole(inputs.gate, placement)
        self.projection = _whole(inputs.projection, placement)
        self.norm = RmsNorm(inputs.norm, placement)

    def forward(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Returns [num_tokens, hidden_size], to be added to the stream.

        Args:
            residual: [num_tokens, hidden_size] the stream, with nothing pending.
            inputs: [num_tokens, size of an input] the layer's.
        """
        gated = functional.gelu(self.gate(residual), approximate="tanh").mul_(inputs)
        normed: Tensor = self.norm(self.projection(gated))
        return normed


def _whole(linear: Linear, placement: Placement) -> ColumnLinear:
    """A projection that every rank has whole, in the model's type whatever other layers have."""
    return ColumnLinear((linear,), (range(linear.outputs),), dataclasses.replace(placement, scheme=None))
