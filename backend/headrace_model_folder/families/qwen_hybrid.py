"""Qwen3.5 and 3.6: Gated DeltaNet in three of four layers, gated attention in the fourth.

Dense, or with experts in every layer and one that all tokens share.

Norms' factors are 1 more than the tensors say, and a quarter of each head is rotated. Published
folders see as well: their text part is read. They have a layer that predicts the token after the
next (MTP), beside the others: one with attention, of the model's last state and the next token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headrace_model_folder.description import (
    Experts,
    GatedDeltaNet,
    Layer,
    Linear,
    Mlp,
    ModelDescription,
    Norm,
    SharedExpert,
    StateFusion,
    Vector,
)
from headrace_model_folder.families.decoder import MAX_WIDTH, Sizes, Switches, decoder, read_sizes
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.fused import fused
from headrace_model_folder.families.layer_types import FULL, read_other_kind
from headrace_model_folder.families.mixtures.experts import ExpertNames, read_routing, with_experts
from headrace_model_folder.fields import Fields
from headrace_model_folder.text_part import TextPart

# As of other sizes (`families.decoder`): far above any model that exists.
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 512
_MAX_KERNEL = 16
# Names of the layer that predicts the token after the next begin so.
_PREDICTION = "mtp."


@dataclasses.dataclass(frozen=True, slots=True)
class _LinearSizes:
    """Sizes of the layers with linear attention."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int


def describe(fields: Fields) -> ModelDescription:
    """Layers have linear attention where `layer_types` says so, else all but each fourth."""
    if not fields.boolean("attn_output_gate", True):
        raise fields.error("attn_output_gate", "must be true: attention without gates is another architecture's")
    sizes, linear = read_sizes(fields, rotates_parts=True), _read_linear(fields)
    bias = fields.boolean("attention_bias", False)
    model = decoder(sizes, [None] * sizes.num_layers, Switches(bias, bias, head_norms=True))
    layers = (
        _raised(_with_delta_net(layer, sizes, linear) if is_linear else _gated(layer))
        for layer, is_linear in zip(model.layers, _linear_layers(fields, sizes.num_layers), strict=True)
    )
    model = dataclasses.replace(model, layers=tuple(layers), norm=_raised_norm(model.norm), unused=(_PREDICTION,))
    return dataclasses.replace(model, mtp=_mtp(model, sizes, bias) if _has_mtp(fields) else None)


def _has_mtp(fields: Fields) -> bool:
    """Whether one layer predicts the token after the next, with the model's own embedding."""
    num_layers = fields.integer("mtp_num_hidden_layers", 0, MAX_WIDTH, 0)
    return num_layers == 1 and not fields.boolean("mtp_use_dedicated_embeddings", False)


def _mtp(model: ModelDescription, sizes: Sizes, bias: bool) -> ModelDescription:
    """The layer that predicts the token after the next, as a model of one layer."""
    alone = decoder(sizes, [None], Switches(bias, bias, head_norms=True), _PREDICTION)
    fusion = StateFusion(
        embedding_norm=_raised_norm(dataclasses.replace(alone.norm, name=f"{_PREDICTION}pre_fc_norm_embedding")),
        state_norm=_raised_norm(dataclasses.replace(alone.norm, name=f"{_PREDICTION}pre_fc_norm_hidden")),
        projection=Linear(f"{_PREDICTION}fc", sizes.hidden_size, 2 * sizes.hidden_size, keeps_dtype=True),
    )
    layers = (_raised(_gated(alone.layers[0])),)
    return dataclasses.replace(model, layers=layers, norm=_raised_norm(alone.norm), fusion=fusion)


def describe_moe(fields: Fields) -> ModelDescription:
    """Every layer has experts, whose weights add up to 1, and a shared one with a gate."""
    inner = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    shared = fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH)
    # The dense model with an MLP of an expert's size, which experts take the place of.
    model = describe(Fields(fields.name, {**fields.values, "intermediate_size": inner}))
    routing = read_routing(fields, "num_experts", "moe_intermediate_size", len(model.layers), renormalized=True)

    def sparse(model: ModelDescription) -> ModelDescription:
        layers = (_with_shared(with_experts(layer, routing, _NAMES), shared) for layer in model.layers)
        return dataclasses.replace(model, layers=tuple(layers))

    return dataclasses.replace(sparse(model), mtp=None if model.mtp is None else sparse(model.mtp))


def _with_shared(layer: Layer, inner: int) -> Layer:
    assert isinstance(layer.mlp, Experts), "every layer has experts"
    name, hidden = f"{layer.name}.mlp.shared_expert", layer.mlp.router.inputs
    mlp = Mlp(
        Linear(f"{name}.gate_proj", inner, hidden),
        Linear(f"{name}.up_proj", inner, hidden),
        Linear(f"{name}.down_proj", hidden, inner),
    )
    shared = SharedExpert(mlp, Linear(f"{name}_gate", 1, hidden, keeps_dtype=True))
    experts = dataclasses.replace(layer.mlp, shared=shared, joined=f"{layer.name}.mlp.experts")
    return dataclasses.replace(layer, mlp=experts)


def _read_linear(fields: Fields) -> _LinearSizes:
    num_key_heads = fields.integer("linear_num_key_heads", 1, _MAX_HEADS)
    num_value_heads = fields.integer("linear_num_value_heads", 1, _MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise fields.error(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads ({num_key_heads}), is {num_value_heads}",
        )
    return _LinearSizes(
        num_key_heads,
        num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, _MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", 1, _MAX_HEAD_DIM),
        kernel_size=fields.integer("linear_conv_kernel_dim", 2, _MAX_KERNEL),
    )


def _linear_layers(fields: Fields, num_layers: int) -> Iterable[bool]:
    """Whether each layer has linear attention; one at least has keys and values."""
    linear = read_other_kind(fields, num_layers, "linear_attention")
    field = "layer_types"
    if linear is None:
        field = "full_attention_interval"
        interval = fields.integer(field, 1, MAX_WIDTH)
        linear = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if all(linear):
        raise fields.error(field, f"must leave one of the {num_layers} layers {FULL!r} at least")
    return linear


def _with_delta_net(layer: Layer, sizes: Sizes, linear: _LinearSizes) -> Layer:
    name, hidden = f"{layer.name}.linear_attn", sizes.hidden_size
    keys, values = linear.num_key_heads * linear.key_dim, linear.num_value_heads * linear.value_dim
    channels, heads = 2 * keys + values, linear.num_value_heads
    mixed = (
        Linear(f"{name}.in_proj_{part}", outputs, hidden)
        for part, outputs in zip("qkv", (keys, keys, values), strict=True)
    )
    query, key, value = fused(f"{name}.in_proj_qkv", *mixed)
    attention = GatedDeltaNet(
        linear.num_key_heads,
        linear.num_value_heads,
        linear.key_dim,
        linear.value_dim,
        linear.kernel_size,
        query=query,
        key=key,
        value=value,
        gate=Linear(f"{name}.in_proj_z", values, hidden),
        correction=Linear(f"{name}.in_proj_b", heads, hidden, keeps_dtype=True),
        decay=Linear(f"{name}.in_proj_a", heads, hidden, keeps_dtype=True),
        output=Linear(f"{name}.out_proj", hidden, values),
        convolution=Vector(f"{name}.conv1d.weight", (channels, 1, linear.kernel_size)),
        log_decay=Vector(f"{name}.A_log", (heads,)),
        decay_bias=Vector(f"{name}.dt_bias", (heads,)),
        norm=Norm(f"{name}.norm", linear.value_dim, sizes.norm_eps),
    )
    return dataclasses.replace(layer, attention=attention)


def _gated(layer: Layer) -> Layer:
    attention = layer.kv_attention
    assert attention.query_norm is not None and attention.key_norm is not None, "the family norms heads"
    gated = dataclasses.replace(
        attention,
        gated=True,
        query=dataclasses.replace(attention.query, outputs=2 * attention.query.outputs),
        query_norm=_raised_norm(attention.query_norm),
        key_norm=_raised_norm(attention.key_norm),
    )
    return dataclasses.replace(layer, attention=gated)


def _raised(layer: Layer) -> Layer:
    assert layer.attention_norm is not None and layer.mlp_norm is not None, "the family norms what parts take"
    return dataclasses.replace(
        layer, attention_norm=_raised_norm(layer.attention_norm), mlp_norm=_raised_norm(layer.mlp_norm)
    )


def _raised_norm(norm: Norm) -> Norm:
    return dataclasses.replace(norm, adds_one=True, rounds_once=True)


_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERT_DEFAULTS = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_NAMES = ExpertNames("mlp", "gate", gate="gate_proj", up="up_proj", down="down_proj")
_TEXT_PART = TextPart(
    "text_config",
    {"model.language_model.": "model."},
    ("model.visual.",),
    of_all=("tie_word_embeddings",),
)

_GGUF = GgufNaming("qwen35", post_attention="post_attention_norm", has_whole_factors=True)

_KNOWS = frozenset({"attention_bias", "layer_types", "attn_output_gate"})

QWEN3_5 = Family("Qwen3_5ForCausalLM", _DEFAULTS, describe, knows=_KNOWS, gguf=_GGUF)
QWEN3_5_OF_SEVERAL = dataclasses.replace(
    QWEN3_5, architecture="Qwen3_5ForConditionalGeneration", text_part=_TEXT_PART, gguf=None
)
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    _DEFAULTS | _EXPERT_DEFAULTS,
    describe_moe,
    knows=_KNOWS,
    gguf=dataclasses.replace(_GGUF, name="qwen35moe", has_experts=True),
)
QWEN3_5_MOE_OF_SEVERAL = dataclasses.replace(
    QWEN3_5_MOE, architecture="Qwen3_5MoeForConditionalGeneration", text_part=_TEXT_PART, gguf=None
)
