"""Rotation and the cache's writing, in one pass over a layer's projection.

Both stand between the projection and attention, with optional norms of each head's query and
key.

Owns the fused kernel, and how another kernel rotates single heads to the same bits
(`rotated_heads`, for `attention.decode`). The operations themselves are `rms_norm`, `rope` and
`kv_cache`, which say what is computed; on a CPU they run one after the other.

Launch rule: a program has heads of one sort, queries, or keys with as many values, so that none of
its threads does what only the other sort needs. It has 4 tokens, each a warp's, and of each a tile
of as many heads as make 256 planes (4 heads of 128): a thread rotates 8 planes, two loads of 16
bytes. Of 32 heads of 128 over 4 with norms, 8,192 tokens take an H200 44.9 us, 1,024 6.81, 256
2.87, 64 1.36 and one 0.97; of 32 over 8 without norms 53.8, 7.63, 3.06, 1.37 and 0.91
(docs/experiments.md, "rotation by sorts of heads").
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
# Tokens of a program, a warp each.
_PROGRAM_TOKENS = 4


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
def _load_planes(place, offs_a, offs_b, mask):
    """Both elements of planes, 0 where masked."""
    return tl.load(place + offs_a, mask=mask, other=0.0), tl.load(place + offs_b, mask=mask, other=0.0)


@triton.jit
def _normed_and_rotated(raw, norm, cosine, sine, eps, NORMED: tl.constexpr, HALF: tl.constexpr):
    """Planes of heads, normed if NORMED, and rotated, in their type."""
    dtype: tl.constexpr = raw[0].dtype
    a, b = raw[0].to(tl.float32), raw[1].to(tl.float32)
    if NORMED:
        mean_square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
        a = scaled_by_rms(a, mean_square, norm[0], eps).to(dtype).to(tl.float32)
        b = scaled_by_rms(b, mean_square, norm[1], eps).to(dtype).to(tl.float32)
    return rotated(a, b, cosine, -sine).to(dtype), rotated(b, a, cosine, sine).to(dtype)


@triton.jit
def _store_in_cache(
    planes, kv_cache, scales, slot, kv_heads, offs_a, offs_b, mask,
    KIND: tl.constexpr, TILE_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Stores planes of keys or values at their tokens' slots; a slot is -1 where nothing is stored.

    A block holds all heads' keys, then all heads' values, and `kv_heads` counts on from one to the
    other.
    """
    mask = mask & (slot >= 0)[:, None]
    tile = slot // BLOCK_SIZE * (2 * NUM_KV_HEADS) + kv_heads
    target = kv_cache + (tile * TILE_STRIDE + slot % BLOCK_SIZE * (2 * HALF))[:, None]
    if KIND == "":
        tl.store(target + offs_a, planes[0].to(kv_cache.dtype.element_ty), mask=mask)
        tl.store(target + offs_b, planes[1].to(kv_cache.dtype.element_ty), mask=mask)
    else:
        a, b = planes[0].to(tl.float32), planes[1].to(tl.float32)
        amax = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)
        scale = head_scale(amax, tl.sum(a * 0.0 + b * 0.0, 1), KIND)
        tl.store(target + offs_a, bits_of(rounded(a, scale[:, None], KIND), KIND), mask=mask)
        tl.store(target + offs_b, bits_of(rounded(b, scale[:, None], KIND), KIND), mask=mask)
        of_scale = scales + tile * (TILE_STRIDE // 4) + BLOCK_SIZE * 2 * HALF // 4 + slot % BLOCK_SIZE
        tl.store(of_scale, scale, mask=slot >= 0)


@triton.jit(do_not_specialize=["slot_mapping", "num_tokens"])
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
    num_tokens,
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
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        grid_behind_may_start()
    # TOKENS tokens, and of each HEADS queries, or keys and as many values. A head's two halves meet
    # in planes (a, b).
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    tile = tl.program_id(1)
    is_query = tile < QUERY_TILES
    rows = tl.arange(0, TOKENS * HEADS)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + rows // HEADS
    heads = rows % HEADS + (tile * HEADS if is_query else NUM_HEADS + (tile - QUERY_TILES) * HEADS)
    is_head = (tokens < num_tokens) & (heads < (NUM_HEADS if is_query else NUM_HEADS + NUM_KV_HEADS))
    offs = tl.arange(0, PLANES)[None, :]
    offs_a, offs_b = _plane_offsets(offs, HALF, ROTARY_HALF, INTERLEAVED)
    mask = is_head[:, None] & (offs < HALF)
    norm = (0.0, 0.0)
    if NORMED:
        # Read while the kernel ahead still runs, which does not store them.
        weight = (query_norm if is_query else key_norm) + rows[:, None] * 0
        norm = _load_planes(weight, offs_a, offs_b, offs < HALF)
    if EARLY:
        grid_before_is_done()
    # All is asked for before the branch. Behind it, the compiler has the rotation and values loaded
    # after a norm's sum, which waits for the heads.
    place = qkv + (tokens * TOKEN_STRIDE + heads * (2 * HALF))[:, None]
    raw = _load_planes(place, offs_a, offs_b, mask)
    of_cosine = rotations + tokens[:, None] * (3 * ROTARY_HALF) + offs
    mask_rotated = mask & (offs < ROTARY_HALF)
    cosine = tl.load(of_cosine, mask=mask_rotated, other=1.0)
    sine = tl.load(of_cosine + 2 * ROTARY_HALF, mask=mask_rotated, other=0.0)
    value = _load_planes(place + NUM_KV_HEADS * 2 * HALF, offs_a, offs_b, mask & ~is_query)
    slot = tl.load(slot_mapping + tokens, mask=is_head, other=-1)
    if is_query:
        a, b = _normed_and_rotated(raw, norm, cosine, sine, eps, NORMED, HALF)
        target = query + (tokens * (NUM_HEADS * 2 * HALF) + heads * (2 * HALF))[:, None]
        tl.store(target + offs_a, a, mask=mask)
        tl.store(target + offs_b, b, mask=mask)
    else:
        key = _normed_and_rotated(raw, norm, cosine, sine, eps, NORMED, HALF)
        kv_heads = heads - NUM_HEADS
        _store_in_cache(
            key, kv_cache, scales, slot, kv_heads, offs_a, offs_b, mask,
            KIND, TILE_STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HALF,
        )  # fmt: skip
        _store_in_cache(
            value, kv_cache, scales, slot, kv_heads + NUM_KV_HEADS, offs_a, offs_b, mask,
            KIND, TILE_STRIDE, BLOCK_SIZE, NUM_KV_HEADS, HALF,
        )  # fmt: skip


def launch_rule(half: int) -> tuple[int, int, int, int]:
    """Tokens of a program, heads of each, planes of a head as a power of two, and warps."""
    planes = triton.next_power_of_2(half)
    heads = max(1, 32 * _THREAD_PLANES // planes)
    return _PROGRAM_TOKENS, heads, planes, _PROGRAM_TOKENS * heads * planes // (32 * _THREAD_PLANES)


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
    tokens, heads, planes, num_warps = launch_rule(half)
    tiles = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    early = card.launches_early(qkv.device)
    _rope_and_write_kv_kernel[(triton.cdiv(num_tokens, tokens), tiles)](
        qkv,
        rotations,
        query_norm,
        key_norm,
        slot_mapping,
        query,
        memory.numbers,
        memory.scales,
        eps,
        num_tokens,
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
        tokens,
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
