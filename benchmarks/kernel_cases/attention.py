"""Cases of paged attention on the heads of an 8B Llama.

Decodes stand beside copy bandwidth, chunks of prompts beside the matrix rate and PyTorch's
attention over contiguous keys.

Owns the shapes and the data: blocks in random order, contexts of any length. `python -m
benchmarks.sweep_attention` times other tiles on the same data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import attention as backends
from torch.nn import functional

from headrace_kernels.attention.paged import (
    DecodeScratch,
    DecodeWork,
    GatheredContext,
    GatherScratch,
    PagedAttentionStep,
    PrefillWork,
    RawHeads,
    ShareScratch,
    paged_attention,
    rotate_write_attend,
)
from headrace_kernels.attention.plan import (
    decode_programs,
    plan_decode,
    plan_prefill,
    prefill_tile_tokens,
    query_len_class,
)
from headrace_kernels.attention.prefill_sm90.launch import takes_blocks_sm90
from headrace_kernels.attention.quantized_kv import KV_TYPES, SCALE_BYTES, quantize, scales_of, tile_bytes, view_of

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 32
SCALE = HEAD_DIM**-0.5
# Contexts of 131,072 tokens.
_GATHER_BYTES = 1 << 29
Case = tuple[Callable[[], object], int, int]


@dataclasses.dataclass(slots=True)
class Layer:
    """A step for one layer."""

    query: Tensor
    kv_cache: Tensor
    step: PagedAttentionStep


def layer(rows: Sequence[tuple[int, int]], gathers: bool = False, window: int | None = None, kv: str = "") -> Layer:
    """Rows of (computed tokens, tokens of this step), planned as a captured step is.

    `gathers`: chunks' contexts, where the card can. `kv`: "int8" or "fp8" of a quantized cache.
    """
    counts = np.array([count for _, count in rows], np.int32)
    ends = np.array([sum(row) for row in rows], np.int32)
    num_blocks = -(-ends // BLOCK_SIZE)
    generator = torch.Generator("cuda").manual_seed(0)
    randn = functools.partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros(len(rows), int(num_blocks.max()), dtype=torch.int32)
    order = torch.split(torch.randperm(int(num_blocks.sum())), num_blocks.tolist())
    for table, blocks in zip(tables, order, strict=True):
        table[: blocks.numel()] = blocks
    kv_cache = randn(int(num_blocks.sum()), 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    kv_cache = _quantized(kv_cache, kv) if kv else kv_cache
    step = PagedAttentionStep(
        query_start_loc=_column(np.concatenate(([0], np.cumsum(counts)))),
        seq_lens=_column(ends),
        rows=_column(np.arange(len(rows))),
        block_tables=tables.cuda(),
        slot_mapping=torch.full((int(counts.sum()),), -1, device="cuda"),
        block_size=BLOCK_SIZE,
        decode=_decode_work(counts, ends, window, kv),
        prefill=_prefill_work(counts, ends, gathers, window, kv_cache),
    )
    return Layer(randn(int(counts.sum()), NUM_HEADS, HEAD_DIM), kv_cache, step)


def _quantized(kv_cache: Tensor, kv: str) -> Tensor:
    """Returns the keys and values of a cache in a quantized one."""
    memory = torch.empty(*kv_cache.shape[:3], tile_bytes(BLOCK_SIZE, HEAD_DIM), dtype=torch.uint8, device="cuda")
    cache = view_of(memory, BLOCK_SIZE, HEAD_DIM, KV_TYPES[kv])
    numbers, scales = quantize(kv_cache, KV_TYPES[kv])
    cache.view(torch.int8).copy_(numbers.view(torch.int8))
    scales_of(cache).copy_(scales)
    return cache


def head_bytes(kv: str) -> int:
    """Bytes of one token's key, or value, of one head."""
    return HEAD_DIM + SCALE_BYTES if kv else 2 * HEAD_DIM


def _column(values: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).cuda()


def _decode_work(
    counts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32], window: int | None, kv: str
) -> DecodeWork | None:
    programs = decode_programs(kv != "", query_len_class(counts) * NUM_HEADS // NUM_KV_HEADS)
    columns = plan_decode(counts, ends, NUM_KV_HEADS, counts.size, sliding_window=window, programs=programs)
    if not (columns.splits >= 0).any():
        return None
    scratch = DecodeScratch.allocate(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, columns.max_query_len, "cuda", programs)
    return DecodeWork(_column(columns.splits), columns.max_query_len, scratch)


def _prefill_work(
    counts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32], gathers: bool, window: int | None, kv_cache: Tensor
) -> PrefillWork | None:
    scratch = None
    tile_tokens = prefill_tile_tokens(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    if gathers:
        scratch = GatherScratch.allocate(NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda", _GATHER_BYTES)
    columns = plan_prefill(
        counts,
        ends,
        NUM_HEADS,
        NUM_KV_HEADS,
        tile_tokens,
        max_query_len=query_len_class(counts),
        num_tiles_padded=None if gathers else int(counts.sum()),
        gather_capacity=scratch.capacity if scratch else 0,
        sliding_window=window,
        persistent=takes_blocks_sm90(NUM_HEADS, torch.bfloat16, kv_cache),
    )
    if not (columns.tiles >= 0).any():
        return None
    gathered = None
    if columns.gather is not None and scratch is not None:
        gathered = GatheredContext(_column(columns.gather.chunks), _column(columns.gather.offsets), scratch)
    if gathered is not None:
        return PrefillWork(_column(columns.tiles), gathered)
    shape = (NUM_HEADS, [(NUM_KV_HEADS, HEAD_DIM)], torch.bfloat16, "cuda", tile_tokens)
    shares = ShareScratch.allocate(*shape)
    return PrefillWork(_column(columns.tiles), None, None, _column(columns.shares), shares)


def seen(rows: Sequence[tuple[int, int]], window: int | None = None) -> tuple[int, int]:
    """Keys that any token of a row sees, and pairs of a token and such a key, summed over rows."""
    keys = pairs = 0
    for computed, count in rows:
        ends = np.arange(computed + 1, computed + count + 1, dtype=np.int64)
        pairs += int(np.minimum(ends, window or ends[-1]).sum())
        keys += int(ends[-1]) if window is None else min(int(ends[-1]), window + count - 1)
    return keys, pairs


def case(rows: Sequence[tuple[int, int]], gathers: bool = False, window: int | None = None, kv: str = "") -> Case:
    """Attention of one layer for any rows of (computed tokens, tokens of this step).

    Returns its launch, bytes of the cache, queries and results, and operations.
    """
    data = layer(rows, gathers, window, kv)
    keys, pairs = seen(rows, window)
    num_bytes = 2 * (keys * NUM_KV_HEADS * head_bytes(kv) + 2 * data.query.numel())

    def launch() -> Tensor:
        return paged_attention(data.query, data.kv_cache, data.step, SCALE, window)

    return launch, num_bytes, 4 * pairs * NUM_HEADS * HEAD_DIM


def decode_case(batch: int, context: int, query_len: int = 1, window: int | None = None, kv: str = "") -> Case:
    """`batch` rows with `query_len` tokens each and `context` tokens in all."""
    return case([(context - query_len, query_len)] * batch, window=window, kv=kv)


def prefill_case(
    batch: int, chunk: int, prefix: int = 0, gathers: bool = True, window: int | None = None, kv: str = ""
) -> Case:
    """`batch` chunks of `chunk` tokens after `prefix` tokens each."""
    return case([(prefix, chunk)] * batch, gathers, window, kv)


def decode() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The sizes of the targets first."""
    for batch, context in [(256, 640), (32, 8192), (1, 131_072), (8, 32_768), (1, 1024), (1, 8192), (64, 2048)]:
        yield f"{batch}x{context}", functools.partial(decode_case, batch, context)
    yield "32x8192 window 4096", functools.partial(decode_case, 32, 8192, window=4096)
    for query_len in (2, 4, 8):
        yield f"32x8192 drafts {query_len}", functools.partial(decode_case, 32, 8192, query_len)
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 128).astype(int) + 1
    yield "128 rows, log-normal", functools.partial(case, [(length, 1) for length in lengths.tolist()])


def raw_decode_case(batch: int, context: int, kv: str = "") -> Case:
    """`batch` decodes with all that lies between a layer's projections.

    That is rotation, cache write and attention.

    Bytes as `decode_case` counts them.
    """
    data = layer([(context - 1, 1)] * batch, kv=kv)
    table, position = data.step.block_tables, context - 1
    slots = table[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    data.step.slot_mapping = slots.contiguous()
    size = (batch, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    qkv = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(batch, HEAD_DIM // 2, device="cuda")
    raw = RawHeads(qkv, torch.stack((angles.cos(), -angles.sin(), angles.sin()), dim=1), NUM_HEADS)
    num_bytes = 2 * (batch * context * NUM_KV_HEADS * head_bytes(kv) + 2 * data.query.numel())

    def launch() -> Tensor:
        return rotate_write_attend(raw, data.kv_cache, data.step, SCALE)

    return launch, num_bytes, 4 * batch * context * NUM_HEADS * HEAD_DIM


def decode_raw() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The sizes of the targets, as a decode step's layer has them."""
    for batch, context in [(256, 640), (32, 8192), (1, 131_072), (1, 640)]:
        yield f"{batch}x{context}", functools.partial(raw_decode_case, batch, context)


def prefill() -> Iterator[tuple[str, Callable[[], Case]]]:
    """8k causal, both ways; chunks after long prefixes; small ones as in mixed steps."""
    yield "8192 gathered", functools.partial(prefill_case, 1, 8192)
    yield "8192 paged", functools.partial(prefill_case, 1, 8192, gathers=False)
    yield "2048 after 32768 gathered", functools.partial(prefill_case, 1, 2048, 32_768)
    yield "2048 after 32768 paged", functools.partial(prefill_case, 1, 2048, 32_768, gathers=False)
    yield "512 after 8192 gathered", functools.partial(prefill_case, 1, 512, 8192)
    yield "512 after 8192 paged", functools.partial(prefill_case, 1, 512, 8192, gathers=False)
    yield "4x2048 gathered", functools.partial(prefill_case, 4, 2048)
    for chunk in (64, 128, 256):
        yield f"{chunk} after 100000 paged", functools.partial(prefill_case, 1, chunk, 100_000, gathers=False)
    yield "512 after 100000 gathered", functools.partial(prefill_case, 1, 512, 100_000)
    yield "8x1000 paged", functools.partial(prefill_case, 8, 1000, gathers=False)
    yield "8192 window 4096 gathered", functools.partial(prefill_case, 1, 8192, window=4096)
    yield "128 after 4096 paged", functools.partial(prefill_case, 1, 128, 4096, gathers=False)
    mixed = [*[(1000, 1)] * 64, (512, 256)]
    yield "64 decodes and a chunk of 256", functools.partial(case, mixed)


def prefill_torch() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The rivals at 8k causal.

    They read keys and values that lie in one piece and are repeated for the query heads.
    """
    for name, backend in (
        ("flash", backends.SDPBackend.FLASH_ATTENTION),
        ("cudnn", backends.SDPBackend.CUDNN_ATTENTION),
    ):
        yield f"8192 {name}", functools.partial(_rival, 8192, backend)


def _rival(length: int, backend: backends.SDPBackend) -> Case:
    generator = torch.Generator("cuda").manual_seed(0)
    size = (1, NUM_HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    keys, pairs = seen([(0, length)])

    def launch() -> Tensor:
        with backends.sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    num_bytes = 2 * 2 * (keys * NUM_KV_HEADS * HEAD_DIM + query.numel())
    return launch, num_bytes, 4 * pairs * NUM_HEADS * HEAD_DIM
