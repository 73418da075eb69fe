"""Phi-3, Phi-3.5 and Phi-4-mini (dense): Llama without biases, with fused tensors.

Query, key and value are one tensor, and gate and up another. A part of each head may be rotated,
and the context is stretched by LongRoPE.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace_model_folder.description import Layer, Mlp, ModelDescription
from headrace_model_folder.families.decoder import MAX_CONTEXT, Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.fused import fused
from headrace_model_folder.fields import Fields


def describe(fields: Fields) -> ModelDescription:
    """All layers have the window, where it is shorter than the context."""
    fields = _with_longrope(fields)
    sizes, window = read_sizes(fields, rotates_parts=True), read_window(fields)
    if window is not None and window >= fields.integer("max_position_embeddings", 1, MAX_CONTEXT):
        window = None
    model = decoder(sizes, [window] * sizes.num_layers, Switches())
    return dataclasses.replace(model, layers=tuple(map(_with_fused_tensors, model.layers)))


def _with_longrope(fields: Fields) -> Fields:
    """Early folders call LongRoPE "su" or "yarn"."""

    def renamed(rope: Any) -> Any:
        is_early = isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn")
        return rope | {"rope_type": "longrope"} if is_early else rope

    ropes = {key: renamed(fields.get(key)) for key in ("rope_scaling", "rope_parameters")}
    return Fields(fields.name, fields.values | ropes)


def _with_fused_tensors(layer: Layer) -> Layer:
    attention, mlp = layer.kv_attention, layer.mlp
    assert isinstance(mlp, Mlp), "the family has no experts"
    query, key, value = fused(f"{layer.name}.self_attn.qkv_proj", *attention.projected)
    gate, up = fused(f"{layer.name}.mlp.gate_up_proj", mlp.gate, mlp.up)
    attention = dataclasses.replace(attention, query=query, key=key, value=value)
    return dataclasses.replace(layer, attention=attention, mlp=dataclasses.replace(mlp, gate=gate, up=up))


PHI3 = Family(
    "Phi3ForCausalLM",
    {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    describe,
    knows=frozenset({"sliding_window"}),
    gguf=GgufNaming("phi3"),
)
