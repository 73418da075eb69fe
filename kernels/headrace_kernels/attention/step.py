"""A step as the Triton attention kernels read it.

Tensors lie on the device, at addresses that a captured graph may fix.

Owns the records and the scratch memory that they point to. What the numbers mean and how they are
chosen is `attention.plan`'s; the kernels are `attention.decode`, `attention.prefill` and
`attention.gathered`. `attention.paged.paged_attention` takes a `PagedAttentionStep` and calls them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace_kernels import card
from headrace_kernels.attention.plan import (
    GATHER_MULTIPLE,
    MOST_PARTS,
    TARGET_PROGRAMS,
    decode_sizes,
    prefill_tile_rows,
)
from headrace_kernels.attention.shares import most_places


@dataclasses.dataclass(slots=True)
class DecodeScratch:
    """Partial results of rows whose context several programs share.

    One layer's are used up before the next layer's begin, so all layers and graphs share one, on
    one stream.
    """

    # float32 [num_partials, num_kv_heads * max_query_len * (num_heads / num_kv_heads), head_dim]; a
    # work of fewer query tokens uses less of it.
    partial: Tensor
    # float32, the first two of these, to base 2.
    lse: Tensor
    # int32 [num_partials, num_kv_heads * MOST_PARTS]: at a row's first place, how many of its
    # programs are done, by parts of its query tokens. 0 between launches, see `attention.decode`.
    done: Tensor

    @classmethod
    def allocate(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int,
        device: torch.device | str,
        programs: int = TARGET_PROGRAMS,
        most_kv_heads: int = 0,
    ) -> Self:
        """Scratch for steps of any number of rows.

        Rows have up to `max_query_len` (1, 2, 4 or 8) query tokens each; `num_kv_heads` and
        `programs` are as for `attention.plan.plan_decode`. Layers may have as many key/value heads
        as `most_kv_heads`; 0: all have `num_kv_heads`.
        """
        num_partials = decode_sizes(1, num_kv_heads, programs).num_partials
        rows = (num_partials, max_query_len * num_heads)
        partial = torch.empty(*rows, head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device)
        counters = (num_partials, max(num_kv_heads, most_kv_heads) * MOST_PARTS)
        return cls(partial, lse, torch.zeros(counters, dtype=torch.int32, device=device))


@dataclasses.dataclass(slots=True)
class DecodeWork:
    """Entries with 1 to 8 query tokens.

    Columns as `attention.plan.DecodeColumns`, on the device.
    """

    # int32 [num_splits, 4]
    splits: Tensor
    # 1, 2, 4 or 8.
    max_query_len: int
    # Made for at least `max_query_len`.
    scratch: DecodeScratch


@dataclasses.dataclass(slots=True)
class GatherScratch:
    """Memory for contexts in one piece, keys and values apart, and how the copy engine reads them.

    One for all layers.
    """

    # [2, num_kv_heads, capacity, head_dim] in the type of queries.
    context: Tensor
    # Descriptors of [num_kv_heads * capacity, head_dim], read in tiles of `tile_keys`.
    keys: TensorDescriptor
    values: TensorDescriptor
    tile_keys: int

    @classmethod
    def allocate(
        cls, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, max_bytes: int
    ) -> Self | None:
        """Memory for as many tokens as fit into `max_bytes`; None if there is none.

        It is None too if the GPU (before sm_90), the dtype or the size of heads rules the path out.
        """
        device = torch.device(device)
        capacity = gather_capacity(num_kv_heads, head_dim, dtype, max_bytes)
        if not capacity or not card.has_copy_engine(device):
            return None
        context = torch.empty(2, num_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        tile_keys = 128 if head_dim <= 128 else 64
        keys, values = (
            TensorDescriptor.from_tensor(half.view(-1, head_dim), [tile_keys, head_dim]) for half in context
        )
        return cls(context, keys, values, tile_keys)

    @property
    def capacity(self) -> int:
        """Tokens that the scratch holds, which `attention.plan.plan_prefill` asks for."""
        return self.context.shape[2]


def gather_capacity(num_kv_heads: int, head_dim: int, dtype: torch.dtype, max_bytes: int) -> int:
    """Tokens whose keys and values fit into `max_bytes`.

    It is 0 if heads of this size or type are not gathered.
    """
    if dtype.itemsize != 2 or head_dim not in (64, 128, 256):
        return 0
    per_token = 2 * num_kv_heads * head_dim * dtype.itemsize
    return max_bytes // per_token // GATHER_MULTIPLE * GATHER_MULTIPLE


@dataclasses.dataclass(slots=True)
class GatheredContext:
    """Contexts that are copied side by side before attention.

    Columns as `attention.plan.GatherColumns`, on the device.
    """

    # int32 [num_chunks, 2]
    chunks: Tensor
    # int32 [num_entries]
    offsets: Tensor
    scratch: GatherScratch


@dataclasses.dataclass(slots=True)
class ShareScratch:
    """Results of programs that share a tile's keys, one for all layers as `DecodeScratch` is."""

    # float32, of each place and key/value head [rows of a tile, head_dim]; and [rows of a tile].
    partial: Tensor
    lse: Tensor
    # int32, of each place and key/value head: at a tile's first place, how many of its programs are
    # done. 0 between launches.
    done: Tensor

    @classmethod
    def allocate(
        cls,
        num_heads: int,
        heads: Iterable[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device | str,
        tile_tokens: int,
    ) -> Self:
        """Scratch for steps of any tiles of `tile_tokens` query tokens.

        `heads` are (num_kv_heads, head_dim) of every kind of layer, which all have `num_heads`
        query heads; results have the sizes of `dtype`'s tiles.
        """
        kinds = list(heads)
        places = most_places(min(num_kv_heads for num_kv_heads, _ in kinds))
        most_rows = most_numbers = most_heads = 0
        for num_kv_heads, head_dim in kinds:
            rows = prefill_tile_rows(head_dim, dtype.itemsize)
            tiles = num_kv_heads * -(-tile_tokens // (rows // (num_heads // num_kv_heads)))
            most_heads, most_rows = max(most_heads, tiles), max(most_rows, tiles * rows)
            most_numbers = max(most_numbers, tiles * rows * head_dim)
        partial = torch.empty(places * most_numbers, dtype=torch.float32, device=device)
        lse = torch.empty(places * most_rows, dtype=torch.float32, device=device)
        return cls(partial, lse, torch.zeros(places * most_heads, dtype=torch.int32, device=device))


@dataclasses.dataclass(slots=True)
class PrefillWork:
    """Entries with more query tokens. Columns as `attention.plan.PrefillColumns`, on the device."""

    # int32 [num_tiles, 2]
    tiles: Tensor
    # None: keys and values are read from the cache, as in graphs.
    gathered: GatheredContext | None
    # Query tokens of a tile; a layer that takes fewer at a time cuts each into several. None: what
    # every layer takes.
    tile_tokens: int | None = None
    # int32 [num_tiles, 3], and where results of shares go. None: each tile is one program's.
    shares: Tensor | None = None
    scratch: ShareScratch | None = None


@dataclasses.dataclass(slots=True)
class PagedAttentionStep:
    """Which tokens of a step belong to which entry, and where each entry's context lies."""

    # [num_entries + 1] int32: entry i has the tokens query_start_loc[i] up to query_start_loc[i +
    # 1].
    query_start_loc: Tensor
    # [num_entries] int32: tokens of context, those of this step included; 0: padding.
    seq_lens: Tensor
    # [num_entries] int32: the entry's row in block_tables.
    rows: Tensor
    # [num_rows, max_blocks] int32; entries beyond a row's context are not read.
    block_tables: Tensor
    # [num_tokens] int64: where each token's key and value go; -1: nowhere.
    slot_mapping: Tensor
    # Tokens per block.
    block_size: int
    # None: no entry has so few query tokens.
    decode: DecodeWork | None
    # None: no entry has more.
    prefill: PrefillWork | None
    # [num_entries] int32: drafts at the end of each entry, for layers that keep states; None:
    # nobody drafts.
    num_drafts: Tensor | None = None
