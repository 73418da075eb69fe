"""A step of several ranks in two pieces of its tokens, so that the sum of one piece runs beside the products of the other.

Owns the order. All but attention takes each token by itself, so a piece goes through the output projection, its sum, the norm, the MLP, its sum, the next norm and the next query, key and value product without the other one:

    products   o(A)  o(B)  norm, MLP(A)  norm, MLP(B)  norm, qkv(A)  norm, qkv(B)  attention
    sums             A     B             A             B

Of a 70B model on 4 ranks, 4,096 tokens a piece, a sum takes 0.31 ms and o, gate and up, down, qkv 0.12, 0.87, 0.43 and 0.16: what is left to be waited for is most of o's first sum and half of down's last. (Reckoned from measured times, not measured itself.)
One product of both pieces' queries, keys and values would leave all of the latter. Products write no tensors that are given to them, so the pieces' queries, keys and values are copied into one: some 20 us of the 150 that this saves.

Which steps are cut is `Collectives.piece_rule`'s; who computes and who adds up, the layers' and the collectives'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from headrace_backend.layers.decoder_layer import DecoderLayer
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.step_metadata import StepMetadata
from headrace_backend.parallel.collectives import Collectives, PendingSum
from headrace_kernels.rounded_tokens import Activations


@dataclasses.dataclass(slots=True)
class _Piece:
    """Some of the step's tokens."""

    # Their part of the residual stream.
    residual: Tensor
    # What goes into it next.
    pending: PendingSum | None = None

    def normed(self, norm: RmsNorm, rounds_to: Callable[[int], torch.dtype | None]) -> Activations:
        """The norm of the residual stream, once the pending sum is in it."""
        added = None if self.pending is None else self.pending.wait()
        self.pending = None
        return norm.of_sum(added, self.residual, rounds_to(len(self.residual)))


class CutStep:
    """The residual stream of such a step on its way through the layers."""

    def __init__(self, residual: Tensor, first: int, together: Collectives) -> None:
        """Cuts it.

        Args:
            residual: [num_tokens, hidden_size] the residual stream, changed in place.
            first: Tokens of the first piece.
            together: Adds up.
        """
        self._sizes = [first, len(residual) - first]
        self._pieces = [_Piece(part) for part in torch.split(residual, self._sizes)]
        self._together = together

    @classmethod
    def of(cls, residual: Tensor, together: Collectives | None) -> Self | None:
        """The step if it is to be cut; None where there is one rank, or the step stays whole."""
        if together is None or together.piece_rule is None:
            return None
        num_tokens, size = residual.shape
        first = together.piece_rule.first_piece(num_tokens, size * residual.itemsize)
        return None if first is None else cls(residual, first, together)

    def forward(self, layer: DecoderLayer, rotations: Tensor, kv_cache: Tensor, metadata: StepMetadata) -> None:
        """As `DecoderLayer.forward`. The sums of its output have begun."""
        heads = self.heads(layer, rotations, kv_cache, metadata)
        for piece, part in zip(self._pieces, torch.split(heads, self._sizes), strict=True):
            piece.pending = self._together.begin_all_reduce(layer.self_attn.o_proj(part))
        for piece in self._pieces:
            normed = piece.normed(layer.post_attention_layernorm, layer.mlp.rounds_to)
            piece.pending = self._together.begin_all_reduce(layer.mlp(normed))

    def heads(self, layer: DecoderLayer, rotations: Tensor, kv_cache: Tensor, metadata: StepMetadata) -> Tensor:
        """As `DecoderLayer.heads`. No sum is pending afterwards."""
        attention = layer.self_attn
        norm = layer.input_layernorm
        # No name keeps the pieces' own beyond the copy.
        qkv = torch.cat([attention.qkv_proj(piece.normed(norm, attention.rounds_to)) for piece in self._pieces])
        return attention.attended(qkv, rotations, kv_cache, metadata)
