"""Paged attention on a CPU, by gathering.

A row's blocks are copied side by side, then PyTorch's fused attention runs over them.

The path for CPUs.

Two steps. `plan_gathers` decides on the host, once per step, which rows go together and which cache
entries they need; `attend` runs the plan in each layer. Rows with one token (decodes) are put
together in buckets of similar context, so that padding stays small and one call serves many rows.
The query heads of a group stand in the place of query positions, so that keys and values are never
repeated. Rows with several tokens (chunks of a prompt) run one by one, in tiles that bound the
mask.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.attention.quantized_kv import dequantized_tiles, is_quantized, tiles_of

_Int64Array = npt.NDArray[np.int64]

# A bucket takes rows down to this share of its longest row's blocks ...
_MIN_FILL = 0.6
# ... and all rows within this many blocks of it: below that, another bucket's calls cost more than
# the padding.
_FREE_PADDING_BLOCKS = 4
# Most values gathered at once (4 MiB in fp32): small enough that they are still in the processor's
# cache when attention reads them. For 32 rows of 20 to 600 tokens a step took 26.5 ms with this
# bound and 32.3 ms without, for 64 rows of up to 1,000 tokens 72 and 91 ms (1 thread, 8 layers).
_MAX_BUCKET_VALUES = 1 << 20
# Largest mask of a chunk's tile, in entries (fp32).
_MAX_MASK_ENTRIES = 1 << 22


@dataclasses.dataclass(slots=True)
class DecodeBucket:
    """Rows with one token each, gathered to the same number of slots."""

    # [num_rows] int64 index of each row's token; None if the bucket is the whole step in order.
    tokens: Tensor | None
    # [num_rows * 2 * num_kv_heads * num_blocks] int64: entries of the cache seen as [.., block_size
    # * head_dim].
    entries: Tensor
    num_rows: int
    # A lone row is cut to the slots it sees and needs no mask: the first and the last + 1.
    cut: tuple[int, int] | None
    # [num_rows, 1, 1, num_slots] fp32, 0 or -inf; None if every row sees every slot.
    mask: Tensor | None
    # int64 entries of the gathered [.., head_dim] that no token was written to; None if there are
    # none.
    unwritten: Tensor | None


@dataclasses.dataclass(slots=True)
class ChunkTile:
    """Some of a chunk's tokens, the end of the slots they see, and their mask.

    A mask of None is plain causal from slot 0.
    """

    first_token: int
    end_token: int
    end_slot: int
    # [tokens, slots] fp32, 0 or -inf.
    mask: Tensor | None


@dataclasses.dataclass(slots=True)
class Chunk:
    """One row of a step that has several tokens to compute."""

    # [2 * num_kv_heads * num_blocks] int64, as in DecodeBucket.
    entries: Tensor
    tiles: list[ChunkTile]


@dataclasses.dataclass(slots=True)
class GatherPlan:
    """What is gathered of the cache for all rows of a step."""

    buckets: list[DecodeBucket]
    chunks: list[Chunk]
    # Where entries are gathered to, for every bucket of every layer in turn: memory that is still
    # in the processor's cache, and no new pages (at 32 rows of 300 tokens a fresh buffer per layer
    # made gathering twice as slow).
    _scratch: Tensor | None = None
    # What was gathered of a quantized cache, dequantized.
    _restored: Tensor | None = None

    def gather(self, kv_cache: Tensor, entries: Tensor) -> Tensor:
        """Copies entries of the cache: [num_entries, block_size * head_dim].

        Entries of a quantized cache become fp32. The result is valid until the next call.
        """
        block_size, head_dim = kv_cache.shape[3:]
        quantized = is_quantized(kv_cache)
        flat = tiles_of(kv_cache).flatten(0, 2) if quantized else kv_cache.view(-1, block_size * head_dim)
        if self._scratch is None:
            lengths = [bucket.entries.numel() for bucket in self.buckets] + [
                chunk.entries.numel() for chunk in self.chunks
            ]
            self._scratch = flat.new_empty(max(lengths), flat.shape[1])
        gathered = torch.index_select(flat, 0, entries, out=self._scratch[: entries.numel()])
        if not quantized:
            return gathered
        if self._restored is None:
            self._restored = torch.empty(self._scratch.shape[0], block_size * head_dim, device=kv_cache.device)
        return dequantized_tiles(gathered, block_size, head_dim, kv_cache.dtype, self._restored[: entries.numel()])


@dataclasses.dataclass(slots=True, frozen=True)
class _Rows:
    """The step's rows on the host, [num_rows] each, and what planning needs besides."""

    tables: npt.NDArray[np.int32]
    first_token: _Int64Array
    query_len: _Int64Array
    seq_len: _Int64Array
    # First slot that any of the row's tokens sees, rounded down to its block.
    first_block: _Int64Array
    num_blocks: _Int64Array
    block_size: int
    num_kv_heads: int
    window: int | None
    has_sinks: bool
    device: torch.device

    def entries(self, rows: _Int64Array, width: int) -> Tensor:
        """Cache entries of the rows' visible blocks.

        Each row is padded to `width` blocks with its own first one.
        """
        column = np.arange(width)
        column = np.where(column < self.num_blocks[rows, None], column, 0) + self.first_block[rows, None]
        blocks = self.tables[rows[:, None], column].astype(np.int64)
        halves = 2 * blocks[:, None, :] + np.arange(2)[:, None]
        entries = self.num_kv_heads * halves[:, :, None, :] + np.arange(self.num_kv_heads)[:, None]
        return self.on_device(entries.reshape(-1))

    def on_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def plan_gathers(
    block_tables: Tensor,
    query_lens: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
    has_sinks: bool = False,
) -> GatherPlan:
    """Groups the rows of a step.

    Args:
        block_tables: [num_rows, max_blocks] int32.
        query_lens: [num_rows] tokens of this step.
        seq_lens: [num_rows] tokens of context, those of this step included.
        block_size: Tokens per block.
        num_kv_heads: Key/value heads of the cache.
        head_dim: Their size.
        sliding_window: Tokens that a token sees, itself included; None: all before it.
        has_sinks: Whether every token sees a sink too, before which no mask is plain causal.
    """
    query_len, seq_len = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    first_seen = (
        np.zeros_like(seq_len) if sliding_window is None else np.maximum(seq_len - query_len - sliding_window + 1, 0)
    )
    first_block = first_seen // block_size
    rows = _Rows(
        tables=block_tables.cpu().numpy(),
        first_token=np.cumsum(query_len) - query_len,
        query_len=query_len,
        seq_len=seq_len,
        first_block=first_block,
        num_blocks=-(-seq_len // block_size) - first_block,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        window=sliding_window,
        has_sinks=has_sinks,
        device=block_tables.device,
    )
    decodes = np.flatnonzero(query_len == 1)
    max_blocks = _MAX_BUCKET_VALUES // (2 * num_kv_heads * block_size * head_dim)
    return GatherPlan(
        buckets=[_bucket(rows, group) for group in _group_by_length(decodes, rows.num_blocks, max_blocks)],
        chunks=[_chunk(rows, int(row)) for row in np.flatnonzero(query_len > 1)],
    )


def _group_by_length(decodes: _Int64Array, num_blocks: _Int64Array, max_blocks: int) -> list[_Int64Array]:
    """Groups rows of similar length, each of at most `max_blocks` with padding, or one row.

    Within a group rows keep the step's order.
    """
    if decodes.size <= 1:
        return [decodes] if decodes.size else []
    longest_first = decodes[np.argsort(-num_blocks[decodes], kind="stable")]
    lengths = num_blocks[longest_first]
    groups, start = [], 0
    while start < longest_first.size:
        shortest = min(_MIN_FILL * lengths[start], lengths[start] - _FREE_PADDING_BLOCKS)
        end = int(np.searchsorted(-lengths, -shortest, side="right"))
        end = min(end, start + max(int(max_blocks // lengths[start]), 1))
        groups.append(np.sort(longest_first[start:end]))
        start = end
    return groups


def _bucket(rows: _Rows, group: _Int64Array) -> DecodeBucket:
    width = int(rows.num_blocks[group].max())
    is_whole_step = group.size == rows.query_len.size
    tokens = None if is_whole_step else rows.on_device(rows.first_token[group])
    entries = rows.entries(group, width)
    if group.size == 1:
        row = int(group[0])
        base = int(rows.first_block[row]) * rows.block_size
        seq_len = int(rows.seq_len[row])
        first = 0 if rows.window is None else max(seq_len - rows.window, 0)
        return DecodeBucket(tokens, entries, 1, (first - base, seq_len - base), None, None)
    mask, unwritten = _bucket_mask(rows, group, width)
    return DecodeBucket(tokens, entries, group.size, None, mask, unwritten)


def _bucket_mask(rows: _Rows, group: _Int64Array, width: int) -> tuple[Tensor | None, Tensor | None]:
    slot = np.arange(width * rows.block_size)
    base = (rows.first_block[group] * rows.block_size)[:, None]
    position = base + slot
    seq_len = rows.seq_len[group, None]
    hidden = position >= seq_len
    # What a slot holds: padding repeats the row's first block. Past the row's end, nobody has
    # written it since it changed hands.
    is_padding = slot >= (rows.num_blocks[group] * rows.block_size)[:, None]
    unwritten_slots = np.where(is_padding, base + slot % rows.block_size, position) >= seq_len
    if rows.window is not None:
        hidden |= position < seq_len - rows.window
    if not hidden.any():
        return None, None
    mask = np.where(hidden, np.float32("-inf"), np.float32(0.0))
    row, offset = np.nonzero(unwritten_slots)
    heads = np.arange(2 * rows.num_kv_heads)
    unwritten = ((row[:, None] * heads.size + heads) * slot.size + offset[:, None]).reshape(-1)
    return rows.on_device(mask[:, None, None, :]), rows.on_device(unwritten) if unwritten.size else None


def _chunk(rows: _Rows, row: int) -> Chunk:
    entries = rows.entries(np.array([row]), int(rows.num_blocks[row]))
    base = int(rows.first_block[row]) * rows.block_size
    count, seq_len, token = int(rows.query_len[row]), int(rows.seq_len[row]), int(rows.first_token[row])
    if count == seq_len and not rows.has_sinks and (rows.window is None or seq_len <= rows.window):
        return Chunk(entries, [ChunkTile(token, token + count, seq_len, None)])
    tile = max(_MAX_MASK_ENTRIES // (seq_len - base), 1)
    tiles = [_tile(rows, row, start, min(start + tile, count), base) for start in range(0, count, tile)]
    return Chunk(entries, tiles)


def _tile(rows: _Rows, row: int, start: int, end: int, base: int) -> ChunkTile:
    computed = int(rows.seq_len[row] - rows.query_len[row])
    position = np.arange(computed + start, computed + end)[:, None]
    other = np.arange(base, computed + end)
    hidden = other > position
    if rows.window is not None:
        hidden |= other <= position - rows.window
    mask = np.where(hidden, np.float32("-inf"), np.float32(0.0))
    token = int(rows.first_token[row])
    return ChunkTile(token + start, token + end, computed + end - base, rows.on_device(mask))


def attend(query: Tensor, kv_cache: Tensor, plan: GatherPlan, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Runs a plan. Arguments and result as `attention.paged.paged_attention`."""
    if len(plan.buckets) == 1 and plan.buckets[0].tokens is None:
        return _attend_bucket(query, kv_cache, plan, plan.buckets[0], scale, sinks)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for bucket in plan.buckets:
        assert bucket.tokens is not None
        attended = _attend_bucket(query.index_select(0, bucket.tokens), kv_cache, plan, bucket, scale, sinks)
        output.index_copy_(0, bucket.tokens, attended)
    for chunk in plan.chunks:
        _attend_chunk(query, kv_cache, plan, chunk, scale, sinks, output)
    return output


def _softmax_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """PyTorch's fused attention, with a sink for each head and query.

    Args:
        query: [.., num_queries, head_dim].
        key: [.., num_slots, head_dim].
        value: [.., num_slots, head_dim].
        mask: [.., num_slots], 0 or -inf; None: every query sees every slot.
        scale: Multiplies the scores.
        sinks: Broadcast to [.., num_queries]; None: there are none.

    Returns:
        [.., num_queries, head_dim].
    """
    if sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    # One more dimension, 0 in all keys but the last, which has nothing else: its score is the sink,
    # so that one mask serves all heads. Its value is 0.
    key, value = functional.pad(key, (0, 1, 0, 1)), functional.pad(value, (0, 1, 0, 1))
    key[..., -1, -1] = 1.0
    column = (sinks.float() / scale).to(query.dtype)[..., None].expand(*query.shape[:-1], 1)
    mask = None if mask is None else functional.pad(mask, (0, 1))
    query = torch.cat((query, column), dim=-1)
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)[..., :-1]


def _attend_bucket(
    query: Tensor, kv_cache: Tensor, plan: GatherPlan, bucket: DecodeBucket, scale: float, sinks: Tensor | None
) -> Tensor:
    """[num_rows, num_heads, head_dim] for a bucket's queries of the same shape."""
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    gathered = plan.gather(kv_cache, bucket.entries).to(query.dtype)
    if bucket.unwritten is not None:
        # The mask gives these slots no weight, but 0 x NaN is NaN: what an earlier owner left
        # behind must go.
        gathered.view(-1, head_dim).index_fill_(0, bucket.unwritten, 0.0)
    key, value = gathered.view(bucket.num_rows, 2, num_kv_heads, -1, head_dim).unbind(1)
    if bucket.cut is not None:
        key, value = key[:, :, slice(*bucket.cut)], value[:, :, slice(*bucket.cut)]
    grouped = query.view(bucket.num_rows, num_kv_heads, -1, head_dim)
    mask = None if bucket.mask is None else bucket.mask.to(query.dtype)
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    return _softmax_of(grouped, key, value, mask, scale, sinks).reshape(query.shape)


def _attend_chunk(
    query: Tensor,
    kv_cache: Tensor,
    plan: GatherPlan,
    chunk: Chunk,
    scale: float,
    sinks: Tensor | None,
    output: Tensor,
) -> None:
    """Fills the chunk's tokens of the output [num_tokens, num_heads, head_dim]."""
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    group = query.shape[1] // num_kv_heads
    gathered = plan.gather(kv_cache, chunk.entries).to(query.dtype).view(2, num_kv_heads, 1, -1, head_dim)
    key, value = gathered.expand(-1, -1, group, -1, -1)
    for tile in chunk.tiles:
        tokens = slice(tile.first_token, tile.end_token)
        # [num_kv_heads, group, tokens, head_dim]
        heads = query[tokens].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        seen = key[:, :, : tile.end_slot], value[:, :, : tile.end_slot]
        if tile.mask is None:
            attended = functional.scaled_dot_product_attention(heads, *seen, is_causal=True, scale=scale)
        else:
            of_heads = None if sinks is None else sinks.view(num_kv_heads, group, 1)
            attended = _softmax_of(heads, *seen, tile.mask.to(query.dtype), scale, of_heads)
        output[tokens].view(-1, num_kv_heads, group, head_dim).copy_(attended.permute(2, 0, 1, 3))
