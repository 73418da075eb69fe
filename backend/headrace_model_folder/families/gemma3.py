"""Gemma 3: the text models, and the text part of those that see.

Norms stand before and behind attention and MLP, their factors 1 more than the tensors say. Five of
six layers have a sliding window and rotate by a base of their own. Embeddings are scaled, the gate
is GELU, and what multiplies scores is stated. Images are not understood: what is there for them is
left out.
"""

from __future__ import annotations

import dataclasses
import math

from headrace_model_folder.description import Layer, Mlp, ModelDescription, Norm
from headrace_model_folder.families.decoder import MAX_CONTEXT, Sizes, Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import read_sliding
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import by_layer_type, read_rope
from headrace_model_folder.text_part import TextPart


def describe(fields: Fields) -> ModelDescription:
    """Layers have a window where `layer_types` or `sliding_window_pattern` says so."""
    _refuse_what_is_not_computed(fields)
    fields, of_sliding = by_layer_type(fields, fields.number("rope_local_base_freq", 1.0, 1e12))
    sizes, bias = read_sizes(fields), fields.boolean("attention_bias", False)
    window, sliding = read_window(fields), _sliding(fields, sizes.num_layers)
    windows = [window if is_sliding else None for is_sliding in sliding]
    model = decoder(sizes, windows, Switches(bias, bias, head_norms=True))
    scale = fields.number("query_pre_attn_scalar", 1e-3, 1e6) ** -0.5
    rope = read_rope(of_sliding, fields.integer("max_position_embeddings", 1, MAX_CONTEXT), sizes.rotary_dim)
    layers = (
        _with_own_parts(layer.with_rope(rope) if is_sliding else layer, sizes, scale)
        for layer, is_sliding in zip(model.layers, sliding, strict=True)
    )
    return dataclasses.replace(
        model,
        embedding=dataclasses.replace(model.embedding, scale=math.sqrt(sizes.hidden_size)),
        layers=tuple(layers),
        norm=_raised(model.norm),
    )


def _refuse_what_is_not_computed(fields: Fields) -> None:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(name) is not None:
            raise fields.error(name, "must be null: soft caps are not supported")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "must be false: a token sees what came before it")


def _sliding(fields: Fields, num_layers: int) -> list[bool]:
    stated = read_sliding(fields, num_layers)
    if stated is not None:
        return stated
    pattern = fields.integer("sliding_window_pattern", 1, 1 << 20)
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def _with_own_parts(layer: Layer, sizes: Sizes, scale: float) -> Layer:
    def norm(name: str) -> Norm:
        return Norm(
            f"{layer.name}.{name}_layernorm", sizes.hidden_size, sizes.norm_eps, adds_one=True, rounds_once=True
        )

    attention, mlp = layer.kv_attention, layer.mlp
    assert isinstance(mlp, Mlp), "the family has no experts"
    assert attention.query_norm is not None and attention.key_norm is not None, "the family norms heads"
    query_norm, key_norm = _raised(attention.query_norm), _raised(attention.key_norm)
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(attention, query_norm=query_norm, key_norm=key_norm, scale=scale),
        mlp=dataclasses.replace(mlp, activation="gelu_tanh"),
        attention_norm=norm("input"),
        attention_output_norm=norm("post_attention"),
        mlp_norm=norm("pre_feedforward"),
        mlp_output_norm=norm("post_feedforward"),
    )


def _raised(norm: Norm) -> Norm:
    return dataclasses.replace(norm, adds_one=True, rounds_once=True)


# config.json of the published models that see leaves out most of them.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_TEXT_PART = TextPart(
    "text_config",
    {
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    of_all=("tie_word_embeddings",),
)

GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _DEFAULTS,
    describe,
    knows=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "layer_types",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "final_logit_softcapping",
            "attn_logit_softcapping",
            "use_bidirectional_attention",
            "hidden_activation",
        }
    ),
    activation_field="hidden_activation",
    activations=("gelu_pytorch_tanh",),
    gguf=GgufNaming("gemma3", post_attention="post_attention_norm", has_whole_factors=True),
)
GEMMA3_OF_SEVERAL = dataclasses.replace(
    GEMMA3, architecture="Gemma3ForConditionalGeneration", text_part=_TEXT_PART, gguf=None
)
