"""The rotary embedding of a model.

Its table of cosines and sines, made from the configuration once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace_kernels.attention.rope import rope_rows
from headrace_kernels.attention.rope_frequencies import (
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    longrope_attention_factor,
    longrope_frequencies,
    rope_table,
    yarn_attention_factor,
    yarn_frequencies,
)
from headrace_model_folder import RopeConfig


class RotaryTable(nn.Module):
    """[max_position, 2, rotary_dim / 2] fp32 cosines and sines, shared by all layers."""

    table: Tensor

    def __init__(self, rope: RopeConfig, rotary_dim: int, max_position: int, device: torch.device) -> None:
        super().__init__()
        frequencies, attention_factor = rope_frequencies(rope, rotary_dim, max_position)
        self.register_buffer(
            "table", rope_table(frequencies, max_position, attention_factor).to(device), persistent=False
        )

    def forward(self, positions: Tensor) -> Tensor:
        """[num_tokens] int64 -> the step's rotations for `headrace_kernels.attention.rope`."""
        return rope_rows(self.table, positions)


def rope_frequencies(rope: RopeConfig, rotary_dim: int, max_position: int) -> tuple[Tensor, float]:
    """Computes the frequencies of a rotary embedding.

    Args:
        rope: Its parameters.
        rotary_dim: Elements of a head that are rotated.
        max_position: Tokens of context that the model is prepared for.

    Returns:
        [rotary_dim / 2] fp32 radians per token, and the factor on cosine and sine.
    """
    match rope.rope_type:
        # dynamic stretches beyond the stated context only, which we never exceed
        case "default" | "dynamic":
            frequencies = default_frequencies(rotary_dim, rope.theta)
            if rope.frequency_divisors is not None:
                frequencies /= torch.tensor(rope.frequency_divisors)
            return frequencies, 1.0
        case "linear":
            return linear_frequencies(rotary_dim, rope.theta, rope.factor), 1.0
        case "llama3":
            low, high = rope.low_freq_factor, rope.high_freq_factor
            original = rope.original_max_position_embeddings
            return llama3_frequencies(rotary_dim, rope.theta, rope.factor, low, high, original), 1.0
        case "yarn":
            return _yarn(rope, rotary_dim)
        case "longrope":
            return _longrope(rope, rotary_dim, max_position)


def _longrope(rope: RopeConfig, rotary_dim: int, max_position: int) -> tuple[Tensor, float]:
    """Chooses one set of LongRoPE divisors for all requests.

    Rotated keys stay in the cache, where a sequence that outgrows the original context could not
    change sets, and one prefix serves short and long requests.
    """
    is_long = max_position > rope.original_max_position_embeddings
    divisors = torch.tensor(rope.long_divisors if is_long else rope.short_divisors)
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = longrope_attention_factor(rope.factor, rope.original_max_position_embeddings)
    return longrope_frequencies(rotary_dim, rope.theta, divisors), attention_factor


def _yarn(rope: RopeConfig, rotary_dim: int) -> tuple[Tensor, float]:
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = yarn_attention_factor(rope.factor, rope.mscale, rope.mscale_all_dim)
    original = rope.original_max_position_embeddings
    blend = (rope.beta_fast, rope.beta_slow, rope.truncate)
    return yarn_frequencies(rotary_dim, rope.theta, rope.factor, original, *blend), attention_factor
