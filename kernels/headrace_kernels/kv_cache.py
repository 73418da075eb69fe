"""The paged KV cache of one layer: writing a step's keys and values, and copying whole blocks.

Layout: [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at index 0, values at index 1. Slot s is token s % block_size of block s // block_size. Which
request owns which block is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def write_kv_reference(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `write_kv`."""
    if int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block_size = kv_cache.shape[3]
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    # [num_blocks, block_size, 2, num_kv_heads, head_dim] puts the two indexed dimensions first, so that each token is one entry.
    slots = kv_cache.permute(0, 3, 1, 2, 4)
    slots.index_put_((blocks, offsets), torch.stack((key, value), dim=1).to(kv_cache.dtype))


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores a step's keys and values.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], already rotated.
        value: The same shape.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], changed in place.
        slot_mapping: [num_tokens] int64, one slot per token, none twice; -1 for tokens that are not stored.
    """
    write_kv_reference(key, value, kv_cache, slot_mapping)


def copy_blocks(kv_caches: Iterable[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks within each layer's cache: first all sources are read, then all targets written.

    Args:
        kv_caches: One cache per layer, changed in place.
        sources: [num_copies] int64 block numbers.
        targets: [num_copies] int64 block numbers, none twice.
    """
    for kv_cache in kv_caches:
        kv_cache.index_copy_(0, targets, kv_cache.index_select(0, sources))
