"""The online softmax over tiles of a quantized cache.

Bytes become numbers in registers, and scales are applied where they cost least.

Owns what `attention.tiles.absorb` is to a plain cache. In its letters, with k and v the scales of a
key and a value and K, V numbers without them: S = (Q / q) K^T, of which row and column are scaled
by q and k at once; P is multiplied by v / u after z has counted it, O = sum P V is in units of u,
the largest v so far. Nothing is scaled number by number.

Numbers become fp16, whatever the model's type: all of 8 bits and of e4m3 are fp16 numbers, and it
is the cheapest to make (INT8: 5 instructions for four; e4m3: 2 from sm_89 on, 10 before). So
queries are divided by the largest of their row (q), and P by u, which leaves both in fp16's range:
no model's queries or values are too large or too small. Models in fp32 are multiplied in fp32.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.attention.quantized_kv import scale_offsets
from headrace_kernels.weight_formats.conversions import numbers_of

# Below all scales (`quantized_kv`), and far enough from 0 that scales over it are finite.
_LEAST_UNIT = tl.constexpr(1e-33)
# Four bytes are in a register and become two of two numbers. (v + 128) + 1024, less 1152.
_INT8_HALVES = (
    "{ .reg .b32 t, c; xor.b32 t, $2, 0x80808080; mov.b32 c, 0x64646464; "
    "prmt.b32 $0, t, c, 0x4140; prmt.b32 $1, t, c, 0x4342; "
    "mov.b32 c, 0x64806480; sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }"
)
_FP8_HALVES = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
# The same by bits: sign, exponent and mantissa move to their places, and 2^8 makes up for the
# exponents' biases, of numbers without a leading 1 too.
_FP8_BITS = (
    "{ .reg .b32 t, a, c; mov.b32 c, 0x5C005C00; "
    "prmt.b32 t, $2, 0, 0x1404; shr.b32 a, t, 1; and.b32 a, a, 0x3F803F80; "
    "lop3.b32 a, t, 0x80008000, a, 0xEA; mul.f16x2 $0, a, c; "
    "prmt.b32 t, $2, 0, 0x3424; shr.b32 a, t, 1; and.b32 a, a, 0x3F803F80; "
    "lop3.b32 a, t, 0x80008000, a, 0xEA; mul.f16x2 $1, a, c; }"
)


@triton.constexpr_function
def halves_assembly(kind, has_fp8):
    """Four bytes in, two of two numbers out."""
    return _INT8_HALVES if kind == "int8" else _FP8_HALVES if has_fp8 else _FP8_BITS


@triton.jit
def halves_of(bits, KIND: tl.constexpr, HAS_FP8: tl.constexpr, STAYS: tl.constexpr):
    """The cache's bytes as fp16 numbers without their scales.

    STAYS: in the layout in which they were loaded. Values need it: a product takes pairs of tokens,
    so the compiler, which moves pure conversions behind the change of layout, would read bytes one
    by one (128 loads of a byte a thread and tile of 64 keys instead of 8 of 16).
    """
    assembly: tl.constexpr = halves_assembly(KIND, HAS_FP8)
    return tl.inline_asm_elementwise(assembly, "=r,=r,r", [bits], dtype=tl.float16, is_pure=not STAYS, pack=4)


@triton.jit
def absorb_quantized(
    acc,
    largest,
    total,
    unit,
    query,
    row_scales,
    k,
    v,
    scales,
    offs_key,
    positions,
    mask,
    seen,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends to one tile of quantized keys and values.

    Arguments as `absorb`, but query [M, D] and row_scales [M] of `divided_query`, k and v the
    cache's bytes, `scales` its memory as fp32, offs_key [N] where the keys begin, positions and
    mask [N] which they are. Returns acc [M, D] in units of `unit` (at first `first_unit`), largest
    [M], total [M], unit.
    """
    KIND: tl.constexpr = SHAPE.kind
    places = scales + scale_offsets(offs_key, positions, SHAPE.block_size, SHAPE.head_dim)
    key_scales = tl.load(places, mask=mask, other=0.0)
    value_scales = tl.load(places + SHAPE.num_kv_heads * SHAPE.tile_stride // 4, mask=mask, other=0.0)
    if SHAPE.fp32_dot or query.dtype == tl.float32:
        key = numbers_of(k, 0, KIND, tl.float32, SHAPE.fp32_dot)
        value = numbers_of(v, 0, KIND, tl.float32, SHAPE.fp32_dot)
        query = query.to(tl.float32)
    else:
        key, value = halves_of(k, KIND, SHAPE.has_fp8, False), halves_of(v, KIND, SHAPE.has_fp8, True)
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * key_scales[None, :]
    if MASKED:
        scores = tl.where(seen, scores * row_scales[:, None], -1.0e30)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
    else:
        new_largest = tl.maximum(largest, tl.max(scores, 1) * row_scales)
        weights = tl.exp2(scores * row_scales[:, None] - new_largest[:, None])
    new_unit = tl.maximum(unit, tl.max(value_scales, 0))
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights * (value_scales / new_unit)[None, :]
    acc = acc * (shrink * (unit / new_unit))[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="tf32x3")
    return acc, new_largest, total, new_unit


@triton.jit
def first_unit():
    """The unit of an acc that is 0."""
    return tl.full([], _LEAST_UNIT, tl.float32)


@triton.jit
def divided_query(query, score_scale):
    """Queries [M, D] over the largest of their row, and the factor of their scores [M].

    Queries are fp16 or, of models in fp32, fp32; the factor includes `score_scale`.
    """
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    divided = wide / largest[:, None]
    if query.dtype != tl.float32:
        divided = divided.to(tl.float16)
    return divided, largest * score_scale
