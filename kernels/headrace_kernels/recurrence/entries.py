"""A step as recurrent layers read it: tokens by entry, and the row whose state an entry continues.

Owns the record. States themselves are tensors with one line for each row of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecurrentEntries(NamedTuple):
    """The entries of a step. Tensors are int32 on the device of the tokens."""

    # [num_entries + 1]: entry i has the tokens query_start_loc[i] up to query_start_loc[i + 1].
    query_start_loc: Tensor
    # [num_entries] tokens of context, those of this step included; 0: padding, without tokens.
    seq_lens: Tensor
    # [num_entries] the row of each entry; no two entries with tokens have the same.
    rows: Tensor
    # Whether no entry has more than one token, or where tokens are drafted than `longest_entry` of
    # `pending`, whatever the tensors come to hold: a captured step is replayed with other lengths.
    only_decodes: bool = False
    # [num_entries] drafts at the end of each entry, which may turn out wrong: an entry with drafts
    # has one other token, the first. None: nothing is drafted.
    num_drafts: Tensor | None = None

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors, in the order in which kernels take them."""
        return self.query_start_loc, self.seq_lens, self.rows


class HostEntries(NamedTuple):
    """Entries with tokens, as numbers, for implementations that decide on the host."""

    # First token of each entry with tokens, and the one behind its last.
    spans: list[tuple[int, int]]
    rows: list[int]
    # Position of each entry's first token; 0: the entry begins its sequence, with an empty state.
    starts: list[int]
    # Tokens at the end of each entry that may turn out wrong.
    num_drafts: list[int]

    @classmethod
    def of(cls, entries: RecurrentEntries) -> HostEntries:
        """Reads the tensors, which waits for the device if they are on one."""
        bounds, seq_lens = entries.query_start_loc.tolist(), entries.seq_lens.tolist()
        spans = list(zip(bounds, bounds[1:], strict=False))[: len(seq_lens)]
        filled = [index for index, (first, end) in enumerate(spans) if end > first]
        rows = entries.rows.tolist()
        num_drafts = [0] * len(rows) if entries.num_drafts is None else entries.num_drafts.tolist()
        return cls(
            [spans[index] for index in filled],
            [rows[index] for index in filled],
            [seq_lens[index] - (spans[index][1] - spans[index][0]) for index in filled],
            [num_drafts[index] for index in filled],
        )
