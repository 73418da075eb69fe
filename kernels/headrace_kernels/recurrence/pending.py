"""Drafts and the states of recurrent layers: what of a row is *pending*, not yet in its matrices.

A matrix holds all that its row has seen, and nothing can be taken out of it. So a step that
verifies drafts leaves a row's matrices behind the last token that is sure to stay, and keeps what
the drafts brought: keys and values as the convolution left them, and the logits of their gates. The
next step knows where the row stands. It first applies what is pending up to there, which the drafts
were right about, and overwrites the rest.

    step N      last d1 d2 d3        matrices: up to `last`; pending: d1 d2 d3
                d1, d2 are right
    step N + 1  d1 d2 | last d1      matrices: up to its own `last`; pending: its own d1

So a matrix is read once and written once in a step, as without drafts, and a copy of a row's line
can be continued at each place from the first pending token to the last right one. Beside the
matrices a line has the number of tokens that each of them holds (its *base*: a head's program reads
and writes its own).

Owns the layout of a line, and the specification of what is kept and applied. What belongs to
position p lies in place p modulo the number of places, which are so many that no token of a step
takes a place that the step reads.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels.recurrence.entries import HostEntries, RecurrentEntries
from headrace_kernels.recurrence.gated_delta import DeltaGates, DeltaHeads, gated_delta_chunked

# A line's elements are a multiple of so many (16 bytes), so that kernels read lines in wide words.
_ALIGNMENT = 4


class PendingTokens(NamedTuple):
    """What drafts left of all rows: views whose lines have a stride and are contiguous."""

    # fp32 [num_rows, num_places, elements of all heads' keys and values].
    mixed: Tensor
    # fp32 [num_rows, num_places, 2, num_value_heads] logits of correction and decay.
    gates: Tensor
    # int32 [num_rows, num_value_heads] tokens that each matrix holds.
    bases: Tensor

    @property
    def num_drafts(self) -> int:
        """Most drafts of a row that a step verifies."""
        return self.mixed.shape[1] // 2


class RowStates(NamedTuple):
    """States of all rows, fp32: views whose lines have a stride and are contiguous."""

    # [num_rows, num_value_heads, key_dim, value_dim].
    matrices: Tensor
    # [num_rows, places, heads.num_channels] kept inputs, see `causal_convolution`.
    tails: Tensor
    # None: nothing is drafted.
    pending: PendingTokens | None = None


def longest_entry(num_drafts: int) -> int:
    """Tokens of the longest entry in a step that has no prompts: a power of two.

    It is that of the largest decode kernel of attention; what must come is computed beside drafts.
    """
    return 1 << num_drafts.bit_length()


def _sizes(heads: DeltaHeads, kernel: int, num_drafts: int) -> tuple[int, int, int, int, int]:
    """Elements of a line's matrices, tails, pending keys and values, their gates, and bases.

    The convolution sees `kernel` - 1 tokens before a step's first, and the step has up to
    `longest_entry`; of pending tokens and drafts of the next step there are up to `num_drafts` each
    around a token that is sure.
    """
    places = 2 * num_drafts + 1 if num_drafts else 0
    keys_and_values = heads.num_key_heads * heads.key_dim + heads.num_value_heads * heads.value_dim
    return (
        heads.num_value_heads * heads.key_dim * heads.value_dim,
        (longest_entry(num_drafts) + kernel - 1) * heads.num_channels,
        places * keys_and_values,
        places * 2 * heads.num_value_heads,
        heads.num_value_heads if num_drafts else 0,
    )


def line_elements(heads: DeltaHeads, kernel: int, num_drafts: int) -> int:
    """Elements of 4 bytes of a row's line, where a step verifies up to so many drafts of a row."""
    elements = sum(_sizes(heads, kernel, num_drafts))
    return -(-elements // _ALIGNMENT) * _ALIGNMENT if num_drafts else elements


def states_of(lines: Tensor, heads: DeltaHeads, kernel: int) -> RowStates:
    """The views of fp32 lines [num_rows, line_elements], by whose length the drafts are known."""
    num_drafts = next(count for count in itertools.count() if line_elements(heads, kernel, count) >= lines.shape[1])
    sizes = _sizes(heads, kernel, num_drafts)
    matrices, tails, mixed, gates, bases = torch.split(lines[:, : sum(sizes)], list(sizes), dim=1)
    matrices = matrices.view(-1, heads.num_value_heads, heads.key_dim, heads.value_dim)
    tails = tails.view(len(lines), -1, heads.num_channels)
    if not num_drafts:
        return RowStates(matrices, tails)
    places = 2 * num_drafts + 1
    gates = gates.view(-1, places, 2, heads.num_value_heads)
    pending = PendingTokens(mixed.view(len(lines), places, -1), gates, bases.view(torch.int32))
    return RowStates(matrices, tails, pending)


def apply_pending_reference(
    gates: DeltaGates, matrices: Tensor, pending: PendingTokens, entries: RecurrentEntries, heads: DeltaHeads
) -> None:
    """Brings the matrices of a step's entries to where the rows stand; bases say so.

    Args:
        gates: Whose `log_decay` and `decay_bias` are those of the layer.
        matrices: fp32 [num_rows, num_value_heads, key_dim, value_dim] of all rows, changed in
            place.
        pending: What is pending of all rows.
        entries: Entries of the step.
        heads: Numbers and sizes of heads.
    """
    mixed, logits, counts, rows, ends = [], [], [0], [], []
    host, num_places = HostEntries.of(entries), pending.mixed.shape[1]
    for row, start in zip(host.rows, host.starts, strict=True):
        base = int(pending.bases[row, 0]) if start else 0
        if base < start:
            places = [position % num_places for position in range(base, start)]
            mixed.append(pending.mixed[row, places])
            logits.append(pending.gates[row, places])
            counts.append(counts[-1] + start - base)
            rows.append(row)
            ends.append(start)
        pending.bases[row] = start
    if rows:
        bounds, seq_lens, numbers = (torch.tensor(column, dtype=torch.int32) for column in (counts, ends, rows))
        correction, decay = torch.cat(logits).unbind(1)
        # Nobody wants outputs: any queries will do.
        keys_and_values = torch.cat(mixed)
        queries = keys_and_values.new_zeros(counts[-1], heads.num_key_heads * heads.key_dim)
        whole = torch.cat((queries, keys_and_values), dim=1)
        of_pending = gates._replace(correction=correction, decay=decay)
        gated_delta_chunked(whole, of_pending, matrices, RecurrentEntries(bounds, seq_lens, numbers), heads)


def keep_drafts_reference(mixed: Tensor, gates: DeltaGates, pending: PendingTokens, entries: RecurrentEntries) -> None:
    """Keeps a step's drafts, and how many tokens its matrices hold behind it.

    Args:
        mixed: [num_tokens, heads.num_channels] queries, keys and values behind the convolution.
        gates: Gates of all tokens.
        pending: What is pending of all rows, changed in place.
        entries: Entries of the step, whose tokens but for drafts the matrices hold.
    """
    _, num_places, width = pending.mixed.shape
    for (first, end), row, start, num_drafts in zip(*HostEntries.of(entries), strict=True):
        last, tokens = start + end - first, slice(end - num_drafts, end)
        places = [position % num_places for position in range(last - num_drafts, last)]
        pending.mixed[row, places] = mixed[tokens, -width:].float()
        pending.gates[row, places, 0] = gates.correction[tokens].float()
        pending.gates[row, places, 1] = gates.decay[tokens].float()
        pending.bases[row] = last - num_drafts
