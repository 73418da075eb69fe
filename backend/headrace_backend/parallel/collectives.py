"""What ranks compute together, as layers see it.

Owns the interface, and what follows from its two operations. Every rank calls the same operations in the same order with tensors of the same shape, and gets the same
bits: a sum adds the ranks' parts in the order of the ranks, whatever the shape, so that a row's result depends neither on the other rows nor on who was first.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_kernels.rms_norm import add_rms_norm

# Times travel as whole numbers of a millionth.
_TIME_UNITS = 1_000_000


class Collectives(abc.ABC):
    """The operations of one rank's group of at least two."""

    rank: int
    world_size: int
    device: torch.device

    @abc.abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of the ranks' tensors, in their shape and type. May be written into `partial`, which must not be used afterwards."""

    @abc.abstractmethod
    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors in order, [world_size, *part.shape]."""

    def add_rms_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum of the ranks' tensors to the residual stream in place and gives the norm of that, all [num_tokens, size]."""
        return add_rms_norm(self.all_reduce(partial), residual, weight, eps)

    def gather_columns(self, part: Tensor) -> Tensor:
        """The ranks' columns side by side: [num_rows, n] -> [num_rows, world_size * n]."""
        return self.all_gather(part.contiguous()).transpose(0, 1).reshape(part.shape[0], -1)

    def all_values(self, *values: int) -> list[list[int]]:
        """What each rank gave, by rank. Waits for all of them; for start-up."""
        gathered: list[list[int]] = self.all_gather(
            torch.tensor(values, dtype=torch.int64, device=self.device)
        ).tolist()
        return gathered


def agreed_least(collectives: Collectives | None, value: int) -> int:
    """The least of the ranks' values; the value itself where there is one rank."""
    return value if collectives is None else min(_only(collectives.all_values(value)))


def agreed_most(collectives: Collectives | None, value: int) -> int:
    """The greatest of the ranks' values; the value itself where there is one rank."""
    return value if collectives is None else max(_only(collectives.all_values(value)))


def slowest_times(collectives: Collectives | None, times: list[float]) -> list[float]:
    """For each of some times the longest that any rank took, exactly alike on all ranks; the times themselves where there is one rank."""
    if collectives is None or not times:
        return times
    by_rank = collectives.all_values(*(round(time * _TIME_UNITS) for time in times))
    return [max(column) / _TIME_UNITS for column in zip(*by_rank, strict=True)]


def _only(values: Sequence[Sequence[int]]) -> list[int]:
    return [value for (value,) in values]
