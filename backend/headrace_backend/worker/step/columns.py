"""The columns of one step on a GPU: filled on the host, copied in one piece, read by kernels.

Owns the order of the columns in that piece and how a plan fills them, padding included. Does not
own what lives longer than a step (`buffers`). All of it is numpy over the whole batch, never a loop
over rows. Token ids that the plan does not know are -1: a kernel looks them up where the step
before left them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step.plan import ForwardPlan, Int32Column, StepPlan
from headrace_backend.worker.plan_columns import Entries, flat_token_ids, last_sampled_bounds, ranges
from headrace_backend.worker.speculation.draws import Draws, num_drafts
from headrace_backend.worker.step.shape import AttentionSizes, StepShape
from headrace_kernels.attention.plan import GatherColumns, plan_decode, plan_prefill

# Columns start at multiples of this many entries (16 bytes), so that kernels may read them in wide
# words.
_ALIGNMENT = 4

Column = TypeVar("Column", Int32Column, torch.Tensor)


@dataclasses.dataclass(slots=True)
class AttentionColumns(Generic[Column]):
    """What attention reads of a step or a piece of one: entries, and how work is divided."""

    # [num_entries] the row of each entry.
    rows: Column
    # [num_entries] tokens of context, this step's included; 0: padding.
    seq_lens: Column
    # [num_entries + 1]
    query_start_loc: Column
    # See `attention.plan.DecodeColumns`: [num_splits * 4].
    splits: Column
    # See `attention.plan.PrefillColumns`: [num_tiles * 2] and [num_tiles * 3].
    tiles: Column
    shares: Column
    # In workers that draft: [num_entries] see `StepColumns.bounds`; else nothing.
    bounds: Column
    # Likewise: [num_entries] drafts at the end of each entry.
    num_drafts: Column


@dataclasses.dataclass(slots=True)
class StepColumns(Generic[Column]):
    """One step's columns, int32, as numpy arrays on the host or as tensors on the card.

    Both have the same fields at the same places.
    """

    # [num_tokens] -1: the row's last sampled token.
    token_ids: Column
    # [num_tokens] which entry a token belongs to; -1: padding.
    token_entries: Column
    # [num_tokens]
    positions: Column
    # [num_entries] the row of each entry of the whole step.
    rows: Column
    # [num_samples] the row that receives the token, the index of its hidden state, and the token's
    # position in the output. Hidden states that are only checked have the scratch row.
    sample_rows: Column
    sample_tokens: Column
    output_positions: Column
    # In workers that draft; else nothing: [num_entries] planned position of the last sampled token
    # that an entry computes, -1: it computes none. Where rows are behind their plan, these lengths
    # and positions are too large by as much (`headrace_kernels.speculation.draft_inputs`).
    bounds: Column
    # Likewise: [num_samples] the first draw of each sample of the plan, and its number of draws.
    first_draws: Column
    draw_counts: Column
    # Of the whole step, or of its two pieces.
    attention: tuple[AttentionColumns[Column], ...]


def _lengths(shape: StepShape) -> list[int]:
    tokens, entries, samples = shape.num_tokens, shape.num_entries, shape.num_samples
    lengths = [tokens, tokens, tokens, entries, samples, samples, samples]
    lengths += (entries, samples, samples) if shape.drafts else (0, 0, 0)
    for part in shape.parts:
        entries = part.num_entries
        lengths += (entries, entries, entries + 1, 4 * part.num_splits, 2 * part.num_tiles, 3 * part.num_tiles)
        lengths += (entries, entries) if shape.drafts else (0, 0)
    return lengths


def _starts(shape: StepShape) -> list[int]:
    sizes = (-(-length // _ALIGNMENT) * _ALIGNMENT for length in _lengths(shape))
    return [0, *itertools.accumulate(sizes)]


def columns_size(shape: StepShape) -> int:
    """Entries of the whole piece of memory."""
    return _starts(shape)[-1]


def split_columns(piece: Column, shape: StepShape) -> StepColumns[Column]:
    """The columns of a shape in a piece of memory, as views."""
    views = (piece[start : start + length] for start, length in zip(_starts(shape), _lengths(shape), strict=False))
    *names, last = (field.name for field in dataclasses.fields(StepColumns))
    assert last == "attention", "what parts have comes behind what the step has"
    of_step: dict[str, Any] = {name: next(views) for name in names}
    size = len(dataclasses.fields(AttentionColumns))
    of_parts = (AttentionColumns(*itertools.islice(views, size)) for _ in shape.parts)
    return StepColumns(attention=tuple(of_parts), **of_step)


def fill_columns(
    columns: StepColumns[Int32Column],
    plan: StepPlan,
    shape: StepShape,
    sizes: AttentionSizes,
    scratch_row: int,
    gather_capacity: int,
    draws: Draws | None = None,
) -> tuple[GatherColumns | None, ...]:
    """Writes a plan into the columns of a shape that holds it.

    Args:
        columns: Columns that are written.
        plan: A plan with at least one row.
        shape: Sizes of the columns.
        sizes: What attention's work is divided by.
        scratch_row: The row that padding uses.
        gather_capacity: Tokens of context that may be gathered, 0 for none.
        draws: Which of the plan's samples are draws of one row, in workers that draft.

    Returns:
        For each of the shape's parts contexts that are to be copied side by side before attention,
        which the host decides from lengths; None: none.
    """
    forward = plan.forward
    _fill_tokens(columns, forward)
    fill_column(columns.rows, forward.rows, scratch_row)
    fill_column(columns.sample_rows, plan.sample.rows, scratch_row)
    fill_column(columns.sample_tokens, plan.wanted_indices, 0)
    fill_column(columns.output_positions, plan.sample.output_positions, 0)
    if draws is not None:
        fill_column(columns.bounds, last_sampled_bounds(forward), -1)
        fill_column(columns.first_draws, draws.firsts, 0)
        fill_column(columns.draw_counts, draws.counts, 0)
    whole = Entries.of(forward)
    # A step that is padded may end within the first piece.
    parts = whole.cut(shape.pieces[0].num_tokens) if shape.pieces else (whole,)
    gathers = tuple(
        _fill_attention(each, entries, part, sizes, scratch_row, gather_capacity)
        for each, entries, part in zip(columns.attention, parts, shape.parts, strict=True)
    )
    if draws is not None:
        _fill_drafted(columns, forward, parts, scratch_row)
    return gathers


def _fill_drafted(
    columns: StepColumns[Int32Column], plan: ForwardPlan, parts: tuple[Entries, ...], scratch_row: int
) -> None:
    """Bounds and drafts of the entries of each part: those of their rows.

    A row whose tokens lie in both parts has its drafts in either. Nobody reads them there: steps of
    models with states, which do, are not cut.
    """
    bounds, drafts = np.full(scratch_row + 1, -1, np.int32), np.zeros(scratch_row + 1, np.int32)
    bounds[plan.rows], drafts[plan.rows] = last_sampled_bounds(plan), num_drafts(plan)
    for each, entries in zip(columns.attention, parts, strict=True):
        fill_column(each.bounds, bounds[entries.rows], -1)
        fill_column(each.num_drafts, drafts[entries.rows], 0)


def fill_padding(columns: StepColumns[Int32Column], scratch_row: int) -> None:
    """Writes columns in which nothing takes part."""
    for column in (columns.token_ids, columns.positions, columns.sample_tokens, columns.output_positions):
        column[:] = 0
    columns.token_entries[:] = -1
    columns.bounds[:] = -1
    columns.first_draws[:] = 0
    columns.draw_counts[:] = 0
    for column in (columns.rows, columns.sample_rows):
        column[:] = scratch_row
    for attention in columns.attention:
        for column in (attention.seq_lens, attention.query_start_loc):
            column[:] = 0
        for column in (attention.splits, attention.tiles, attention.shares):
            column[:] = -1
        attention.rows[:] = scratch_row
        attention.bounds[:] = -1
        attention.num_drafts[:] = 0


def fill_with_tokens(
    columns: StepColumns[Int32Column],
    shape: StepShape,
    sizes: AttentionSizes,
    scratch_row: int,
    longest: int,
    vocab_size: int,
) -> None:
    """Writes columns of a step that is full of different tokens, for measurements.

    Padding would not do: experts take as long as tokens are many and choose differently, and all
    padding is one token. Entries are rows from the first on, with as many tokens each.

    Args:
        columns: Columns that are written.
        shape: Sizes of the columns.
        sizes: What attention's work is divided by.
        scratch_row: The row that padding uses.
        longest: Tokens of an entry, at most; what is left over is padding.
        vocab_size: Number of token ids.
    """
    fill_padding(columns, scratch_row)
    each, more = divmod(shape.num_tokens, shape.num_entries)
    counts = np.minimum(each + (np.arange(shape.num_entries) < more), longest).astype(np.int32)
    rows, ids = np.arange(counts.size, dtype=np.int32), np.arange(counts.sum(), dtype=np.int32) % vocab_size
    plan = ForwardPlan(rows=rows, starts=np.zeros_like(rows), counts=counts, known_counts=counts, token_ids=ids)
    _fill_tokens(columns, plan)
    columns.rows[:] = rows
    whole = Entries.of(plan)
    parts = whole.cut(shape.pieces[0].num_tokens) if shape.pieces else (whole,)
    for attention, entries, part in zip(columns.attention, parts, shape.parts, strict=True):
        _fill_attention(attention, entries, part, sizes, scratch_row, gather_capacity=0)


def fill_column(column: Int32Column, values: npt.NDArray[np.integer], padding: int) -> None:
    """Writes values, and padding behind them."""
    column[: values.size] = values
    column[values.size :] = padding


def _fill_tokens(columns: StepColumns[Int32Column], plan: ForwardPlan) -> None:
    counts = plan.counts
    ends = np.cumsum(counts, dtype=np.int64)
    fill_column(columns.token_entries, np.repeat(np.arange(counts.size, dtype=np.int32), counts), -1)
    fill_column(columns.positions, ranges(plan.starts, counts), 0)
    fill_column(columns.token_ids, flat_token_ids(plan, ends), 0)


def _fill_attention(
    columns: AttentionColumns[Int32Column],
    entries: Entries,
    shape: StepShape,
    sizes: AttentionSizes,
    scratch_row: int,
    gather_capacity: int,
) -> GatherColumns | None:
    query_lens, seq_lens = entries.counts, entries.seq_lens
    fill_column(columns.rows, entries.rows, scratch_row)
    fill_column(columns.seq_lens, seq_lens, 0)
    columns.query_start_loc[0] = 0
    fill_column(columns.query_start_loc[1:], np.cumsum(query_lens), entries.num_tokens)
    if shape.num_splits:
        decode = plan_decode(
            query_lens,
            seq_lens,
            sizes.num_kv_heads,
            shape.num_entries,
            max_query_len=shape.query_len,
            part_len=sizes.part_len(shape.query_len, shape.num_tokens),
            programs=sizes.programs_of(shape.query_len, shape.num_tokens),
        )
        columns.splits[:] = decode.splits.reshape(-1)
    if not shape.num_tiles:
        return None
    prefill = plan_prefill(
        query_lens,
        seq_lens,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.tile_tokens,
        max_query_len=shape.query_len,
        num_tiles_padded=shape.num_tiles,
        gather_capacity=gather_capacity,
        persistent=sizes.copies_blocks,
    )
    columns.tiles[:] = prefill.tiles.reshape(-1)
    columns.shares[:] = prefill.shares.reshape(-1)
    return prefill.gather
