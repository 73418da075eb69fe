"""How llama.cpp's converters change the numbers of a family's tensors, each with its way back.

Written from its `conversion`, and independently of the product's reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from tests.support.gguf_numbers import Floats

# Whose rows of queries and keys alternate, and whose norms are 1 more than folders say.
_ALTERNATING, _WHOLE_FACTORS = ("llama", "smollm3"), ("gemma3", "qwen35", "qwen35moe")


class Layout(NamedTuple):
    """A tensor's numbers as folders have them -> as files do, and back."""

    to_file: Callable[[Floats], Floats]
    back: Callable[[Floats], Floats]


def layout(arch: str, config: Mapping[str, Any], name: str) -> Layout:
    """What is changed in a tensor of a folder."""
    if "linear_attn." in name:
        return _of_linear_attention(config, name.rpartition("linear_attn.")[2])
    if arch in _ALTERNATING and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return Layout(
            lambda rows: _exchanged(rows, heads, 2), lambda rows: _exchanged(rows, heads, len(rows) // heads // 2)
        )
    if arch in _WHOLE_FACTORS and name.endswith("norm.weight"):
        return Layout(lambda factors: factors + 1, lambda factors: factors - 1)
    return Layout(np.squeeze if name.endswith("shared_expert_gate.weight") else _same, _same)


def _same(values: Floats) -> Floats:
    return values


def _exchanged(values: Floats, groups: int, outer: int) -> Floats:
    """[groups, outer, rest] -> [groups, rest, outer] of the first dimension."""
    parts = values.reshape(groups, outer, -1, *values.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(values.shape)


def _of_linear_attention(config: Mapping[str, Any], part: str) -> Layout:
    """Value heads by key become heads by place; rates of decay are whole."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    places = values // keys

    def heads(array: Floats, outer: int, inner: int, size: int) -> Floats:
        parts = array.reshape(outer, inner, size, *array.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(array.shape)

    def by_place(array: Floats, size: int) -> Floats:
        return heads(array, keys, places, size)

    def by_key(array: Floats, size: int) -> Floats:
        return heads(array, places, keys, size)

    match part:
        case "norm.weight":
            return Layout(_same, _same)
        case "A_log":
            return Layout(lambda log: -np.exp(by_place(log, 1)), lambda rates: np.log(-by_key(rates, 1)))
        case "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
            return Layout(lambda array: by_place(array, 1), lambda array: by_key(array, 1))
        case "in_proj_z.weight":
            return Layout(lambda array: by_place(array, dim), lambda array: by_key(array, dim))
        case "out_proj.weight":
            return Layout(lambda array: by_place(array.T, dim).T, lambda array: by_key(array.T, dim).T)
        case "in_proj_qkv.weight" | "conv1d.weight":
            return Layout(
                lambda array: np.concatenate((array[:before], by_place(array[before:], dim))).squeeze(),
                lambda array: np.concatenate((array[:before], by_key(array[before:], dim))),
            )
    raise KeyError(part)
