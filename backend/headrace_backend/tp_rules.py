"""Which numbers of ranks suit a model: what can be refused before torch is loaded.

Owns the rule and its words, and what a rank has of a model's sizes; supervisor, backend and worker
all ask here. Which rows and columns a rank keeps is `weights.placement`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from headrace_backend.config import MAX_TP, QUANTIZE_GROUPS, EngineConfig
from headrace_backend.quantize_rules import NF4_INPUTS
from headrace_model_folder import ModelConfig
from headrace_model_folder.description import (
    Attention,
    Experts,
    GatedDeltaNet,
    Layer,
    Linear,
    Mlp,
    ModelDescription,
)


def unsuitable_tp(config: EngineConfig, model: ModelConfig) -> str | None:
    """Explains why `config.tp` ranks can't share the model; returns None if they can.

    The message names the numbers of ranks that work.

    Args:
        config: The engine's configuration.
        model: Its sizes, and what another tool made of its weights.
    """
    if config.expert_parallel and not model.description.expert_layers:
        return "expert_parallel is set, and the model has no experts: without it, ranks have a part of each layer"
    group = _group(config)
    reason = _reason(config, group, model)
    if reason is None:
        return None
    return f"tp is {config.tp}, {reason}; {_working(config, group, model)}"


def fewer_ranks(config: EngineConfig, model: ModelConfig, most: int) -> str:
    """The numbers of ranks up to `most` that suit the model, as the end of a refusal."""
    sizes = [size for size in range(1, most + 1) if unsuitable_tp(_with_tp(config, size), model) is None]
    return f"tp {', '.join(map(str, sizes))} {'work' if len(sizes) > 1 else 'works'}"


def rank_part(model: ModelDescription, world_size: int, whole_experts: bool = False) -> ModelDescription:
    """What the first of several ranks computes of a model.

    The vocabulary stays whole, because every rank draws from whole logits.

    Args:
        model: The model.
        world_size: Ranks that share it.
        whole_experts: Whether each has some experts whole, in place of a part of every one.
    """
    if world_size == 1:
        return model
    layers = (_layer_part(layer, world_size, whole_experts) for layer in model.layers)
    return dataclasses.replace(model, layers=tuple(layers))


def _layer_part(layer: Layer, world_size: int, whole_experts: bool) -> Layer:
    attention = layer.attention
    part = (
        _attention_part(attention, world_size)
        if isinstance(attention, Attention)
        else _delta_net_part(attention, world_size)
    )
    return dataclasses.replace(layer, attention=part, mlp=_mlp_part(layer.mlp, world_size, whole_experts))


def _delta_net_part(attention: GatedDeltaNet, world_size: int) -> GatedDeltaNet:
    key_heads, value_heads = max(attention.num_key_heads // world_size, 1), attention.num_value_heads // world_size
    keys, values = key_heads * attention.key_dim, value_heads * attention.value_dim
    return dataclasses.replace(
        attention,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        query=dataclasses.replace(attention.query, outputs=keys),
        key=dataclasses.replace(attention.key, outputs=keys),
        value=dataclasses.replace(attention.value, outputs=values),
        gate=dataclasses.replace(attention.gate, outputs=values),
        correction=dataclasses.replace(attention.correction, outputs=value_heads),
        decay=dataclasses.replace(attention.decay, outputs=value_heads),
        output=dataclasses.replace(attention.output, inputs=values),
    )


def _attention_part(attention: Attention, world_size: int) -> Attention:
    heads, kv_heads = attention.num_heads // world_size, max(attention.num_kv_heads // world_size, 1)
    query_norm, key_norm = attention.query_norm, attention.key_norm
    if attention.norms_projections and query_norm is not None and key_norm is not None:
        query_norm = dataclasses.replace(query_norm, size=heads * attention.head_dim)
        key_norm = dataclasses.replace(key_norm, size=kv_heads * attention.head_dim)
    return dataclasses.replace(
        attention,
        query_norm=query_norm,
        key_norm=key_norm,
        num_heads=heads,
        num_kv_heads=kv_heads,
        query=dataclasses.replace(attention.query, outputs=heads * attention.query_width),
        key=attention.key and dataclasses.replace(attention.key, outputs=kv_heads * attention.head_dim),
        value=attention.value and dataclasses.replace(attention.value, outputs=kv_heads * attention.head_dim),
        output=dataclasses.replace(attention.output, inputs=heads * attention.head_dim),
        sinks=attention.sinks and dataclasses.replace(attention.sinks, num_heads=heads),
    )


def _mlp_part(mlp: Mlp | Experts, world_size: int, whole_experts: bool) -> Mlp | Experts:
    """Every rank has a part of each expert or some whole, a part of the shared one, the router."""
    if isinstance(mlp, Mlp):
        return _dense_part(mlp, world_size)
    experts = tuple(_dense_part(expert, world_size) for expert in mlp.experts)
    if whole_experts:
        experts = mlp.experts[: len(mlp.experts) // world_size]
    shared = mlp.shared and dataclasses.replace(mlp.shared, mlp=_dense_part(mlp.shared.mlp, world_size))
    return dataclasses.replace(mlp, experts=experts, shared=shared)


def _dense_part(mlp: Mlp, world_size: int) -> Mlp:
    inner = mlp.inner // world_size
    return dataclasses.replace(
        mlp,
        gate=dataclasses.replace(mlp.gate, outputs=inner),
        up=dataclasses.replace(mlp.up, outputs=inner),
        down=dataclasses.replace(mlp.down, inputs=inner),
    )


def _with_tp(config: EngineConfig, tp: int) -> EngineConfig:
    return config.model_copy(update={"tp": tp})


class _Group(NamedTuple):
    """A group of inputs that share a scale, and so must lie on one rank."""

    size: int
    name: str


def _group(config: EngineConfig) -> _Group:
    if config.quantize == "nf4":
        return _Group(NF4_INPUTS, "NF4's block of")
    # Of int8 and fp8 each rank has scales of its own.
    return _Group(config.quantize_group if config.quantize == "int4" else 1, "quantize_group")


def _reason(config: EngineConfig, group: _Group, model: ModelConfig) -> str | None:
    world_size, whole_experts = config.tp, config.expert_parallel
    if world_size == 1:
        return "which is one rank, and expert_parallel deals experts out to several" if whole_experts else None
    described = model.description
    for name, size in _dealt_out(described, whole_experts):
        if size % world_size:
            return f"which does not divide {name} {size}"
    if (reason := _vocabulary(config, model)) is not None:
        return reason
    for name, size in _repeated(described):
        if size % world_size and world_size % size:
            return f"which neither divides {name} {size} nor is a multiple of it"
    return _straddling(world_size, whole_experts, group, model) or _cut_layer(world_size, whole_experts, model)


def _vocabulary(config: EngineConfig, model: ModelConfig) -> str | None:
    """Ranks have as many tokens each, the last one perhaps fewer, but where weights have scales."""
    size = model.vocab_size
    if size % config.tp == 0:
        return None
    if config.quantize_head != "off":
        return f"which does not divide vocab_size {size}, as it must with quantize_head"
    if model.shared_blocks != (1, 1):
        return f"which does not divide vocab_size {size}, as it must where the file has its tokens in blocks"
    if -(-size // config.tp) * (config.tp - 1) >= size:
        return f"which leaves a rank none of the {size} tokens of vocab_size"
    return None


def _repeated(model: ModelDescription) -> Iterator[tuple[str, int]]:
    """Numbers of heads that ranks divide or repeat, by config.json's names."""
    for layer in model.layers:
        if isinstance(layer.attention, Attention):
            yield "num_key_value_heads", layer.attention.num_kv_heads
        else:
            yield "linear_num_key_heads", layer.attention.num_key_heads


def _dealt_out(model: ModelDescription, whole_experts: bool) -> Iterator[tuple[str, int]]:
    """Sizes that are split evenly over the ranks, by config.json's names."""
    for layer in model.layers:
        if isinstance(layer.attention, Attention):
            yield "num_attention_heads", layer.attention.num_heads
        else:
            yield "linear_num_value_heads", layer.attention.num_value_heads
        if isinstance(layer.mlp, Mlp):
            yield "intermediate_size", layer.mlp.inner
        elif whole_experts:
            yield "the number of experts", len(layer.mlp.experts)
        else:
            yield "the inner size of experts", layer.mlp.inner
        if isinstance(layer.mlp, Experts) and layer.mlp.shared is not None:
            yield "the inner size of shared experts", layer.mlp.shared.mlp.inner


def _cut_layer(world_size: int, whole_experts: bool, model: ModelConfig) -> str | None:
    """Layers that another tool quantized are cut where their words, groups and blocks end."""
    if model.quantization is None:
        return None
    parts = {part.name: part for part in rank_part(model.description, world_size, whole_experts).linears}
    for whole in model.description.linears:
        form, part = model.quantization.layers.get(whole.name), parts.get(whole.name)
        if form is None or part is None:
            continue
        if (reason := form.cuts(part.outputs, part.inputs, (whole.outputs, whole.inputs))) is not None:
            return f"which {whole.name} does not bear: {reason}"
    return None


def _straddling(world_size: int, whole_experts: bool, group: _Group, model: ModelConfig) -> str | None:
    """Inputs that share a scale must lie on one rank."""
    for layer in model.description.layers:
        attention, mlp = model.shared_blocks
        for linear, block in (
            (layer.attention.output, attention),
            *((down, mlp) for down in _downs(layer.mlp, whole_experts)),
        ):
            unit, part = group if block == 1 else _Group(block, "a block of"), linear.inputs // world_size
            if part % unit.size:
                name = linear.name.rpartition(".")[2]
                return (
                    f"which leaves each rank {part} of {name}'s {linear.inputs} inputs, and {unit.name} {unit.size} "
                    "does not divide those"
                )
    return None


def _downs(mlp: Mlp | Experts, whole_experts: bool) -> list[Linear]:
    """Down projections of each size whose inputs ranks share."""
    if isinstance(mlp, Mlp):
        return [mlp.down]
    shared = [] if mlp.shared is None else [mlp.shared.mlp.down]
    return shared if whole_experts else [mlp.down, *shared]


def _working(config: EngineConfig, group: _Group, model: ModelConfig) -> str:
    """Describes what can be set instead."""
    sizes = [size for size in range(1, MAX_TP + 1) if _reason(_with_tp(config, size), group, model) is None]
    works = f"tp {', '.join(map(str, sizes))} {'work' if len(sizes) > 1 else 'works'}" if sizes else ""
    groups = [
        other
        for other in QUANTIZE_GROUPS
        if config.quantize == "int4" and _reason(config, group._replace(size=other), model) is None
    ]
    other = f"quantize_group {groups[-1]} works with tp {config.tp}" if groups else ""
    whole = f"expert_parallel works with tp {config.tp}" if _suits_whole_experts(config, group, model) else ""
    return ", ".join(filter(None, (works, other, whole))) or "no number of ranks works"


def _suits_whole_experts(config: EngineConfig, group: _Group, model: ModelConfig) -> bool:
    """Whether as many ranks could share the model if each had some experts whole."""
    if config.expert_parallel or not model.description.expert_layers:
        return False
    return _reason(config.model_copy(update={"expert_parallel": True}), group, model) is None
