"""The decoder-only language model that all families share: embedding, layers, norm, output head.

It is made from a `ModelDescription`, which says what a family's layers have and how its tensors are
named. One of several pipeline stages has some of the layers: the first one the embedding too, the
last one norm and head. What goes from stage to stage is the residual stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from headrace_backend.layers.attention import Attention
from headrace_backend.layers.cut_step import CutStep
from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.layers.embedding import OutputHead, TokenEmbedding
from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_backend.layers.norm import residual_norm
from headrace_backend.layers.per_layer_input import PerLayerInputs
from headrace_backend.layers.rotary import RotaryTables, Rotations
from headrace_backend.layers.step_metadata import StepMetadata, StepPieces
from headrace_backend.layers.stream_taps import StreamTaps
from headrace_backend.models.representative_layers import representative_places
from headrace_backend.models.weighted_module import WeightedModule
from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.pp_rules import WHOLE, Stage
from headrace_backend.quantization.head_weight import HeadWeight
from headrace_backend.tp_rules import rank_part
from headrace_backend.weights.placement import Placement
from headrace_kernels.rms_norm import summed
from headrace_model_folder import ModelDescription, description
from headrace_model_folder.description import GatedDeltaNet


class Decoder(nn.Module):
    """Embedding, layers and the last norm: the part that checkpoints call `model`."""

    def __init__(self, model: ModelDescription, placement: Placement, max_position: int, stage: Stage) -> None:
        super().__init__()
        # None in stages behind the first, which are given the residual stream.
        self.embed_tokens = TokenEmbedding(model.embedding, placement) if stage.is_first else None
        self.rotary = RotaryTables(model, max_position, placement.device)
        self._device = placement.device
        own_inputs = model.per_layer_embedding
        self.per_layer_inputs = None if own_inputs is None else PerLayerInputs(own_inputs, placement)
        layers = [DecoderLayer(layer, placement, self.rotary.number(layer)) for layer in model.layers]
        _let_read_keys(model, layers)
        self._kv_sources = model.kv_sources
        self.layers = nn.ModuleList()
        for layer, module in zip(model.layers, layers, strict=True):
            # By its number in the whole model, as messages name it.
            self.layers.add_module(layer.name.rpartition(".")[2], module)
        # The same, with their type; inside `representative_layers` some of them, by their places.
        self._layers = tuple(layers)
        self._places: list[int] | None = None
        # One layer of each kind: those of a folder that another tool quantized may differ.
        self._kinds = tuple({layer.launch_kind(): layer for layer in layers}.values())
        # None in stages before the last, which give the residual stream away.
        is_whole = model.layers[-1].norms_outputs
        self.norm = residual_norm(model.norm, placement, is_whole) if stage.is_last else None
        self._together = placement.shard.collectives
        # Copies the streams that enter some layers; None: nobody wants them.
        self._taps: StreamTaps | None = None
        # [max_tokens, hidden_size] takes the hidden states behind the last norm; None: nobody wants
        # those of all tokens.
        self._hidden: Tensor | None = None
        # Called with each layer that is computed; None: nobody wants to know.
        self.on_progress: Callable[[], None] | None = None

    def forward(
        self,
        entering: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        metadata: StepMetadata | StepPieces,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Passes a step through all layers and the last norm: `CausalLM.forward` says how."""
        if self._places is not None:
            kv_caches = [kv_caches[place] for place in self._places]
        residual: Tensor = entering if self.embed_tokens is None else self.embed_tokens(entering)
        own_inputs = self._own_inputs(entering, residual)
        rotations = self.rotary(positions)
        if self.norm is None:
            assert not isinstance(metadata, StepPieces), "a step of several stages is whole"
            return self._stream_behind(residual, rotations, kv_caches, metadata)
        if not isinstance(metadata, StepPieces) and self.fuses(len(residual)):
            self._forward_fused(residual, rotations, kv_caches, metadata)
            return self._left(self.norm(residual), wanted)
        heads = self._last_heads(residual, rotations, kv_caches, metadata, own_inputs)
        last, last_input = self._layers[-1], own_inputs[-1]
        if wanted is not None and self._hidden is None:
            # No later layer sees the other tokens.
            heads, residual = heads.index_select(0, wanted), residual.index_select(0, wanted)
            last_input = None if last_input is None else last_input.index_select(0, wanted)
            return self._normed(last.behind_heads(heads, residual, last_input), residual)
        return self._left(self._normed(last.behind_heads(heads, residual, last_input), residual), wanted)

    def _normed(self, pending: Tensor | None, residual: Tensor) -> Tensor:
        """The last norm of the residual stream, to which `pending` is added first in place."""
        assert self.norm is not None, "the last stage has the norm"
        return self.norm(residual) if pending is None else self.norm.add(pending, residual)

    def _left(self, hidden: Tensor, wanted: Tensor | None) -> Tensor:
        """The wanted ones of a step's hidden states; all are copied if they are tapped."""
        if self._hidden is not None:
            self._hidden[: len(hidden)].copy_(hidden)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def _own_inputs(self, token_ids: Tensor, embedded: Tensor) -> Sequence[Tensor | None]:
        """What each layer that is computed has of each token besides; None: nothing."""
        if self.per_layer_inputs is None:
            return [None] * len(self._layers)
        inputs = self.per_layer_inputs(token_ids, embedded).unbind(1)
        return inputs if self._places is None else [inputs[place] for place in self._places]

    def _stream_behind(
        self, residual: Tensor, rotations: Rotations, kv_caches: list[Tensor], metadata: StepMetadata
    ) -> Tensor:
        """The residual stream behind a stage's layers, nothing of which is pending."""
        if self.fuses(len(residual)):
            self._forward_fused(residual, rotations, kv_caches, metadata)
            return residual
        pending: Tensor | None = None
        for layer, kv_cache in self._reported(zip(self._layers, kv_caches, strict=True)):
            pending = layer(pending, residual, rotations, kv_cache, metadata)
        if pending is None:
            return residual
        if not self._layers[-1].is_output_whole:
            assert self._together is not None, "parts of an output are those of several ranks"
            pending = self._together.all_reduce(pending)
        return residual.add_(summed(pending))

    def _last_heads(
        self,
        residual: Tensor,
        rotations: Rotations,
        kv_caches: list[Tensor],
        metadata: StepMetadata | StepPieces,
        own_inputs: Sequence[Tensor | None],
    ) -> Tensor:
        """Runs all layers up to the heads of the last one, and returns those heads' outputs.

        What follows in the last layer takes each token by itself.
        """
        *layers, last = zip(self._layers, kv_caches, strict=True)
        if isinstance(metadata, StepPieces):
            assert self._together is not None, "a step of one rank is whole"
            cut = CutStep(residual, rotations, metadata, self._together, self._taps)
            for layer, kv_cache in self._reported(layers):
                cut.forward(layer, kv_cache)
            return cut.heads(*last)
        pending: Tensor | None = None
        for (layer, kv_cache), own_input in zip(self._reported(layers), own_inputs, strict=False):
            heads = self._heads(layer, pending, residual, rotations, kv_cache, metadata)
            pending = layer.behind_heads(heads, residual, own_input)
        return self._heads(last[0], pending, residual, rotations, last[1], metadata)

    def _heads(
        self,
        layer: DecoderLayer,
        pending: Tensor | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: Tensor,
        metadata: StepMetadata,
    ) -> Tensor:
        """`DecoderLayer.heads`, behind which the stream that enters the layer is whole."""
        heads = layer.heads(pending, residual, rotations, kv_cache, metadata)
        if self._taps is not None:
            self._taps.note(layer, residual)
        return heads

    def tap(self, places: Sequence[int], max_tokens: int, dtype: torch.dtype) -> Tensor:
        """Has the streams that enter some layers copied: `CausalLM.tap_streams` says how."""
        assert self.embed_tokens is not None and self.norm is not None, "stages tap nothing"
        layers = [self._layers[place] for place in places]
        self._taps = StreamTaps(layers, self.norm.weight.shape[0], max_tokens, dtype, self._device)
        return self._taps.streams

    def tap_hidden(self, max_tokens: int, dtype: torch.dtype) -> Tensor:
        """Has hidden states behind the last norm copied: `CausalLM.tap_hidden` says how."""
        assert self.embed_tokens is not None and self.norm is not None, "stages tap nothing"
        self._hidden = torch.zeros(max_tokens, self.norm.weight.shape[0], dtype=dtype, device=self._device)
        return self._hidden

    def use_cache_groups(self, layer_groups: Sequence[int]) -> None:
        """Tells each layer its cache group: `CausalLM.use_cache_groups` says how."""
        attentions = [layer.self_attn for layer in self._layers if isinstance(layer.self_attn, Attention)]
        for attention, source in zip(attentions, self._kv_sources, strict=True):
            attention.cache_group = layer_groups[source]

    def fuses(self, num_tokens: int) -> bool:
        """Whether all layers fuse norms, SwiGLU and additions into the products of such a step."""
        return all(layer.fuses(num_tokens) for layer in self._kinds)

    def _forward_fused(
        self, residual: Tensor, rotations: Rotations, kv_caches: list[Tensor], metadata: StepMetadata
    ) -> None:
        for layer, kv_cache in self._reported(zip(self._layers, kv_caches, strict=True)):
            if self._taps is not None:
                self._taps.note(layer, residual)
            layer.forward_fused(residual, rotations, kv_cache, metadata)

    def _reported(self, layers: Iterable[tuple[DecoderLayer, Tensor]]) -> Iterable[tuple[DecoderLayer, Tensor]]:
        """Yields the layers with their caches, and reports each when the next one is asked for."""
        return layers if self.on_progress is None else _reporting(layers, self.on_progress)

    @contextlib.contextmanager
    def representative_layers(self) -> Iterator[None]:
        """Takes steps through some layers: `CausalLM.representative_layers` says which."""
        whole = self._layers
        self._places = representative_places([layer.launch_kind() for layer in whole], self._together)
        self._layers = tuple(whole[place] for place in self._places)
        try:
            yield
        finally:
            self._layers, self._places = whole, None


def _reporting(
    layers: Iterable[tuple[DecoderLayer, Tensor]], report: Callable[[], None]
) -> Iterator[tuple[DecoderLayer, Tensor]]:
    for layer in layers:
        yield layer
        report()


def _let_read_keys(model: ModelDescription, layers: Sequence[DecoderLayer]) -> None:
    """Tells layers that read other layers' keys and values whose."""
    modules = {layer.name: module.self_attn for layer, module in zip(model.layers, layers, strict=True)}
    for layer in model.layers:
        reader = modules[layer.name]
        if isinstance(layer.attention, description.Attention) and layer.attention.kv_source is not None:
            source = modules[layer.attention.kv_source]
            assert isinstance(reader, Attention) and isinstance(source, Attention), "states have no keys"
            reader.read_keys_of(source, layer.attention.kv_source)


class CausalLM(WeightedModule):
    """A language model, or one stage of it."""

    def __init__(self, model: ModelDescription, placement: Placement, max_position: int, stage: Stage = WHOLE) -> None:
        """Allocates the parameters.

        Args:
            model: Parts, sizes and tensor names; of several stages this one's part.
            placement: Type, device and rank.
            max_position: Tokens of context to prepare for.
            stage: Which of several pipeline stages it is.
        """
        super().__init__()
        self.stage = stage
        self.model = Decoder(model, placement, max_position, stage)
        if stage.is_last:
            self.lm_head = OutputHead(model, placement, self.model.embed_tokens)
        self.num_layers, self.num_kv_layers = len(model.layers), len(model.kv_attentions)
        own = rank_part(model, placement.shard.world_size)
        self._attentions = tuple(layer.attention for layer in own.layers)
        self._is_plain = model.is_plain
        self.shard = placement.shard
        # Of this rank: what attention and the KV cache need.
        self.num_heads = own.attention.num_heads
        self.norms_heads = any(attention.norms_heads for attention in own.kv_attentions)
        # Of the first layer with keys, and of each: number of key and value heads, and their size.
        self.num_kv_heads, self.head_dim = own.attention.num_kv_heads, own.attention.head_dim
        self.kv_heads = tuple((attention.num_kv_heads, attention.head_dim) for attention in own.kv_attentions)
        # For each layer with attention to a cache, whose of those it reads and writes.
        self.kv_sources = model.kv_sources
        self.hidden_size = model.hidden_size
        # Of activations.
        self.dtype = placement.dtype
        self.vocab_size = model.vocab_size
        self.attention_window = model.window
        self.max_position = max_position
        # Deals the rows that a step draws out to ranks; None: there are no others.
        self.row_dealer = RowDealer.of(placement.shard.collectives, model.vocab_size) if stage.is_last else None
        head = self.lm_head.weight if stage.is_last else None
        self.take_stock(head if isinstance(head, HeadWeight) else None, counts_head=not model.head.tied)

    def state_elements(self, num_drafts: int = 0) -> tuple[int, ...]:
        """Elements of 4 bytes that a row has in each layer, of this rank; 0 in those with keys.

        Args:
            num_drafts: Most drafts of a row that a step verifies.
        """
        return tuple(
            attention.drafted_state_elements(num_drafts) if isinstance(attention, GatedDeltaNet) else 0
            for attention in self._attentions
        )

    def forward(
        self,
        entering: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        metadata: StepMetadata | StepPieces,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """One pass over a step's tokens. Their keys and values are written to the caches.

        Args:
            entering: [num_tokens] int64 token ids; behind the first stage [num_tokens, hidden_size]
                the residual stream that the stage before returned, which is changed in place.
            positions: [num_tokens] int64, below max_position.
            kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim]; layers of
                different cache groups may have the same. Of recurrent layers the states of all
                rows, fp32 [num_rows, state_elements].
            metadata: Rows, lengths, block tables and slots of the step; of one with a
                `first_piece`, of its pieces.
            wanted: int32 or int64, tokens whose hidden states are wanted: for others the last layer
                does no more than keys and values; None: all.

        Returns:
            [num_tokens, hidden_size] hidden states after the last norm; of the wanted ones, in
            their order. Before the last stage the residual stream of all tokens.
        """
        hidden: Tensor = self.model(entering, positions, kv_caches, metadata, wanted)
        return hidden

    def first_piece(self, num_tokens: int, is_captured: bool) -> int | None:
        """Tokens of the first of two pieces in which to compute a step; None: it stays whole.

        A step that is replayed from a graph has other sizes than one launched kernel by kernel.

        Decided by sizes alone, so alike on all ranks. A step of several stages stays whole: one
        stream goes from each to the next. So does that of a model whose layers have other norms
        than those before attention and MLP: no other sum may come between the two pieces'.
        """
        together = self.shard.collectives
        if self.stage.count > 1 or not self._is_plain or together is None or together.piece_rule is None:
            return None
        return together.piece_rule.first_piece(num_tokens, self.hidden_size * self.dtype.itemsize, is_captured)

    @property
    def can_be_captured(self) -> bool:
        """Whether graphs can hold its steps."""
        return all(module.can_be_captured for module in self.modules() if isinstance(module, ExpertMlp))

    def representative_layers(self) -> contextlib.AbstractContextManager[None]:
        """Has steps go through the first layer, the last and one of each other kind while entered.

        They launch every kernel that whole steps launch, in a fraction of the launches.

        What comes out is of no use, and other layers' caches are not written.

        Of several ranks all enter together.
        """
        return self.model.representative_layers()

    def tap_streams(self, places: Sequence[int], max_tokens: int) -> Tensor:
        """Has every later step copy the residual stream as it enters some layers.

        Args:
            places: Numbers of the layers, from 0 on.
            max_tokens: Tokens of the largest step.

        Returns:
            [max_tokens, len(places) * hidden_size] where each step leaves its copies, the layers'
            side by side, in the order of its tokens.
        """
        return self.model.tap(places, max_tokens, self.dtype)

    def tap_hidden(self, max_tokens: int) -> Tensor:
        """Has every later step copy the hidden states of all its tokens, behind the last norm.

        The last layer then computes all tokens, whichever are wanted.

        Args:
            max_tokens: Tokens of the largest step.

        Returns:
            [max_tokens, hidden_size] where each step leaves them, in the order of its tokens.
        """
        return self.model.tap_hidden(max_tokens, self.dtype)

    def use_cache_groups(self, layer_groups: Sequence[int]) -> None:
        """Has each layer read and write the blocks of its cache group in all later steps.

        Args:
            layer_groups: The group of each layer with keys and values; empty: there is one.
        """
        self.model.use_cache_groups(layer_groups or [0] * self.num_kv_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] hidden states of the rows that sample -> [n, vocab_size] fp32."""
        logits: Tensor = self.lm_head(hidden)
        self._report_progress()
        return logits

    def report_progress(self, report: Callable[[], None]) -> None:
        """Has `report` called with every layer and every product of the output layer.

        A step's time consists of these where the host computes it.
        """
        self.model.on_progress = report

    def _report_progress(self) -> None:
        if self.model.on_progress is not None:
            self.model.on_progress()

    @property
    def part_size(self) -> int:
        """Tokens of this rank's part of the vocabulary, of which it computes logits itself.

        0 before the last stage.
        """
        return self.lm_head.part_size if self.stage.is_last else 0

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Logits of this rank's part of the vocabulary, to [n, part_size] fp32.

        Sends nothing to other ranks.
        """
        self.lm_head.part(hidden, out)
        self._report_progress()

    def gather_logits(self, part: Tensor, out: Tensor) -> None:
        """Puts all ranks' parts side by side, to [n, vocab_size] fp32.

        Of one rank, whose part is `out` already, nothing is to be done.
        """
        self.lm_head.whole(part, out)

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the likeliest tokens, int64 [n], and which rows are finite, bool [n].

        It takes hidden states [n, hidden_size] and agrees with `choose_greedy` of their logits.
        """
        return self.lm_head.most_likely(hidden)
