"""GPTQ rounds weights input by input, and later inputs' weights make up for each error.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", 2022, sections 3 and 4: the Cholesky form with lazy updates by
blocks. Owns the order of inputs and the damping. A group's scale is found when its first input is
reached, from the weights as they are by then; with `act_order` from the original weights, so that
groups lie side by side in the file (static groups).

Inputs that calibration never saw (all zeros) say nothing and are rounded to nearest: their row of
the Gram matrix becomes that of an input which goes with no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_quantize.checks import QuantizeRefused
from headrace_quantize.rounding.numbers import NumberFormat, QuantizedMatrix, grouped

# Inputs whose errors are collected before the weights behind them are updated. A multiple of all
# group sizes.
_BLOCK = 128
# The Gram matrix of few tokens is singular, and fp32 may find it indefinite: more is added until it
# is not.
_MORE_DAMPING = 10.0
_MOST_DAMPING = 10.0


def inverse_factor(gram: Tensor, damping: float, name: str) -> Tensor:
    """Upper triangular U with U^T U = (gram + damping x mean of its diagonal)^-1.

    Args:
        gram: [K, K], not changed.
        damping: Share of the mean; ten times as much, and so on, where that does not suffice.
        name: The projection, for the message.

    Raises:
        QuantizeRefused: No damping up to ten times the mean makes it positive definite.
    """
    diagonal = gram.diagonal()
    upper: Tensor
    mean = float(diagonal.mean())
    dead = diagonal <= 0
    share = damping
    while share <= max(_MOST_DAMPING, damping):
        damped = gram.clone()
        damped.diagonal().add_(torch.where(dead, mean or 1.0, share * mean))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not int(failed) and bool(torch.isfinite(upper).all()):
                return upper
        share *= _MORE_DAMPING
    raise QuantizeRefused(
        f"--damping: the Hessian of {name} is not positive definite with {_MOST_DAMPING:g} times its mean added"
    )


def quantize(
    weight: Tensor, gram: Tensor, format: NumberFormat, group: int | None, damping: float, act_order: bool, name: str
) -> QuantizedMatrix:
    """Rounds a projection.

    Args:
        weight: Weight [outputs, K] fp32, not changed.
        gram: Gram matrix [K, K] of the weight's inputs.
        format: Format of the numbers.
        group: Inputs that share a scale; None: all.
        damping: Share of the mean diagonal that `inverse_factor` adds to the diagonal.
        act_order: Inputs with the largest squares first.
        name: Name of the projection, for messages.
    """
    order = (
        gram.diagonal().argsort(descending=True, stable=True)
        if act_order
        else torch.arange(len(gram), device=gram.device)
    )
    ordered = gram[order][:, order] if act_order else gram
    rounding = _Rounding(weight, format, group, order, static=act_order)
    upper = inverse_factor(ordered, damping, name)
    # An input's weights lie side by side: each is read and written a hundred times.
    left = weight.t()[order]
    for begin in range(0, len(left), _BLOCK):
        end = min(begin + _BLOCK, len(left))
        errors = _round_block(left[begin:end], upper[begin:end, begin:end], rounding, begin)
        left[end:].addmm_(upper[begin:end, end:].t(), errors, alpha=-1)
    return rounding.result()


def _round_block(block: Tensor, upper: Tensor, rounding: _Rounding, begin: int) -> Tensor:
    """Rounds the inputs of a block, which is used up, and returns their errors [inputs, outputs].

    Each error is divided by its diagonal entry.
    """
    errors = torch.empty_like(block)
    for place in range(len(block)):
        errors[place] = rounding.round(begin + place, block[place:]) / upper[place, place]
        block[place + 1 :].addr_(upper[place, place + 1 :], errors[place], alpha=-1)
    return errors


class _Rounding:
    """Scales by group and the numbers found so far."""

    def __init__(self, weight: Tensor, format: NumberFormat, group: int | None, order: Tensor, static: bool) -> None:
        self._format, self._order, self._static = format, order.tolist(), static
        self._group = group or weight.shape[1]
        groups = grouped(weight, group)
        scales, zeros = format.fit(groups.amin(2), groups.amax(2))
        # [groups, outputs], and [inputs, outputs].
        self._scales, self._zeros = scales.t().contiguous(), zeros.t().contiguous()
        self._numbers = torch.empty_like(weight.t(), memory_format=torch.contiguous_format)
        self._is_whole_row = self._group == weight.shape[1]

    def round(self, place: int, left: Tensor) -> Tensor:
        """Rounds the first of the inputs in `left` and returns what is lost, [outputs].

        `left` holds the inputs of the block from `place` on, [inputs, outputs].
        """
        index = self._order[place]
        group = index // self._group
        # A whole row's scale is the one it began with: nothing was updated then.
        if not self._static and not self._is_whole_row and index % self._group == 0:
            mine = left[: self._group]
            self._scales[group], self._zeros[group] = self._format.fit(mine.amin(0), mine.amax(0))
        scale, zero = self._scales[group], self._zeros[group]
        numbers = self._format.round(left[0], scale, zero)
        self._numbers[index] = numbers
        return left[0] - self._format.dequantize(numbers, scale, zero)

    def result(self) -> QuantizedMatrix:
        """After all inputs."""
        found = (each.t().contiguous() for each in (self._numbers, self._scales, self._zeros))
        return QuantizedMatrix(self._format, *found)
