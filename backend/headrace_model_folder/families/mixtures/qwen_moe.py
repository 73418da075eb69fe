"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP of some or all layers."""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import Layer, ModelDescription
from headrace_model_folder.errors import shown
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.mixtures.experts import ExpertNames, read_routing, with_experts
from headrace_model_folder.fields import Fields

_NAMES = ExpertNames("mlp", "gate", gate="gate_proj", up="up_proj", down="down_proj")


def describe(fields: Fields) -> ModelDescription:
    """Norms on queries and keys; layers that are not sparse have a dense MLP."""
    sizes, bias = read_sizes(fields), fields.boolean("attention_bias", False)
    window = read_window(fields) if fields.boolean("use_sliding_window", False) else None
    model = decoder(sizes, [window] * sizes.num_layers, Switches(bias, bias, head_norms=True))
    is_renormalized = fields.boolean("norm_topk_prob", False)
    name = _name_of_number(fields)
    routing = read_routing(fields, name, "moe_intermediate_size", sizes.num_layers, is_renormalized, 128)
    sparse = _sparse_layers(fields, sizes.num_layers)

    def mixed(index: int, layer: Layer) -> Layer:
        return with_experts(layer, routing, _NAMES) if index in sparse else layer

    return dataclasses.replace(model, layers=tuple(mixed(index, layer) for index, layer in enumerate(model.layers)))


def _name_of_number(fields: Fields) -> str:
    """What config.json calls the number of experts; transformers 5 writes another name."""
    usual, newer = fields.get("num_experts"), fields.get("num_local_experts")
    if usual is not None and newer is not None and usual != newer:
        raise fields.error("num_experts", f"must be num_local_experts ({shown(newer)}), is {shown(usual)}")
    return "num_experts" if newer is None else "num_local_experts"


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Layers with experts: each `decoder_sparse_step`-th that `mlp_only_layers` does not name."""
    step, dense = fields.integer("decoder_sparse_step", 1, 1 << 20), fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < num_layers for index in dense):
        raise fields.error("mlp_only_layers", f"must be a list of layers from 0 to {num_layers - 1}, is {shown(dense)}")
    return frozenset(range(step - 1, num_layers, step)) - frozenset(dense)


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    describe,
    knows=frozenset({"attention_bias", "sliding_window", "norm_topk_prob"}),
    gguf=GgufNaming("qwen3moe", has_experts=True),
)
