"""The rotary embeddings of a model: tables of cosines and sines, made from the description once.

Layers that rotate alike share a table. A step takes its rows of each once (`Rotations`), and a
layer knows by a number which of them are its own.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from headrace_kernels.attention.rope import rope_rows
from headrace_kernels.attention.rope_frequencies import (
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    longrope_attention_factor,
    longrope_frequencies,
    proportional_frequencies,
    rope_table,
    yarn_attention_factor,
    yarn_frequencies,
)
from headrace_model_folder import ModelDescription, RopeConfig
from headrace_model_folder.description import Attention, Layer

# A step's rows of each table, in the order of `ModelDescription.rotations`.
Rotations: TypeAlias = tuple[Tensor, ...]


class RotaryTable(nn.Module):
    """[max_position, 2, rotary_dim / 2] fp32 cosines and sines of layers that rotate alike."""

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


class RotaryTables(nn.Module):
    """The table of each rotation that some layer of a model has."""

    def __init__(self, model: ModelDescription, max_position: int, device: torch.device) -> None:
        super().__init__()
        self.tables = nn.ModuleList(RotaryTable(*rotation, max_position, device) for rotation in model.rotations)
        self._numbers = {rotation: number for number, rotation in enumerate(model.rotations)}

    def forward(self, positions: Tensor) -> Rotations:
        """[num_tokens] int64 -> the step's rotations, a tensor for each table."""
        return tuple(table(positions) for table in self.tables)

    def number(self, layer: Layer) -> int:
        """Which of the step's rotations a layer's heads take; 0 of one that rotates nothing."""
        return self._numbers[layer.attention.rotation] if isinstance(layer.attention, Attention) else 0


def tables_bytes(model: ModelDescription, max_position: int) -> int:
    """Bytes of a model's `RotaryTables`, which every rank has whole."""
    return max_position * sum(rotary_dim for _, rotary_dim in model.rotations) * torch.float32.itemsize


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
        case "proportional":
            return proportional_frequencies(rotary_dim, rope.theta, rope.factor, rope.proportion), 1.0
        case "none":
            # A cosine of 1 and a sine of 0 in all positions leave heads as they are, to the bit.
            return torch.zeros(rotary_dim // 2), 1.0


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
