"""An EAGLE-3 head: one decoder layer that drafts for a model from that model's residual stream.

Owns its mathematics and its loading. A state is three of the target's streams, fused, and behind a
draft the residual stream that the head itself made, or its norm.

    new state = (state or its norm) + attention(norm(embedding), norm(state)) + MLP
    logits    = output layer(norm(new state))

Every rank has the whole head; embedding and output layer that the folder leaves to the target are
the target's, of which each rank has a part.
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
from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead, without_first
from headrace_backend.models.load import WeightMemory
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.progress import Progress
from headrace_model_folder import Eagle3Folder
from headrace_model_folder.description import Mlp
from headrace_model_folder.draft_heads.eagle3_folder import weight_shapes

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
        return WeightMemory(on_meta.weight_bytes, streams)

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
        targets = head.weight_targets()
        with torch.inference_mode():
            if has_weights:
                load_weights(self.folder, targets, progress, _PHASE)
            else:
                shapes = weight_shapes(self.folder.head)
                fill_with_noise(targets, {name: shapes[name] for name in targets}, seed, progress, _PHASE)
        head.join(target, self.folder.head.layers_of(self.num_target_layers), self.max_tokens)
        return head.eval()


class EagleHead(DraftHead):
    """Implements `DraftHead` for a head of a folder of its own; every rank has all of it."""

    target_ids: Tensor

    def __init__(self, folder: Eagle3Folder, placement: Placement, max_position: int) -> None:
        """Allocates the parameters.

        Args:
            folder: The head's parts, and the target's ids of its tokens.
            placement: Type and device.
            max_position: Tokens of context to prepare for.
        """
        head = folder.head
        model, [layer] = head.model, head.model.layers
        super().__init__(model, placement.dtype)
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
        self.stream_norms = nn.ModuleList(RmsNorm(norm, placement) for norm in head.stream_norms)
        reduced = dataclasses.replace(model.embedding, vocab_size=head.draft_vocab_size)
        alone = dataclasses.replace(model, embedding=reduced)
        self.lm_head = OutputHead(alone, placement, None) if folder.has_output_layer else None
        self.rotary = RotaryTable(model.rope, model.attention.rotary_dim, max_position, placement.device)
        ids = torch.tensor(folder.target_ids, dtype=torch.int64, device=placement.device)
        self.register_buffer("target_ids", ids, persistent=False)
        self._has_all_tokens = folder.target_ids == tuple(range(head.vocab_size))
        self._norms_residual, self._norms_output = head.norms_residual, head.norms_output
        # The target's streams, once it is joined.
        self._streams = torch.empty(0)
        self.take_stock()

    def join(self, target: CausalLM, layers: tuple[int, ...], max_tokens: int) -> None:
        """Has a target leave its streams to this head, and lend its embedding if need be.

        Args:
            target: The whole model, of several ranks this one's part.
            layers: Whose entering streams are fused.
            max_tokens: Tokens of the target's largest step.
        """
        self._streams = target.tap_streams(layers, max_tokens)
        if self.embed_tokens is None:
            self.borrow_embedding(target)
        if self.lm_head is None:
            self.borrow_output_layer(target)

    def states(self, first: int, count: int) -> Tensor:
        """Implements `DraftHead.states`: the streams, fused."""
        streams = self._streams[first : first + count]
        if self.stream_norms:
            # One of all, or one of each.
            parts = streams.chunk(len(self.stream_norms), dim=-1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.stream_norms, parts, strict=True)]
            streams = torch.cat(normed, dim=-1)
        state: Tensor = self.fc(streams)
        return state

    def write_kv(self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Implements `DraftHead.write_kv`."""
        qkv = self._projected(token_ids, positions, self.hidden_norm(states))
        self.self_attn.write_kv(qkv, self.rotary(positions), kv_cache, slots)

    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, metadata: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        """Implements `DraftHead.forward`."""
        normed = self.hidden_norm(states)
        qkv = self._projected(token_ids, positions, normed)
        residual = normed if self._norms_residual else states
        heads = self.self_attn.attended(qkv, self.rotary(positions), kv_cache, metadata)
        attended = self.post_attention_layernorm.add(self.self_attn.o_proj(heads), residual)
        hidden = self.norm.add(self.mlp(attended), residual)
        return hidden, hidden if self._norms_output else residual

    def _projected(self, token_ids: Tensor, positions: Tensor, normed: Tensor) -> Tensor:
        """Queries, keys and values side by side, of tokens and the normed states before them."""
        [embedding] = self._targets_embedding or (self.embed_tokens,)
        assert embedding is not None, "a head is joined to its target"
        both = torch.cat((self.input_layernorm(embedding(token_ids)), normed), dim=-1)
        return without_first(self.self_attn.qkv_proj(both), positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Implements `DraftHead.logits`."""
        own: Tensor = self._output_layer(hidden)
        if self._has_all_tokens:
            return own
        logits = torch.full((len(own), self.vocab_size), -torch.inf, dtype=own.dtype, device=own.device)
        return logits.index_copy_(1, self.target_ids, own)

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `DraftHead.most_likely`."""
        own, finite = self._output_layer.most_likely(hidden)
        return self.target_ids[own], finite

    @property
    def _output_layer(self) -> OutputHead:
        [output] = self._targets_output or (self.lm_head,)
        assert output is not None, "a head is joined to its target"
        return output
