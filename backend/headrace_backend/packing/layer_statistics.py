"""What the numbers of a layer say of how it was packed, when there is no original to compare with.

They say where their middle is, whether scales are theirs, and how large outputs and inputs are.

Owns the sums, on the layer's device, each row seen once. `faults` judges them; what follows is why
they say anything, of trained layers and of random ones. Numbers come as *steps*: number less zero
point, whole or, of numbers from a table, not.

*Middle.* Weights scatter around 0, so that number less zero point is 0 on average to a small part
of a step. Zero points one off shift it by a step, a third of int4's scatter. *Scales.* A scale
comes from the largest weight of its group. Where that is large by chance, the scale is large and
the group's numbers scatter less. So logarithms of scale and of scatter, without what a row or a
column of groups has in common, fall against each other (-0.5 to -0.9), as soon as a layer has some
hundred groups; scales of other groups do not. A scale that comes from the scatter of its group
leaves all groups the same scatter, and says nothing. For rows in another order within a word it is
tried which order falls most. *Sizes.* Norms of rows and columns, which layers that feed each other
share in trained models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Ways to confuse the eight numbers of a word, or of two: AWQ's order for the plain one and the
# other way round, the last first, and neighbours exchanged.
WORD_ORDERS = {
    "the order of AWQ": (0, 2, 4, 6, 1, 3, 5, 7),
    "the inverse of AWQ's order": (0, 4, 1, 5, 2, 6, 3, 7),
    "highest bits first": (7, 6, 5, 4, 3, 2, 1, 0),
    "exchanged pairs": (1, 0, 3, 2, 5, 4, 7, 6),
    "highest bytes first": (3, 2, 1, 0, 7, 6, 5, 4),
}
_WORD = 8
# A group reaches the end of its range if it takes so much of it.
_REACHED = 0.8
# Scatter of whole numbers that are all as frequent, as a part of their range.
EVEN_SCATTER = 12**-0.5


class Findings(NamedTuple):
    """The figures of one layer, read from the device."""

    bits: int
    # Of number less zero point: mean, and scatter as a part of the range of numbers.
    mean: float
    scatter: float
    # Of all groups, those that reach the end of their range.
    reaching: float
    # Groups that have a scale and scatter, where rows have several; 0: none.
    num_groups: int
    # Of logarithms of scale and scatter: as they are, then with rows in each of WORD_ORDERS.
    correlations: tuple[float, ...]
    # How much the scatter of groups varies, as a part of its mean.
    variation: float
    # [N] and [K] sums of squares.
    rows: Tensor
    columns: Tensor
    # What `scatter` would be if all numbers were as frequent.
    even_scatter: float
    # Ways in which inputs may have been confused, by name: which of so many neighbours each one is.
    input_orders: Mapping[str, tuple[int, ...]]


class LayerStatistics:
    """Sums over one layer.

    Rows are added in order, from one thread or stream; `finish` ends them.
    """

    def __init__(
        self,
        bits: int,
        is_symmetric: bool,
        even_scatter: float = EVEN_SCATTER,
        input_orders: Mapping[str, tuple[int, ...]] = WORD_ORDERS,
    ) -> None:
        """Starts with empty sums; `add` takes rows in order.

        Args:
            bits: Width of one number.
            is_symmetric: Whether ranges reach as far below 0 as above.
            even_scatter: Scatter that numbers would have if all were as frequent, as a part of
                their range.
            input_orders: Ways in which inputs may have been confused, by name.
        """
        self._bits, self._is_symmetric = bits, is_symmetric
        self._even_scatter, self._input_orders = even_scatter, input_orders
        # Of each piece of rows.
        self._scales: list[Tensor] = []
        self._scatters: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._columns: Tensor | None = None
        # [5]: sum, squares and count of number less zero point; groups that reach the end, and all
        # groups.
        self._sums: Tensor | None = None
        self._correlations: Tensor | None = None

    def add(self, steps: Tensor, scales: Tensor) -> None:
        """Adds rows.

        Args:
            steps: [num_rows, num_groups, group_size] fp32, numbers less their zero points.
            scales: [num_rows, num_groups] fp32, of either sign.
        """
        scales = scales.abs()
        squares = steps.square()
        full = float(1 << self._bits)
        reach = 2 * steps.abs().amax(-1) if self._is_symmetric else steps.amax(-1) - steps.amin(-1)
        # Whole numbers of a group, or few bits of one: exact enough in fp32.
        totals, of_squares = steps.sum(-1), squares.sum(-1)
        counted = [
            totals.sum(dtype=torch.float64),
            of_squares.sum(dtype=torch.float64),
            torch.full((), steps.numel(), dtype=torch.float64, device=steps.device),
            (reach >= _REACHED * full).sum().double(),
            torch.full((), scales.numel(), dtype=torch.float64, device=steps.device),
        ]
        sums = torch.stack(counted)
        self._sums = sums if self._sums is None else self._sums + sums
        self._scales.append(scales)
        self._scatters.append(_scatter(totals, of_squares, steps.shape[-1]))
        factors = scales.square()
        self._rows.append((of_squares * factors).sum(1))
        columns = squares.mul_(factors[:, :, None]).sum(0).flatten()
        self._columns = columns if self._columns is None else self._columns + columns

    def finish(self, order: Tensor | None) -> None:
        """Ends the sums once all rows are there; keeps what is small.

        Args:
            order: [K] which input of the layer each added column is; None: they are in order.
        """
        if self._columns is None:
            return
        if order is not None:
            self._columns = torch.empty_like(self._columns).index_copy_(0, order, self._columns)
        self._correlations = _correlations(torch.cat(self._scales), torch.cat(self._scatters))
        self._scales, self._scatters = [], []

    def read(self) -> Findings | None:
        """The findings; None where there were no rows. Waits for the device."""
        if self._sums is None or self._columns is None or self._correlations is None:
            return None
        total, squares, count, reaching, all_groups = self._sums.tolist()
        num_groups, variation, *correlations = self._correlations.tolist()
        mean, rows = total / count, torch.cat(self._rows).cpu()
        return Findings(
            self._bits,
            mean,
            max(squares / count - mean * mean, 0.0) ** 0.5 / (1 << self._bits),
            reaching / all_groups,
            int(num_groups),
            tuple(correlations),
            variation,
            rows,
            self._columns.cpu(),
            self._even_scatter,
            self._input_orders,
        )


def _scatter(totals: Tensor, squares: Tensor, count: int) -> Tensor:
    """Returns the standard deviation of each group by its sums.

    It is 0 where all numbers are the same but for how sums are rounded.
    """
    variance = (squares - totals.square() / count) / count
    return torch.where(variance > 1e-6 * squares / count, variance, 0.0).clamp_(min=0).sqrt()


def _correlations(scales: Tensor, scatters: Tensor) -> Tensor:
    """Returns what scales and scatters have in common, [3 + orders].

    The entries are how many groups count, how much their scatter varies, the correlation of both
    logarithms, and that correlation with rows of words in each other order.
    """
    whole = len(scales) // _WORD * _WORD
    scales, scatters = scales[:whole], scatters[:whole]
    if scales.shape[1] < 2 or whole == 0:
        return torch.zeros(3 + len(WORD_ORDERS), dtype=torch.float64, device=scales.device)
    usable = (scales > 0) & (scatters > 0)
    sizes, spreads = (_without_common(values, usable) for values in (scales, scatters))
    # Not by an index, which would be copied to the device and waits for its stream.
    rows = spreads.view(-1, _WORD, spreads.shape[1]).unbind(1)
    others = (torch.stack([rows[place] for place in order], 1).flatten(0, 1) for order in WORD_ORDERS.values())
    found = [_correlation(sizes, spreads), *(_correlation(sizes, other) for other in others)]
    return torch.stack([usable.sum().double(), _variation(scatters, usable), *found])


def _variation(values: Tensor, usable: Tensor) -> Tensor:
    """Deviation of the usable ones, as a part of their mean."""
    count = usable.sum().clamp(min=1)
    kept = torch.where(usable, values, torch.zeros_like(values)).double()
    mean = kept.sum() / count
    squares = torch.where(usable, kept - mean, torch.zeros_like(kept)).square().sum()
    return (squares / count).sqrt() / mean.clamp(min=1e-30)


def _without_common(values: Tensor, usable: Tensor) -> Tensor:
    """Logarithms less the means of their row and their column; 0 where they are not usable."""
    logs = torch.where(usable, values, torch.ones_like(values)).double().log()
    logs = logs - logs.mean(1, keepdim=True)
    return torch.where(usable, logs - logs.mean(0, keepdim=True), torch.zeros_like(logs))


def _correlation(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum() / (left.square().sum() * right.square().sum()).sqrt().clamp(min=1e-30)
