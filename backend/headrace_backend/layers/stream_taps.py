"""Copies of the residual stream as it enters some layers, for who drafts from them.

Owns the memory, whose address never changes, so that graphs can write to it, and which layer's copy
lies where in it. A model without taps copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_backend.layers.decoder_layer import DecoderLayer


class StreamTaps:
    """The copies of the step that was computed last."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates for steps of up to `max_tokens`.

        Args:
            layers: Whose entering streams are copied; one may be there twice.
            hidden_size: Elements of the stream.
            max_tokens: Tokens of the largest step.
            dtype: Type of the stream.
            device: Device of the stream.
        """
        self._columns: dict[DecoderLayer, list[slice]] = {}
        for place, layer in enumerate(layers):
            columns = slice(place * hidden_size, (place + 1) * hidden_size)
            self._columns.setdefault(layer, []).append(columns)
        # [max_tokens, num_layers * hidden_size], the layers' streams side by side.
        self.streams: Tensor = torch.zeros(max_tokens, len(layers) * hidden_size, dtype=dtype, device=device)

    def note(self, layer: DecoderLayer, residual: Tensor) -> None:
        """Copies a step's stream [num_tokens, hidden_size] if this layer's is wanted.

        Nothing of the layers before may be pending.
        """
        for columns in self._columns.get(layer, ()):
            self.streams[: len(residual), columns].copy_(residual)
