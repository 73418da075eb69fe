"""Frequencies of the rotary embedding.

There is one function per way of stretching a context, and the table of cosines and sines made
from them.

All in fp32 like the models' training code; computed once at load. Rotating queries and keys is
`rope`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def default_frequencies(head_dim: int, theta: float) -> Tensor:
    """[head_dim / 2] theta^(-2i / head_dim): a geometric series of radians per token."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))


def linear_frequencies(head_dim: int, theta: float, factor: float) -> Tensor:
    """Positions divided by the factor."""
    return default_frequencies(head_dim, theta) / factor


def proportional_frequencies(head_dim: int, theta: float, factor: float, proportion: float) -> Tensor:
    """The first planes, a share of all, have a whole head's frequencies, the others 0.

    Source: transformers' rotary type `proportional`.
    """
    frequencies = linear_frequencies(head_dim, theta, factor)
    frequencies[int(proportion * head_dim // 2) :] = 0.0
    return frequencies


def llama3_frequencies(
    head_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended.

    Source: Llama 3.1's reference code.
    """
    frequencies = default_frequencies(head_dim, theta)
    rotations = original_context / (2 * math.pi / frequencies)
    kept = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Frequencies of YaRN, [head_dim / 2].

    Dimensions that rotate often within the original context are kept, slow ones are divided by the
    factor, a ramp lies between.

    Source: YaRN (Peng et al., 2023), section 3.2.
    """

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal bounds would divide by zero; a ramp of a thousandth of a dimension is a step.
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    frequencies = default_frequencies(head_dim, theta)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def longrope_frequencies(head_dim: int, theta: float, divisors: Tensor) -> Tensor:
    """Each frequency divided by its own factor, [head_dim / 2].

    There is one set of factors for contexts as long as the original one, another for longer ones.

    Source: LongRoPE (Ding et al., 2024).
    """
    return 1.0 / (divisors * theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """What LongRoPE multiplies cosine and sine by, for a context stretched by the factor.

    It is the same for both sets of divisors.
    """
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN multiplies cosine and sine by, so that long contexts keep attention sharp.

    Source: YaRN, section 3.4.
    """

    def sharpness(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return sharpness(mscale) / sharpness(mscale_all_dim)
    return sharpness(1.0)


def rope_table(frequencies: Tensor, max_position: int, attention_factor: float = 1.0) -> Tensor:
    """Cosine and sine of every position's angles, fp32 [max_position, 2, head_dim / 2].

    Both are multiplied by the attention factor.
    """
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).mul_(attention_factor)
