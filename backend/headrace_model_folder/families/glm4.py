"""GLM-4 of April 2025 (0414): norms before and behind attention and MLP, gate and up in one tensor.

The first half of each head is rotated, and neighbours form planes. Queries, keys and values have
biases.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import Layer, Mlp, ModelDescription, Norm
from headrace_model_folder.families.decoder import Sizes, Switches, decoder, read_sizes
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.fused import fused
from headrace_model_folder.fields import Fields


def describe(fields: Fields) -> ModelDescription:
    """Every layer sees the whole context."""
    sizes, bias = read_sizes(fields, rotates_parts=True), fields.boolean("attention_bias", False)
    model = decoder(sizes, [None] * sizes.num_layers, Switches(qkv_bias=bias))
    return dataclasses.replace(model, layers=tuple(_with_own_parts(layer, sizes) for layer in model.layers))


def _with_own_parts(layer: Layer, sizes: Sizes) -> Layer:
    assert isinstance(layer.mlp, Mlp), "the family has no experts"
    gate, up = fused(f"{layer.name}.mlp.gate_up_proj", layer.mlp.gate, layer.mlp.up)
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(layer.kv_attention, interleaved=True),
        mlp=dataclasses.replace(layer.mlp, gate=gate, up=up),
        attention_output_norm=Norm(f"{layer.name}.post_self_attn_layernorm", sizes.hidden_size, sizes.norm_eps),
        mlp_output_norm=Norm(f"{layer.name}.post_mlp_layernorm", sizes.hidden_size, sizes.norm_eps),
    )


GLM4 = Family(
    "Glm4ForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    describe,
    knows=frozenset({"attention_bias"}),
    gguf=GgufNaming("glm4"),
)
