"""What proposes tokens by passes of its own: a small model, or a head over the target's states.

Owns the interface that the drafters of a CPU and a GPU call (`cpu_draft_model`, `gpu_draft_model`),
and the small model behind it. Heads are `head_drafts`. Both have a KV cache whose blocks have the
numbers of the target's.
"""

from __future__ import annotations

from typing import Protocol

import torch

from headrace_backend.layers.step_metadata import GroupMetadata
from headrace_backend.step.plan import ForwardPlan
from headrace_backend.worker.step.kv_caches import cache_bytes, copy_planned_blocks
from headrace_backend.worker.step.runner import CausalModel


class DraftingModel(Protocol):
    """A model or head with its caches."""

    # Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim].
    kv_caches: list[torch.Tensor]
    # Of a layer's attention.
    num_heads: int
    # Of activations.
    dtype: torch.dtype
    # Whether `follow` attends, for which the step must describe this model's attention.
    attends_in_follow: bool

    @property
    def cache_bytes(self) -> int:
        """Memory of all that its blocks hold."""

    def copy_blocks(self, plan: ForwardPlan) -> None:
        """Copies the blocks that a plan has copied, before anything of it is computed."""

    def begin(self, rows: torch.Tensor, positions: torch.Tensor, step: GroupMetadata) -> None:
        """Takes the rows of the passes to come, before the first.

        Args:
            rows: int32 [n].
            positions: int32 or int64 [n] of the tokens that the first pass computes.
            step: The first pass; its slots and lengths are not looked at.
        """

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: GroupMetadata
    ) -> torch.Tensor:
        """Passes over one token of each row: hidden states [n, hidden_size].

        Args:
            token_ids: int64 [n].
            positions: int64 [n].
            rows: int32 [n], of those that `begin` was given.
            step: The pass.
        """

    def follow(self, token_ids: torch.Tensor, positions: torch.Tensor, step: GroupMetadata, first: int) -> None:
        """Computes keys and values of tokens that the target has just computed.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens].
            step: Their slots and block tables.
            first: Place of the first of them in the target's step.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] of the target's vocabulary."""

    def most_likely(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens, int64 [n], and which rows are finite, bool [n]."""


class SmallModel:
    """Implements `DraftingModel` with a language model that knows nothing of its target."""

    attends_in_follow = True

    def __init__(self, model: CausalModel, kv_caches: list[torch.Tensor], num_heads: int) -> None:
        """Takes its parts.

        Args:
            model: The model.
            kv_caches: Its caches, one per layer.
            num_heads: Query heads of a layer.
        """
        self._model = model
        self.kv_caches = kv_caches
        self.num_heads, self.dtype = num_heads, model.dtype

    @property
    def cache_bytes(self) -> int:
        """Implements `DraftingModel.cache_bytes`."""
        return cache_bytes(self.kv_caches)

    def copy_blocks(self, plan: ForwardPlan) -> None:
        """Implements `DraftingModel.copy_blocks`."""
        copy_planned_blocks(plan, self.kv_caches)

    def begin(self, rows: torch.Tensor, positions: torch.Tensor, step: GroupMetadata) -> None:
        """Implements `DraftingModel.begin`: its cache is all that a pass needs."""

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: GroupMetadata
    ) -> torch.Tensor:
        """Implements `DraftingModel.compute`."""
        return self._model(token_ids, positions, self.kv_caches, step)

    def follow(self, token_ids: torch.Tensor, positions: torch.Tensor, step: GroupMetadata, first: int) -> None:
        """Implements `DraftingModel.follow` by a whole pass."""
        self._model(token_ids, positions, self.kv_caches, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Implements `DraftingModel.logits`."""
        return self._model.logits(hidden)

    def most_likely(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implements `DraftingModel.most_likely`."""
        return self._model.most_likely(hidden)
