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


class HostEntries(NamedTuple):
    """Entries with tokens, as numbers, for implementations that decide on the host."""

    # First token of each entry with tokens, and the one behind its last.
    spans: list[tuple[int, int]]
    rows: list[int]
    # Whether an entry begins its sequence, with an empty state.
    begins: list[bool]

    @classmethod
    def of(cls, entries: RecurrentEntries) -> HostEntries:
        """Reads the tensors, which waits for the device if they are on one."""
        starts, seq_lens = entries.query_start_loc.tolist(), entries.seq_lens.tolist()
        spans = list(zip(starts, starts[1:], strict=False))[: len(seq_lens)]
        filled = [index for index, (first, end) in enumerate(spans) if end > first]
        rows = entries.rows.tolist()
        return cls(
            [spans[index] for index in filled],
            [rows[index] for index in filled],
            [spans[index][1] - spans[index][0] == seq_lens[index] for index in filled],
        )
