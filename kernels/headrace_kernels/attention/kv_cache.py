"""The paged KV cache of one layer: writing a step's keys and values, and copying whole blocks.

Layout: [num_blocks, 2, num_kv_heads, block_size, head_dim], keys at index 0, values at index 1; of
8-bit numbers with scales behind them, see `quantized_kv`. Slot s is token s % block_size of block s
// block_size. Which request owns which block is decided elsewhere. On a GPU a step's keys and
values are written by `rope_kv` or `attention.decode`; `write_kv` waits for the device there.

Launch rule of `copy_blocks`: 512 numbers of 8 blocks at a time a program, 4 warps, so that a block
of 32,768 numbers occupies 64 programs. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.attention.quantized_kv import is_quantized, quantize, scales_of, tiles_of
from headrace_kernels.triton_runtime import uses_triton

_COPIES, _CHUNK = 8, 512


def write_kv_reference(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Specification of `write_kv`, in plain PyTorch."""
    if int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block_size = kv_cache.shape[3]
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    # [num_blocks, block_size, 2, num_kv_heads, head_dim] puts the two indexed dimensions first, so
    # that each token is one entry.
    heads = torch.stack((key, value), dim=1)
    if is_quantized(kv_cache):
        numbers, scales = quantize(heads, kv_cache.dtype)
        scales_of(kv_cache).permute(0, 3, 1, 2).index_put_((blocks, offsets), scales)
        kv_cache, heads = kv_cache.view(torch.int8), numbers.view(torch.int8)
    kv_cache.permute(0, 3, 1, 2, 4).index_put_((blocks, offsets), heads.to(kv_cache.dtype))


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores a step's keys and values.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], already rotated.
        value: [num_tokens, num_kv_heads, head_dim], too.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], changed in place.
        slot_mapping: [num_tokens] int64, one slot per token, none twice; -1 for tokens that are not
            stored.
    """
    write_kv_reference(key, value, kv_cache, slot_mapping)


def copy_blocks_reference(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Specification of `copy_blocks` for one layer."""
    kv_cache.index_copy_(0, targets, kv_cache.index_select(0, sources))


@triton.jit(do_not_specialize=["sources", "targets", "num_copies"])
def _copy_blocks_kernel(
    kv_cache,
    scratch,
    sources,
    targets,
    num_copies,
    BLOCK_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    COPIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # A program owns one part of every block, so the order of its reads and writes is its own
    # affair: all sources into the scratch, then all targets out of it.
    offs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)[None, :]
    for first in range(0, num_copies, COPIES):
        copies = first + tl.arange(0, COPIES)
        mask = (copies < num_copies)[:, None] & (offs < SIZE)
        source = tl.load(sources + copies, mask=copies < num_copies, other=0)
        values = tl.load(kv_cache + source[:, None] * BLOCK_STRIDE + offs, mask=mask)
        tl.store(scratch + copies.to(tl.int64)[:, None] * SIZE + offs, values, mask=mask)
    tl.debug_barrier()
    for first in range(0, num_copies, COPIES):
        copies = first + tl.arange(0, COPIES)
        mask = (copies < num_copies)[:, None] & (offs < SIZE)
        target = tl.load(targets + copies, mask=copies < num_copies, other=0)
        values = tl.load(scratch + copies.to(tl.int64)[:, None] * SIZE + offs, mask=mask)
        tl.store(kv_cache + target[:, None] * BLOCK_STRIDE + offs, values, mask=mask)


def _copy_blocks_triton(kv_cache: Tensor, scratch: Tensor, sources: Tensor, targets: Tensor) -> None:
    assert kv_cache[0].is_contiguous()
    size, num_copies = kv_cache[0].numel(), sources.shape[0]
    grid, stride = (triton.cdiv(size, _CHUNK),), kv_cache.stride(0)
    _copy_blocks_kernel[grid](
        kv_cache, scratch, sources, targets, num_copies, stride, size, _COPIES, _CHUNK, num_warps=4
    )


def whole_blocks(kv_cache: Tensor) -> Tensor:
    """All of a cache's memory, blocks first.

    Of a quantized cache these are its tiles, which begin and end at multiples of four bytes. What
    lies between tiles is another layer's, of another size, and is moved with them.
    """
    numbers = tiles_of(kv_cache) if is_quantized(kv_cache) else kv_cache
    if not numbers[0].is_contiguous():
        block = 2 * numbers.stride(1)
        numbers = numbers.as_strided((len(numbers), block), (block, 1))
    return numbers.view(torch.int32) if is_quantized(kv_cache) else numbers


def copy_blocks(kv_caches: Iterable[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks within each layer's cache: reads all sources, then writes all targets.

    Args:
        kv_caches: One cache per layer, of one type, changed in place.
        sources: [num_copies] int64 block numbers.
        targets: [num_copies] int64 block numbers, none twice.
    """
    if not sources.shape[0]:
        return
    scratch: Tensor | None = None
    for kv_cache in map(whole_blocks, kv_caches):
        if not uses_triton(kv_cache):
            copy_blocks_reference(kv_cache, sources, targets)
            continue
        if scratch is None or scratch.shape[1] != kv_cache[0].numel():
            scratch = kv_cache.new_empty(sources.shape[0], kv_cache[0].numel())
        _copy_blocks_triton(kv_cache, scratch, sources, targets)
