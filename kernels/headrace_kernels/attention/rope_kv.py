"""Rotation and the cache's writing, in one pass over a layer's projection.

Both stand between the projection and attention, with optional norms of each head's query and
key.

Owns the fused kernel, and how another kernel rotates single heads to the same bits
(`rotated_heads`, for `attention.decode`). The operations themselves are `rms_norm`, `rope` and
`kv_cache`, which say what is computed; on a CPU they run one after the other.

Launch rule: heads of one token a program, as many as make 256 planes (4 heads of 128) with one warp
up to 64 tokens, so that a single row reaches a dozen multiprocessors, and 1,024 planes (16 heads)
with 4 warps beyond. A thread rotates 8 planes: two loads of 16 bytes. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.attention.kv_cache import write_kv_reference
from headrace_kernels.attention.quantized_kv import bits_of, head_scale, memory_of, rounded
from headrace_kernels.attention.rope import rope_reference, rotated
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.rms_norm import rms_norm_reference, scaled_by_rms
from headrace_kernels.triton_runtime import uses_triton

# Numbers of a thread, of one head: the order in which a norm's squares are added up depends on it.
_THREAD_PLANES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class RawHeads:
    """What a layer's projection gave, and how its heads are normed and rotated.

    Fields as the arguments of `rope_and_write_kv`.
    """

    # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    qkv: Tensor
    # [num_tokens, 3, rotary_dim / 2] fp32
    rotations: Tensor
    num_heads: int
    # [head_dim]; None: no such norms.
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0
    # Whether neighbours rotate together, and not a head's two halves.
    interleaved: bool = False


def rope_and_write_kv_reference(
    qkv: Tensor,
    rotations: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Specification of `rope_and_write_kv`, in plain PyTorch."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    end = num_heads + num_kv_heads
    if query_norm is None or key_norm is None:
        rotated = rope_reference(qkv[:, :end], rotations, interleaved)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    else:
        query = rope_reference(rms_norm_reference(qkv[:, :num_heads], query_norm, eps), rotations, interleaved)
        key = rope_reference(rms_norm_reference(qkv[:, num_heads:end], key_norm, eps), rotations, interleaved)
    write_kv_reference(key, qkv[:, end:], kv_cache, slot_mapping)
    return query


@triton.jit
def _plane_offsets(offs, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets of the two elements of each of a head's HALF planes.

    The first ROTARY_HALF planes rotate, the others pair what stays as it is.
    """
    if INTERLEAVED:
        rotates = offs < ROTARY_HALF
        offs_a = tl.where(rotates, 2 * offs, offs + ROTARY_HALF)
        offs_b = tl.where(rotates, 2 * offs + 1, offs + HALF)
    elif ROTARY_HALF == HALF:
        offs_a, offs_b = offs, offs + HALF
    else:
        rotates = offs < ROTARY_HALF
        offs_a = tl.where(rotates, offs, offs + ROTARY_HALF)
        offs_b = tl.where(rotates, offs + ROTARY_HALF, offs + HALF)
    return offs_a, offs_b


@triton.jit
def _norm_weights(query_norm, key_norm, heads, offs, mask, NUM_HEADS: tl.constexpr):
    """Each head's factors of its norm, [heads, planes]."""
    is_query = (heads < NUM_HEADS)[:, None]
    of_query = tl.load(query_norm + offs + heads[:, None] * 0, mask=mask & is_query, other=0.0)
    of_key = tl.load(key_norm + offs + heads[:, None] * 0, mask=mask & ~is_query, other=0.0)
    return tl.where(is_query, of_query, of_key)


@triton.jit(do_not_specialize=["slot_mapping"])
def _rope_and_write_kv_kernel(
    qkv,
    rotations,
    query_norm,
    key_norm,
    slot_mapping,
    query,
    kv_cache,
    scales,
    eps,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    # One token, HEADS of its heads: queries, then keys, then values. A head's two halves meet in
    # planes (a, b).
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offs = tl.arange(0, PLANES)[None, :]
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (offs < HALF)
    offs_a, offs_b = _plane_offsets(offs, HALF, ROTARY_HALF, INTERLEAVED)
    place = qkv + token * TOKEN_STRIDE + heads[:, None] * (2 * HALF)
    raw_a = tl.load(place + offs_a, mask=mask, other=0.0)
    raw_b = tl.load(place + offs_b, mask=mask, other=0.0)
    rotation = rotations + token * (3 * ROTARY_HALF) + offs + heads[:, None] * 0
    mask_rotated = mask & (offs < ROTARY_HALF)
    cosine = tl.load(rotation, mask=mask_rotated, other=1.0)
    sine = tl.load(rotation + 2 * ROTARY_HALF, mask=mask_rotated, other=0.0)
    slot = tl.load(slot_mapping + token)

    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if NORMED:
        dtype: tl.constexpr = qkv.dtype.element_ty
        # Before the sum, which later loads would wait for.
        weight_a = _norm_weights(query_norm, key_norm, heads, offs_a, mask, NUM_HEADS)
        weight_b = _norm_weights(query_norm, key_norm, heads, offs_b, mask, NUM_HEADS)
        mean_square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
        a = scaled_by_rms(a, mean_square, weight_a, eps).to(dtype).to(tl.float32)
        b = scaled_by_rms(b, mean_square, weight_b, eps).to(dtype).to(tl.float32)
    rotated_a = rotated(a, b, cosine, -sine).to(qkv.dtype.element_ty)
    rotated_b = rotated(b, a, cosine, sine).to(qkv.dtype.element_ty)

    mask_query = mask & (heads < NUM_HEADS)[:, None]
    target = query + token * (NUM_HEADS * 2 * HALF) + heads[:, None] * (2 * HALF)
    tl.store(target + offs_a, rotated_a, mask=mask_query)
    tl.store(target + offs_b, rotated_b, mask=mask_query)

    # A block holds all heads' keys, then all heads' values, as they follow each other in the
    # projection too. Values are stored as they are.
    kv_heads = heads - NUM_HEADS
    is_value = (kv_heads >= NUM_KV_HEADS)[:, None]
    mask_kv = mask & (kv_heads >= 0)[:, None] & (slot >= 0)
    start = kv_cache + slot // BLOCK_SIZE * (2 * NUM_KV_HEADS * TILE_STRIDE) + slot % BLOCK_SIZE * (2 * HALF)
    target = start + kv_heads[:, None] * TILE_STRIDE
    if KIND == "":
        tl.store(target + offs_a, tl.where(is_value, raw_a, rotated_a).to(kv_cache.dtype.element_ty), mask=mask_kv)
        tl.store(target + offs_b, tl.where(is_value, raw_b, rotated_b).to(kv_cache.dtype.element_ty), mask=mask_kv)
    else:
        kept_a = tl.where(is_value, raw_a, rotated_a).to(tl.float32)
        kept_b = tl.where(is_value, raw_b, rotated_b).to(tl.float32)
        amax = tl.max(tl.maximum(tl.abs(kept_a), tl.abs(kept_b)), 1)
        scale = head_scale(amax, tl.sum(kept_a * 0.0 + kept_b * 0.0, 1), KIND)
        tl.store(target + offs_a, bits_of(rounded(kept_a, scale[:, None], KIND), KIND), mask=mask_kv)
        tl.store(target + offs_b, bits_of(rounded(kept_b, scale[:, None], KIND), KIND), mask=mask_kv)
        tile = slot // BLOCK_SIZE * (2 * NUM_KV_HEADS) + kv_heads
        of_scale = scales + tile * (TILE_STRIDE // 4) + BLOCK_SIZE * 2 * HALF // 4 + slot % BLOCK_SIZE
        tl.store(of_scale, scale, mask=(kv_heads >= 0) & (kv_heads < 2 * NUM_KV_HEADS) & (slot >= 0))


def launch_rule(num_tokens: int, half: int) -> tuple[int, int, int]:
    """Heads of a program, planes of a head rounded up to a power of two, and warps."""
    planes = triton.next_power_of_2(half)
    heads = max(1, (256 if num_tokens <= 64 else 1024) // planes)
    return heads, planes, max(1, heads * planes // (32 * _THREAD_PLANES))


@triton.jit
def head_planes(places, mask_head, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each plane of the heads that begin at `places`, [heads, planes] twice."""
    offs = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    mask = mask_head[:, None] & (offs < HALF)
    offs_a, offs_b = _plane_offsets(offs, HALF, ROTARY_HALF, INTERLEAVED)
    a = tl.load(places[:, None] + offs_a, mask=mask, other=0.0)
    return a, tl.load(places[:, None] + offs_b, mask=mask, other=0.0)


@triton.jit
def mean_squares(a, b, HALF: tl.constexpr):
    """Mean square of heads whose planes are a and b (`head_planes`), [heads] fp32.

    Squares are added up in the order of `_rope_and_write_kv_kernel` if there are as many heads as
    `heads_for_norm` says, or more.
    """
    a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.sum(a * a + b * b, axis=1) / (2 * HALF)


def heads_for_norm(half: int, num_warps: int) -> int:
    """Heads of a tile in which warps add up squares as `_rope_and_write_kv_kernel` does.

    A thread then has as many values of a head as there.
    """
    return int(max(1, 32 * _THREAD_PLANES // triton.next_power_of_2(half)) * num_warps)


@triton.jit
def rotation_rows(
    rotation, offs_row, mask_row, ROTARY_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """One token's cosines and signed sines of every dimension, [rows, PADDED_DIM] each.

    They are the same in all rows, which are there so that the loads have the layout of the heads
    to be rotated. Dimensions that do not rotate have 1 and 0.
    """
    dims = tl.arange(0, PADDED_DIM)[None, :] + offs_row[:, None] * 0
    mask = mask_row[:, None] & (dims < ROTARY_DIM)
    # A rotation is cosine, minus sine, sine: one cosine for both elements of a plane, and the two
    # signs side by side.
    if INTERLEAVED:
        planes, signs = dims // 2, dims % 2 * (ROTARY_DIM // 2) + dims // 2
    else:
        planes, signs = dims % (ROTARY_DIM // 2), dims
    cosine = tl.load(rotation + planes, mask=mask, other=1.0)
    return cosine, tl.load(rotation + ROTARY_DIM // 2 + signs, mask=mask, other=0.0)


@triton.jit
def _partners(dims, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The dimension that each dimension rotates with; any for those that do not rotate."""
    if INTERLEAVED:
        partners = dims ^ 1
    else:
        partners = (dims + ROTARY_DIM // 2) % ROTARY_DIM
    return partners


@triton.jit
def numbers_with_partners(
    places, mask_row, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Numbers that lie at `places` [rows], and those they rotate with, [rows, PADDED_DIM] twice.

    They are heads, or for all rows a norm's weight. They are 0 where masked and beyond HEAD_DIM.
    """
    dims = tl.arange(0, PADDED_DIM)[None, :]
    mask = mask_row[:, None] & (dims < HEAD_DIM)
    numbers = tl.load(places[:, None] + dims, mask=mask, other=0.0)
    return numbers, tl.load(places[:, None] + _partners(dims, ROTARY_DIM, INTERLEAVED), mask=mask, other=0.0)


@triton.jit
def rotated_heads(x, partner, cosine, sine, factor, partner_factor, mean_square, eps, NORMED: tl.constexpr):
    """Heads, normed and rotated, [rows, PADDED_DIM] in their type.

    Heads x and the numbers they rotate with are those of `numbers_with_partners`, as are a norm's
    two factors, which count if NORMED; `mean_square` is [rows], the rotation that of
    `rotation_rows`.
    """
    dtype: tl.constexpr = x.dtype
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    if NORMED:
        x = scaled_by_rms(x, mean_square, factor, eps).to(dtype).to(tl.float32)
        partner = scaled_by_rms(partner, mean_square, partner_factor, eps).to(dtype).to(tl.float32)
    return rotated(x, partner, cosine, sine).to(dtype)


def _rope_and_write_kv_triton(
    qkv: Tensor,
    rotations: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    interleaved: bool,
) -> Tensor:
    memory = memory_of(kv_cache)
    num_tokens, total_heads, head_dim = qkv.shape
    num_kv_heads, half = (total_heads - num_heads) // 2, head_dim // 2
    qkv = qkv.contiguous()
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return query
    heads, planes, num_warps = launch_rule(num_tokens, half)
    early = card.launches_early(qkv.device)
    _rope_and_write_kv_kernel[(num_tokens, triton.cdiv(total_heads, heads))](
        qkv,
        rotations,
        query_norm,
        key_norm,
        slot_mapping,
        query,
        memory.numbers,
        memory.scales,
        eps,
        query_norm is not None,
        memory.kind,
        total_heads * head_dim,
        memory.tile_stride,
        kv_cache.shape[3],
        num_heads,
        num_kv_heads,
        half,
        rotations.shape[2],
        interleaved,
        heads,
        planes,
        early,
        num_warps=num_warps,
        launch_pdl=early,
    )
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
    interleaved: bool = False,
) -> Tensor:
    """Turns queries and keys to their positions and stores keys and values.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], a layer's projection: queries,
            keys, values. Not changed.
        rotations: [num_tokens, 3, rotary_dim / 2] fp32 of `rope.rope_rows`; dimensions of a head
            from rotary_dim on do not rotate.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim] in the type of qkv, or
            quantized (`quantized_kv`), changed in place.
        slot_mapping: [num_tokens] int64, one slot per token, none twice; -1 for tokens that are not
            stored.
        num_heads: Query heads.
        query_norm: [head_dim] weight of the RMS norm of each query before it is rotated; None: no
            such norm.
        key_norm: [head_dim] weight of the norm of each key; both norms or neither.
        eps: Added to the norms' mean square.
        interleaved: Whether neighbours rotate together, and not a head's two halves.

    Returns:
        [num_tokens, num_heads, head_dim] the rotated queries.
    """
    run = _rope_and_write_kv_triton if uses_triton(qkv) else rope_and_write_kv_reference
    return run(qkv, rotations, kv_cache, slot_mapping, num_heads, query_norm, key_norm, eps, interleaved)
