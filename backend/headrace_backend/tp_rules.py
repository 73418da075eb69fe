"""Which numbers of ranks suit a model: what can be refused before torch is loaded.

Owns the rule and its words, and what a rank has of a model's sizes; supervisor, backend and worker all ask here. Which rows and columns a rank keeps is `weights.placement`'s.
"""

from __future__ import annotations

import dataclasses

from headrace_backend.config import MAX_TP, QUANTIZE_GROUPS, EngineConfig
from headrace_model_folder import ModelConfig


def unsuitable_tp(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why the model can't be shared by `config.tp` ranks, with the numbers that work; None if it can."""
    group = config.quantize_group if config.quantize == "int4" else 1
    if config.tp > 1 and model.quantization is not None:
        return f"tp is {config.tp}, but a folder whose weights are quantized already is served by one rank; --quantize quantizes a plain folder for several"
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
    """The sizes of what one rank computes; the vocabulary stays whole, because every rank gets whole logits."""
    if world_size == 1:
        return model
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // world_size,
        num_kv_heads=max(model.num_kv_heads // world_size, 1),
        intermediate_size=model.intermediate_size // world_size,
    )


def _reason(world_size: int, group: int, model: ModelConfig) -> str | None:
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
    return _straddling(world_size, group, model)


def _straddling(world_size: int, group: int, model: ModelConfig) -> str | None:
    """Inputs that share a scale must lie on one rank."""
    for name, size in (
        ("o_proj", model.num_heads * model.head_dim),
        ("down_proj", model.intermediate_size),
    ):
        if size // world_size % group:
            return f"which leaves each rank {size // world_size} of {name}'s {size} inputs, and quantize_group {group} does not divide those"
    return None


def _working(config: EngineConfig, group: int, model: ModelConfig) -> str:
    """What can be set instead."""
    sizes = [size for size in range(1, MAX_TP + 1) if _reason(size, group, model) is None]
    works = f"tp {', '.join(map(str, sizes))} {'work' if len(sizes) > 1 else 'works'}" if sizes else ""
    groups = [other for other in QUANTIZE_GROUPS if group > 1 and _reason(config.tp, other, model) is None]
    other = f"quantize_group {groups[-1]} works with tp {config.tp}" if groups else ""
    return ", ".join(filter(None, (works, other))) or "no number of ranks works"
