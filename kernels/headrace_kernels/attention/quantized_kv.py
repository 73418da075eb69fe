"""A KV cache of 8-bit numbers.

The file has its layout, how a head becomes numbers and a scale, and what kernels need to write
and to read them.

Owns the numbers. Where tokens go is `kv_cache`'s, who writes on a GPU is `rope_kv` and
`attention.decode`, who reads are the attention files. A layer's cache stays one tensor [num_blocks,
2, num_kv_heads, block_size, head_dim], of int8 or float8_e4m3fn, whose type says that it is
quantized; it is a view:

    one block, one half (keys or values), one head = a tile:   block_size * head_dim numbers |
                                                               block_size scales (fp32)

so scales lie in their block and go where it goes, a tile's numbers are in one piece as in a plain
cache, and for blocks of 16 tokens or more both begin at multiples of 16 bytes.

One scale per token and head, of keys (after rotation) and of values each: scale = amax / 127 (INT8)
or amax / 448 (FP8, e4m3), number = x / scale rounded to nearest, ties to even. Measured scales need
no calibration, can't saturate where keys are large (a static scale of 1 clips at 448) and lose
nothing where values are small; of a head of 128 they are 3% of its bytes. A head that is all but
zero (below 1e-30) is stored as zeros. One with NaN or infinity has the scale NaN, so that whoever
reads it sees it. Reference and kernels agree to the bit.

Error of a dequantized number: INT8 half a step, amax / 254; FP8 1/16 of the number, or amax /
2^18.8 (half of e4m3's smallest step) where that is more.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Types of quantized caches, by what `weight_formats.conversions` calls their numbers.
KV_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_KINDS = {dtype: kind for kind, dtype in KV_TYPES.items()}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
SCALE_BYTES = 4
_LEAST = 1e-30
# Sign, exponent and mantissa of e4m3 where they stand in fp32: 0x87F00000.
_E4M3_IN_FP32 = -0x78100000


class CacheMemory(NamedTuple):
    """A layer's cache as kernels read it."""

    # The cache; int8 for FP8 too, which cards before sm_89 have no type for.
    numbers: Tensor
    # The same memory as fp32; None: not quantized.
    scales: Tensor | None
    # "int8", "fp8" or "": not quantized.
    kind: str
    # Numbers from one head's tile to the next.
    tile_stride: int


def is_quantized(kv_cache: Tensor) -> bool:
    """Whether a layer's cache is one of 8-bit numbers with scales."""
    return kv_cache.dtype in _KINDS


def tile_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of one head's keys, or values, in one block: numbers and scales."""
    return block_size * (head_dim + SCALE_BYTES)


def view_of(memory: Tensor, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A layer's cache [num_blocks, 2, num_kv_heads, block_size, head_dim] in memory of tiles.

    Args:
        memory: uint8 [num_blocks, 2, num_kv_heads, tile_bytes], contiguous.
        block_size: Tokens per block.
        head_dim: Dimensions of a head.
        dtype: One of KV_TYPES.
    """
    return memory[..., : block_size * head_dim].view(*memory.shape[:3], block_size, head_dim).view(dtype)


def tiles_of(kv_cache: Tensor) -> Tensor:
    """All of a quantized cache's memory, int8 [num_blocks, 2, num_kv_heads, tile_bytes].

    Scales are included.

    Raises:
        ValueError: The tensor is no view of tiles.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    size, step = tile_bytes(block_size, head_dim), tile_stride(kv_cache)
    if step is None or step < size or step % SCALE_BYTES:
        raise ValueError(f"kv_cache must be a view of tiles with their scales, and has strides {kv_cache.stride()}")
    strides = (2 * num_kv_heads * step, num_kv_heads * step, step, 1)
    return torch.as_strided(kv_cache.view(torch.int8), (num_blocks, 2, num_kv_heads, size), strides)


def tile_stride(kv_cache: Tensor) -> int | None:
    """Elements from one head's keys, or values, in a block to the next's; None: they vary.

    More than a tile has where layers of other sizes share the memory.
    """
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    step = kv_cache.stride(1) // num_kv_heads
    strides = (2 * num_kv_heads * step, num_kv_heads * step, step, head_dim, 1)
    # A dimension of one entry may have any stride.
    found = zip(kv_cache.shape, kv_cache.stride(), strides, strict=True)
    return None if any(length > 1 and stride != wanted for length, stride, wanted in found) else step


def scales_of(kv_cache: Tensor) -> Tensor:
    """fp32 [num_blocks, 2, num_kv_heads, block_size] of a quantized cache, a view."""
    return tiles_of(kv_cache).view(torch.float32)[..., -kv_cache.shape[3] :]


def memory_of(kv_cache: Tensor) -> CacheMemory:
    """What kernels are given of a cache, quantized or not.

    Raises:
        ValueError: Its tiles do not lie at equal distances, or have no room for scales.
    """
    step = tile_stride(kv_cache)
    if is_quantized(kv_cache):
        tiles = tiles_of(kv_cache)
        assert step is not None, "tiles lie at equal distances"
        return CacheMemory(tiles, tiles.view(torch.float32), _KINDS[kv_cache.dtype], step)
    block_size, head_dim = kv_cache.shape[3:]
    if step is None or step < block_size * head_dim:
        raise ValueError(f"kv_cache must have its tiles at equal distances, and has strides {kv_cache.stride()}")
    return CacheMemory(kv_cache, None, "", step)


def num_bytes(kv_cache: Tensor) -> int:
    """All of a cache's memory, scales included, and what lies between tiles."""
    return kv_cache.shape[0] * 2 * kv_cache.stride(1) * kv_cache.itemsize if kv_cache.numel() else 0


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes heads [..., head_dim] to a type of KV_TYPES.

    Returns values of the same shape, and their scales, fp32 [...].
    """
    kind, wide = _KINDS[dtype], x.float()
    amax = wide.abs().amax(-1)
    # A tensor divides as IEEE says; by a number of Python's torch multiplies with its inverse on a
    # GPU.
    scale = torch.where(amax < _LEAST, 0.0, amax / amax.new_full((), _LARGEST[kind]))
    # infinity times 0 is NaN.
    scale = scale + (wide * 0.0).sum(-1)
    divisor = torch.where(scale > 0.0, scale, torch.inf)[..., None]
    # A scale of 0, infinity or NaN divides nothing.
    ratio = torch.where(divisor < torch.inf, wide / divisor, 0.0)
    numbers = (ratio.round() if dtype is torch.int8 else ratio).to(dtype)
    # No minus zero.
    bits = numbers.view(torch.int8)
    bits.masked_fill_(bits == -128, 0)
    return numbers, scale


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., head_dim] what numbers [..., head_dim] and their scales [...] stand for."""
    return numbers.float() * scales[..., None]


def dequantized_blocks(kv_cache: Tensor, blocks: Tensor) -> Tensor:
    """What blocks of a cache stand for, [len(blocks), 2, num_kv_heads, block_size, head_dim].

    A quantized cache gives fp32, others their own type.
    """
    if not is_quantized(kv_cache):
        return kv_cache[blocks]
    numbers = kv_cache.view(torch.int8)[blocks].view(kv_cache.dtype)
    return dequantize(numbers, scales_of(kv_cache)[blocks])


def dequantized_tiles(tiles: Tensor, block_size: int, head_dim: int, dtype: torch.dtype, out: Tensor) -> Tensor:
    """Dequantizes tiles int8 [n, tile_bytes] into `out`, fp32 [n, block_size * head_dim]."""
    numbers = tiles[:, : block_size * head_dim].view(-1, block_size, head_dim)
    scales = tiles.view(torch.float32)[:, -block_size:]
    dequantized = out.view(-1, block_size, head_dim)
    if dtype is torch.int8:
        dequantized.copy_(numbers)
    else:
        # e4m3 by bits: torch's own conversion dequantizes 59 million numbers a second, this 2,700
        # million (one thread). Widened by its sign, a byte has it at bit 31 after the shift; 2^120
        # makes up for the exponents' biases. What e4m3 has for NaN comes out as 480, and is in no
        # cache: a head's scale says that it is no number.
        words = dequantized.view(torch.int32)
        words.copy_(numbers)
        words.bitwise_left_shift_(20).bitwise_and_(_E4M3_IN_FP32)
        dequantized.mul_(2.0**120)
    dequantized.mul_(scales[..., None])
    return out


_INT8_LARGEST = tl.constexpr(_LARGEST["int8"])
_FP8_LARGEST = tl.constexpr(_LARGEST["fp8"])
_LEAST_HEAD = tl.constexpr(_LEAST)
# 1.5 * 2^23: beyond it fp32 has no fractions, so that a sum is rounded as wanted. And 2^14, where
# fp32's step is e4m3's smallest, 2^-9.
_INTEGERS = tl.constexpr(1.5 * 2**23)
_SMALLEST_STEPS = tl.constexpr(2.0**14)
_E4M3_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def head_scale(amax, not_finite, KIND: tl.constexpr):
    """Scales of heads by the largest of their magnitudes.

    `not_finite` is 0, or NaN where a head holds NaN or infinity (the sum of x * 0).
    """
    LARGEST: tl.constexpr = _INT8_LARGEST if KIND == "int8" else _FP8_LARGEST
    # Division as IEEE says, or the bits differ from the reference's.
    return tl.where(amax < _LEAST_HEAD, 0.0, tl.math.div_rn(amax, amax * 0.0 + LARGEST)) + not_finite


@triton.jit
def rounded(x, scale, KIND: tl.constexpr):
    """Heads over their scales, rounded to values of KIND, fp32.

    The result is 0 where the scale is 0 or not finite.

    `scale` is broadcast to x.
    """
    scale += x * 0.0
    finite = (scale > 0.0) & (scale < float("inf"))
    ratio = tl.where(finite, tl.math.div_rn(x, tl.where(finite, scale, 1.0)), 0.0)
    if KIND == "int8":
        return (ratio + _INTEGERS) - _INTEGERS
    # e4m3: 3 bits of mantissa are left, ties to even; below its smallest leading 1 a fixed step.
    word = ratio.to(tl.int32, bitcast=True)
    magnitude = tl.abs(ratio)
    word = (word + 0x7FFFF + ((word >> 20) & 1)) & -0x100000
    small = (magnitude + _SMALLEST_STEPS) - _SMALLEST_STEPS
    return tl.where(magnitude < _E4M3_NORMAL, tl.where(ratio < 0.0, -small, small), word.to(tl.float32, bitcast=True))


@triton.jit
def bits_of(number, KIND: tl.constexpr):
    """int8 as the cache holds what `rounded` gave."""
    if KIND == "int8":
        return number.to(tl.int8)
    magnitude = tl.abs(number)
    word = magnitude.to(tl.int32, bitcast=True)
    # Exponents are biased by 127 in fp32 and by 7 here.
    code = tl.where(magnitude < _E4M3_NORMAL, (magnitude * 512.0).to(tl.int32), (word >> 20) - (120 << 3))
    return tl.where(number < 0.0, code | 0x80, code).to(tl.int8)


@triton.jit
def quantized_heads(heads, KIND: tl.constexpr):
    """Heads [n, head_dim] as the cache's bytes, as numbers in fp32, and their scales [n]."""
    wide = heads.to(tl.float32)
    scale = head_scale(tl.max(tl.abs(wide), 1), tl.sum(wide * 0.0, 1), KIND)
    numbers = rounded(wide, scale[:, None], KIND)
    return bits_of(numbers, KIND), numbers, scale


@triton.jit
def scale_offsets(offs_key, positions, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Offsets of the scales of heads in the cache as fp32.

    Heads are given by where their values begin (`attention.tiles.key_offsets`) and by position.
    """
    in_block = positions % BLOCK_SIZE
    return ((offs_key - in_block * HEAD_DIM + BLOCK_SIZE * HEAD_DIM) >> 2) + in_block
