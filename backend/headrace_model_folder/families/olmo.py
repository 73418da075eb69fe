"""OLMo 2 and OLMo 3: norms of outputs instead of inputs, and of whole queries and keys.

Attention and MLP read the residual stream as it is. OLMo 3 has a sliding window in three of four
layers, which rotate without the scaling that stretches the context of the others.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import Layer, ModelDescription, Norm
from headrace_model_folder.families.decoder import MAX_CONTEXT, Sizes, Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import read_sliding
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import by_layer_type, read_rope


def describe_olmo2(fields: Fields) -> ModelDescription:
    """Every layer sees the whole context."""
    sizes = read_sizes(fields)
    return _with_own_norms(fields, sizes, [None] * sizes.num_layers)


def describe_olmo3(fields: Fields) -> ModelDescription:
    """Layers have a window where `layer_types` says so, by default all but each fourth."""
    theta = fields.number("rope_theta", 1.0, 1e12)
    fields, of_sliding = by_layer_type(fields, theta)
    sizes, window = read_sizes(fields), read_window(fields)
    sliding = read_sliding(fields, sizes.num_layers) or [(layer + 1) % 4 != 0 for layer in range(sizes.num_layers)]
    model = _with_own_norms(fields, sizes, [window if is_sliding else None for is_sliding in sliding])
    rope = read_rope(of_sliding, fields.integer("max_position_embeddings", 1, MAX_CONTEXT), sizes.rotary_dim)
    layers = (
        layer.with_rope(rope) if is_sliding else layer for layer, is_sliding in zip(model.layers, sliding, strict=True)
    )
    return dataclasses.replace(model, layers=tuple(layers))


def _with_own_norms(fields: Fields, sizes: Sizes, windows: list[int | None]) -> ModelDescription:
    bias = fields.boolean("attention_bias", False)
    model = decoder(sizes, windows, Switches(bias, bias))
    layers = tuple(_normed(layer, sizes) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, norm=_norm(model.norm.name, sizes.hidden_size, sizes))


def _normed(layer: Layer, sizes: Sizes) -> Layer:
    attention, name = layer.kv_attention, layer.name
    query, key, _ = attention.projected
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(
            attention,
            query_norm=_norm(f"{name}.self_attn.q_norm", query.outputs, sizes),
            key_norm=_norm(f"{name}.self_attn.k_norm", key.outputs, sizes),
        ),
        attention_norm=None,
        mlp_norm=None,
        attention_output_norm=_norm(f"{name}.post_attention_layernorm", sizes.hidden_size, sizes),
        mlp_output_norm=_norm(f"{name}.post_feedforward_layernorm", sizes.hidden_size, sizes),
    )


def _norm(name: str, size: int, sizes: Sizes) -> Norm:
    return Norm(name, size, sizes.norm_eps, rounds_once=True)


_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

OLMO2 = Family(
    "Olmo2ForCausalLM",
    _DEFAULTS,
    describe_olmo2,
    knows=frozenset({"attention_bias"}),
    gguf=GgufNaming("olmo2", windowed="Olmo3ForCausalLM", post_attention="post_attention_norm"),
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    {**_DEFAULTS, "sliding_window": 4096, "rope_theta": 500_000.0},
    describe_olmo3,
    knows=frozenset({"attention_bias", "sliding_window", "layer_types"}),
)
