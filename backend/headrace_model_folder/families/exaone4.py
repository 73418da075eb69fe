"""EXAONE 4: norms of outputs and of heads, none of inputs.

Larger models have a sliding window in three of four layers. Those alone rotate queries and keys
then, and the layers that see everything know positions through them.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import Layer, ModelDescription, Norm
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import Sizes, Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import read_sliding
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import NO_ROPE


def describe(fields: Fields) -> ModelDescription:
    """Layers have the window, if there is one, where `layer_types` or the pattern says so."""
    sizes, window = read_sizes(fields), read_window(fields)
    sliding = [False] * sizes.num_layers if window is None else _sliding(fields, sizes.num_layers)
    model = decoder(sizes, [window if is_sliding else None for is_sliding in sliding], Switches(head_norms=True))
    layers = (_normed(layer, sizes) for layer in model.layers)
    if window is not None:
        layers = (
            layer if is_sliding else layer.with_rope(NO_ROPE) for layer, is_sliding in zip(layers, sliding, strict=True)
        )
    return dataclasses.replace(model, layers=tuple(layers))


def _sliding(fields: Fields, num_layers: int) -> list[bool]:
    """For each layer whether it has the window; a pattern is a period, or letters such as LLLG."""
    stated = read_sliding(fields, num_layers)
    if stated is not None:
        return stated
    name = "sliding_window_pattern"
    pattern = fields.get(name)
    if not isinstance(pattern, str):
        period = fields.integer(name, 1, 1 << 20)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    if not pattern or set(pattern) - {"L", "G"}:
        raise fields.error(name, f"must be a number or letters L and G, is {shown(pattern)}")
    return [pattern[layer % len(pattern)] == "L" and layer + 1 < num_layers for layer in range(num_layers)]


def _normed(layer: Layer, sizes: Sizes) -> Layer:
    """The layer with norms behind attention and MLP in place of those before them."""
    return dataclasses.replace(
        layer,
        attention_norm=None,
        mlp_norm=None,
        attention_output_norm=Norm(f"{layer.name}.post_attention_layernorm", sizes.hidden_size, sizes.norm_eps),
        mlp_output_norm=Norm(f"{layer.name}.post_feedforward_layernorm", sizes.hidden_size, sizes.norm_eps),
    )


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    {
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    describe,
    knows=frozenset({"sliding_window", "layer_types"}),
    gguf=GgufNaming("exaone4", post_attention="post_attention_norm"),
)
