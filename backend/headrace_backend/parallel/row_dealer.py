"""Deals the rows that a step draws out to the ranks, so that each draws its share.

Each rank computes logits of a part of the vocabulary for all rows. A draw needs a row's whole
logits, but only once: here a rank gets them of its share of the rows, draws those, and the ranks
tell each other the tokens. With n ranks an n-th of the logits travels to each that all of them
would have to get, and an n-th of the rows is left to draw.

    logits of all rows,        rows of one share,           tokens of         tokens of
    part of the vocabulary --> whole vocabulary --(draw)--> one share    -->  all rows

Owns who has which rows, which steps are worth it, and both exchanges. Does not own the draw.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torch import Tensor

from headrace_backend.parallel.collectives import Collectives

# Fewest bytes of logits that a rank of several cards no longer receives, where rows are dealt out:
# of a vocabulary of 128,256 from 234 rows on for four ranks, and from 524 on for two. On four H100s
# (2026-11-28), from parts to tokens, 128 rows took 293 to 364 us as whole logits and 417 to 661
# dealt out, 256 rows 525 to 618 and 299 to 673, 512 rows 977 to 1,116 and 323 to 588. Dealing takes
# the host that long to launch, and short steps have no such time to give.
_LEAST_SAVED_BYTES = 64 << 20
# On a CPU drawing a row takes longer than any message: as soon as another rank takes one.
_LEAST_SAVED_BYTES_ON_CPU = 1
_LOGIT_BYTES = 4
# Stands for the token of a row that is not finite.
_NOT_FINITE = -1


@dataclasses.dataclass(frozen=True, slots=True)
class RowShares:
    """Which of a step's rows each rank draws: runs of equal length, the last ones shorter."""

    num_rows: int
    num_ranks: int

    @property
    def length(self) -> int:
        """Rows of the longest share, which rank 0 has."""
        return -(-self.num_rows // self.num_ranks)

    def rows(self, rank: int) -> slice:
        """The rows of one rank; of the last ranks there may be none."""
        first, end = (min(place * self.length, self.num_rows) for place in (rank, rank + 1))
        return slice(first, end)

    def counts(self) -> list[int]:
        """Number of rows of each rank."""
        shares = map(self.rows, range(self.num_ranks))
        return [share.stop - share.start for share in shares]


class RowDealer:
    """One rank's end of the exchanges."""

    def __init__(self, collectives: Collectives, vocab_size: int) -> None:
        self._collectives = collectives
        self._vocab_size = vocab_size
        on_cpu = collectives.device.type == "cpu"
        self._least_saved_bytes = _LEAST_SAVED_BYTES_ON_CPU if on_cpu else _LEAST_SAVED_BYTES

    @classmethod
    def of(cls, collectives: Collectives | None, vocab_size: int) -> Self | None:
        """A rank's dealer; None where there are no others to deal rows out to.

        Nor is there one where ranks do not divide the vocabulary: the last one's part ends with
        logits of no token.
        """
        if collectives is None or vocab_size % collectives.world_size:
            return None
        return cls(collectives, vocab_size) if collectives.world_size > 1 else None

    def pays(self, num_rows: int) -> bool:
        """Whether a step that draws so many rows is worth dealing out.

        Decided by sizes alone, so alike on all ranks; with more rows it stays so.
        """
        num_ranks = self._collectives.world_size
        others_rows = num_rows - self.shares(num_rows).length
        saved = _LOGIT_BYTES * others_rows * (self._vocab_size - self._vocab_size // num_ranks)
        return saved >= self._least_saved_bytes

    def shares(self, num_rows: int) -> RowShares:
        """How so many rows are dealt out."""
        return RowShares(num_rows, self._collectives.world_size)

    def own_rows(self, num_rows: int) -> slice:
        """Rows that this rank draws, of so many."""
        return self.shares(num_rows).rows(self._collectives.rank)

    def deal(self, part: Tensor, room: Tensor) -> Tensor:
        """Exchanges parts of the vocabulary for rows.

        Args:
            part: fp32 [num_rows, part_size] this rank's part of each row, contiguous.
            room: fp32 [at least twice the longest share, vocab_size], contiguous, overwritten.

        Returns:
            fp32 [number of own rows, vocab_size] whole logits of this rank's rows: the first ones
            of `room`.
        """
        shares, rank = self.shares(len(part)), self._collectives.rank
        counts = shares.counts()
        logits = room[: counts[rank]]
        received = room[shares.length : shares.length + counts[rank]]
        by_rank = received.view(shares.num_ranks, counts[rank], part.shape[1])
        self._collectives.all_to_all(part, counts, by_rank)
        logits.view(counts[rank], shares.num_ranks, part.shape[1]).copy_(by_rank.transpose(0, 1))
        return logits

    @staticmethod
    def marked(tokens: Tensor, finite: Tensor) -> Tensor:
        """Tokens with their flags in them, int64 [n], as `gather` sends them. Can be captured."""
        return torch.where(finite, tokens, _NOT_FINITE)

    def gather(self, marked: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Puts together what all ranks have drawn.

        Args:
            marked: int64 [longest share] what `marked` gave for the own rows, and then anything.
            num_rows: Rows that all ranks have drawn together.

        Returns:
            Tokens of all rows, int64 [num_rows], 0 where a row is not finite; whether it is finite,
            bool [num_rows].
        """
        # All shares but the last ones are whole, so that what is no row's lies behind all rows.
        tokens = self._collectives.all_gather(marked).flatten()[:num_rows]
        finite = tokens != _NOT_FINITE
        return tokens.clamp_(min=0), finite
