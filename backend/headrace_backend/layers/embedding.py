"""Token embedding and output head, split over ranks by vocabulary; tied, they share one weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.embedding import embedding
from headrace_kernels.linear import linear


class TokenEmbedding(ShardedModule):
    """Token id -> vector."""

    def __init__(self, vocab_size: int, size: int, placement: Placement) -> None:
        super().__init__()
        self._rows = placement.shard.split(vocab_size)
        self._is_whole = len(self._rows) == vocab_size
        self.weight = placement.empty(len(self._rows), size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, size], a new tensor; with several ranks their results add up to it."""
        return embedding(token_ids, self.weight, self._rows.start, self._is_whole)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight."""
        yield CheckpointPart("weight", 0, WeightTarget.of(self.weight, self._rows, range(self.weight.shape[1])))


class OutputHead(ShardedModule):
    """Hidden state -> logits of this rank's tokens."""

    def __init__(self, vocab_size: int, size: int, placement: Placement, tied_to: TokenEmbedding | None) -> None:
        super().__init__()
        self._rows = placement.shard.split(vocab_size)
        self._is_tied = tied_to is not None
        self.weight = placement.empty(len(self._rows), size) if tied_to is None else tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, size] -> [num_tokens, this rank's part of the vocabulary] fp32."""
        return linear(hidden, self.weight, out_dtype=torch.float32)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight; nothing if it is the embedding's."""
        if not self._is_tied:
            yield CheckpointPart("weight", 0, WeightTarget.of(self.weight, self._rows, range(self.weight.shape[1])))
