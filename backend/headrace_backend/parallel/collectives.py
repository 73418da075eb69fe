"""What ranks compute together, as layers see it.

Owns the interface, and what follows from its two operations. Every rank calls the same operations
in the same order with tensors of the same shape, and gets the same bits: a sum adds the ranks'
parts in the order of the ranks, whatever the shape, so that a row's result depends neither on the
other rows nor on who was first.

A sum may be begun and waited for later, so that products run beside it. Between begin and wait its
tensor belongs to the sum: nobody reads it, writes it or gives its memory to others. What is begun
is waited for before any other operation, but for further begun ones: at no time do two ways of
adding up wait for other ranks at once.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import add_rms_norm, rounded_add_rms_norm
from headrace_kernels.rounded_tokens import RoundedTokens

# Times travel as whole numbers of a millionth.
_TIME_UNITS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class PieceRule:
    """Rule that says which steps are cut into two pieces of their tokens.

    One piece's all-reduce then runs beside the other's products.

    By sizes alone, so alike on all ranks.
    """

    # Of a sum of the whole step, where it is launched kernel by kernel, of which pieces have twice
    # as many.
    least_bytes: int
    # The same where it is replayed from a graph.
    least_captured_bytes: int
    # Tokens that the first piece is a multiple of.
    multiple: int

    def first_piece(self, num_tokens: int, token_bytes: int, is_captured: bool = False) -> int | None:
        """Tokens of the first of two pieces, as near to half as the multiple allows.

        None: the step stays whole.
        """
        first = (num_tokens + self.multiple) // (2 * self.multiple) * self.multiple
        least_bytes = self.least_captured_bytes if is_captured else self.least_bytes
        is_cut = num_tokens * token_bytes >= least_bytes and 0 < first < num_tokens
        return first if is_cut else None


class PendingAllReduce(abc.ABC):
    """A sum that was begun."""

    @abc.abstractmethod
    def wait(self) -> Tensor:
        """The sum, for whatever this rank computes from now on; to be called once.

        Raises:
            PeerLost: Another rank is gone.
        """


class DoneAllReduce(PendingAllReduce):
    """One that has been computed already."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def wait(self) -> Tensor:
        """Implements `PendingAllReduce.wait`."""
        return self._total


class Collectives(abc.ABC):
    """The operations of one rank's group of at least two."""

    rank: int
    world_size: int
    device: torch.device
    # Of the steps whose sums are begun and waited for later; None: there are no such.
    piece_rule: PieceRule | None = None

    @abc.abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """Adds up the ranks' tensors, in their shape and type.

        May be written into `partial`, which must not be used afterwards.
        """

    def begin_all_reduce(self, partial: Tensor) -> PendingAllReduce:
        """Begins the `all_reduce` of a piece of a step, and returns it pending.

        It goes on while this rank computes other things, where that is possible.
        """
        return DoneAllReduce(self.all_reduce(partial))

    @abc.abstractmethod
    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors in order, [world_size, *part.shape]."""

    def all_to_all(self, rows: Tensor, counts: Sequence[int], out: Tensor) -> None:
        """Sends each rank its rows, and receives this rank's from all of them.

        Here everything is gathered and most of it dropped, which says what comes out.

        Args:
            rows: [num_rows, n] contiguous: rank 0's rows, then rank 1's and so on.
            counts: Rows of each rank, alike on all of them; some may be 0.
            out: [world_size, counts[rank], n] contiguous, written.
        """
        first = sum(counts[: self.rank])
        out.copy_(self.all_gather(rows)[:, first : first + counts[self.rank]])

    def add_rms_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """All-reduces `partial`, adds it to the residual stream in place and returns the norm.

        All are [num_tokens, size].
        """
        return add_rms_norm(self.all_reduce(partial), residual, weight, eps)

    def rounded_add_rms_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: InputRounding
    ) -> RoundedTokens:
        """Does what `add_rms_norm` does, the norm rounded as `round_tokens` does."""
        return rounded_add_rms_norm(self.all_reduce(partial), residual, weight, eps, rounding)

    def gather_columns(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The ranks' columns side by side: [num_rows, n] -> [num_rows, world_size * n].

        Written to `out`, if it is given, which must be contiguous.
        """
        by_row = self.all_gather(part.contiguous()).transpose(0, 1)
        if out is None:
            return by_row.reshape(part.shape[0], -1)
        out.view(by_row.shape).copy_(by_row)
        return out

    def maximum(self, part: Tensor) -> Tensor:
        """The greatest of the ranks' tensors, number by number, exactly alike on all ranks."""
        return self.all_gather(part).amax(0)

    def all_values(self, *values: int) -> list[list[int]]:
        """What each rank gave, by rank. Waits for all of them; for start-up."""
        gathered: list[list[int]] = self.all_gather(
            torch.tensor(values, dtype=torch.int64, device=self.device)
        ).tolist()
        return gathered


class GroupCollectives(Collectives):
    """The operations of a process group of torch's, at first of all ranks that were connected."""

    # None: all ranks.
    group: dist.ProcessGroup | None = None

    def within(self, group: dist.ProcessGroup) -> Self:
        """Returns the operations of some of the ranks, this one among them, which all call them."""
        part = copy.copy(self)
        part.group, part.rank, part.world_size = group, group.rank(), group.size()
        return part

    @staticmethod
    @abc.abstractmethod
    def named_losses() -> contextlib.AbstractContextManager[None]:
        """Has errors of the connection that are raised inside come out as `PeerLost`."""


def agreed_least(collectives: Collectives | None, value: int) -> int:
    """The least of the ranks' values; the value itself where there is one rank."""
    return value if collectives is None else min(_only(collectives.all_values(value)))


def agreed_most(collectives: Collectives | None, value: int) -> int:
    """The greatest of the ranks' values; the value itself where there is one rank."""
    return value if collectives is None else max(_only(collectives.all_values(value)))


def agreed_any(collectives: Collectives | None, flags: Sequence[bool]) -> list[bool]:
    """Which of some flags any rank has set; the flags themselves where there is one rank."""
    if collectives is None:
        return list(flags)
    return [any(column) for column in zip(*collectives.all_values(*map(int, flags)), strict=True)]


def slowest_times(collectives: Collectives | None, times: list[float]) -> list[float]:
    """Returns for each time the longest that any rank took, exactly alike on all ranks.

    With one rank these are the times themselves.
    """
    if collectives is None or not times:
        return times
    by_rank = collectives.all_values(*(round(time * _TIME_UNITS) for time in times))
    return [max(column) / _TIME_UNITS for column in zip(*by_rank, strict=True)]


def _only(values: Sequence[Sequence[int]]) -> list[int]:
    return [value for (value,) in values]
