"""Measures how far quantized rows are from what was read, and the limit that rounding allows.

Owns sums of squares on the weight's device, read once at the end: nothing waits while weights are
read. On the demo model it is 0.58 of that limit in integers and 0.42 in FP8. The limit follows from
the original values and the kind of number alone, so that rows packed in a wrong order, under a
neighbour's scale or with a zero point one off exceed it, whatever the model.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from headrace_backend.weights.destination import Destination
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.weight_formats.quantized_weight import QuantKind

_INT8_MOST = 127
# Steps of a group's range, which includes 0.
_INT4_STEPS = 15
# e4m3: 3 bits behind the point, 448 the greatest, 2^-9 the least.
_FP8_HALF_STEP = 2.0**-4
_FP8_MOST = 448.0
_FP8_LEAST = 2.0**-9
# A tensor may be this many times as far from its original as rounding can bring it: scales are
# rounded too.
_ROUNDING_SLACK = 1.1


class RoundedRows(Destination):
    """Rows that are rounded to few bits as they come, and know their distance from the original."""

    @abc.abstractmethod
    def error(self) -> tuple[float, float]:
        """||rounded - original|| / ||original||, and the most that rounding can have made of it.

        Waits for the device.
        """

    def finish(self, name: str) -> float:
        """The relative error of the tensor `name`, once all of its rows have come.

        Raises:
            QuantizationRefused: Rounding does not explain it.
        """
        error, most = self.error()
        if not error <= most * _ROUNDING_SLACK:
            raise QuantizationRefused(
                f"tensor {name!r} is not what was read: quantized it is off by {error:.3%}, and rounding explains "
                f"{most:.3%}"
            )
        return error


class TensorError:
    """Error of one quantized tensor.

    Rows are added in any order; those of one tensor from one thread or stream.
    """

    def __init__(self, kind: QuantKind, group_size: int, device: torch.device) -> None:
        self._kind = kind
        self._group_size = group_size
        # [3] sums of squares: of the differences, of the largest possible ones, of the original.
        self._sums = torch.zeros(3, dtype=torch.float32, device=device)

    def add(self, original: Tensor, quantized: Tensor, magnitudes: Tensor | None = None) -> None:
        """Adds rows.

        Args:
            original: Values as they were read, [num_rows, num_inputs].
            quantized: Values that the quantized rows stand for, [num_rows, num_inputs].
            magnitudes: [num_rows] fp32, what rows were scaled by; None: the largest magnitude of
                each group. Not for INT4.
        """
        exact = original.float()
        difference = (quantized.float() - exact).square().sum()
        groups = exact.view(len(exact), -1, self._group_size)
        limit = self._possible_squares(groups, None if magnitudes is None else magnitudes[:, None])
        self._sums += torch.stack([difference, limit, exact.square().sum()])

    def read(self) -> tuple[float, float]:
        """||quantized - original|| / ||original||, and the most that rounding can have made of it.

        Waits for the device.
        """
        difference, limit, square = self._sums.tolist()
        if square == 0:
            return (0.0 if difference == 0 else float("inf")), 0.0
        return (difference / square) ** 0.5, (limit / square) ** 0.5

    def _possible_squares(self, groups: Tensor, most: Tensor | None) -> Tensor:
        """Sum over all weights of the squares of half a quantization step.

        `groups` is [num_rows, num_groups, group_size], magnitudes are [num_rows, num_groups].
        """
        sizes = groups.abs()
        if most is None:
            most = sizes.amax(-1)
        if self._kind is QuantKind.FP8:
            least = most[..., None] * (_FP8_LEAST / _FP8_MOST / 2)
            return torch.maximum(sizes * _FP8_HALF_STEP, least).square().sum()
        if self._kind is QuantKind.INT8:
            half_steps = most / _INT8_MOST / 2
        else:
            half_steps = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / _INT4_STEPS / 2
        return half_steps.square().sum() * self._group_size
