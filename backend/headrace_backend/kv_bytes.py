"""Bytes that keys and values take in the KV cache, computed without torch.

Memory plan, model facts and step costs share this arithmetic, and the cache is made by it.

How the numbers and scales lie is `headrace_kernels.attention.quantized_kv`'s; a test holds the two
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace_model_folder.description import ModelDescription

# fp32, one of each token and head.
_SCALE_BYTES = 4
# Tiles of heads begin at multiples of this many bytes where layers of several sizes share a place.
_ALIGNMENT = 16
# Number of key and value heads of a layer, and the elements of one.
KvHeads = tuple[int, int]


def kv_heads(model: ModelDescription) -> list[KvHeads]:
    """The heads of each layer that keeps keys and values."""
    return [(attention.num_kv_heads, attention.head_dim) for attention in model.kv_attentions]


def kv_token_bytes(model: ModelDescription, item_bytes: int, kv_dtype: str, num_ranks: int = 1) -> int:
    """Bytes of one token's keys and values in all layers, scales included.

    Of several ranks together, each of which has a head at least, so that several may have the same.

    Args:
        model: The whole model, or what one rank has of it.
        item_bytes: Bytes of one value of the model's dtype.
        kv_dtype: Dtype of the cache, by the names of `EngineConfig.kv_dtype`.
        num_ranks: Ranks that share the model's heads.
    """
    return sum(
        max(1, num_ranks // heads[0]) * _token_bytes(heads, item_bytes, kv_dtype != "auto") for heads in kv_heads(model)
    )


def place_bytes(
    heads: Sequence[KvHeads], places: Sequence[int], block_size: int, item_bytes: int, is_quantized: bool
) -> list[int]:
    """Bytes of a block in each of its places, which are as large as the largest layer there.

    Where layers of several sizes share a place, each has its tiles at equal distances in it.

    Args:
        heads: Heads of each layer that keeps keys and values.
        places: Each layer's place in the blocks of its group; empty: every layer has one alone.
        block_size: Tokens of a block.
        item_bytes: Bytes of one value of an unquantized cache.
        is_quantized: Whether values are bytes with scales.
    """
    sharing: dict[int, set[KvHeads]] = {}
    for layer, place in zip(heads, places or range(len(heads)), strict=True):
        sharing.setdefault(place, set()).add(layer)
    return [
        _shared_bytes(
            [(count, block_size * _token_bytes((count, size), item_bytes, is_quantized)) for count, size in found]
        )
        for _, found in sorted(sharing.items())
    ]


def _token_bytes(heads: KvHeads, item_bytes: int, is_quantized: bool) -> int:
    num_heads, head_dim = heads
    return 2 * num_heads * (head_dim + _SCALE_BYTES if is_quantized else head_dim * item_bytes)


def _shared_bytes(layers: Sequence[tuple[int, int]]) -> int:
    """The least bytes that hold each layer's block, and are cut into its tiles evenly.

    Args:
        layers: Number of heads and bytes of a block, for each size of layer.
    """
    largest = max(size for _, size in layers)
    if len(layers) == 1:
        return largest
    unit = math.lcm(*(2 * num_heads * _ALIGNMENT for num_heads, _ in layers))
    return -(-largest // unit) * unit
