"""Token embedding and output head, split over ranks by vocabulary.

Tied, they share one weight, which may be in blocks as a file has it.

A head of 8 bits has a weight of its own in any case.

With several ranks both can give every rank the whole: an embedding is the sum of what the ranks
have of it, all but one of them zeros, and logits are the ranks' parts side by side, so that
whatever is done to logits is done to the same bits as it would be by one rank. Rows may be dealt
out instead (`parallel.row_dealer`): then a rank gets whole logits of some of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.head_weight import HeadWeight
from headrace_backend.weights.destination import CopiedRows
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.embedding import embedding
from headrace_kernels.linear.dense import linear
from headrace_kernels.sampling.choice import best_candidates, choose_greedy, most_likely_part
from headrace_model_folder.description import Embedding, ModelDescription


class TokenEmbedding(ShardedModule):
    """Token id -> vector."""

    def __init__(self, embedding: Embedding, placement: Placement) -> None:
        super().__init__()
        self._name, self._shard = embedding.name, placement.shard
        self._rows = placement.shard.split(embedding.vocab_size)
        self._is_whole = len(self._rows) == embedding.vocab_size
        self.weight = _table(len(self._rows), embedding.hidden_size, placement.of(embedding.name))
        self._copy: tuple[HeadWeight, ...] = ()
        # Rounded to the model's type, as models that have one were trained.
        self._scale = float(torch.tensor(embedding.scale, dtype=placement.dtype))

    def fill_too(self, copy: HeadWeight) -> None:
        """Makes this embedding's tensor fill an output head too, which has its own form."""
        # In a tuple, so that it is no module of this one.
        self._copy = (copy,)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, size], a new tensor."""
        rows = self._rows_of(token_ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def _rows_of(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, BlockLinearWeight):
            return self._of_blocks(self.weight, token_ids)
        found = embedding(token_ids, self.weight, self._rows.start, self._is_whole)
        return found if self._is_whole else self._shard.together.all_reduce(found)

    def _of_blocks(self, weight: BlockLinearWeight, token_ids: Tensor) -> Tensor:
        if self._is_whole:
            return weight.rows(token_ids)
        local = token_ids - self._rows.start
        outside = (local < 0) | (local >= len(self._rows))
        found = weight.rows(local.masked_fill_(outside, 0)).masked_fill_(outside[:, None], 0)
        return self._shard.together.all_reduce(found)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight."""
        target = _target(self.weight, self._rows)
        for copy in self._copy:
            rows = CopiedRows(target.destination, copy.destination(range(len(self._rows))))
            target = dataclasses.replace(target, destination=rows)
        yield CheckpointPart(f"{self._name}.weight", target)


class OutputHead(ShardedModule):
    """Hidden state -> logits."""

    def __init__(self, model: ModelDescription, placement: Placement, embedding: TokenEmbedding | None) -> None:
        """Allocates the weight, unless it is the embedding's, which must be given then."""
        super().__init__()
        self._name, self._shard = model.head.name, placement.shard
        self._rows = placement.shard.split(model.vocab_size)
        self._is_whole = len(self._rows) == model.vocab_size
        self._is_tied, self._softcap = model.head.tied, model.head.softcap
        assert embedding is not None or not self._is_tied, "a tied output layer has the embedding's weight"
        self.weight = self._made(model.hidden_size, placement.of(self._name), embedding if self._is_tied else None)

    def _made(
        self, size: int, placement: Placement, tied_to: TokenEmbedding | None
    ) -> nn.Parameter | BlockLinearWeight | HeadWeight:
        if placement.head_scheme is not None:
            weight = HeadWeight(len(self._rows), size, placement.head_scheme, placement)
            if tied_to is not None:
                tied_to.fill_too(weight)
            return weight
        return _table(len(self._rows), size, placement) if tied_to is None else tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, size] -> [num_tokens, vocab_size] fp32."""
        return self.whole(self.part(hidden))

    @property
    def part_size(self) -> int:
        """Tokens of this rank's part of the vocabulary."""
        return len(self._rows)

    def whole(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Gathers each rank's [num_tokens, part_size] to [num_tokens, vocab_size] on all ranks.

        The result is in `out` if it is given.

        Of one rank it is the part itself.
        """
        return part if self._is_whole else self._shard.together.gather_columns(part, out)

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`choose_greedy` of forward(hidden).

        Of several ranks each finds its own best, and only those travel.
        """
        if self._is_whole:
            return choose_greedy(self.part(hidden))
        tokens, peaks = most_likely_part(self.part(hidden), self._rows.start)
        # Numbers of fp32 and ids are exact in fp64.
        candidates = self._shard.together.all_gather(torch.stack((peaks.double(), tokens.double()), dim=1))
        return best_candidates(candidates)

    def part(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_tokens, size] -> [num_tokens, part_size] fp32: `out`, if it is given."""
        logits = self._product(hidden, out)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def _product(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        if isinstance(self.weight, HeadWeight):
            return self.weight.logits(hidden, out)
        if isinstance(self.weight, BlockLinearWeight):
            return self.weight.multiply_to(hidden, None, torch.float32, out)
        return linear(hidden, self.weight, out_dtype=torch.float32, out=out)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight; nothing if the embedding's tensor fills it."""
        if not self._is_tied:
            yield CheckpointPart(f"{self._name}.weight", _target(self.weight, self._rows))


def _table(num_rows: int, size: int, placement: Placement) -> nn.Parameter | BlockLinearWeight:
    """An empty [num_rows, size], as the file has it."""
    if placement.block_kinds is not None:
        return BlockLinearWeight.of_file((num_rows,), size, placement)
    return placement.empty(num_rows, size)


def _target(weight: nn.Parameter | BlockLinearWeight | HeadWeight, rows: range) -> WeightTarget:
    if isinstance(weight, (BlockLinearWeight, HeadWeight)):
        return WeightTarget(weight.destination(range(len(rows))), rows, range(weight.num_inputs))
    return WeightTarget.of(weight, rows, range(weight.shape[1]))
