"""Whose rows of a GGUF file stand in another order than modules take them.

Owns the two reasons: Llama's files have the two numbers that are rotated together side by side,
where ours lie half a head apart; Qwen3.5's have value heads by their place among those of a key,
the first of every key, then the second, where ours lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace_model_folder.description import Attention, GatedDeltaNet, ModelDescription
from headrace_model_folder.families.family import GgufNaming
from headrace_model_folder.safetensors_header import RowOrder


def row_orders(model: ModelDescription, naming: GgufNaming) -> dict[str, RowOrder]:
    """Name of each tensor whose rows stand in another order -> that order.

    Args:
        model: The model; projections that a file keeps in one tensor have their own names.
        naming: What files of the family differ in.
    """
    orders = dict(_of_values(model.recurrent_layers))
    return orders | dict(_of_halves(model.attentions)) if naming.alternates else orders


def _of_halves(attentions: Iterable[Attention]) -> Iterator[tuple[str, RowOrder]]:
    """Queries and keys."""
    for attention in attentions:
        order = RowOrder(attention.head_dim // 2, 2)
        for linear in attention.projected[:2]:
            yield from ((name, order) for name, _ in linear.tensors())


def _of_values(attentions: Iterable[GatedDeltaNet]) -> Iterator[tuple[str, RowOrder]]:
    """Whatever has rows for each value head, or for each of its elements."""
    for attention in attentions:
        places, keys = attention.values_per_key, attention.num_key_heads
        if places == 1:
            continue
        of_heads, of_elements = RowOrder(places, keys), RowOrder(places, keys, attention.value_dim)
        channels = RowOrder(places, keys, attention.value_dim, attention.query.outputs + attention.key.outputs)
        for part, order in (
            (attention.value, of_elements),
            (attention.gate, of_elements),
            (attention.correction, of_heads),
            (attention.decay, of_heads),
            (attention.log_decay, of_heads),
            (attention.decay_bias, of_heads),
            (attention.convolution, channels),
        ):
            yield from ((name, order) for name, _ in part.tensors())
