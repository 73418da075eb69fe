"""Norms of queries and of keys over all heads together.

Several ranks have some of the heads each: they add up the squares of all, and each norms its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace_backend.layers.norm import norm_weight
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.rms_norm import rms_norm
from headrace_model_folder import description

# Of what ranks add up for each token: 16 bytes in fp32, which the kernels of collectives take.
_SUMS = 4


class ProjectionNorms(ShardedModule):
    """The norms of one rank that has all heads."""

    def __init__(self, attention: description.Attention, query: range, key: range, placement: Placement) -> None:
        """Allocates the weights.

        Args:
            attention: The attention whose projections are normed.
            query: The outputs of the query projection that this rank keeps.
            key: The outputs of the key projection that it keeps.
            placement: Type, device and rank.
        """
        super().__init__()
        assert attention.query_norm is not None and attention.key_norm is not None
        self._norms = attention.query_norm, attention.key_norm
        self._kept = query, key
        self.query_weight, self.key_weight = (
            norm_weight(norm, len(kept), placement) for norm, kept in zip(self._norms, self._kept, strict=True)
        )

    def forward(self, qkv: Tensor) -> None:
        """Norms queries and keys in place.

        Args:
            qkv: [num_tokens, queries, keys and values of all heads] of this rank.
        """
        for part, weight, norm in zip(self._parts(qkv), self._weights, self._norms, strict=True):
            part.copy_(rms_norm(part, weight, norm.eps))

    @property
    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.query_weight, self.key_weight

    def _parts(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and the keys."""
        end = len(self._kept[0])
        return qkv[:, :end], qkv[:, end : end + len(self._kept[1])]

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weights of this rank's heads."""
        for norm, weight, kept in zip(self._norms, self._weights, self._kept, strict=True):
            yield CheckpointPart(f"{norm.name}.weight", WeightTarget.of(weight, kept))


class SummingProjectionNorms(ProjectionNorms):
    """The norms of one of several ranks, which have some of the heads each."""

    def __init__(self, attention: description.Attention, query: range, key: range, placement: Placement) -> None:
        super().__init__(attention, query, key, placement)
        self._shard = placement.shard
        # Elements that the sums are over: a key head that several ranks have counts as often.
        self._sizes = tuple(len(kept) * placement.shard.world_size for kept in self._kept)

    def forward(self, qkv: Tensor) -> None:
        """Implements `ProjectionNorms.forward`. All ranks call it together."""
        parts = self._parts(qkv)
        sums = torch.zeros(len(qkv), _SUMS, dtype=torch.float32, device=qkv.device)
        for place, part in enumerate(parts):
            sums[:, place] = part.float().square().sum(1)
        sums = self._shard.together.all_reduce(sums)
        for place, (part, weight) in enumerate(zip(parts, self._weights, strict=True)):
            mean_square = sums[:, place, None] / self._sizes[place]
            normed = (part.float() * (mean_square + self._norms[place].eps).rsqrt()).to(weight.dtype)
            part.copy_(normed.mul_(weight))


def projection_norms(
    attention: description.Attention, query: range, key: range, placement: Placement
) -> ProjectionNorms | None:
    """The norms over all heads, for one rank or several; None: the attention has no such norms."""
    if not attention.norms_projections:
        return None
    kind = ProjectionNorms if placement.shard.world_size == 1 else SummingProjectionNorms
    return kind(attention, query, key, placement)
