"""An EAGLE-3 head: one decoder layer that drafts for a model from that model's residual stream.

Owns its mathematics and its loading. Of a token x with position i it takes the embedding of x and
the *state* of the token before it: three of the target's streams at i - 1, fused, or what the head
itself made of a draft. The layer attends to earlier tokens of the head's own cache, where slot i
holds what x and the state of i - 1 gave.

    new state = (state or its norm) + attention(norm(embedding), norm(state)) + MLP
    logits    = output layer(norm(new state))

Every rank has the whole head; an embedding that the folder leaves to the target is the target's, of
which each rank has a part.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from headrace_backend.layers.attention import Attention
from headrace_backend.layers.embedding import OutputHead, TokenEmbedding
from headrace_backend.layers.linear import ColumnLinear
from headrace_backend.layers.mlp import GatedMlp
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.rotary import RotaryTable
from headrace_backend.layers.sharded_module import weight_targets
from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import WeightMemory
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.progress import Progress
from headrace_kernels.attention.rope_kv import rope_and_write_kv
from headrace_model_folder import Eagle3Folder
from headrace_model_folder.description import Mlp
from headrace_model_folder.eagle3_folder import weight_shapes

_PHASE = "draft weights"


@dataclasses.dataclass(frozen=True, slots=True)
class HeadBuild:
    """A head before it is loaded."""

    folder: Eagle3Folder
    # Type and device of its parameters, which are the target's.
    dtype: torch.dtype
    device: torch.device
    # Tokens of context to prepare for; a head's own limit is none, beyond it drafts may get worse.
    max_position: int
    # Layers of the target, by which the streams are chosen where the folder does not say.
    num_target_layers: int
    # Tokens of the target's largest step.
    max_tokens: int

    def empty_head(self) -> EagleHead:
        """Allocates the head; its weights are still to be filled."""
        return EagleHead(self.folder, Placement(self.dtype, self.device), self.max_position)

    def memory(self) -> WeightMemory:
        """Bytes of the weights, and of the target's streams, which are taken with them."""
        on_meta = EagleHead(self.folder, Placement(self.dtype, torch.device("meta")), 1)
        streams = self.folder.head.fusion.inputs * self.max_tokens * self.dtype.itemsize
        return WeightMemory(sum(parameter.nbytes for parameter in on_meta.parameters()), streams)

    def loaded(self, has_weights: bool, target: CausalLM, progress: Progress, seed: int) -> EagleHead:
        """Makes the head with its weights, beside its target.

        Args:
            has_weights: Whether to read the folder's weights; else they are seeded noise.
            target: The model that it drafts for; later steps of it leave their streams to the head.
            progress: Called with (phase, done, total, unit).
            seed: Seed of noise.

        Raises:
            InvalidModelFolder: A weight can't be read or is not finite.
        """
        head = self.empty_head()
        targets = weight_targets(head)
        with torch.inference_mode():
            if has_weights:
                load_weights(self.folder, targets, progress, _PHASE)
            else:
                shapes = weight_shapes(self.folder.head)
                fill_with_noise(targets, {name: shapes[name] for name in targets}, seed, progress, _PHASE)
        head.join(target, self.folder.head.layers_of(self.num_target_layers), self.max_tokens)
        return head.eval()


class EagleHead(nn.Module):
    """A head, which computes nothing before it is joined to its target."""

    target_ids: Tensor

    def __init__(self, folder: Eagle3Folder, placement: Placement, max_position: int) -> None:
        """Allocates the parameters.

        Args:
            folder: The head's parts, and the target's ids of its tokens.
            placement: Type and device.
            max_position: Tokens of context to prepare for.
        """
        super().__init__()
        head = folder.head
        model, [layer] = head.model, head.model.layers
        assert isinstance(layer.mlp, Mlp), "a head has no experts"
        assert layer.attention_norm is not None and layer.mlp_norm is not None, "a head's parts are behind norms"
        self.embed_tokens = TokenEmbedding(model.embedding, placement) if folder.has_embedding else None
        self.fc = ColumnLinear((head.fusion,), (range(head.fusion.outputs),), placement)
        self.input_layernorm = RmsNorm(layer.attention_norm, placement)
        self.hidden_norm = RmsNorm(head.hidden_norm, placement)
        self.self_attn = Attention(layer.kv_attention, placement)
        self.post_attention_layernorm = RmsNorm(layer.mlp_norm, placement)
        self.mlp = GatedMlp(layer.mlp, placement)
        self.norm = RmsNorm(model.norm, placement)
        reduced = dataclasses.replace(model.embedding, vocab_size=head.draft_vocab_size)
        self.lm_head = OutputHead(dataclasses.replace(model, embedding=reduced), placement, None)
        self.rotary = RotaryTable(model.rope, model.attention.rotary_dim, max_position, placement.device)
        ids = torch.tensor(folder.target_ids, dtype=torch.int64, device=placement.device)
        self.register_buffer("target_ids", ids, persistent=False)
        self._has_all_tokens = folder.target_ids == tuple(range(head.vocab_size))
        self._norms_residual = head.norms_residual
        self.vocab_size, self.hidden_size, self.dtype = head.vocab_size, model.hidden_size, placement.dtype
        attention = model.attention
        self.num_heads, self.num_kv_heads, self.head_dim = (
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
        )
        # The target's embedding, in a tuple so that it is no module of this one; and its streams.
        self._targets_embedding: tuple[TokenEmbedding, ...] = ()
        self._streams = torch.empty(0)
        # The collectives of the ranks that have the target.
        self.together: Collectives | None = None

    def join(self, target: CausalLM, layers: tuple[int, ...], max_tokens: int) -> None:
        """Has a target leave its streams to this head, and lend its embedding if need be.

        Args:
            target: The whole model, of several ranks this one's part.
            layers: Whose entering streams are fused.
            max_tokens: Tokens of the target's largest step.
        """
        self._streams = target.tap_streams(layers, max_tokens)
        self.together = target.shard.collectives
        if self.embed_tokens is None:
            assert target.model.embed_tokens is not None, "a target of one stage has an embedding"
            self._targets_embedding = (target.model.embed_tokens,)

    def fused(self, first: int, count: int) -> Tensor:
        """States [count, hidden_size] of tokens of the step that the target computed last.

        Args:
            first: Place of the first token in the step.
            count: Number of tokens, padding included.
        """
        state: Tensor = self.fc(self._streams[first : first + count])
        return state

    def write_kv(self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Writes the keys and values of tokens, and computes nothing else.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens].
            states: [num_tokens, hidden_size] state of the token before each.
            kv_cache: The head's cache.
            slots: int64 [num_tokens] places in it; -1: nowhere.
        """
        qkv, _ = self._projected(token_ids, positions, states)
        rotations = self.rotary(positions)
        rope_and_write_kv(qkv.view(len(qkv), -1, self.head_dim), rotations, kv_cache, slots, self.num_heads)

    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, metadata: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        """Computes tokens behind the states of those before them.

        Args:
            token_ids: int64 [num_tokens].
            positions: int64 [num_tokens].
            states: [num_tokens, hidden_size] state of the token before each.
            kv_cache: The head's cache; the tokens' keys and values are written first.
            metadata: Rows, lengths, block tables and slots.

        Returns:
            [num_tokens, hidden_size] hidden states for `logits`, and the tokens' own states.
        """
        qkv, residual = self._projected(token_ids, positions, states)
        heads = self.self_attn.attended(qkv, self.rotary(positions), kv_cache, metadata)
        normed = self.post_attention_layernorm.add(self.self_attn.o_proj(heads), residual)
        return self.norm.add(self.mlp(normed), residual), residual

    def _projected(self, token_ids: Tensor, positions: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values side by side, and a new residual stream.

        A sequence's first token has no state before it, and heads never saw one as context. Its key
        and value are zeros.
        """
        [embedding] = self._targets_embedding or (self.embed_tokens,)
        assert embedding is not None, "a head is joined to its target"
        normed = self.hidden_norm(states)
        residual = normed.clone() if self._norms_residual else states.clone()
        qkv = self.self_attn.qkv_proj(torch.cat((self.input_layernorm(embedding(token_ids)), normed), dim=-1))
        return qkv.masked_fill_((positions == 0)[:, None], 0), residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] fp32; -inf for tokens that the head does not know."""
        own: Tensor = self.lm_head(hidden)
        if self._has_all_tokens:
            return own
        logits = torch.full((len(own), self.vocab_size), -torch.inf, dtype=own.dtype, device=own.device)
        return logits.index_copy_(1, self.target_ids, own)

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Likeliest tokens, int64 [n], and which rows are finite, bool [n]."""
        own, finite = self.lm_head.most_likely(hidden)
        return self.target_ids[own], finite
