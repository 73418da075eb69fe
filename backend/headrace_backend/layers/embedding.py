"""Token embedding and output head, split over ranks by vocabulary.

Tied, they share one weight, which may be in blocks as a file has it.

A head of 8 bits has a weight of its own in any case.

With several ranks both can give every rank the whole: an embedding is the sum of what the ranks
have of it, all but one of them zeros, and logits are the ranks' parts side by side, so that
whatever is done to logits is done to the same bits as it would be by one rank. Rows may be dealt
out instead (`parallel.row_dealer`): then a rank gets whole logits of some of them. Ranks' parts are
of one size: where they do not divide the vocabulary, the last rank's ends with rows of no token,
whose logits are minus infinity and leave the rank in no case but as such.
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
        placement = placement.of(embedding.name)
        self._rows = _rows(embedding.vocab_size, placement)
        self._tokens = _tokens(self._rows, embedding.vocab_size)
        self._is_whole = len(self._rows) == embedding.vocab_size
        self.weight = _table(self._rows, self._tokens, embedding.hidden_size, placement)
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

    @property
    def num_padding(self) -> int:
        """Numbers of the rows of no token."""
        return _num_padding(self.weight, len(self._rows) - len(self._tokens))

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight."""
        target = _target(self.weight, self._tokens)
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
        self._rows = _rows(model.vocab_size, placement.of(self._name))
        self._tokens = _tokens(self._rows, model.vocab_size)
        self._vocab_size = model.vocab_size
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
        return _table(self._rows, self._tokens, size, placement) if tied_to is None else tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, size] -> [num_tokens, vocab_size] fp32."""
        return self.whole(self.part(hidden))

    @property
    def part_size(self) -> int:
        """Logits of a rank's part of the vocabulary; some of the last rank's may be no token's."""
        return len(self._rows)

    def whole(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Gathers each rank's [num_tokens, part_size] to [num_tokens, vocab_size] on all ranks.

        The result is in `out` if it is given.

        Of one rank it is the part itself.
        """
        if self._is_whole:
            return part
        if len(self._rows) * self._shard.world_size == self._vocab_size:
            return self._shard.together.gather_columns(part, out)
        tokens = self._shard.together.gather_columns(part)[:, : self._vocab_size]
        return tokens.contiguous() if out is None else out.copy_(tokens)

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
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        if len(self._tokens) < len(self._rows):
            logits[:, len(self._tokens) :] = -torch.inf
        return logits

    def _product(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        if isinstance(self.weight, HeadWeight):
            return self.weight.logits(hidden, out)
        if isinstance(self.weight, BlockLinearWeight):
            return self.weight.multiply_to(hidden, None, torch.float32, out)
        return linear(hidden, self.weight, out_dtype=torch.float32, out=out)

    @property
    def num_padding(self) -> int:
        """Numbers of the rows of no token; 0 if they are the embedding's."""
        return 0 if self._is_tied else _num_padding(self.weight, len(self._rows) - len(self._tokens))

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight; nothing if the embedding's tensor fills it."""
        if not self._is_tied:
            yield CheckpointPart(f"{self._name}.weight", _target(self.weight, self._tokens))


def _num_padding(weight: nn.Parameter | BlockLinearWeight | HeadWeight, num_rows: int) -> int:
    return num_rows * weight.shape[1] if isinstance(weight, nn.Parameter) else 0


def _rows(vocab_size: int, placement: Placement) -> range:
    """A rank's rows: of weights with scales those that ranks divide the vocabulary into.

    Others may end with rows of no token.
    """
    has_scales = placement.head_scheme is not None or placement.block_kinds is not None
    return placement.shard.split(vocab_size) if has_scales else placement.shard.split_vocabulary(vocab_size)


def _tokens(rows: range, vocab_size: int) -> range:
    """The rows that are some token's."""
    return range(rows.start, min(rows.stop, vocab_size))


def _table(rows: range, tokens: range, size: int, placement: Placement) -> nn.Parameter | BlockLinearWeight:
    """A table of so many rows, as the file has it; empty, but for the rows of no token: zeros."""
    if placement.block_kinds is not None:
        return BlockLinearWeight.of_file((len(rows),), size, placement)
    table = placement.empty(len(rows), size)
    table[len(tokens) :] = 0
    return table


def _target(weight: nn.Parameter | BlockLinearWeight | HeadWeight, tokens: range) -> WeightTarget:
    if isinstance(weight, (BlockLinearWeight, HeadWeight)):
        return WeightTarget(weight.destination(range(len(tokens))), tokens, range(weight.num_inputs))
    return WeightTarget.of(weight[: len(tokens)], tokens, range(weight.shape[1]))
