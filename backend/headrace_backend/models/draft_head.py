"""A head that drafts for a model from what that model computed: what all such heads have in common.

Of a token x with position i a head takes the embedding of x and the *state* of the token before it:
something of the target at i - 1, or what the head itself made of a draft. Its one layer attends to
earlier tokens of the head's own cache, where slot i holds what x and the state of i - 1 gave. What
a state is, and how it meets the embedding, is what heads differ in (`eagle_head`, `mtp_head`). What
a head keeps from step to step is the worker's.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from headrace_backend.layers.embedding import OutputHead, TokenEmbedding
from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.weighted_module import WeightedModule
from headrace_backend.tp_rules import rank_part
from headrace_model_folder import ModelDescription


class DraftHead(WeightedModule, abc.ABC):
    """A head, which computes nothing before it is joined to its target."""

    def __init__(self, model: ModelDescription, dtype: torch.dtype, world_size: int = 1) -> None:
        """Notes its sizes.

        Args:
            model: The head as a model of one layer, whose vocabulary is its target's.
            dtype: Type of activations.
            world_size: Ranks that share it; 1: each has all of it.
        """
        super().__init__()
        self.vocab_size, self.hidden_size, self.dtype = model.vocab_size, model.hidden_size, dtype
        # Of this rank.
        attention = rank_part(model, world_size).attention
        self.num_heads, self.num_kv_heads, self.head_dim = (
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
        )
        # The target's embedding and output layer, in tuples so that they are no modules of this
        # one.
        self._targets_embedding: tuple[TokenEmbedding, ...] = ()
        self._targets_output: tuple[OutputHead, ...] = ()

    def borrow_embedding(self, target: CausalLM) -> None:
        """Takes the target's embedding for the head's own."""
        assert target.model.embed_tokens is not None, "a target of one stage has an embedding"
        self._targets_embedding = (target.model.embed_tokens,)

    def borrow_output_layer(self, target: CausalLM) -> None:
        """Takes the target's output layer for the head's own."""
        self._targets_output = (target.lm_head,)

    @abc.abstractmethod
    def states(self, first: int, count: int) -> Tensor:
        """States [count, hidden_size] of tokens of the step that the target computed last.

        Args:
            first: Place of the first token in the step.
            count: Number of tokens, padding included.
        """

    @abc.abstractmethod
    def write_kv(self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Writes the keys and values of tokens, and computes nothing else.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens].
            states: [num_tokens, hidden_size] state of the token before each.
            kv_cache: The head's cache.
            slots: int64 [num_tokens] places in it; -1: nowhere.
        """

    @abc.abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, metadata: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        """Computes tokens behind the states of those before them.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens].
            states: [num_tokens, hidden_size] state of the token before each; may be overwritten.
            kv_cache: The head's cache; the tokens' keys and values are written first.
            metadata: Rows, lengths, block tables and slots.

        Returns:
            [num_tokens, hidden_size] hidden states for `logits`, and the tokens' own states.
        """

    @abc.abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] fp32; -inf for tokens that the head does not know."""

    @abc.abstractmethod
    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Likeliest tokens, int64 [n], and which rows are finite, bool [n]."""


def without_first(qkv: Tensor, positions: Tensor) -> Tensor:
    """Zeros, in place, for the first token of each sequence.

    That token has no state before it, and heads never saw one as context. Its key and value are
    zeros, before and behind any norm and rotation.

    Args:
        qkv: [num_tokens, queries, keys and values side by side].
        positions: int64 [num_tokens].
    """
    return qkv.masked_fill_((positions == 0)[:, None], 0)
