"""AWQ: scales inputs with large activations up in the weight, so that they get finer numbers.

What makes the inputs is scaled down.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", 2023, section 3. Scales are mean |x|^alpha, alpha on a grid from 0 (no scaling) to 1;
what is best is judged by the error of the outputs, from the Gram matrix of the inputs. Ranges of
groups are then shrunk where that lowers the error too (`clip`). Owns the search. Where scales may
be folded into is `stages`' knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace_quantize.rounding.numbers import NumberFormat, QuantizedMatrix, grouped, round_to_nearest
from headrace_quantize.rounding.statistics import output_error

_ALPHAS = tuple(step / 20 for step in range(20))
_SHRINKS = tuple(1 - step / 20 for step in range(10))
# Smaller activations are not told apart, so that no input is scaled without bound.
_LEAST_SIZE = 1e-4
# Weights that are compared at a time.
_BLOCK_NUMBERS = 1 << 24


def search_scales(
    weights: Sequence[Tensor],
    sizes: Tensor,
    gram: Tensor,
    format: NumberFormat,
    group: int | None,
    tie: Callable[[Tensor], Tensor],
) -> Tensor:
    """Finds the scales [K] of a product's inputs, all 1 where none lowers the error.

    Args:
        weights: Weights [outputs, K] fp32 of the projections that share the inputs and will be
            rounded.
        sizes: Mean |x| of each input, [K].
        gram: Gram matrix of the inputs, [K, K].
        format: Format of the numbers.
        group: Inputs that share a scale of numbers.
        tie: Makes scales equal for inputs that come from one place.
    """
    best, least = torch.ones_like(sizes), float("inf")
    for alpha in _ALPHAS:
        scales = tie(sizes.clamp(min=_LEAST_SIZE).pow(alpha))
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(_scaled_error(weight, scales, gram, format, group) for weight in weights)
        if error < least:
            best, least = scales, error
    return best


def _scaled_error(weight: Tensor, scales: Tensor, gram: Tensor, format: NumberFormat, group: int | None) -> float:
    error = 0.0
    for rows in torch.split(weight, max(_BLOCK_NUMBERS // weight.shape[1], 1)):
        found = round_to_nearest(rows * scales, format, group).dequantized() / scales
        error += float(output_error(rows - found, gram).sum())
    return error


def round_within_ranges(weight: Tensor, gram: Tensor, format: NumberFormat, group: int | None) -> QuantizedMatrix:
    """Rounds to nearest within the ranges that change the outputs least, and cuts weights beyond.

    Args:
        weight: Scaled weight, [outputs, K] fp32.
        gram: Gram matrix of the scaled inputs, [K, K].
        format: Format of the numbers.
        group: Inputs that share a scale; None: all.
    """
    return round_to_nearest(weight, format, group, _best_shrinks(weight, gram, format, group))


def _best_shrinks(weight: Tensor, gram: Tensor, format: NumberFormat, group: int | None) -> Tensor:
    """[outputs, groups]: how much of each group's range to use.

    Groups are judged one by one, by the inputs of their own.
    """
    groups = grouped(weight, group)
    count, size = groups.shape[1:]
    inner = torch.stack([gram[first : first + size, first : first + size] for first in range(0, count * size, size)])
    best = torch.ones(len(weight), count, device=weight.device)
    least = torch.full_like(best, float("inf"))
    for shrink in _SHRINKS:
        found = round_to_nearest(weight, format, group, torch.full_like(best, shrink)).dequantized()
        # [groups, outputs, inputs of a group]
        difference = (groups - found.view(groups.shape)).transpose(0, 1)
        error = (torch.bmm(difference, inner) * difference).sum(2).t()
        better = error < least
        best, least = torch.where(better, shrink, best), torch.where(better, error, least)
    return best
