"""Which numbers of ranks suit a model: what can be refused before torch is loaded.

Owns the rule and its words, and what a rank has of a model's sizes; supervisor, backend and worker
all ask here. Which rows and columns a rank keeps is `weights.placement`'s.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from headrace_backend.config import MAX_TP, QUANTIZE_GROUPS, EngineConfig
from headrace_backend.quantize_rules import NF4_INPUTS
from headrace_model_folder import ModelConfig, expected_tensors


def unsuitable_tp(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why the model can't be shared by `config.tp` ranks, with the numbers that work; None if it
    can.

    Args:
        config: The engine's.
        model: Its sizes, and what another tool made of its weights.
    """
    group = _group(config)
    reason = _reason(config.tp, group, model)
    if reason is None:
        return None
    return f"tp is {config.tp}, {reason}; {_working(config, group, model)}"


def fewer_ranks(config: EngineConfig, model: ModelConfig, most: int) -> str:
    """The numbers of ranks up to `most` that suit the model, as the end of a refusal."""
    sizes = [
        size for size in range(1, most + 1) if unsuitable_tp(config.model_copy(update={"tp": size}), model) is None
    ]
    return f"tp {', '.join(map(str, sizes))} {'work' if len(sizes) > 1 else 'works'}"


def rank_part(model: ModelConfig, world_size: int) -> ModelConfig:
    """The sizes of what one rank computes; the vocabulary stays whole, because every rank gets
    whole logits.
    """
    if world_size == 1:
        return model
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // world_size,
        num_kv_heads=max(model.num_kv_heads // world_size, 1),
        intermediate_size=model.intermediate_size // world_size,
    )


# Layers whose inputs are dealt out to ranks; others' outputs are.
_SHARED_INPUTS = ("o_proj", "down_proj")


class _Group(NamedTuple):
    """Inputs that share a scale, and so must lie on one rank."""

    size: int
    name: str


def _group(config: EngineConfig) -> _Group:
    if config.quantize == "nf4":
        return _Group(NF4_INPUTS, "NF4's block of")
    # Of int8 and fp8 each rank has scales of its own.
    return _Group(config.quantize_group if config.quantize == "int4" else 1, "quantize_group")


def _reason(world_size: int, group: _Group, model: ModelConfig) -> str | None:
    if world_size == 1:
        return None
    for name, size in (
        ("num_attention_heads", model.num_heads),
        ("intermediate_size", model.intermediate_size),
        ("vocab_size", model.vocab_size),
    ):
        if size % world_size:
            return f"which does not divide {name} {size}"
    if model.num_kv_heads % world_size and world_size % model.num_kv_heads:
        return f"which neither divides num_key_value_heads {model.num_kv_heads} nor is a multiple of it"
    return _straddling(world_size, group, model) or _cut_layer(world_size, model)


def _cut_layer(world_size: int, model: ModelConfig) -> str | None:
    """Layers that another tool quantized are cut where their words, groups and blocks end."""
    if model.quantization is None:
        return None
    shapes, keys = expected_tensors(model), max(model.num_kv_heads // world_size, 1) * model.head_dim
    for layer, form in model.quantization.layers.items():
        outputs, inputs = shapes[f"{layer}.weight"]
        whole, name = (outputs, inputs), layer.rpartition(".")[2]
        if name in _SHARED_INPUTS:
            inputs //= world_size
        else:
            outputs = keys if name in ("k_proj", "v_proj") else outputs // world_size
        if (reason := form.cuts(outputs, inputs, whole)) is not None:
            return f"which {layer} does not bear: {reason}"
    return None


def _straddling(world_size: int, group: _Group, model: ModelConfig) -> str | None:
    """Inputs that share a scale must lie on one rank."""
    sizes = (model.num_heads * model.head_dim, model.intermediate_size)
    for name, size, block in zip(_SHARED_INPUTS, sizes, model.shared_blocks, strict=True):
        unit = group if block == 1 else _Group(block, "a block of")
        if size // world_size % unit.size:
            return f"which leaves each rank {size // world_size} of {name}'s {size} inputs, and {unit.name} {unit.size} does not divide those"
    return None


def _working(config: EngineConfig, group: _Group, model: ModelConfig) -> str:
    """What can be set instead."""
    sizes = [size for size in range(1, MAX_TP + 1) if _reason(size, group, model) is None]
    works = f"tp {', '.join(map(str, sizes))} {'work' if len(sizes) > 1 else 'works'}" if sizes else ""
    groups = [
        other
        for other in QUANTIZE_GROUPS
        if config.quantize == "int4" and _reason(config.tp, group._replace(size=other), model) is None
    ]
    other = f"quantize_group {groups[-1]} works with tp {config.tp}" if groups else ""
    return ", ".join(filter(None, (works, other))) or "no number of ranks works"
