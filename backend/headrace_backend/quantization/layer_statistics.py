"""What the integers of a layer tell of how it was packed: where their middle is.

Owns the sums, on the layer's device, and the limit. Weights of a trained or random layer scatter around 0, so the mean of number less zero point over a whole tensor is a small part of a step. Zero points that are one
off shift it by exactly a step, which int4 shows: a step is a third of what its numbers scatter. In 8 bits a step is lost in what means are by themselves, and costs as little.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerStatistics:
    """Sums over the numbers of one layer. Rows are added in any order, from one thread or stream."""

    def __init__(self) -> None:
        # [3]: numbers less zero points, their squares, how many; there from the first rows on.
        self._sums: Tensor | None = None

    def add(self, groups: Tensor, zeros: Tensor) -> None:
        """Adds rows.

        Args:
            groups: [num_rows, num_groups, group_size] integers.
            zeros: [num_rows, num_groups].
        """
        steps = groups.float() - zeros.float()[:, :, None]
        count = torch.full((), steps.numel(), dtype=torch.float64, device=steps.device)
        sums = torch.stack([steps.sum(dtype=torch.float64), steps.square().sum(dtype=torch.float64), count])
        self._sums = sums if self._sums is None else self._sums + sums

    def mean_and_spread(self) -> tuple[float, float] | None:
        """Of number less zero point, in steps; None where there are no integers. Waits for the device."""
        if self._sums is None:
            return None
        total, squares, count = self._sums.tolist()
        mean = total / count
        return mean, max(squares / count - mean * mean, 0.0) ** 0.5
