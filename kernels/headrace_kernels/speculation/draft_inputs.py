"""A step's columns, planned by upper bounds, as rows really stand.

Owns the two operations that resolve columns in place before a step's inputs are made of them
(`step_inputs`): ids of tokens that only the device knows, and positions, lengths and places in the
output, which are too large by what earlier steps did not settle. By how much is the same for all of
a row: its *lag*, the planned position of its last sampled token less the real one. And the one that
keeps a row's drafts for the next step, which are ids of the vocabulary whatever was proposed.

Launch rule: 256 entries of a column a program, 4 warps. Not measured yet.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton

_BLOCK = 256


class PlannedEntries(NamedTuple):
    """What says how far behind its plan each entry of a step is."""

    # int32 [num_entries] the row of each entry.
    rows: Tensor
    # int32 [num_entries] planned position of the row's last sampled token; -1: the entry computes
    # no such token, and its plan is exact.
    bounds: Tensor
    # int32 [num_rows] position of each row's last sampled token, as the row stands.
    next_positions: Tensor

    def lags(self) -> Tensor:
        """By how much an entry's plan is too large, int32 [num_entries]."""
        return torch.where(self.bounds < 0, 0, self.bounds - self.next_positions[self.rows.long()])


def resolve_tokens_reference(
    token_ids: Tensor,
    token_entries: Tensor,
    positions: Tensor,
    entries: PlannedEntries,
    last_tokens: Tensor,
    drafts: Tensor,
) -> None:
    """Specification of `resolve_tokens`, in plain PyTorch."""
    entry = token_entries.clamp(min=0).long()
    row = entries.rows[entry].long()
    used = token_entries >= 0
    positions -= torch.where(used, entries.lags()[entry], 0)
    unknown = torch.cat((last_tokens[:, None], drafts), dim=1)[row, (-1 - token_ids).clamp(min=0).long()]
    token_ids.copy_(torch.where(used & (token_ids < 0), unknown, token_ids))


@triton.jit
def _lag(entries, mask, rows, bounds, next_positions):
    """How far each entry is behind its plan, and its row."""
    row = tl.load(rows + entries, mask=mask, other=0).to(tl.int64)
    bound = tl.load(bounds + entries, mask=mask, other=-1)
    behind = mask & (bound >= 0)
    return tl.where(behind, bound - tl.load(next_positions + row, mask=behind, other=0), 0), row


_TOKEN_COLUMNS = ["token_ids", "token_entries", "positions", "rows", "bounds"]


@triton.jit(
    do_not_specialize=[*_TOKEN_COLUMNS, "next_positions", "last_tokens", "drafts", "num_tokens"],
    do_not_specialize_on_alignment=_TOKEN_COLUMNS,
)
def resolve_tokens_kernel(
    token_ids,
    token_entries,
    positions,
    rows,
    bounds,
    next_positions,
    last_tokens,
    drafts,
    num_tokens,
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of tokens). Arguments as those of `resolve_tokens`, `drafts` contiguous."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(token_entries + offs, mask=offs < num_tokens, other=-1)
    used = entry >= 0
    lag, row = _lag(entry, used, rows, bounds, next_positions)
    position = tl.load(positions + offs, mask=used, other=0)
    tl.store(positions + offs, position - lag, mask=used)
    token = tl.load(token_ids + offs, mask=used, other=0)
    is_last, is_draft = used & (token == -1), used & (token < -1)
    token = tl.where(is_draft, tl.load(drafts + row * NUM_DRAFTS + (-2 - token), mask=is_draft, other=0), token)
    token = tl.where(is_last, tl.load(last_tokens + row, mask=is_last, other=0), token)
    tl.store(token_ids + offs, token, mask=is_last | is_draft)


def resolve_tokens(
    token_ids: Tensor,
    token_entries: Tensor,
    positions: Tensor,
    entries: PlannedEntries,
    last_tokens: Tensor,
    drafts: Tensor,
) -> None:
    """Writes ids and positions of a step's tokens as their rows stand, in place.

    Args:
        token_ids: [num_tokens] int32; -1: the row's last sampled token, -2 its first draft, -3 its
            second and so on.
        token_entries: [num_tokens] int32, the entry that a token belongs to; -1: padding, which is
            left as it is.
        positions: [num_tokens] int32, as planned.
        entries: How far entries are behind their plans.
        last_tokens: [num_rows] int32.
        drafts: [num_rows, num_drafts] int32, drafted for the token after the last one and on.
    """
    if not uses_triton(token_ids):
        resolve_tokens_reference(token_ids, token_entries, positions, entries, last_tokens, drafts)
        return
    num_tokens = token_ids.shape[0]
    if num_tokens:
        columns = (token_ids, token_entries, positions, *entries, last_tokens, drafts)
        grid = (triton.cdiv(num_tokens, _BLOCK),)
        resolve_tokens_kernel[grid](*columns, num_tokens, drafts.shape[1], _BLOCK, num_warps=4)


def lower_bounds_reference(
    values: Tensor, entries: PlannedEntries, tokens: Tensor | None = None, token_entries: Tensor | None = None
) -> None:
    """Specification of `lower_bounds`, in plain PyTorch."""
    lags = entries.lags()
    if tokens is None or token_entries is None:
        values -= lags
        return
    entry = token_entries[tokens.long()]
    values -= torch.where(entry < 0, 0, lags[entry.clamp(min=0).long()])


_BOUND_COLUMNS = ["values", "rows", "bounds", "tokens", "token_entries"]


@triton.jit(
    do_not_specialize=[*_BOUND_COLUMNS, "next_positions", "num_values"],
    do_not_specialize_on_alignment=_BOUND_COLUMNS,
)
def lower_bounds_kernel(
    values,
    rows,
    bounds,
    next_positions,
    tokens,
    token_entries,
    num_values,
    BY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of values). Arguments as those of `lower_bounds`."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_values
    entry = offs
    if BY_TOKEN:
        token = tl.load(tokens + offs, mask=mask, other=0)
        entry = tl.load(token_entries + token, mask=mask, other=-1)
    mask = mask & (entry >= 0)
    lag, _ = _lag(entry, mask, rows, bounds, next_positions)
    tl.store(values + offs, tl.load(values + offs, mask=mask, other=0) - lag, mask=mask)


def lower_bounds(
    values: Tensor, entries: PlannedEntries, tokens: Tensor | None = None, token_entries: Tensor | None = None
) -> None:
    """Takes from planned lengths, or places in outputs, what their rows are behind, in place.

    Args:
        values: int32, one for each entry (their lengths of context), or one for each of `tokens`.
        entries: How far entries are behind their plans.
        tokens: int32 [num_values], a token of the entry that each value belongs to.
        token_entries: int32 [num_tokens], the entry of each token; -1: padding, whose values stay.
    """
    if not uses_triton(values):
        lower_bounds_reference(values, entries, tokens, token_entries)
        return
    num_values = values.shape[0]
    if num_values:
        by_token = tokens is not None and token_entries is not None
        # Not read where values are those of entries.
        which = (tokens, token_entries) if by_token else (values, values)
        grid = (triton.cdiv(num_values, _BLOCK),)
        lower_bounds_kernel[grid](values, *entries, *which, num_values, by_token, _BLOCK, num_warps=4)


def store_drafts_reference(drafts: Tensor, rows: Tensor, proposed: Tensor, vocab_size: int, num_lost: Tensor) -> None:
    """Specification of `store_drafts`, in plain PyTorch."""
    is_id = (proposed >= 0) & (proposed < vocab_size)
    drafts.index_copy_(0, rows.long(), torch.where(is_id, proposed, 0).to(drafts.dtype))
    num_lost += (~is_id).sum()


@triton.jit(do_not_specialize=["rows", "vocab_size"], do_not_specialize_on_alignment=["rows"])
def store_drafts_kernel(drafts, rows, proposed, num_lost, vocab_size, NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (sample). Arguments as those of `store_drafts`, both matrices contiguous."""
    sample = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < NUM_DRAFTS
    token = tl.load(proposed + sample * NUM_DRAFTS + offs, mask=mask, other=0)
    is_id = (token >= 0) & (token < vocab_size)
    row = tl.load(rows + sample).to(tl.int64)
    tl.store(drafts + row * NUM_DRAFTS + offs, tl.where(is_id, token, 0).to(tl.int32), mask=mask)
    lost = tl.sum((mask & (is_id == 0)).to(tl.int32), axis=0)
    if lost > 0:
        tl.atomic_add(num_lost, lost)


def store_drafts(drafts: Tensor, rows: Tensor, proposed: Tensor, vocab_size: int, num_lost: Tensor) -> None:
    """Keeps proposed tokens as their rows' drafts; what is no id of the vocabulary becomes token 0.

    Args:
        drafts: int32 [num_rows, num_drafts] contiguous, changed in place.
        rows: int32 [num_samples], each at most once.
        proposed: int32 or int64 [num_samples, num_drafts].
        vocab_size: Ids are below.
        num_lost: int32 [1], to which the number of those that are no ids is added.
    """
    if not uses_triton(drafts):
        store_drafts_reference(drafts, rows, proposed, vocab_size, num_lost)
        return
    num_samples, num_drafts = proposed.shape
    if num_samples:
        block = triton.next_power_of_2(num_drafts)
        store_drafts_kernel[(num_samples,)](
            drafts, rows, proposed.contiguous(), num_lost, vocab_size, num_drafts, block, num_warps=1
        )
