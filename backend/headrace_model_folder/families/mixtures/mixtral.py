"""Mixtral: Mistral with a mixture of experts in each layer."""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.families.decoder import Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.mixtures.experts import ExpertNames, read_routing, with_experts
from headrace_model_folder.fields import Fields

_NAMES = ExpertNames("block_sparse_moe", "gate", gate="w1", up="w3", down="w2")


def describe(fields: Fields) -> ModelDescription:
    """All layers have experts and the window, if there is one."""
    sizes, window = read_sizes(fields), read_window(fields)
    routing = read_routing(fields, "num_local_experts", "intermediate_size", sizes.num_layers, renormalized=True)
    model = decoder(sizes, [window] * sizes.num_layers, Switches())
    return dataclasses.replace(model, layers=tuple(with_experts(layer, routing, _NAMES) for layer in model.layers))


MIXTRAL = Family(
    "MixtralForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    describe,
    knows=frozenset({"sliding_window"}),
    gguf=GgufNaming("llama", alternates=True, has_experts=True),
)
