"""A step of decodes whose new tokens are still in the projection.

Heads are neither normed nor rotated, and nothing of them is in the cache.

What comes of it by the separate kernels, and in fp64.
"""

from __future__ import annotations

import contextlib

import torch
from tests.support.attention_case import Case, Shape, copy_of, spoil, stored
from torch import Tensor

from headrace_kernels.attention.paged import PagedAttentionStep, RawHeads, paged_attention
from headrace_kernels.attention.rope_kv import rope_and_write_kv
from headrace_kernels.triton_runtime import INTERPRETED, forced

EPS = 1e-6


class RawCase:
    """Rows with `computed` tokens before the new one.

    The slots of new tokens hold NaN, as do all others that no token sees; the projection of padding
    is NaN too.
    """

    def __init__(
        self,
        shape: Shape,
        computed: list[int],
        device: str,
        *,
        normed: bool = False,
        seed: int = 0,
        padding: int = 0,
        plan_window: int | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        wide_norms: bool = False,
    ) -> None:
        rows = [(count, 1) for count in computed]
        self.shape, self._num_rows = shape, len(rows)
        self.case = Case(shape, rows, device, seed=seed, padding=padding, max_query_len=1, plan_window=plan_window)
        generator = torch.Generator(device).manual_seed(seed + 1000)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

        tokens = len(rows) + padding
        qkv = randn(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        qkv[len(rows) :] = float("nan")
        angles = 6 * torch.rand(tokens, (rotary_dim or shape.head_dim) // 2, generator=generator, device=device)
        rotations = torch.stack((angles.cos(), -angles.sin(), angles.sin()), dim=1)
        kept = torch.float32 if wide_norms else shape.dtype
        weights = [randn(shape.head_dim).to(kept) if normed else None for _ in range(2)]
        self.raw = RawHeads(qkv, rotations, shape.num_heads, *weights, EPS, interleaved)
        self.places = [self._place(i, position) for i, position in enumerate(computed)]
        for i, (block, offset) in enumerate(self.places):
            self.step.slot_mapping[i] = block * shape.block_size + offset
            spoil(self.kv_cache, block, offset)

    @property
    def step(self) -> PagedAttentionStep:
        """The step."""
        return self.case.step

    @property
    def kv_cache(self) -> Tensor:
        """The cache, as the kernel under test finds it."""
        return self.case.kv_cache

    def _place(self, entry: int, position: int) -> tuple[int, int]:
        """Block and offset of an entry's position."""
        table = self.step.block_tables[int(self.step.rows[entry])]
        return int(table[position // self.shape.block_size]), position % self.shape.block_size

    def separately(self) -> tuple[Tensor, Tensor]:
        """Results and cache as one kernel after the other makes them."""
        raw, cache = self.raw, copy_of(self.kv_cache)
        norms = (raw.query_norm, raw.key_norm, raw.eps)
        with forced() if INTERPRETED else contextlib.nullcontext():
            query = rope_and_write_kv(
                raw.qkv, raw.rotations, cache, self.step.slot_mapping, raw.num_heads, *norms, raw.interleaved
            )
        arguments = (self.step, self.shape.scale, self.shape.window, self.case.sinks)
        return paged_attention(query, cache, *arguments), cache

    def oracle(self) -> Tensor:
        """[rows, num_heads, head_dim] in fp64.

        Queries, keys and values are rounded to the dtype as the cache keeps them, all else is
        exact.
        """
        raw, count, kv = self.raw, self._num_rows, self.shape.num_kv_heads
        query, key, value = raw.qkv[:count].split((self.shape.num_heads, kv, kv), dim=1)
        self.case.query = self._rotated(query, raw.query_norm)
        key = self._rotated(key, raw.key_norm)
        for i, context in enumerate(self.case.contexts):
            context[:, :, -1] = stored(torch.stack((key[i], value[i])), self.kv_cache)
        return self.case.oracle()

    def _rotated(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        wide = heads.double()
        if weight is not None:
            wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        turning = 2 * self.raw.rotations.shape[-1]
        wide, still = wide[..., :turning], wide[..., turning:]
        is_paired = self.raw.interleaved
        a, b = (wide[..., 0::2], wide[..., 1::2]) if is_paired else wide.chunk(2, dim=-1)
        cosine, _, sine = self.raw.rotations[: heads.shape[0], :, None].double().unbind(1)
        rotated = torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1 if is_paired else -2).flatten(-2)
        return torch.cat((rotated, still), dim=-1).to(self.shape.dtype)
