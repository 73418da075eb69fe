"""A step for the Triton attention kernels with everything around it poisoned.

What it should give is in fp64.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from headrace_kernels.attention.paged import (
    DecodeScratch,
    DecodeWork,
    GatheredContext,
    GatherScratch,
    PagedAttentionStep,
    PrefillWork,
    ShareScratch,
)
from headrace_kernels.attention.plan import (
    decode_programs,
    plan_decode,
    plan_prefill,
    prefill_tile_tokens,
    query_len_class,
)
from headrace_kernels.attention.quantized_kv import (
    KV_TYPES,
    dequantize,
    is_quantized,
    quantize,
    scales_of,
    tile_bytes,
    tiles_of,
    view_of,
)
from headrace_kernels.triton_runtime import INTERPRETED


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, blocks and numbers of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    # Of the cache: "int8", "fp8", or as dtype.
    kv: str = ""
    has_sinks: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def empty_cache(num_blocks: int, shape: Shape, device: str) -> Tensor:
    """Memory of blocks, whatever it holds."""
    size = (num_blocks, 2, shape.num_kv_heads)
    if not shape.kv:
        return torch.empty(*size, shape.block_size, shape.head_dim, dtype=shape.dtype, device=device)
    memory = torch.empty(*size, tile_bytes(shape.block_size, shape.head_dim) // 4, dtype=torch.float32, device=device)
    return view_of(memory.view(torch.uint8), shape.block_size, shape.head_dim, KV_TYPES[shape.kv])


def stored(heads: Tensor, kv_cache: Tensor) -> Tensor:
    """Heads [..., head_dim] as a cache keeps them, and gives them back."""
    return dequantize(*quantize(heads, kv_cache.dtype)) if is_quantized(kv_cache) else heads


def memory_of(kv_cache: Tensor) -> Tensor:
    """All of a cache: its tiles where it is quantized."""
    return tiles_of(kv_cache) if is_quantized(kv_cache) else kv_cache


def copy_of(kv_cache: Tensor) -> Tensor:
    """Another cache of the same content."""
    if not is_quantized(kv_cache):
        return kv_cache.clone()
    return view_of(tiles_of(kv_cache).clone().view(torch.uint8), *kv_cache.shape[3:], kv_cache.dtype)


def store_blocks(kv_cache: Tensor, blocks: list[int] | int, heads: Tensor) -> None:
    """Fills blocks with heads [.., 2, num_kv_heads, block_size, head_dim].

    A token with NaN spoils its scale.
    """
    if not is_quantized(kv_cache):
        kv_cache[blocks] = heads
        return
    numbers, scales = quantize(heads, kv_cache.dtype)
    kv_cache.view(torch.int8)[blocks] = numbers.view(torch.int8)
    scales_of(kv_cache)[blocks] = scales


def spoil(kv_cache: Tensor, block: int, offset: int) -> None:
    """Makes NaN of one token."""
    (scales_of(kv_cache) if is_quantized(kv_cache) else kv_cache)[block, :, :, offset] = float("nan")


def probabilities(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [kv_heads, group, .., slots] with each head's sink in the denominator."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.double().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _few_empty(splits: np.ndarray) -> np.ndarray:
    """The columns of splits with two that are empty, of the hundreds that a graph's size leaves.

    Each empty one is programs that end at once, and the interpreter takes milliseconds for that.
    """
    used = int(np.flatnonzero(splits[:, 0] >= 0).max()) + 1
    return splits[: used + 2]


class Case:
    """A step of rows with (computed tokens, tokens of this step).

    Row i of the step is row `len(rows) - 1 - i` of the block tables.

    Whatever no token sees is NaN: slots behind a row's end and before its window, blocks of nobody,
    scratch. Unused entries of block tables lie outside of the cache.
    """

    def __init__(
        self,
        shape: Shape,
        rows: list[tuple[int, int]],
        device: str,
        *,
        seed: int = 0,
        max_query_len: int | None = None,
        padding: int = 0,
        gather_bytes: int = 0,
        plan_window: int | None = None,
        spare_blocks: int = 3,
        column_offset: int = 0,
        shares: bool = False,
    ) -> None:
        self.shape, self.rows, self.device = shape, rows, device
        self._column_offset = column_offset
        self._generator = torch.Generator(device).manual_seed(seed)
        counts = np.array([count for _, count in rows] + [0] * padding, np.int32)
        ends = np.array([sum(row) for row in rows] + [0] * padding, np.int32)
        num_tokens = int(counts.sum())
        joint = self._random(num_tokens + padding, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        # A view of a joint projection, as in the model.
        self.query = joint[:, : shape.num_heads]
        # Sinks of very different weights: some outweigh their head's context, some nothing.
        self.sinks = 4 * self._random(shape.num_heads) if shape.has_sinks else None
        self.contexts: list[Tensor] = []
        tables = self._fill_cache(spare_blocks)
        self.step = PagedAttentionStep(
            query_start_loc=self._column(np.concatenate(([0], np.cumsum(counts)))),
            seq_lens=self._column(ends),
            rows=self._column(np.array([*reversed(range(len(rows))), *[0] * padding])),
            block_tables=tables,
            slot_mapping=torch.full((num_tokens + padding,), -1, device=device),
            block_size=shape.block_size,
            decode=None,
            prefill=None,
        )
        self._plan(counts, ends, max_query_len, padding, gather_bytes, plan_window or shape.window, shares)

    def _random(self, *size: int) -> Tensor:
        values = torch.randn(*size, generator=self._generator, device=self.device, dtype=torch.float32)
        return values.to(self.shape.dtype)

    def _column(self, values: np.ndarray) -> Tensor:
        """The values on the device, in a view that begins `column_offset` entries into memory."""
        memory = torch.zeros(self._column_offset + values.size, dtype=torch.int32, device=self.device)
        memory[self._column_offset :] = torch.from_numpy(values.astype(np.int32)).flatten()
        return memory[self._column_offset :].view(values.shape)

    def _fill_cache(self, spare_blocks: int) -> Tensor:
        """Makes the cache and the rows' keys and values.

        Returns the block tables [num_rows, max_blocks].
        """
        shape, size = self.shape, self.shape.block_size
        num_blocks = [-(-(computed + count) // size) for computed, count in self.rows]
        total = sum(num_blocks) + spare_blocks
        # Many spare blocks stay untouched memory: the rows' blocks are the last.
        order = torch.randperm(sum(num_blocks) + min(spare_blocks, 3), generator=self._generator, device=self.device)
        order = (order + total - order.numel()).tolist()
        self.kv_cache = empty_cache(total, shape, self.device)
        poison = torch.full((2, shape.num_kv_heads, size, shape.head_dim), float("nan"), device=self.device)
        store_blocks(self.kv_cache, order, poison.to(shape.dtype).expand(len(order), -1, -1, -1, -1))
        tables = torch.full((len(self.rows), max(num_blocks) + 2), 10**7, dtype=torch.int32)
        for row, (computed, count) in enumerate(self.rows):
            blocks = [order.pop() for _ in range(num_blocks[row])]
            tables[len(self.rows) - 1 - row, : len(blocks)] = torch.tensor(blocks)
            context = self._random(2, shape.num_kv_heads, computed + count, shape.head_dim)
            self.contexts.append(stored(context, self.kv_cache))
            written = context.clone()
            if shape.window is not None:
                written[:, :, : max(computed - shape.window + 1, 0)] = float("nan")
            padded = torch.full((2, shape.num_kv_heads, len(blocks) * size, shape.head_dim), float("nan"))
            padded = padded.to(self.device, shape.dtype)
            padded[:, :, : computed + count] = written
            store_blocks(self.kv_cache, blocks, padded.unflatten(2, (len(blocks), size)).permute(2, 0, 1, 3, 4))
        return tables.to(self.device)

    def _plan(
        self,
        counts: np.ndarray,
        ends: np.ndarray,
        max_query_len: int | None,
        padding: int,
        gather_bytes: int,
        window: int | None,
        shares: bool,
    ) -> None:
        shape, heads = self.shape, (self.shape.num_heads, self.shape.num_kv_heads)
        room = counts.size + padding
        query_len = query_len_class(counts) if max_query_len is None else max_query_len
        programs = decode_programs(shape.kv != "", query_len * heads[0] // heads[1])
        decode = plan_decode(
            counts, ends, heads[1], room, max_query_len=query_len, sliding_window=window, programs=programs
        )
        if (decode.splits >= 0).any():
            scratch = DecodeScratch.allocate(*heads, shape.head_dim, query_len, self.device, programs)
            scratch.partial.fill_(float("nan"))
            scratch.lse.fill_(float("nan"))
            splits = self._column(_few_empty(decode.splits) if INTERPRETED else decode.splits)
            self.step.decode = DecodeWork(splits, decode.max_query_len, scratch)
        scratch_for = (heads[1], shape.head_dim, shape.dtype, self.device, gather_bytes)
        gather_scratch = GatherScratch.allocate(*scratch_for)
        tile_tokens = prefill_tile_tokens(*heads, shape.head_dim, shape.dtype.itemsize)
        needed = sum(-(-count // tile_tokens) for count in counts.tolist() if count > decode.max_query_len)
        prefill = plan_prefill(
            counts,
            ends,
            *heads,
            tile_tokens,
            max_query_len=decode.max_query_len,
            num_tiles_padded=needed + padding,
            gather_capacity=gather_scratch.capacity if gather_scratch else 0,
            sliding_window=window,
        )
        if not needed:
            return
        gathered = None
        if prefill.gather is not None:
            assert gather_scratch is not None
            gather_scratch.context.fill_(float("nan"))
            columns = (self._column(prefill.gather.chunks), self._column(prefill.gather.offsets))
            gathered = GatheredContext(*columns, gather_scratch)
        self.step.prefill = PrefillWork(self._column(prefill.tiles), gathered)
        if shares:
            of_layer = (shape.num_heads, [(heads[1], shape.head_dim)], shape.dtype, self.device, tile_tokens)
            self.step.prefill.shares = self._column(prefill.shares)
            self.step.prefill.scratch = ShareScratch.allocate(*of_layer)
            self.step.prefill.scratch.partial.fill_(float("nan"))
            self.step.prefill.scratch.lse.fill_(float("nan"))

    def oracle(self) -> Tensor:
        """[num_tokens, num_heads, head_dim] fp64, padding left out."""
        outputs, start = [], 0
        for (computed, count), context in zip(self.rows, self.contexts, strict=True):
            key, value = context.double()
            query = self.query[start : start + count].double().unflatten(1, (key.shape[0], -1))
            position = torch.arange(computed, computed + count, device=self.device)[:, None]
            other = torch.arange(computed + count, device=self.device)
            hidden = (other > position) | (position - other >= (self.shape.window or 10**9))
            scores = torch.einsum("thgd,hsd->hgts", query, key) * self.shape.scale
            weights = probabilities(scores.masked_fill(hidden, -math.inf), self.sinks)
            outputs.append(torch.einsum("hgts,hsd->thgd", weights, value).flatten(1, 2))
            start += count
        return torch.cat(outputs)
