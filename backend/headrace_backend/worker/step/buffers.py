"""The memory on the card that every step uses in turn.

Its addresses never change, so that graphs can hold them.

Owns what a GPU keeps of each row between steps (`DeviceRows`: its block table and its last sampled
token), the piece of columns and its upload, and what kernels make of it: token ids, positions,
slots, attention's scratch, the hidden states that are sampled. Does not own the cache or the model.

The host sends differences of block tables only: blocks that a row got since the step before. One
row more than the batch has is scratch: padding reads and writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from headrace_backend.layers.step_metadata import StepMetadata, StepPieces, grouped
from headrace_backend.pp_rules import WHOLE, Stage
from headrace_backend.step.plan import ForwardPlan, SamplePlan, StepPlan
from headrace_backend.worker.device_copies import copy_to_device, staging_memory
from headrace_backend.worker.plan_columns import table_places
from headrace_backend.worker.speculation.draws import Draws
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_backend.worker.step.columns import (
    AttentionColumns,
    StepColumns,
    columns_size,
    fill_column,
    fill_columns,
    fill_padding,
    fill_with_tokens,
    split_columns,
)
from headrace_backend.worker.step.shape import AttentionSizes, StepShape
from headrace_kernels.attention.plan import GatherColumns
from headrace_kernels.attention.step import (
    DecodeScratch,
    DecodeWork,
    GatheredContext,
    GatherScratch,
    PagedAttentionStep,
    PrefillWork,
    ShareScratch,
)
from headrace_kernels.speculation.draft_inputs import PlannedEntries, lower_bounds, resolve_tokens
from headrace_kernels.step_inputs import build_step_inputs, scatter_int32

# Tables and slots of each cache group begin at multiples of 16 bytes, as kernels know them.
_ALIGNMENT = 4


class DeviceRows:
    """What a GPU keeps of each row.

    Block tables int32 [num_groups, num_rows + 1 or a few more, max_blocks], one for each cache
    group, and last tokens int32 [num_rows + 1].
    """

    def __init__(
        self, num_rows: int, max_blocks: int, num_blocks: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self._num_blocks = num_blocks
        self._device = device
        self.scratch_row = num_rows
        shape = (num_groups, _aligned(num_rows + 1), max_blocks)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        # Each group's, [num_rows + 1 or a few more, max_blocks].
        self.group_tables = self.block_tables.unbind()
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    def update_tables(self, plan: ForwardPlan) -> None:
        """Applies the plan's block table updates."""
        if plan.table_rows.size:
            places = table_places(plan, self.block_tables.shape, self.scratch_row, self._num_blocks)
            places_there, blocks = (copy_to_device(column, self._device) for column in (places, plan.table_blocks))
            scatter_int32(self.block_tables.view(-1), places_there, blocks)

    @contextlib.contextmanager
    def own_blocks(self) -> Iterator[None]:
        """Gives every row a block of its own while entered, as far as there are blocks.

        For measurements, before any row is taken.
        """
        blocks = torch.arange(self.block_tables.shape[1], device=self._device) % self._num_blocks
        self.block_tables.copy_(blocks[:, None])
        try:
            yield
        finally:
            self.block_tables.zero_()


# Of each part of a step; nothing: no part gathers.
Gathers: TypeAlias = tuple[GatherColumns | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step, and the largest row."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Tokens that a token sees in every layer; None: all before it.
    attention_window: int | None = None
    # Most tokens that a step draws for a row.
    tokens_per_row: int = 1
    # Cache groups, in each of which a row has a block table.
    num_groups: int = 1

    @property
    def max_num_draws(self) -> int:
        """Most tokens that a step draws."""
        return self.max_num_seqs * self.tokens_per_row

    @property
    def max_num_wanted(self) -> int:
        """Most hidden states that a step samples from and checks: of each draw, of each window."""
        return self.max_num_draws + self.max_num_batched_tokens // (
            self.attention_window or self.max_num_batched_tokens + 1
        )


@dataclasses.dataclass(slots=True)
class StepInputs:
    """What the model computes in one step."""

    # int64 [num_tokens]
    token_ids: torch.Tensor
    # int64 [num_tokens]
    positions: torch.Tensor
    attention: StepMetadata | StepPieces


class StepBuffers:
    """One step's tensors, for any shape up to the largest."""

    def __init__(
        self,
        limits: StepLimits,
        sizes: AttentionSizes,
        kv_caches: Sequence[torch.Tensor],
        dtype: torch.dtype,
        hidden_size: int,
        logit_sizes: tuple[int, int],
        gather_bytes: int,
        stage: Stage = WHOLE,
    ) -> None:
        """Allocates for the largest step.

        Args:
            limits: Limits of a step.
            sizes: Sizes of the layers' attention.
            kv_caches: A cache of every size that layers have, [num_blocks, 2, num_kv_heads,
                block_size, head_dim]; their device is everybody's.
            dtype: Type of queries and hidden states.
            hidden_size: The model's hidden size.
            logit_sizes: Tokens of this rank's part of the vocabulary, and of all of it.
            gather_bytes: Most memory for contexts that are gathered before attention.
            stage: Which of several pipeline stages takes the steps.
        """
        self._device = device = kv_caches[0].device
        self._sizes = sizes
        self._block_size = kv_caches[0].shape[3]
        num_kv_heads, head_dim = (max(cache.shape[dim] for cache in kv_caches) for dim in (2, 4))
        largest = StepShape.mixed(limits.max_num_batched_tokens, limits.max_num_seqs, sizes)
        # Wherever a step is cut, a piece has no more entries and tiles than it all.
        largest_cut = dataclasses.replace(largest, num_samples=limits.max_num_wanted, pieces=(largest, largest))
        self._piece = torch.zeros(columns_size(largest_cut), dtype=torch.int32, device=device)
        self._token_ids, self._positions = torch.zeros(2, largest.num_tokens, dtype=torch.int64, device=device)
        num_slots = _aligned(largest.num_tokens)
        self._slots = torch.zeros(limits.num_groups, num_slots, dtype=torch.int64, device=device)
        self._group_slots = self._slots.unbind()
        self._decode_scratch = DecodeScratch.allocate(
            sizes.num_heads, sizes.num_kv_heads, head_dim, sizes.drafted_query_len, device, sizes.programs, num_kv_heads
        )
        heads = [(cache.shape[2], cache.shape[4]) for cache in kv_caches]
        self._share_scratch = ShareScratch.allocate(sizes.num_heads, heads, dtype, device, sizes.tile_tokens)
        # Contexts are gathered for layers that are all alike.
        most = gather_bytes if len({cache.shape[2:] for cache in kv_caches}) == 1 else 0
        self._gather_scratch = GatherScratch.allocate(num_kv_heads, head_dim, dtype, device, most)
        # [num_samples, hidden_size] what the forward pass leaves for the draw and for checks.
        self.hidden = torch.zeros(limits.max_num_wanted, hidden_size, dtype=dtype, device=device)
        part_size, vocab_size = logit_sizes
        self._longest, self._vocab_size = limits.max_model_len, vocab_size
        # fp32 [num_samples, part_size] the logits that this rank computes, and [num_samples,
        # vocab_size] those that are drawn from: of one rank the same.
        self.logits_part = torch.zeros(limits.max_num_draws, part_size, dtype=torch.float32, device=device)
        self.logits = self.logits_part
        if part_size < vocab_size:
            # Where rows are dealt out, twice the longest share lies here: one row more if any.
            self.logits = torch.zeros(limits.max_num_draws + 1, vocab_size, dtype=torch.float32, device=device)
        self._own_samples = torch.zeros(2 * limits.max_num_draws, dtype=torch.int32, device=device)

        # [num_tokens, hidden_size] the residual stream that comes from the stage before, and the
        # one that goes to the next; no tokens where there is no such stage.
        self.entering, self.leaving = (
            torch.zeros(largest.num_tokens if exists else 0, hidden_size, dtype=dtype, device=device)
            for exists in (not stage.is_first, not stage.is_last)
        )

    @property
    def gather_capacity(self) -> int:
        """Tokens of context that a step outside of graphs can gather."""
        return 0 if self._gather_scratch is None else self._gather_scratch.capacity

    def upload(
        self, plan: StepPlan, shape: StepShape, scratch_row: int, is_captured: bool, draws: Draws | None = None
    ) -> Gathers:
        """Fills the columns of a shape that holds the plan, and sends them after earlier work.

        In workers that draft the plan has a sample for each draw, and `draws` of them.

        Returns:
            Contexts that are to be gathered by each part, for `inputs`.
        """
        host = self._host_piece(shape)
        capacity = 0 if is_captured else self.gather_capacity
        columns = split_columns(host.numpy(), shape)
        gathers = fill_columns(columns, plan, shape, self._sizes, scratch_row, capacity, draws)
        self._send(host)
        return gathers

    def own_samples(self, num_samples: int) -> torch.Tensor:
        """Row and output position of so many samples, int32 [2, num_samples].

        Where rows are dealt out they are those that this rank draws.
        """
        return self._own_samples[: 2 * num_samples].view(2, num_samples)

    def upload_own(self, plan: SamplePlan, num_samples: int, scratch_row: int) -> None:
        """Fills `own_samples` after earlier work, padding included."""
        host = staging_memory((2, num_samples), torch.int32, self._device)
        rows, positions = host.numpy()
        fill_column(rows, plan.rows, scratch_row)
        fill_column(positions, plan.output_positions, 0)
        self.own_samples(num_samples).copy_(host, non_blocking=True)

    def upload_padding(self, shape: StepShape, scratch_row: int) -> None:
        """Columns of a step in which nothing takes part."""
        host = self._host_piece(shape)
        fill_padding(split_columns(host.numpy(), shape), scratch_row)
        self._send(host)

    def upload_tokens(self, shape: StepShape, scratch_row: int) -> None:
        """Columns of a step that is full of different tokens: `fill_with_tokens`."""
        host = self._host_piece(shape)
        columns = split_columns(host.numpy(), shape)
        fill_with_tokens(columns, shape, self._sizes, scratch_row, self._longest, self._vocab_size)
        self._send(host)

    def columns(self, shape: StepShape) -> StepColumns[torch.Tensor]:
        """The columns on the card, as they were uploaded last with this shape."""
        return split_columns(self._piece, shape)

    def tokens(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions of the step's tokens, int64 [num_tokens], as `inputs` has made them."""
        return self._token_ids[: shape.num_tokens], self._positions[: shape.num_tokens]

    def inputs(
        self, shape: StepShape, rows: DeviceRows, gathers: Gathers, drafts: RowDrafts | None = None
    ) -> StepInputs:
        """Launches the making of the model's inputs from the columns and the rows' state.

        No gathers: as in graphs. With `drafts` rows go on where they stand.
        """
        columns = self.columns(shape)
        if drafts is not None:
            _resolve(columns, drafts)
        token_ids, positions = self.tokens(shape)
        build_step_inputs(
            columns.token_ids,
            columns.token_entries,
            columns.positions,
            columns.rows,
            rows.last_tokens,
            rows.block_tables,
            self._block_size,
            token_ids,
            positions,
            self._slots,
        )
        parts = zip(
            columns.attention,
            shape.parts,
            self._slots_of_parts(shape),
            gathers or (None,) * len(shape.parts),
            strict=True,
        )
        attention = [self._attention_step(*part, rows) for part in parts]
        if not shape.pieces:
            return StepInputs(token_ids, positions, attention[0])
        first, second = attention
        return StepInputs(token_ids, positions, StepPieces(shape.pieces[0].num_tokens, (first, second)))

    def _slots_of_parts(self, shape: StepShape) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the slots of each part's tokens, in each cache group."""
        lengths = [part.num_tokens for part in shape.parts]
        return zip(*(torch.split(slots[: shape.num_tokens], lengths) for slots in self._group_slots), strict=True)

    def _attention_step(
        self,
        columns: AttentionColumns[torch.Tensor],
        part: StepShape,
        slots: tuple[torch.Tensor, ...],
        gather: GatherColumns | None,
        rows: DeviceRows,
    ) -> StepMetadata:
        decode = self._decode_work(columns, part.query_len) if part.num_splits else None
        prefill = self._prefill_work(columns, gather) if part.num_tiles else None
        # Groups differ in where keys and values lie; work is divided by lengths, which they share.
        return grouped(
            [
                PagedAttentionStep(
                    query_start_loc=columns.query_start_loc,
                    seq_lens=columns.seq_lens,
                    rows=columns.rows,
                    block_tables=block_tables,
                    slot_mapping=slot_mapping,
                    block_size=self._block_size,
                    decode=decode,
                    prefill=prefill,
                    num_drafts=columns.num_drafts if part.drafts else None,
                )
                for block_tables, slot_mapping in zip(rows.group_tables, slots, strict=True)
            ]
        )

    def _decode_work(self, columns: AttentionColumns[torch.Tensor], query_len: int) -> DecodeWork:
        return DecodeWork(columns.splits.view(-1, 4), query_len, self._decode_scratch)

    def _prefill_work(self, columns: AttentionColumns[torch.Tensor], gather: GatherColumns | None) -> PrefillWork:
        tiles, shares = columns.tiles.view(-1, 2), columns.shares.view(-1, 3)
        return PrefillWork(tiles, self._gathered(gather), self._sizes.tile_tokens, shares, self._share_scratch)

    def _gathered(self, gather: GatherColumns | None) -> GatheredContext | None:
        if gather is None:
            return None
        assert self._gather_scratch is not None
        chunks, offsets = (copy_to_device(column, self._device) for column in (gather.chunks, gather.offsets))
        return GatheredContext(chunks, offsets, self._gather_scratch)

    def _host_piece(self, shape: StepShape) -> torch.Tensor:
        return staging_memory(columns_size(shape), torch.int32, self._device)

    def _send(self, host: torch.Tensor) -> None:
        self._piece[: host.numel()].copy_(host, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _resolve(columns: StepColumns[torch.Tensor], drafts: RowDrafts) -> None:
    """Makes columns exact that are upper bounds, and looks up the rows' last tokens and drafts."""
    entries = PlannedEntries(columns.rows, columns.bounds, drafts.next_positions)
    tokens = (columns.token_ids, columns.token_entries, columns.positions)
    resolve_tokens(*tokens, entries, drafts.last_tokens, drafts.drafts)
    lower_bounds(columns.output_positions, entries, columns.sample_tokens, columns.token_entries)
    for attention in columns.attention:
        lower_bounds(attention.seq_lens, PlannedEntries(attention.rows, attention.bounds, drafts.next_positions))
