"""Few query rows over a quantized cache, by transposed products.

Keys, and then dimensions, stand as the rows of a tile, and query rows as its columns.

Owns the context of one split of `attention.decode` where a cache has 8-bit numbers and there are at
most TRANSPOSED_ROWS query rows (a group of 4 heads has 4). A tensor core's tile has 16 rows and 8
columns: as columns, 8 query rows cost half the products, half the softmax and half the registers
that they do as rows. In the letters of `attention.quantized`: S^T = K (Q / q)^T, O^T += V^T P^T.

One warp a program: it waits for no other, and no number passes through shared memory but on its way
from the cache. Numbers are copied there as bytes and become fp16 in registers, in the layout of
their product. Values must stand with pairs of tokens side by side, and what transposes 16-bit
numbers on the way from shared memory takes no bytes: they are read as pairs of dimensions, and the
even dimensions of O are summed apart from the odd ones.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_kernels.attention.plan import TRANSPOSED_ROWS
from headrace_kernels.attention.quantized import halves_assembly, halves_of
from headrace_kernels.attention.quantized_kv import SCALE_BYTES, scale_offsets
from headrace_kernels.attention.tiles import Launch, pipeline_stages
from headrace_kernels.weight_formats.conversions import numbers_of

# Dimensions of a head in registers, so that half of them are the 16 rows of a product, and so that
# a warp holds the sums.
_LEAST_DIM, _MOST_DIM = 32, 256


def takes_transposed(kind: str, query_rows: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether products of a split are transposed.

    A split has `query_rows` query rows and heads of `dim` numbers in registers, of a model in
    `dtype` over a cache of `kind` ("": not quantized).

    Models in fp32 are multiplied in fp32. Sums of heads of 512 do not fit a warp: they spill 4 KiB
    on sm_90.
    """
    return kind != "" and query_rows <= TRANSPOSED_ROWS and _LEAST_DIM <= dim <= _MOST_DIM and dtype.itemsize == 2


def transposed_rule(dim: int, device: torch.device) -> Launch:
    """Keys per tile, warps and stages for heads of `dim` numbers in registers.

    The next two tiles are on their way while one is worked on: stages are counted twice, as keys
    wait for their blocks' numbers.

    Heads of 256 have half the keys, for their registers.

    32 rows of 8,192 tokens with heads of 128 in FP8 take 133 us on an H200, 202 by the kernel for
    all caches (docs/experiments.md, "Launch rules of kernels").
    """
    tile = 32 if dim <= 128 else 16
    buffers = pipeline_stages(device, 0, 2 * tile * (dim + SCALE_BYTES), 2)
    return Launch(tile, 1, 2 * buffers + 1)


@triton.constexpr_function
def _pair_assembly(kind, has_fp8):
    """Assembly like `halves_assembly`, with bytes 0 and 2 first, then 1 and 3.

    It uses other selectors, or sorts the bytes first where there are none.
    """
    assembly = halves_assembly(kind, has_fp8)
    if "prmt" not in assembly:
        return assembly.replace("$2", "p").replace("{ ", "{ .reg .b32 p; prmt.b32 p, $2, 0, 0x3120; ", 1)
    for selector, other in (("0x4140", "0x4240"), ("0x4342", "0x4341"), ("0x1404", "0x2404"), ("0x3424", "0x3414")):
        assembly = assembly.replace(selector, other)
    return assembly


@triton.jit
def _halves_of_pairs(pairs, KIND: tl.constexpr, HAS_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """Two tensors of values without scales: first and second bytes of pairs.

    Pairs of neighbouring bytes are int16, the first one lower. Values are fp16, or fp32 if PLAIN.
    """
    if PLAIN:
        first = numbers_of(pairs.to(tl.int8), 0, KIND, tl.float32, True)
        second = numbers_of((pairs >> 8).to(tl.int8), 0, KIND, tl.float32, True)
    else:
        assembly: tl.constexpr = _pair_assembly(KIND, HAS_FP8)
        first, second = tl.inline_asm_elementwise(
            assembly, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return first, second


@triton.jit
def _tile_offsets(
    table,
    start,
    end,
    kv_head,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Offsets like `attention.tiles.key_offsets`, for positions start up to start + TILE.

    The first begins a block or its part of TILE tokens: each block's number is read once.

    From `end` on they lie anywhere in the cache.
    """
    within = tl.arange(0, TILE)
    offsets = tl.zeros([TILE], tl.int64)
    for part in tl.static_range((TILE + SHAPE.block_size - 1) // SHAPE.block_size):
        position = start + part * SHAPE.block_size
        block = tl.load(table + position // SHAPE.block_size, mask=position < end, other=0).to(tl.int64)
        tile = (block * (2 * SHAPE.num_kv_heads) + kv_head) * SHAPE.tile_stride
        begin = tile + start % SHAPE.block_size * SHAPE.head_dim
        offsets = tl.where(within // SHAPE.block_size == part, begin, offsets)
    return offsets + within % SHAPE.block_size * SHAPE.head_dim


@triton.jit
def _absorb(
    first,
    second,
    largest,
    total,
    unit,
    query,
    row_scales,
    k,
    pairs,
    key_scales,
    value_scales,
    seen,
    SHAPE: tl.constexpr,
):
    """Adds one tile of keys to the online softmax, with transposed products.

    first and second are [D / 2, M] in units of `unit`, query [D, M], k [N, D] bytes, pairs
    [D / 2, N] of values' bytes, scales [N], seen [N, M] or broadcast to it.

    Returns all five.
    """
    KIND: tl.constexpr = SHAPE.kind
    if SHAPE.fp32_dot:
        key = numbers_of(k, 0, KIND, tl.float32, True)
    else:
        key = halves_of(k, KIND, SHAPE.has_fp8, False)
    scores = tl.dot(key, query, input_precision="tf32x3") * key_scales[:, None]
    scores = tl.where(seen, scores * row_scales[None, :], -1.0e30)
    new_largest = tl.maximum(largest, tl.max(scores, 0))
    weights = tl.exp2(scores - new_largest[None, :])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 0)
    new_unit = tl.maximum(unit, tl.max(value_scales, 0))
    per_unit = 1.0 / new_unit
    weights = (weights * (value_scales * per_unit)[:, None]).to(query.dtype)
    shrink *= unit * per_unit
    value, other_value = _halves_of_pairs(pairs, KIND, SHAPE.has_fp8, SHAPE.fp32_dot)
    first = tl.dot(value, weights, first * shrink[None, :], input_precision="tf32x3")
    second = tl.dot(other_value, weights, second * shrink[None, :], input_precision="tf32x3")
    return first, second, new_largest, total, new_unit


@triton.jit
def absorb_context(
    acc,
    largest,
    total,
    unit,
    query,
    row_scales,
    position,
    begin,
    end,
    first_seen,
    window,
    table,
    kv_head,
    kv_cache,
    scales,
    SHAPE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A split's positions `begin` (a multiple of 64) to `end`.

    `acc` [M, D] in units of `unit`, `largest` and `total` [M] are as
    `attention.quantized.absorb_quantized` has them, with which query and row_scales of
    `divided_query`; the rows' tokens stand at `position` [M], and see `window` tokens, none of
    which is before `first_seen`. Returns acc, largest, total, unit.
    """
    ROWS: tl.constexpr = acc.shape[0]
    DIM: tl.constexpr = acc.shape[1]
    offs_dim, offs_pair = tl.arange(0, DIM), tl.arange(0, DIM // 2)
    query = tl.trans(query.to(tl.float32) if SHAPE.fp32_dot else query)
    first, second = tl.split(tl.permute(tl.reshape(acc, [ROWS, DIM // 2, 2]), (1, 0, 2)))
    pairs_of_values = (kv_cache + SHAPE.num_kv_heads * SHAPE.tile_stride).to(tl.pointer_type(tl.int16))
    for start in tl.range(begin, end, SPLIT.tile, num_stages=SPLIT.stages):
        positions = start + tl.arange(0, SPLIT.tile)
        mask_key = positions < end
        if SPLIT.is_windowed:
            mask_key = mask_key & (positions >= first_seen)
        offs_key = _tile_offsets(table, start, end, kv_head, SHAPE, SPLIT.tile)
        # A slot that was never written, or is being written, may hold any bytes. The score of such
        # a key is replaced; 0 times such a value may be NaN, so that it is not loaded.
        k = tl.load(
            kv_cache + offs_key[:, None] + offs_dim[None, :], mask=(offs_dim < SHAPE.head_dim)[None, :], other=0
        )
        pairs = tl.load(
            pairs_of_values + (offs_key // 2)[None, :] + offs_pair[:, None],
            mask=mask_key[None, :] & (offs_pair < SHAPE.head_dim // 2)[:, None],
            other=0,
        )
        places = scales + scale_offsets(offs_key, positions, SHAPE.block_size, SHAPE.head_dim)
        key_scales = tl.load(places, mask=mask_key, other=0.0)
        value_scales = tl.load(places + SHAPE.num_kv_heads * SHAPE.tile_stride // 4, mask=mask_key, other=0.0)
        seen = mask_key[:, None]
        if SPLIT.query_len > 1:
            seen = seen & (positions[:, None] <= position[None, :])
            if SPLIT.is_windowed:
                seen = seen & (positions[:, None] > position[None, :] - window)
        first, second, largest, total, unit = _absorb(
            first, second, largest, total, unit, query, row_scales, k, pairs, key_scales, value_scales, seen,
            SHAPE,
        )  # fmt: skip
    acc = tl.reshape(tl.permute(tl.join(first, second), (1, 0, 2)), [ROWS, DIM])
    return acc, largest, total, unit
