"""A family's description as GGUF files of it have the tensors.

Owns what converters change in the numbers or in which tensor holds them: factors of norms that
folders state less 1 are whole, experts that folders stack with gates and ups alternating have a
tensor for each projection, and value heads of linear attention stand by their place among those of
a key, with their rates of decay as they are used. Source: llama.cpp's `conversion`.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import (
    Attention,
    Experts,
    GatedDeltaNet,
    Layer,
    ModelDescription,
    Norm,
    StateFusion,
)
from headrace_model_folder.families.family import GgufNaming


def as_in_file(config: ModelConfig, naming: GgufNaming) -> ModelConfig:
    """Returns the config with a description of the file's tensors.

    Args:
        config: The model's configuration, described as folders have it.
        naming: What files of the family differ in.
    """
    model = _model(config.description, naming)
    mtp = config.mtp and dataclasses.replace(config.mtp, description=_model(config.mtp.description, naming))
    return dataclasses.replace(config, description=model, mtp=mtp)


def _model(model: ModelDescription, naming: GgufNaming) -> ModelDescription:
    layers = tuple(_with_file_heads(_without_stacks(layer)) for layer in model.layers)
    model = dataclasses.replace(model, layers=layers, mtp=model.mtp and _model(model.mtp, naming))
    if not naming.has_whole_factors:
        return model
    layers = tuple(map(_with_whole_factors, layers))
    fusion = model.fusion and _whole_fusion(model.fusion)
    return dataclasses.replace(model, layers=layers, norm=_whole(model.norm), fusion=fusion)


def _without_stacks(layer: Layer) -> Layer:
    if not isinstance(layer.mlp, Experts) or layer.mlp.stacked is None:
        return layer
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, stacked=None))


def _with_file_heads(layer: Layer) -> Layer:
    if not isinstance(layer.attention, GatedDeltaNet):
        return layer
    heads = dataclasses.replace(layer.attention, has_rates=True, output_by_place=layer.attention.values_per_key > 1)
    return dataclasses.replace(layer, attention=heads)


def _with_whole_factors(layer: Layer) -> Layer:
    return dataclasses.replace(
        layer,
        attention=_whole_heads(layer.attention) if isinstance(layer.attention, Attention) else layer.attention,
        attention_norm=layer.attention_norm and _whole(layer.attention_norm),
        attention_output_norm=layer.attention_output_norm and _whole(layer.attention_output_norm),
        mlp_norm=layer.mlp_norm and _whole(layer.mlp_norm),
        mlp_output_norm=layer.mlp_output_norm and _whole(layer.mlp_output_norm),
    )


def _whole_heads(attention: Attention) -> Attention:
    return dataclasses.replace(
        attention,
        query_norm=attention.query_norm and _whole(attention.query_norm),
        key_norm=attention.key_norm and _whole(attention.key_norm),
    )


def _whole_fusion(fusion: StateFusion) -> StateFusion:
    return dataclasses.replace(
        fusion, embedding_norm=_whole(fusion.embedding_norm), state_norm=_whole(fusion.state_norm)
    )


def _whole(norm: Norm) -> Norm:
    return dataclasses.replace(norm, adds_one=False)
