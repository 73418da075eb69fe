"""A decoder in plain PyTorch with a contiguous KV cache, as servers begin without an engine.

For the lower rungs of `bench_ladder`.

Owns weights (seeded Gaussian, as `--load dummy` makes them), the forward pass over whole prompts,
and one decode step over rows of unequal length. No kernels of ours, nothing paged, no graphs; its
rotary embedding leaves context stretching out, which costs the same.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import Shape

_STANDARD_DEVIATION = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class ContiguousCache:
    """Keys and values of all layers: each row has `max_len` slots from the beginning."""

    def __init__(self, shape: Shape, rows: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, max_len, shape.head_dim)
        # [layers, 2, rows, num_kv_heads, max_len, head_dim]
        self.slots = torch.zeros(size, dtype=dtype, device=device)
        self._heads = torch.arange(shape.num_kv_heads, device=device)[:, None]

    def write(self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes keys and values [n, num_kv_heads, length, head_dim] into [n] rows.

        Positions are [n, length].
        """
        where = rows[:, None, None], self._heads, positions[:, None]
        self.slots[(layer, 0, *where)] = key
        self.slots[(layer, 1, *where)] = value

    def read(self, layer: int, rows: Tensor, context: int) -> Tensor:
        """[2, n, num_kv_heads, context, head_dim] of a layer.

        There is no copy where all rows are read in order.
        """
        slots = self.slots[layer, :, :, :, :context]
        return slots if len(rows) == slots.shape[1] else slots[:, rows]


class PlainModel:
    """Computes logits; the caller keeps rows and lengths."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """Makes the weights."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        assert not shape.num_experts, "the plain model has no experts"
        hidden, wide = shape.hidden_size, shape.intermediate_size
        self._embedding = self._noise(shape.vocab_size, hidden)
        self._head = self._embedding if shape.tied else self._noise(shape.vocab_size, hidden)
        self._layers = [
            _Layer(
                self._noise(heads, hidden),
                self._noise(hidden, shape.num_heads * shape.head_dim),
                self._noise(2 * wide, hidden),
                self._noise(hidden, wide),
            )
            for _ in range(shape.num_layers)
        ]
        powers = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        self._frequencies = shape.rope_theta**-powers

    def _noise(self, *size: int) -> Tensor:
        made = torch.empty(size, dtype=self.dtype, device=self.device)
        return made.normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, lengths: Tensor, cache: ContiguousCache | None, rows: Tensor) -> Tensor:
        """Whole prompts from position 0, padded at their ends.

        Args:
            ids: [n, longest] token ids.
            lengths: [n] tokens of each prompt.
            cache: Takes the keys and values; None: nobody needs them again.
            rows: [n] rows of the cache.

        Returns:
            [n] the most likely next tokens.
        """
        positions = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        hidden = self._run(ids, positions, cache, rows, context=None)
        last = hidden[torch.arange(len(ids), device=self.device), lengths - 1]
        return self._next(last)

    @torch.inference_mode()
    def decode(self, ids: Tensor, positions: Tensor, cache: ContiguousCache, rows: Tensor, context: int) -> Tensor:
        """One token for each row.

        Args:
            ids: [n] newest tokens.
            positions: [n] their positions.
            cache: Holds what came before.
            rows: [n] rows of the cache, ascending.
            context: Longest row, this token included: every row reads so many slots.

        Returns:
            [n] the most likely next tokens.
        """
        return self._next(self._run(ids[:, None], positions[:, None], cache, rows, context)[:, 0])

    def _next(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head).float().argmax(dim=-1)

    def _run(
        self, ids: Tensor, positions: Tensor, cache: ContiguousCache | None, rows: Tensor, context: int | None
    ) -> Tensor:
        residual = F.embedding(ids, self._embedding)
        angles = positions[..., None].float() * self._frequencies
        rotation = (angles.cos()[:, :, None].to(self.dtype), angles.sin()[:, :, None].to(self.dtype))
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, _normed(residual), positions, rotation, cache, rows, context)
            residual = residual + F.linear(attended, layer.output)
            gate, up = F.linear(_normed(residual), layer.gate_up).chunk(2, dim=-1)
            residual = residual + F.linear(F.silu(gate) * up, layer.down)
        return _normed(residual)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        hidden: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: ContiguousCache | None,
        rows: Tensor,
        context: int | None,
    ) -> Tensor:
        shape, (count, length) = self.shape, hidden.shape[:2]
        heads = F.linear(hidden, layer.qkv).view(count, length, -1, shape.head_dim)
        parts = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=2)
        query, key = (_rotated(part, rotation).transpose(1, 2) for part in parts[:2])
        value = parts[2].transpose(1, 2)
        if cache is not None:
            cache.write(index, rows, positions, key, value)
        if context is None:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            assert cache is not None
            attended = _decode_attention(query, cache.read(index, rows, context), positions)
        return attended.transpose(1, 2).flatten(2)


def _decode_attention(query: Tensor, context: Tensor, positions: Tensor) -> Tensor:
    """Attention of [n, heads, 1, head_dim] queries up to [n, 1] positions.

    The context is [2, n, num_kv_heads, context, head_dim]; each key and value head is read once for
    its group of query heads.
    """
    key, value = context
    grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
    scores = (grouped @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    beyond = torch.arange(key.shape[2], device=query.device) > positions
    scores.masked_fill_(beyond[:, None, None], float("-inf"))
    attended: Tensor = scores.softmax(dim=-1).to(query.dtype) @ value
    return attended.view(query.shape)


def _normed(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], eps=1e-5)


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
