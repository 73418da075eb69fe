"""Drives a model over a paged cache without a worker.

Hands out blocks, builds AttentionMetadata for any mix of rows, keeps nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_backend.models.causal_lm import CausalLM
from headrace_kernels.attention.paged import AttentionMetadata

# Of rows with states.
_NUM_SLOTS = 8


@dataclasses.dataclass
class Row:
    """One sequence: its tokens so far and how many of them are in the cache."""

    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    # Where its states lie in recurrent layers; None: nowhere yet.
    slot: int | None = None


class PagedDriver:
    """A model with its cache.

    Fresh blocks and states are full of NaN, and blocks handed out in a shuffled order: nobody may
    rely on their contents or order.
    """

    def __init__(self, model: CausalLM, num_blocks: int = 64, block_size: int = 16) -> None:
        self.model = model
        self.block_size = block_size
        self.free_blocks = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.free_slots = list(range(_NUM_SLOTS))
        caches = [
            torch.full((num_blocks, 2, heads, block_size, dim), float("nan"), dtype=model.dtype)
            for heads, dim in model.kv_heads
        ]
        sources = iter(model.kv_sources)
        self.kv_caches = [
            torch.full((_NUM_SLOTS, size), float("nan")) if size else caches[next(sources)]
            for size in model.state_elements()
        ]

    def release(self, row: Row) -> None:
        """Gives the blocks back, poisoned, and forgets what was computed."""
        for kv_cache in self.kv_caches:
            kv_cache[row.blocks if kv_cache.dim() == 5 else row.slot] = float("nan")
        self.free_blocks += row.blocks
        if row.slot is not None:
            self.free_slots.append(row.slot)
        row.blocks, row.num_computed, row.slot = [], 0, None

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Tensor]:
        """Computes the next `counts[i]` tokens of each row.

        Returns each row's logits [counts[i], vocab_size].
        """
        for row, count in zip(rows, counts, strict=True):
            row.slot = self.free_slots.pop() if row.slot is None else row.slot
            while len(row.blocks) * self.block_size < row.num_computed + count:
                row.blocks.append(self.free_blocks.pop())
        positions = [
            p for row, n in zip(rows, counts, strict=True) for p in range(row.num_computed, row.num_computed + n)
        ]
        tokens = [
            t for row, n in zip(rows, counts, strict=True) for t in row.tokens[row.num_computed : row.num_computed + n]
        ]
        metadata = self._metadata(rows, counts)
        hidden = self.model(torch.tensor(tokens), torch.tensor(positions), self.kv_caches, metadata)
        for row, count in zip(rows, counts, strict=True):
            row.num_computed += count
        return list(self.model.logits(hidden).split(list(counts)))

    def _metadata(self, rows: Sequence[Row], counts: Sequence[int]) -> AttentionMetadata:
        ends = [row.num_computed + count for row, count in zip(rows, counts, strict=True)]
        slots = [
            row.blocks[position // self.block_size] * self.block_size + position % self.block_size
            for row, end in zip(rows, ends, strict=True)
            for position in range(row.num_computed, end)
        ]
        width = max(len(row.blocks) for row in rows)
        # What lies beyond a row's blocks is never read: a number that is no block would show it.
        tables = [row.blocks + [1 << 20] * (width - len(row.blocks)) for row in rows]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_size=self.block_size,
            max_query_len=max(counts),
            max_seq_len=max(ends),
            query_lens_cpu=np.array(counts, np.int32),
            seq_lens_cpu=np.array(ends, np.int32),
            rows=torch.tensor([row.slot for row in rows], dtype=torch.int32),
        )
