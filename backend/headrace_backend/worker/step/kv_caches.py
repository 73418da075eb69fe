"""The KV caches: a tensor for each place of a block, allocated once.

The copies of whole blocks that a plan asks for.

Owns how the memory is made and how blocks are copied before a forward pass. Does not own how many
blocks there are (`memory_plan`) nor who holds which (the engine).

A block holds some tokens of one cache group, in as many layers as the group has: each layer has its
place in the group's blocks. So layers of different groups that have the same place share a tensor,
and block tables keep them apart. A model with one group has a place, and a tensor, for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace_backend.cache_groups import CacheLayout
from headrace_backend.kv_bytes import KvHeads, place_bytes
from headrace_backend.step.plan import ForwardPlan
from headrace_backend.worker.device_copies import indices_on_device
from headrace_backend.worker.step.lazy_memory import zeros
from headrace_backend.worker.step.row_states import block_caches, holds_states
from headrace_kernels.attention.kv_cache import copy_blocks, whole_blocks
from headrace_kernels.attention.quantized_kv import KV_TYPES, num_bytes, tile_bytes, view_of


def allocate_kv_caches(
    num_caches: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One zeroed cache [num_blocks, 2, num_kv_heads, block_size, head_dim] per layer or place.

    Of a type of 8 bits with its scales.

    Zeros, because attention multiplies what lies behind a row's end by 0, and 0 times a NaN is a
    NaN.
    """
    if dtype in KV_TYPES.values():
        block_size, head_dim = shape[3:]
        memory = (*shape[:3], tile_bytes(block_size, head_dim))
        return [view_of(zeros(memory, torch.uint8, device), block_size, head_dim, dtype) for _ in range(num_caches)]
    return [zeros(shape, dtype, device) for _ in range(num_caches)]


def allocate_layer_caches(
    heads: Sequence[KvHeads],
    layout: CacheLayout,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """The cache of each layer that keeps keys and values, of which those with one place share one.

    Where these differ in their heads, their caches are views of the same memory: each has its tiles
    at equal distances in a block, and blocks begin where they begin for the others.

    Args:
        heads: Heads of each layer on this rank.
        layout: Which layers share a place.
        num_blocks: Number of blocks.
        block_size: Tokens of a block.
        dtype: Type of the cache.
        device: Device of the cache.
    """
    places = layout.layer_places() or range(len(heads))
    is_quantized = dtype in KV_TYPES.values()
    if len(set(heads)) == 1:
        shape = (num_blocks, 2, heads[0][0], block_size, heads[0][1])
        caches = allocate_kv_caches(max(places) + 1, shape, dtype, device)
        return [caches[place] for place in places]
    sizes = place_bytes(heads, places, block_size, dtype.itemsize, is_quantized)
    memory = [zeros((num_blocks, size), torch.uint8, device) for size in sizes]
    shared = {key: _view(memory[key[0]], block_size, key[1], dtype) for key in set(zip(places, heads, strict=True))}
    return [shared[key] for key in zip(places, heads, strict=True)]


def _view(memory: torch.Tensor, block_size: int, heads: KvHeads, dtype: torch.dtype) -> torch.Tensor:
    """The cache of layers with these heads in a place's memory, uint8 [num_blocks, bytes]."""
    num_heads, head_dim = heads
    block = memory.shape[1] // dtype.itemsize
    tile = block // (2 * num_heads)
    shape = (memory.shape[0], 2, num_heads, block_size, head_dim)
    return memory.view(dtype).as_strided(shape, (block, num_heads * tile, tile, head_dim, 1))


def allocate_states(
    num_blocks: int, block_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeroed states of tokens, [num_blocks, block_size, hidden_size], beside their keys."""
    return zeros((num_blocks, block_size, hidden_size), dtype, device)


def kv_type(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The type of the cache of a model that is computed in `dtype`, with `kv_dtype` configured."""
    return dtype if kv_dtype == "auto" else KV_TYPES[kv_dtype]


def cache_bytes(kv_caches: list[torch.Tensor]) -> int:
    """Memory of all layers' caches, scales and states of recurrent layers included."""
    states = sum(cache.nbytes for cache in kv_caches if holds_states(cache))
    return states + sum(map(num_bytes, block_caches(kv_caches)))


def clear_blocks(kv_caches: list[torch.Tensor], num_blocks: int) -> None:
    """Zeros the first blocks of every layer, scales included."""
    for cache in block_caches(kv_caches):
        whole_blocks(cache)[:num_blocks].zero_()


def copy_planned_blocks(plan: ForwardPlan, kv_caches: list[torch.Tensor]) -> None:
    """Copies the plan's blocks in every layer; after its table updates, before its forward pass."""
    if plan.copy_sources.size:
        caches = block_caches(kv_caches)
        device = caches[0].device
        sources, targets = (indices_on_device(blocks, device) for blocks in (plan.copy_sources, plan.copy_targets))
        copy_blocks(caches, sources, targets)
