"""The layer of a model that predicts the token after the next (MTP), as a head that drafts.

Owns its mathematics and its loading. A state is the target's hidden state behind its last norm, and
behind a draft the head's own behind the head's last norm.

    stream    = eh_proj(enorm(embedding), hnorm(state))
    new state = norm(stream + attention + MLP or experts)
    logits    = output layer(new state)

The layer is shared out over ranks as the target's layers are, and what stands before it is whole on
each. Embedding and output layer are the target's: training shares them, and folders have copies.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.2. What a state is, as vLLM and SGLang
feed it to layers of GLM-4.5 and Qwen3.5: behind the last norm.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace_backend.layers.attention import Attention
from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.layers.linear import ColumnLinear
from headrace_backend.layers.norm import RmsNorm, residual_norm
from headrace_backend.layers.rotary import RotaryTables, Rotations
from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead, without_first
from headrace_backend.models.load import WeightMemory, fill_weights, module_memory
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.progress import Progress
from headrace_model_folder import ModelDescription, ModelFolder


@dataclasses.dataclass(frozen=True, slots=True)
class MtpBuild:
    """An MTP layer before it is loaded."""

    # Its description as a model of one layer, and the bits, type, device and rank of its target.
    model: ModelBuild
    # Tokens of the target's largest step.
    max_tokens: int

    def empty_head(self) -> MtpHead:
        """Allocates the head; its weights are still to be filled."""
        limit = self.model.max_position or self.model.config.max_position_embeddings
        return MtpHead(self.model.description, self.model.placement, limit)

    def memory(self) -> WeightMemory:
        """Bytes of the weights, and of the target's states, which are taken with them.

        Raises QuantizationRefused where the bits do not suit the layer.
        """
        on_meta = dataclasses.replace(self.model.placement, device=torch.device("meta"))
        memory = module_memory(MtpHead(self.model.description, on_meta, 1), self.model)
        states = self.model.description.hidden_size * self.max_tokens * self.model.dtype.itemsize
        return memory._replace(scratch=memory.scratch + states)

    def loaded(self, folder: ModelFolder | None, target: CausalLM, progress: Progress, seed: int) -> MtpHead:
        """Makes the head with its weights, beside its target.

        Args:
            folder: The layer's folder (`open_mtp`); None: the weights are seeded noise.
            target: The model that it drafts for; later steps of it leave their states to the head.
            progress: Called with (phase, done, total, unit).
            seed: Seed of noise.

        Raises:
            InvalidModelFolder: A weight can't be read or is not finite.
            QuantizationRefused: The bits do not suit the layer, or a quantized weight is not what
                it should be.
        """
        head = self.empty_head()
        fill_weights(head, head.weight_targets(), self.model, folder, progress, seed)
        head.join(target, self.max_tokens)
        return head.eval()


class MtpHead(DraftHead):
    """Implements `DraftHead` for a layer of the target's own folder."""

    def __init__(self, model: ModelDescription, placement: Placement, max_position: int) -> None:
        """Allocates the parameters, of several ranks this one's share.

        Args:
            model: The layer as a model of one layer, with what stands before it.
            placement: Type, device, rank, and the bits of the weights.
            max_position: Tokens of context to prepare for.
        """
        super().__init__(model, placement.dtype, placement.shard.world_size)
        fusion, [layer] = model.fusion, model.layers
        assert fusion is not None, "a head reads states"
        self.enorm, self.hnorm = RmsNorm(fusion.embedding_norm, placement), RmsNorm(fusion.state_norm, placement)
        # In the model's type and whole, as routers are, unless the folder has it in few bits.
        plain = dataclasses.replace(placement, scheme=None)
        self.eh_proj = ColumnLinear((fusion.projection,), (range(fusion.projection.outputs),), plain)
        self.rotary = RotaryTables(model, max_position, placement.device)
        self.layer = DecoderLayer(layer, placement, self.rotary.number(layer))
        self.norm = residual_norm(model.norm, placement, self.layer.is_output_whole)
        # The target's, once it is joined.
        self._states = torch.empty(0)
        self.take_stock()

    def join(self, target: CausalLM, max_tokens: int) -> None:
        """Has a target leave its states to this head, and lend its embedding and output layer.

        Args:
            target: The whole model, of several ranks this one's part.
            max_tokens: Tokens of the target's largest step.
        """
        self._states = target.tap_hidden(max_tokens)
        self.borrow_embedding(target)
        self.borrow_output_layer(target)

    def states(self, first: int, count: int) -> Tensor:
        """Implements `DraftHead.states`."""
        return self._states[first : first + count]

    def write_kv(self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Implements `DraftHead.write_kv`."""
        rotations = self.rotary(positions)
        qkv = self._projected(self._entering(token_ids, states), positions)
        qkv, _ = self._attention.ungated(qkv)
        self._attention.write_kv(qkv, rotations[self.layer.rotation], kv_cache, slots)

    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, kv_cache: Tensor, metadata: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        """Implements `DraftHead.forward`; hidden states are states."""
        rotations: Rotations = self.rotary(positions)
        residual = self._entering(token_ids, states)
        qkv = self._projected(residual, positions)
        heads = self._attention.gated(qkv, rotations[self.layer.rotation], kv_cache, metadata)
        hidden = self.norm.add(self.layer.after_heads(heads, residual), residual)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Implements `DraftHead.logits`."""
        [output] = self._targets_output
        logits: Tensor = output(hidden)
        return logits

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `DraftHead.most_likely`."""
        [output] = self._targets_output
        return output.most_likely(hidden)

    @property
    def _attention(self) -> Attention:
        attention = self.layer.self_attn
        assert isinstance(attention, Attention), "the layer keeps keys and values"
        return attention

    def _entering(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """The residual stream that enters the layer."""
        [embedding] = self._targets_embedding
        both = torch.cat((self.enorm(embedding(token_ids)), self.hnorm(states)), dim=-1)
        stream: Tensor = self.eh_proj(both)
        return stream

    def _projected(self, residual: Tensor, positions: Tensor) -> Tensor:
        """Queries, keys and values side by side; gates, if any, stand between queries."""
        normed = self.layer.input_layernorm.of_stream(None, residual, self._attention.rounds_to(len(residual)))
        return without_first(self._attention.qkv_proj(normed), positions)
