"""Text through a model one decoder layer at a time, with one layer's weights in memory.

    ids -embed-> hidden states [pieces, tokens, width] on the host -run(layer 0)-> ... -run(layer n
    - 1)-> hidden states before the last norm

Owns how a batch of pieces becomes a step (rows, blocks of a cache that is used over and over,
rotations) and how the input of a projection is taken on its way. The layers are those that serve.
A layer's attention, which costs most, can be computed once and kept on the host (`heads`), for
those who need what comes behind it several times.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.layers.gated_delta_net import GatedDeltaNet
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.rotary import RotaryTables, Rotations
from headrace_backend.layers.sharded_module import weight_targets
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.attention.paged import AttentionMetadata
from headrace_model_folder import ModelFolder
from headrace_model_folder.description import Norm
from headrace_quantize.calibration_text import Pieces
from headrace_quantize.source_tensors import SourceTensors
from headrace_quantize.stored_parts import stored_parts

_BLOCK = 16
# Tokens that pass through a layer at once: enough to fill a card, few enough that what lies between
# a layer's products stays small.
_BATCH_TOKENS = 4096


class _Enough(Exception):  # noqa: N818
    """The input that was wanted is there; the rest of the layer need not be computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A decoder layer, and where its checkpoint tensors lie in it."""

    module: DecoderLayer
    # Name of a projection's tensor, or of another one -> place.
    targets: dict[str, WeightTarget]
    # Name of each tensor as the folder has it -> the targets that it fills, rows after rows.
    stored: dict[str, tuple[str, ...]]

    def weight(self, projection: str) -> Tensor:
        """The weight [outputs, inputs] of a projection as the folder has it; parts are copied."""
        parts = [self.targets[name].tensor for name in self.stored[f"{projection}.weight"]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, name: str, tensor: Tensor) -> None:
        """Fills what a tensor of the folder fills, from that tensor."""
        first = 0
        for target in (self.targets[part] for part in self.stored[name]):
            rows = tensor[first : first + len(target.rows)]
            target.put(rows.flatten(), target.rows.start, target.rows.stop)
            first += len(rows)


class DecoderPass:
    """The layers of one model over pieces of one length."""

    def __init__(
        self,
        model: ModelFolder,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares for pieces of `length` tokens; loads nothing.

        Args:
            model: The folder of the original.
            dtype: Type to compute in.
            device: Device to compute on.
            length: Tokens of each piece.
            on_batch: Called whenever a batch of pieces has passed through a layer or a part of it.
        """
        self._folder, self._on_batch = model, on_batch
        self._rows = max(_BATCH_TOKENS // length, 1)
        self.dtype, self.device, self._length = dtype, device, length
        self._description = model.config.description
        self._rotary = RotaryTables(self._description, length, device)
        self._steps: dict[int, tuple[AttentionMetadata, Rotations]] = {}
        self._cache: Tensor | None = None

    def embed(self, pieces: Pieces, source: SourceTensors) -> Tensor:
        """[pieces, tokens, width] on the host: what the first layer reads."""
        if not pieces:
            return self._nothing()
        table = source.read("model.embed_tokens.weight")
        # Rounded to the type, as a server does.
        scale = torch.tensor(self._description.embedding.scale, dtype=self.dtype)
        return torch.stack([table[torch.tensor(ids)].to(self.dtype) * scale for ids in pieces])

    def norm(self, norm: Norm, source: SourceTensors) -> RmsNorm:
        """A norm with the original's factors, as a server has it."""
        made = RmsNorm(norm, Placement(self.dtype, self.device))
        for name, target in made.checkpoint_parts():
            target.put(source.read(name), target.rows.start, target.rows.stop)
        return made

    def load(self, index: int) -> LoadedLayer:
        """A layer with the original's weights.

        Raises:
            InvalidModelFolder: A tensor can't be read, or is not finite.
        """
        described = self._description.layers[index]
        layer = DecoderLayer(described, Placement(self.dtype, self.device), self._rotary.number(described))
        targets = weight_targets(layer)
        load_weights(self._folder, targets, lambda *_: None)
        stored = {name: parts for name, parts in stored_parts(self._description).items() if parts[0] in targets}
        whole = {part for parts in stored.values() for part in parts}
        stored |= {name: (name,) for name in targets if name not in whole}
        return LoadedLayer(layer.eval(), targets, stored)

    def run(self, layer: DecoderLayer, hidden: Tensor, heads: Tensor | None = None) -> None:
        """Passes all pieces through a layer, in place.

        Args:
            layer: The layer.
            hidden: [pieces, tokens, width] what the layer reads, then what leaves it.
            heads: What `heads` returned for this layer and text; None: it is computed.
        """
        for part in self._parts(hidden):
            hidden[part] = self._forward(layer, hidden[part], None if heads is None else heads[part]).cpu()
            self._on_batch()

    def heads(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """Computes the attention of all pieces: [pieces, tokens, heads' outputs], on the host."""
        width = layer.self_attn.o_proj.weight.num_inputs
        kept = torch.empty(*hidden.shape[:2], width, dtype=self.dtype)
        for part in self._parts(hidden):
            residual = self._residual(hidden[part])
            kept[part] = self._heads(layer, residual, len(hidden[part])).view(-1, *kept.shape[1:]).cpu()
            self._on_batch()
        return kept

    def inputs(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        taken: dict[str, Callable[[Tensor], None]],
        heads: Tensor | None = None,
    ) -> None:
        """Hands over what products of a layer multiply by, and stops there.

        Args:
            layer: Its weights as they are by now.
            hidden: What the layer reads; not changed.
            taken: Path of a product in the layer, in their order -> called with [tokens, inputs] of
                each batch.
            heads: What `heads` returned for this layer and text; None: it is computed.
        """
        last = list(taken)[-1]
        hooks = [
            layer.get_submodule(path).register_forward_pre_hook(_taker(take, path == last))
            for path, take in taken.items()
        ]
        try:
            for part in self._parts(hidden):
                with contextlib.suppress(_Enough):
                    self._forward(layer, hidden[part], None if heads is None else heads[part])
                self._on_batch()
        finally:
            for hook in hooks:
                hook.remove()

    def num_batches(self, num_pieces: int) -> int:
        """Batches in which so many pieces pass through a layer."""
        return -(-num_pieces // self._rows)

    def _parts(self, hidden: Tensor) -> Iterator[slice]:
        """The pieces in parts of a few, none of no pieces."""
        return (slice(first, first + self._rows) for first in range(0, len(hidden), self._rows))

    def _nothing(self) -> Tensor:
        return torch.empty(0, self._length, self._description.hidden_size, dtype=self.dtype)

    def _forward(self, layer: DecoderLayer, batch: Tensor, attended: Tensor | None) -> Tensor:
        """[rows, tokens, width] -> the same after the layer, on the device."""
        residual = self._residual(batch)
        if attended is None:
            heads = self._heads(layer, residual, len(batch))
        else:
            heads = attended.to(self.device).flatten(0, 1)
        return residual.add_(layer.after_heads(heads, residual)).view(batch.shape)

    def _residual(self, batch: Tensor) -> Tensor:
        """[rows, tokens, width] -> a copy on the device, [all tokens, width]."""
        return batch.to(self.device, copy=True).flatten(0, 1)

    def _heads(self, layer: DecoderLayer, residual: Tensor, rows: int) -> Tensor:
        metadata, rotations = self._step(rows)
        kept = self._states(rows) if isinstance(layer.self_attn, GatedDeltaNet) else self._kv_cache(rows)
        return layer.heads(None, residual, rotations, kept, metadata)

    def _states(self, rows: int) -> Tensor:
        """States of these rows, which sequences that begin do not read."""
        return torch.empty(rows, self._description.recurrent_layers[0].state_elements, device=self.device)

    def _kv_cache(self, rows: int) -> Tensor:
        """Blocks for these rows: what earlier batches left is overwritten before it is read."""
        blocks = rows * -(-self._length // _BLOCK)
        if self._cache is None or len(self._cache) < blocks:
            attention = self._description.attention
            shape = (blocks, 2, attention.num_kv_heads, _BLOCK, attention.head_dim)
            self._cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._cache[:blocks]

    def _step(self, rows: int) -> tuple[AttentionMetadata, Rotations]:
        if rows not in self._steps:
            positions = torch.arange(self._length, device=self.device).repeat(rows)
            self._steps[rows] = self._metadata(rows), self._rotary(positions)
        return self._steps[rows]

    def _metadata(self, rows: int) -> AttentionMetadata:
        length, blocks = self._length, -(-self._length // _BLOCK)
        lengths = np.full(rows, length, np.int32)
        slots = torch.arange(rows)[:, None] * blocks * _BLOCK + torch.arange(length)
        return AttentionMetadata(
            query_start_loc=torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=self.device),
            seq_lens=torch.full((rows,), length, dtype=torch.int32, device=self.device),
            block_tables=torch.arange(rows * blocks, dtype=torch.int32, device=self.device).view(rows, blocks),
            slot_mapping=slots.flatten().to(self.device),
            block_size=_BLOCK,
            max_query_len=length,
            max_seq_len=length,
            query_lens_cpu=lengths,
            seq_lens_cpu=lengths,
            rows=torch.arange(rows, dtype=torch.int32, device=self.device),
        )


def _taker(take: Callable[[Tensor], None], is_last: bool) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        take(arguments[0])
        if is_last:
            raise _Enough

    return hook
