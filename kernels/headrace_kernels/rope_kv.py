"""Between a layer's projections and its attention: optional norms of each head's query and key, rotation, and the write into the paged cache, in one pass over the projection.

Owns the fused kernel. The operations themselves are `rms_norm`, `rope` and `kv_cache`, which say what it computes; on a CPU they run one after the other.
"""

from __future__ import annotations

from torch import Tensor

from headrace_kernels.kv_cache import write_kv
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.rope import rope


def rope_and_write_kv_reference(
    qkv: Tensor,
    rotations: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `rope_and_write_kv`."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    end = num_heads + num_kv_heads
    if query_norm is None or key_norm is None:
        turned = rope(qkv[:, :end], rotations)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
    else:
        query = rope(rms_norm(qkv[:, :num_heads], query_norm, eps), rotations)
        key = rope(rms_norm(qkv[:, num_heads:end], key_norm, eps), rotations)
    write_kv(key, qkv[:, end:], kv_cache, slot_mapping)
    return query


def rope_and_write_kv(
    qkv: Tensor,
    rotations: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Turns queries and keys to their positions and stores keys and values.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], a layer's projection: queries, keys, values. Not changed.
        rotations: [num_tokens, 3, head_dim / 2] fp32 of `rope.rope_rows`.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim] in the type of qkv, changed in place.
        slot_mapping: [num_tokens] int64, one slot per token, none twice; -1 for tokens that are not stored.
        num_heads: Query heads.
        query_norm: [head_dim] weight of the RMS norm of each query before it is turned; None: no such norm.
        key_norm: The same of the keys; both or neither.
        eps: Added to the norms' mean square.

    Returns:
        [num_tokens, num_heads, head_dim] the turned queries.
    """
    return rope_and_write_kv_reference(qkv, rotations, kv_cache, slot_mapping, num_heads, query_norm, key_norm, eps)
