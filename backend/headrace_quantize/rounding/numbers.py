"""Rounds to numbers of few bits and back: what scales and zero points mean for every method.

    value = scale x (number - zero)

Integers run from -2^(bits-1) to 2^(bits-1) - 1; e4m3 from -448 to 448, without zero. Scales are
rounded to the type that they are stored in before anything is rounded by them, so that what is
measured here is what a reader dequantizes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

_FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True, slots=True)
class NumberFormat:
    """Kind of number, and the type of its scales."""

    bits: int
    symmetric: bool
    is_float: bool
    scale_dtype: torch.dtype

    @property
    def least(self) -> float:
        """The lowest number."""
        return torch.finfo(_FP8).min if self.is_float else -(2.0 ** (self.bits - 1))

    @property
    def most(self) -> float:
        """The highest number."""
        return torch.finfo(_FP8).max if self.is_float else 2.0 ** (self.bits - 1) - 1

    def fit(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point with which numbers span a range.

        Args:
            low: Lowest value of each group, fp32; taken as 0 if above.
            high: Highest value, alike.

        Returns:
            Scales (fp32, of a value that `scale_dtype` holds) and zero points (fp32, whole), shaped
            like `low`.
        """
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.symmetric:
            scale = self._storable(torch.maximum(low / self.least, high / self.most))
            return scale, torch.zeros_like(scale)
        scale = self._storable((high - low) / (self.most - self.least))
        return scale, (self.least - low / scale).round_().clamp_(self.least, self.most)

    def round(self, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest numbers, fp32. Scale and zero broadcast."""
        numbers = values / scale
        if not self.is_float:
            numbers = numbers.round_().add_(zero)
        numbers = numbers.clamp_(self.least, self.most)
        return numbers.to(_FP8).float() if self.is_float else numbers

    def dequantize(self, numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The values that numbers stand for, fp32."""
        return (numbers - zero) * scale

    def _storable(self, scale: Tensor) -> Tensor:
        """Rounded to the stored type, never 0: a group of zeros has scale 1."""
        least = 2.0**-24 if self.scale_dtype == torch.float16 else torch.finfo(self.scale_dtype).tiny
        stored = torch.where(scale > 0, scale.clamp(min=least), 1.0)
        return stored.to(self.scale_dtype).float()


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A projection's weight [outputs, inputs] in numbers."""

    format: NumberFormat
    # [outputs, inputs] fp32, each a number of the format.
    numbers: Tensor
    # [outputs, groups] fp32.
    scales: Tensor
    zeros: Tensor

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        groups = self.numbers.view(len(self.numbers), self.scales.shape[1], -1)
        values = self.format.dequantize(groups, self.scales[:, :, None], self.zeros[:, :, None])
        return values.flatten(1)


def grouped(weight: Tensor, group: int | None) -> Tensor:
    """[outputs, inputs] -> [outputs, groups, inputs of a group]."""
    return weight.reshape(len(weight), -1, group or weight.shape[1])


def round_to_nearest(
    weight: Tensor, format: NumberFormat, group: int | None, shrink: Tensor | None = None
) -> QuantizedMatrix:
    """Every weight to the nearest number, the range of each group as wide as its weights.

    Args:
        weight: [outputs, inputs] fp32.
        format: Numbers.
        group: Inputs that share a scale; None: all.
        shrink: [outputs, groups], what ranges are multiplied by; None: 1.
    """
    groups = grouped(weight, group)
    low, high = groups.amin(2), groups.amax(2)
    if shrink is not None:
        low, high = low * shrink, high * shrink
    scales, zeros = format.fit(low, high)
    numbers = format.round(groups, scales[:, :, None], zeros[:, :, None])
    return QuantizedMatrix(format, numbers.flatten(1), scales, zeros)
