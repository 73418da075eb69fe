"""What all paged attention kernels share.

The file has the online softmax over tiles of keys, addresses in the paged cache, and sizes that
the GPU limits.

In the letters of the maths: S = Q K^T, P = 2^(S * scale - m), O = sum P V, z = sum P, with m the
largest S * scale so far; scale holds log2(e). S, P, O, m and z are fp32; P is rounded to the type
of V for its product. A hidden score is -1e30 instead of minus infinity, so that a row which sees
nothing of a tile gives finite numbers that the next tile it sees wipes out.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.attention.quantized_kv import CacheMemory
from headrace_kernels.triton_runtime import INTERPRETED

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


class AttentionShape(NamedTuple):
    """Heads and cache that an attention kernel is compiled for: one constexpr of every kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Dimensions of a head in registers.
    padded_dim: int
    block_size: int
    # Elements of the cache from one head's tile to the next.
    tile_stride: int
    # "int8", "fp8" or "": not quantized.
    kind: str
    # Whether the GPU converts e4m3 by itself.
    has_fp8: bool
    # Whether products are fp32: in the interpreter, whose tl.dot is wrong for bf16.
    fp32_dot: bool


class SplitShape(NamedTuple):
    """What a decode kernel is compiled for besides heads and cache: one constexpr of it."""

    # Most query tokens of an entry, and how many of them a program takes.
    query_len: int
    part_len: int
    # Query rows of a tile.
    rows: int
    # Whether query rows are the columns of products (`attention.transposed`).
    is_transposed: bool
    # Keys of a tile, and stages of their loads.
    tile: int
    stages: int
    is_windowed: bool
    # Query rows that are merged, a power of two, and partial results loaded at a time.
    merged_rows: int
    at_once: int
    # Heads of the tile in which squares of the new key are added up; 0: the kernel norms nothing.
    norm_heads: int = 0
    # Dimensions of a head that the kernel rotates; 0: none.
    rotary_dim: int = 0
    # Whether neighbours of those rotate together, and not the two halves.
    interleaved: bool = False
    # Whether it starts while the kernel before it still runs, and lets the one behind do so.
    is_early: bool = False


def attention_shape(num_heads: int, head_dim: int, kv_cache: Tensor, memory: CacheMemory) -> AttentionShape:
    """The shape of `num_heads` query heads over a layer's cache and its memory (`memory_of`)."""
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=kv_cache.shape[2],
        head_dim=head_dim,
        padded_dim=padded_dim(head_dim),
        block_size=kv_cache.shape[3],
        tile_stride=memory.tile_stride,
        kind=memory.kind,
        has_fp8=memory.kind == "fp8" and card.has_fp8_products(kv_cache.device),
        fp32_dot=INTERPRETED,
    )


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
    """Adds one tile of keys to the online softmax.

    query is [M, D], key and value [N, D], seen [M, N] or broadcast to it (read if MASKED).

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
def absorb_sinks(acc, largest, total, sinks, head, mask_row, is_counted):
    """Adds each row's sink to the online softmax: a score whose value is 0.

    `sinks` has a logit for each head, `head` [M] is the rows' own. Of several programs that share a
    row's context only the one for which `is_counted` holds adds it.

    Returns acc [M, D], largest [M], total [M].
    """
    # log2(e), as `LOG2_E` has it.
    sink = tl.load(sinks + head, mask=mask_row, other=0.0).to(tl.float32) * 1.4426950408889634
    new_largest = tl.where(is_counted, tl.maximum(largest, sink), largest)
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.where(is_counted, tl.exp2(sink - new_largest), 0.0)
    return acc * shrink[:, None], new_largest, total


@triton.jit
def key_offsets(table, positions, mask, kv_head, SHAPE: tl.constexpr):
    """Offsets of the keys at `positions` [N] of a block table, int64 [N].

    Values lie num_kv_heads * tile_stride further. Caches have more than 2^31 elements.
    """
    block = tl.load(table + positions // SHAPE.block_size, mask=mask, other=0).to(tl.int64)
    tile = (block * (2 * SHAPE.num_kv_heads) + kv_head) * SHAPE.tile_stride
    return tile + (positions % SHAPE.block_size) * SHAPE.head_dim


def pipeline_stages(device: torch.device, fixed_bytes: int, stage_bytes: int, wanted: int) -> int:
    """Stages of loads in flight: `wanted`, or as many as fit beside `fixed_bytes`.

    2 KiB are left for reductions and barriers.
    """
    return max(1, min(wanted, (card.shared_bytes(device) - fixed_bytes - 2048) // stage_bytes))


def padded_dim(head_dim: int) -> int:
    """The size of a head in registers: a power of two that a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def heads_in_line(query: Tensor) -> Tensor:
    """Query [num_tokens, num_heads, head_dim] whose heads lie side by side.

    Tokens may be further apart (views of a joint projection are).
    """
    if query.stride(2) == 1 and query.stride(1) == query.shape[2]:
        return query
    return query.contiguous()
