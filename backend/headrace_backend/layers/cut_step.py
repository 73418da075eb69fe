"""Computes a step of several ranks in two pieces of its tokens.

The all-reduce of one piece runs beside what the other one computes.

Owns the order. The pieces go through each half of a layer one after the other, and a piece's sum is
waited for when its turn comes again:

    computed     attention, o: A   B   norm, MLP: A   B   norm, qkv, attention, o: A   B
    all-reduce                     A   B              A   B                            A

The first piece does not see the second one's tokens. The second sees the first one's as it sees a
row's context: their keys and values are in the cache by then.

Beside its sum (64 MiB, four H200s, 2026-11-22) a piece of 4,096 tokens of a 70B model in FP8 takes
1.16 ms for the products of its MLP instead of 1.07, and the sum alone takes 0.34; one of 1,024
tokens 0.32 instead of 0.27, the sum 0.10.

Which steps are cut is `Collectives.piece_rule`'s; who makes the pieces' metadata, the runner's; who
computes and who adds up, the layers' and the collectives'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.layers.norm import PlainStream, RmsNorm
from headrace_backend.layers.rotary import Rotations
from headrace_backend.layers.step_metadata import StepMetadata, StepPieces
from headrace_backend.layers.stream_taps import StreamTaps
from headrace_backend.parallel.collectives import Collectives, PendingAllReduce
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import Activations


@dataclasses.dataclass(slots=True)
class _Piece:
    """Some of the step's tokens."""

    # Their parts of the residual stream and of the step's rows of each rotary table.
    residual: Tensor
    rotations: Rotations
    metadata: StepMetadata
    # What goes into the residual stream next.
    pending: PendingAllReduce | None = None

    def normed(
        self, norm: RmsNorm | PlainStream, rounds_to: Callable[[int], InputRounding | None], keeps: bool = False
    ) -> Activations:
        """The norm of the residual stream, once the pending all-reduce is in it."""
        added = None if self.pending is None else self.pending.wait()
        self.pending = None
        return norm.of_sum(added, self.residual, rounds_to(len(self.residual)), keeps)

    def heads(self, layer: DecoderLayer, kv_cache: Tensor) -> Tensor:
        """Returns this piece's heads in front of a layer's o_proj (`DecoderLayer.heads`)."""
        attention = layer.self_attn
        normed = self.normed(layer.input_layernorm, attention.rounds_to)
        return attention.heads(normed, self.rotations[layer.rotation], kv_cache, self.metadata)


class CutStep:
    """The residual stream of such a step on its way through the layers."""

    def __init__(
        self,
        residual: Tensor,
        rotations: Rotations,
        pieces: StepPieces,
        together: Collectives,
        taps: StreamTaps | None = None,
    ) -> None:
        """Cuts the step.

        Args:
            residual: [num_tokens, hidden_size] the residual stream, changed in place.
            rotations: The step's rows of each rotary table.
            pieces: The two pieces of the step, neither of them empty.
            together: The collectives that all-reduce each piece's partial outputs.
            taps: Copies the streams that enter some layers; None: nobody wants them.
        """
        sizes = [pieces.first, len(residual) - pieces.first]
        turns = zip(*(torch.split(rows, sizes) for rows in rotations), strict=True)
        parts = zip(torch.split(residual, sizes), turns, pieces.metadata, strict=True)
        self._pieces = [_Piece(*part) for part in parts]
        self._residual, self._together, self._taps = residual, together, taps

    def forward(self, layer: DecoderLayer, kv_cache: Tensor) -> None:
        """Computes a layer for this piece (`DecoderLayer.forward`).

        The all-reduce of its output has begun and is pending.
        """
        for piece in self._pieces:
            piece.pending = self._together.begin_all_reduce(layer.self_attn.o_proj(piece.heads(layer, kv_cache)))
        self._note(layer)
        for piece in self._pieces:
            normed = piece.normed(layer.post_attention_layernorm, layer.mlp.rounds_to, layer.mlp.reads_unrounded)
            piece.pending = self._together.begin_all_reduce(layer.mlp(normed))

    def heads(self, layer: DecoderLayer, kv_cache: Tensor) -> Tensor:
        """Returns both pieces' attention heads in front of a layer's o_proj (`DecoderLayer.heads`).

        No all-reduce is pending afterwards.
        """
        heads = torch.cat([piece.heads(layer, kv_cache) for piece in self._pieces])
        self._note(layer)
        return heads

    def _note(self, layer: DecoderLayer) -> None:
        """Copies the stream that enters a layer, which is whole once both pieces were normed."""
        if self._taps is not None:
            self._taps.note(layer, self._residual)
