"""What all paged attention kernels share: the online softmax over tiles of keys, addresses in the
paged cache, and sizes that the card limits.

In the letters of the maths: S = Q K^T, P = 2^(S * scale - m), O = sum P V, z = sum P, with m the
largest S * scale so far; scale holds log2(e). S, P, O, m and z are fp32; P is rounded to the type
of V for its product. A hidden score is -1e30 instead of minus infinity, so that a row which sees
nothing of a tile gives finite numbers that the next tile it sees wipes out.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card

# exp(x) is 2^(x * LOG2_E).
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel of this size is run. Each kernel has a rule for it; measurements give others."""

    # Keys per tile.
    tile: int
    warps: int
    # Stages of loads in flight.
    stages: int
    # Most registers of a thread; None: as many as the compiler likes.
    registers: int | None = None


@triton.jit
def absorb(
    acc,
    largest,
    total,
    query,
    key,
    value,
    seen,
    score_scale,
    MASKED: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    """One tile: query [M, D], key and value [N, D], seen [M, N] or broadcast to it (read if
    MASKED).

    Returns acc [M, D], largest [M], total [M].
    """
    if FP32_DOT:
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(seen, scores * score_scale, -1.0e30)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
    else:
        new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="tf32x3")
    return acc, new_largest, total


@triton.jit
def key_offsets(
    table,
    positions,
    mask,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
):
    """int64 [N] where the keys at `positions` of a block table begin; the values lie NUM_KV_HEADS *
    TILE_STRIDE further.

    Caches have more than 2^31 values.
    """
    block = tl.load(table + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return (block * (2 * NUM_KV_HEADS) + kv_head) * TILE_STRIDE + (positions % BLOCK_SIZE) * HEAD_DIM


def pipeline_stages(device: torch.device, fixed_bytes: int, stage_bytes: int, wanted: int) -> int:
    """Stages of loads in flight: `wanted`, or as many as fit beside `fixed_bytes`.

    2 KiB are left for reductions and barriers.
    """
    return max(1, min(wanted, (card.shared_bytes(device) - fixed_bytes - 2048) // stage_bytes))


def padded_dim(head_dim: int) -> int:
    """The size of a head in registers: a power of two that a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def heads_in_line(query: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim] whose heads lie side by side; tokens may be further apart
    (views of a joint projection are).
    """
    if query.stride(2) == 1 and query.stride(1) == query.shape[2]:
        return query
    return query.contiguous()
