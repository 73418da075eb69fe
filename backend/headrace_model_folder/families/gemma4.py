"""Gemma 4: the text models, and the text part of those that see and hear.

Layers are Gemma 3's, but norms have the factors that the tensors say, values are normed too, and a
number of each layer multiplies the stream behind it. Layers that see the whole context have heads
of their own size, whose keys may be the values, and rotate a share of each head. The last layers
may read the keys and values of layers before them. Small models have inputs of tokens in every
layer (`parts.per_layer_input`). Logits are capped. A larger model has experts beside each layer's
MLP. Images and sounds are not understood: what is there for them is left out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from headrace_model_folder.description import (
    Attention,
    Embedding,
    Head,
    Layer,
    Linear,
    Mlp,
    ModelDescription,
    Norm,
    PerLayerEmbedding,
    PerLayerInput,
    Vector,
)
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import MAX_CONTEXT, MAX_WIDTH, Sizes, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.layer_types import FULL, read_sliding
from headrace_model_folder.families.mixtures.gemma4_experts import read_gemma4_routing, with_experts_beside
from headrace_model_folder.fields import Fields
from headrace_model_folder.rope_config import (
    RopeConfig,
    by_layer_type,
    read_proportional_rope,
    read_rope,
    refuse_partial_rotation,
)
from headrace_model_folder.text_part import TextPart

_MAX_HEADS, _MAX_HEAD_DIM = 1024, 1024
_SLIDING = "sliding_attention"


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What layers of one kind have alike: those with a window, or those that see everything."""

    window: int | None
    rope: RopeConfig
    # Whether keys are the values, as they leave their projection.
    keys_are_values: bool


def describe(fields: Fields) -> ModelDescription:
    """Layers have a window where `layer_types` says so, and five of six where it is absent."""
    _refuse_what_is_not_computed(fields)
    kinds = _kinds(fields)
    # The rotations of both kinds are read; what is left is that of no layer.
    fields = Fields(fields.name, {**fields.values, "rope_parameters": None, "rope_scaling": None})
    sizes, sliding = read_sizes(fields), _sliding(fields)
    sources, routing = _kv_sources(fields, sliding), read_gemma4_routing(fields, len(sliding))
    layers = []
    for index, is_sliding in enumerate(sliding):
        of_layer = _layer_sizes(fields, sizes, index, is_sliding, is_shared=sources[index] is not None)
        layer = _layer(index, of_layer, kinds[is_sliding], sources[index], fields)
        layers.append(layer if routing is None else with_experts_beside(layer, routing, sizes.norm_eps))
    shared = [layer.name for layer, source in zip(layers, sources, strict=True) if source is not None]
    return ModelDescription(
        embedding=Embedding(
            "model.embed_tokens", sizes.vocab_size, sizes.hidden_size, scale=math.sqrt(sizes.hidden_size)
        ),
        layers=tuple(layers),
        norm=_norm("model.norm", sizes.hidden_size, sizes.norm_eps),
        head=Head("lm_head", sizes.is_tied, _softcap(fields)),
        unused=tuple(f"{name}.self_attn.{part}" for name in shared for part in ("k_proj", "v_proj", "k_norm")),
        per_layer_embedding=_per_layer_embedding(fields, sizes),
    )


def _refuse_what_is_not_computed(fields: Fields) -> None:
    name = "use_bidirectional_attention"
    if fields.get(name) not in (None, False, "vision"):
        raise fields.error(
            name, f"must be 'vision' or null: tokens of a text see what came before them, is {shown(fields.get(name))}"
        )


def _softcap(fields: Fields) -> float | None:
    name = "final_logit_softcapping"
    return None if fields.get(name) is None else fields.number(name, 1e-3, 1e6)


def _kinds(fields: Fields) -> dict[bool, _Kind]:
    """Layers with a window, by True, and those that see everything, by False."""
    if fields.get("rope_parameters") is None:
        fields = Fields(fields.name, {**fields.values, "rope_parameters": _ROTATIONS})
    full, of_sliding = by_layer_type(fields, 10_000.0)
    keys_are_values = fields.boolean("attention_k_eq_v", False)
    return {
        True: _Kind(read_window(fields), _rope(of_sliding), False),
        False: _Kind(None, _rope(full), keys_are_values),
    }


def _rope(fields: Fields) -> RopeConfig:
    proportional = read_proportional_rope(fields)
    if proportional is not None:
        return proportional
    refuse_partial_rotation(fields)
    # The size of a head counts in types alone that state a number for each of its planes.
    return read_rope(fields, fields.integer("max_position_embeddings", 1, MAX_CONTEXT), 2)


def _sliding(fields: Fields) -> list[bool]:
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    stated = read_sliding(fields, num_layers)
    if stated is None:
        return [index % 6 != 5 and index != num_layers - 1 for index in range(num_layers)]
    if stated[-1]:
        raise fields.error("layer_types", f"must end with {FULL!r}")
    return stated


def _kv_sources(fields: Fields, sliding: list[bool]) -> list[int | None]:
    """The layer before whose keys and values each layer reads; None: its own."""
    num_layers = len(sliding)
    first = num_layers - fields.integer("num_kv_shared_layers", 0, num_layers - 1, 0)
    sources: list[int | None] = [None] * first
    for is_sliding in sliding[first:]:
        own = [index for index in range(first) if sliding[index] == is_sliding]
        if not own:
            kind = _SLIDING if is_sliding else FULL
            raise fields.error("num_kv_shared_layers", f"must leave a layer of {kind!r} whose keys others read")
        sources.append(own[-1])
    return sources


def _layer_sizes(fields: Fields, sizes: Sizes, index: int, is_sliding: bool, is_shared: bool) -> Sizes:
    """The sizes of one layer: its heads, and the width of its MLP."""
    is_wide = is_shared and fields.boolean("use_double_wide_mlp", False)
    sizes = dataclasses.replace(sizes, inner=sizes.inner * (2 if is_wide else 1))
    stated = _stated_heads(fields, index, is_sliding)
    head_dim = stated.integer("head_dim", 2, _MAX_HEAD_DIM, sizes.head_dim)
    num_kv_heads = stated.integer("num_key_value_heads", 1, _MAX_HEADS, sizes.num_kv_heads)
    if sizes.num_heads % num_kv_heads:
        rule = f"must divide num_attention_heads ({sizes.num_heads}), is {num_kv_heads}"
        raise stated.error("num_key_value_heads", rule)
    if head_dim % 2:
        raise stated.error("head_dim", f"must be even, is {head_dim}")
    return dataclasses.replace(sizes, head_dim=head_dim, num_kv_heads=num_kv_heads, rotary_dim=head_dim)


def _stated_heads(fields: Fields, index: int, is_sliding: bool) -> Fields:
    """What config.json says of a layer's heads beside what holds for all, in either form."""
    by_layer: Any = fields.get("per_layer_config")
    if by_layer is None:
        own = {} if is_sliding else {"head_dim": fields.get("global_head_dim")}
        if not is_sliding and fields.boolean("attention_k_eq_v", False):
            own["num_key_value_heads"] = fields.get("num_global_key_value_heads")
        return Fields(fields.name, own)
    if not isinstance(by_layer, dict):
        raise fields.error("per_layer_config", f"must be an object, is {shown(by_layer)}")
    own = by_layer.get(str(index), {})
    if not isinstance(own, dict) or not set(own) <= {"head_dim", "num_key_value_heads"}:
        rule = f"must state head_dim and num_key_value_heads of layer {index} and nothing else, is {shown(own)}"
        raise fields.error("per_layer_config", rule)
    return Fields(f"{fields.name}: per_layer_config {index}", own)


def _norm(name: str, size: int, eps: float) -> Norm:
    return Norm(name, size, eps, rounds_once=True)


def _layer(index: int, sizes: Sizes, kind: _Kind, source: int | None, fields: Fields) -> Layer:
    name, hidden, eps = f"model.layers.{index}", sizes.hidden_size, sizes.norm_eps
    norms = (
        _norm(f"{name}.{part}_layernorm", hidden, eps)
        for part in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    attention_norm, attention_output_norm, mlp_norm, mlp_output_norm = norms
    return Layer(
        name,
        attention_norm,
        _attention(f"{name}.self_attn", sizes, kind, source, fields.boolean("attention_bias", False)),
        mlp_norm,
        Mlp(
            Linear(f"{name}.mlp.gate_proj", sizes.inner, hidden),
            Linear(f"{name}.mlp.up_proj", sizes.inner, hidden),
            Linear(f"{name}.mlp.down_proj", hidden, sizes.inner),
            activation="gelu_tanh",
        ),
        attention_output_norm,
        mlp_output_norm,
        per_layer_input=_per_layer_input(name, sizes, fields),
        scalar=Vector(f"{name}.layer_scalar", (1,)),
    )


def _attention(name: str, sizes: Sizes, kind: _Kind, source: int | None, bias: bool) -> Attention:
    hidden, head_dim = sizes.hidden_size, sizes.head_dim
    queries, keys = sizes.num_heads * head_dim, sizes.num_kv_heads * head_dim
    is_shared = source is not None
    return Attention(
        sizes.num_heads,
        sizes.num_kv_heads,
        head_dim,
        kind.window,
        kind.rope,
        head_dim,
        query=Linear(f"{name}.q_proj", queries, hidden, bias),
        key=None if is_shared else Linear(f"{name}.k_proj", keys, hidden, bias),
        value=None if is_shared or kind.keys_are_values else Linear(f"{name}.v_proj", keys, hidden, bias),
        output=Linear(f"{name}.o_proj", hidden, queries, bias),
        query_norm=_norm(f"{name}.q_norm", head_dim, sizes.norm_eps),
        key_norm=None if is_shared else _norm(f"{name}.k_norm", head_dim, sizes.norm_eps),
        scale=1.0,
        value_norm_eps=sizes.norm_eps,
        kv_source=None if source is None else f"model.layers.{source}",
    )


def _per_layer_size(fields: Fields) -> int:
    """Elements of a layer's input of a token; 0: there is none."""
    return fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, 0)


def _per_layer_embedding(fields: Fields, sizes: Sizes) -> PerLayerEmbedding | None:
    size = _per_layer_size(fields)
    if not size:
        return None
    if fields.integer("vocab_size_per_layer_input", 1, 1 << 22) != sizes.vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"must be vocab_size ({sizes.vocab_size})")
    width = size * sizes.num_layers
    return PerLayerEmbedding(
        Embedding("model.embed_tokens_per_layer", sizes.vocab_size, width, scale=math.sqrt(size)),
        Linear("model.per_layer_model_projection", width, sizes.hidden_size, keeps_dtype=True),
        sizes.hidden_size**-0.5,
        _norm("model.per_layer_projection_norm", size, sizes.norm_eps),
        2.0**-0.5,
    )


def _per_layer_input(name: str, sizes: Sizes, fields: Fields) -> PerLayerInput | None:
    size, hidden = _per_layer_size(fields), sizes.hidden_size
    if not size:
        return None
    return PerLayerInput(
        Linear(f"{name}.per_layer_input_gate", size, hidden, keeps_dtype=True),
        Linear(f"{name}.per_layer_projection", hidden, size, keeps_dtype=True),
        _norm(f"{name}.post_per_layer_input_norm", hidden, sizes.norm_eps),
    )


_ROTATIONS = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# What another class of the same models, which has no inputs by layer, assumes.
_UNIFIED_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_TEXT_PART = TextPart(
    "text_config",
    {"model.language_model.": "model."},
    ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    of_all=("tie_word_embeddings",),
)

GEMMA4 = Family(
    "Gemma4ForCausalLM",
    _DEFAULTS,
    describe,
    knows=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "layer_types",
            "final_logit_softcapping",
            "use_bidirectional_attention",
            "hidden_activation",
            "attention_k_eq_v",
            "num_kv_shared_layers",
            "hidden_size_per_layer_input",
            "enable_moe_block",
            "use_double_wide_mlp",
        }
    ),
    activation_field="hidden_activation",
    activations=("gelu_pytorch_tanh",),
    gguf=GgufNaming("gemma4", has_experts=None, has_varied_layers=True, post_attention="post_attention_norm"),
)
GEMMA4_OF_SEVERAL = dataclasses.replace(
    GEMMA4, architecture="Gemma4ForConditionalGeneration", text_part=_TEXT_PART, gguf=None
)
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4, architecture="Gemma4UnifiedForCausalLM", defaults=_UNIFIED_DEFAULTS, gguf=None
)
GEMMA4_UNIFIED_OF_SEVERAL = dataclasses.replace(
    GEMMA4_UNIFIED, architecture="Gemma4UnifiedForConditionalGeneration", text_part=_TEXT_PART
)
