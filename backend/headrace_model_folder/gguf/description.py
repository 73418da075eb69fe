"""A family's description as GGUF files of it have the tensors.

Owns what converters change in the numbers or in which tensor holds them: factors of norms that
folders state less 1 are whole, and experts that folders stack with gates and ups alternating have a
tensor for each projection.
"""

from __future__ import annotations

import dataclasses

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import Experts, Layer, Norm
from headrace_model_folder.families.family import GgufNaming


def as_in_file(config: ModelConfig, naming: GgufNaming) -> ModelConfig:
    """Returns the config with a description of the file's tensors.

    Args:
        config: The model's configuration, described as folders have it.
        naming: What files of the family differ in.
    """
    model = config.description
    layers = tuple(map(_without_stacks, model.layers))
    model = dataclasses.replace(model, layers=layers)
    if naming.has_whole_factors:
        layers = tuple(map(_with_whole_factors, layers))
        model = dataclasses.replace(model, layers=layers, norm=_whole(model.norm))
    return dataclasses.replace(config, description=model)


def _without_stacks(layer: Layer) -> Layer:
    if not isinstance(layer.mlp, Experts) or layer.mlp.stacked is None:
        return layer
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, stacked=None))


def _with_whole_factors(layer: Layer) -> Layer:
    attention = layer.kv_attention
    heads = dataclasses.replace(
        attention,
        query_norm=attention.query_norm and _whole(attention.query_norm),
        key_norm=attention.key_norm and _whole(attention.key_norm),
    )
    return dataclasses.replace(
        layer,
        attention=heads,
        attention_norm=layer.attention_norm and _whole(layer.attention_norm),
        attention_output_norm=layer.attention_output_norm and _whole(layer.attention_output_norm),
        mlp_norm=layer.mlp_norm and _whole(layer.mlp_norm),
        mlp_output_norm=layer.mlp_output_norm and _whole(layer.mlp_output_norm),
    )


def _whole(norm: Norm) -> Norm:
    return dataclasses.replace(norm, adds_one=False)
