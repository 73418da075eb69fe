"""Inputs of a product rounded to 8 bits and back, as a weight's scheme says.

This is for where no kernel multiplies the 8 bits themselves.

Owns what a scheme may say (`InputRounding`) and its arithmetic, which is that of the formats' own
tools. Which products round, and which on a card multiply rounded tokens (`rounded_tokens`), is
`linear.quantized`'s.

    e4m3 and symmetric int8    scale = max|x| / 448 or max|x| / 127.5, number = x / scale to
                               nearest, ties to even, cut off at -448 and 448 or at -128 and 127
    int8 with a zero point     scale = (max(x, 0) - min(x, 0)) / 255, zero = -128 - min(x, 0) /
                               scale to nearest, number = x / scale + zero

A product multiplies scale (number - zero). A static scale and zero point hold for all tokens;
others are measured over each token's inputs or over groups of them. Neither looks at other tokens,
so a row's result does not depend on its batch. Inputs that are NaN or infinite make the token NaN,
which ends its request.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

# The smallest and the largest number of each type.
_RANGES = {torch.float8_e4m3fn: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}


@dataclasses.dataclass(frozen=True, slots=True)
class InputRounding:
    """How a weight's scheme rounds the inputs that it multiplies."""

    # torch.float8_e4m3fn or torch.int8.
    number: torch.dtype
    # Inputs that share a scale, the last of a token maybe fewer; 0: all of a token's.
    group_size: int = 0
    # Whether there is no zero point.
    is_symmetric: bool = True
    # The scale of all tokens; None: each token or group has its own.
    scale: float | None = None
    # int8 with a static scale: the zero point of all tokens.
    zero_point: int = 0

    @property
    def is_per_token(self) -> bool:
        """Whether values and one scale for each token say all.

        Then kernels may multiply the values themselves.
        """
        return self.group_size == 0 and self.is_symmetric


def rounded_inputs(x: Tensor, rounding: InputRounding) -> Tensor:
    """Rounds inputs to 8 bits and back.

    Args:
        x: [num_tokens, num_inputs] bf16, fp16 or fp32.
        rounding: The scheme.

    Returns:
        [num_tokens, num_inputs] in the type of x, to which results are rounded.
    """
    num_tokens, num_inputs = x.shape
    wide = x.float()
    if rounding.scale is not None:
        # Infinity times 0 is NaN: what a static scale cuts off must not come out as a number.
        wide = wide + wide * 0
        scale, zero = (torch.tensor(value, device=x.device) for value in (rounding.scale, float(rounding.zero_point)))
        return _rounded(wide, scale, zero, rounding).to(x.dtype)
    group = rounding.group_size or num_inputs
    groups = functional.pad(wide, (0, -num_inputs % group)).view(num_tokens, -1, group)
    found = _rounded(groups, *_measured(groups, rounding), rounding)
    return found.view(num_tokens, -1)[:, :num_inputs].to(x.dtype)


def _measured(groups: Tensor, rounding: InputRounding) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group: [num_tokens, groups, 1]."""
    low, high = _RANGES[rounding.number]
    if rounding.is_symmetric:
        scales = groups.abs().amax(-1, keepdim=True) / ((high - low) / 2)
    else:
        least = groups.amin(-1, keepdim=True).clamp_(max=0)
        scales = (groups.amax(-1, keepdim=True).clamp_(min=0) - least) / (high - low)
    # Groups of zeros have any scale.
    scales = torch.where(scales == 0, torch.finfo(torch.float32).eps, scales)
    if rounding.is_symmetric:
        return scales, torch.zeros((), device=groups.device)
    return scales, (low - least / scales).clamp_(low, high).round_()


def _rounded(wide: Tensor, scales: Tensor, zeros: Tensor, rounding: InputRounding) -> Tensor:
    low, high = _RANGES[rounding.number]
    numbers = (wide / scales + zeros).clamp_(low, high)
    if rounding.number is torch.int8:
        numbers = numbers.round_()
    else:
        numbers = numbers.to(rounding.number).float()
    return (numbers - zeros) * scales
