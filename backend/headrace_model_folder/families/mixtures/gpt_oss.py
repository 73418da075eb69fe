"""gpt-oss: alternating windows, attention sinks, biases everywhere, experts in every layer."""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import ClampedGating, Experts, Layer, ModelDescription, Sinks, StackedExperts
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import MAX_CONTEXT, Switches, decoder, read_sizes
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import read_sliding
from headrace_model_folder.families.mixtures.experts import ExpertNames, Routing, read_routing, with_experts
from headrace_model_folder.fields import Fields

_NAMES = ExpertNames("mlp", "router", gate="gate_proj", up="up_proj", down="down_proj")


def describe(fields: Fields) -> ModelDescription:
    """Layers look back by turns at `sliding_window` tokens and at all, or as `layer_types` says.

    The router's softmax is over the chosen experts, which is that over all of them renormalized.
    """
    sizes, bias = read_sizes(fields), fields.boolean("attention_bias", True)
    model = decoder(sizes, _windows(fields, sizes.num_layers), Switches(qkv_bias=bias, output_bias=bias))
    _refuse_other_number(fields)
    routing = read_routing(fields, "num_local_experts", "intermediate_size", sizes.num_layers, renormalized=True)
    gating = ClampedGating(
        alpha=fields.number("swiglu_alpha", 1e-3, 1e3, 1.702), limit=fields.number("swiglu_limit", 1e-3, 1e6, 7.0)
    )
    layers = (_layer(layer, routing._replace(has_biases=True), gating) for layer in model.layers)
    return dataclasses.replace(model, layers=tuple(layers))


def _layer(layer: Layer, routing: Routing, gating: ClampedGating) -> Layer:
    layer = with_experts(layer, routing, _NAMES)
    assert isinstance(layer.mlp, Experts)
    mlp = dataclasses.replace(layer.mlp, gating=gating, stacked=StackedExperts(f"{layer.name}.mlp.experts"))
    sinks = Sinks(f"{layer.name}.self_attn.sinks", layer.kv_attention.num_heads)
    return dataclasses.replace(layer, attention=dataclasses.replace(layer.kv_attention, sinks=sinks), mlp=mlp)


def _windows(fields: Fields, num_layers: int) -> list[int | None]:
    sliding = read_sliding(fields, num_layers) or [index % 2 == 0 for index in range(num_layers)]
    if not any(sliding):
        return [None] * num_layers
    window = fields.integer("sliding_window", 1, MAX_CONTEXT)
    return [window if is_sliding else None for is_sliding in sliding]


def _refuse_other_number(fields: Fields) -> None:
    """Published files state the experts of a token twice."""
    usual, other = fields.get("num_experts_per_tok"), fields.get("experts_per_token")
    if other is not None and other != usual:
        raise fields.error("experts_per_token", f"must be num_experts_per_tok ({shown(usual)}), is {shown(other)}")


GPT_OSS = Family(
    "GptOssForCausalLM",
    {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        # Published files state none; their tensors are in it.
        "torch_dtype": "bfloat16",
        # Read where config.json has no `rope_parameters` either.
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    describe,
    knows=frozenset({"attention_bias", "sliding_window", "layer_types", "swiglu_limit", "swiglu_alpha"}),
    gguf=GgufNaming("gpt-oss", has_experts=True, post_attention="post_attention_norm"),
)
