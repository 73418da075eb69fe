"""Cases of attention over quantized caches, and of writing to one.

Shapes and data are those of `attention`; the floor counts a byte a value and the scales.

`attention`'s cases of the same labels are the rivals in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernel_cases.attention import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Case,
    decode_case,
    head_bytes,
    prefill_case,
    raw_decode_case,
)
from headrace_kernels.attention.quantized_kv import KV_TYPES, tile_bytes, view_of
from headrace_kernels.attention.rope_kv import rope_and_write_kv

_Cases = Iterator[tuple[str, Callable[[], Case]]]


def decode() -> _Cases:
    """The sizes of the targets, alone and as a decode step's layer has them (raw); drafts."""
    for kv in KV_TYPES:
        for batch, context in [(256, 640), (32, 8192), (1, 131_072), (1, 640), (64, 2048)]:
            yield f"{kv} {batch}x{context}", functools.partial(decode_case, batch, context, kv=kv)
            yield f"{kv} {batch}x{context} raw", functools.partial(raw_decode_case, batch, context, kv)
        for query_len in (2, 4, 8):
            yield f"{kv} 32x8192 drafts {query_len}", functools.partial(decode_case, 32, 8192, query_len, kv=kv)


def prefill() -> _Cases:
    """Chunks through the table and gathered."""
    for kv in KV_TYPES:
        for gathers in (True, False):
            way = "gathered" if gathers else "paged"
            yield f"{kv} 8192 {way}", functools.partial(prefill_case, 1, 8192, gathers=gathers, kv=kv)
            yield f"{kv} 512 after 8192 {way}", functools.partial(prefill_case, 1, 512, 8192, gathers, kv=kv)
        yield f"{kv} 8x1000 paged", functools.partial(prefill_case, 8, 1000, gathers=False, kv=kv)


def write() -> _Cases:
    """Rotation and the write of a step's keys and values."""
    for kv in KV_TYPES:
        for tokens in (1, 256, 8192):
            yield f"{kv} {tokens}", functools.partial(_write_case, tokens, kv)


def _write_case(tokens: int, kv: str) -> Case:
    size = (-(-tokens // BLOCK_SIZE), 2, NUM_KV_HEADS, tile_bytes(BLOCK_SIZE, HEAD_DIM))
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    cache = view_of(memory, BLOCK_SIZE, HEAD_DIM, KV_TYPES[kv])
    heads = NUM_HEADS + 2 * NUM_KV_HEADS
    qkv = torch.randn(tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(tokens, HEAD_DIM // 2, device="cuda")
    rotations = torch.stack((angles.cos(), -angles.sin(), angles.sin()), dim=1)
    slots = torch.arange(tokens, device="cuda")
    num_bytes = tokens * (2 * HEAD_DIM * (heads + NUM_HEADS) + 2 * NUM_KV_HEADS * head_bytes(kv))

    def launch() -> Tensor:
        return rope_and_write_kv(qkv, rotations, cache, slots, NUM_HEADS)

    return launch, num_bytes + rotations.nbytes, 0
