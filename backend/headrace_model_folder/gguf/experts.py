"""The experts of a GGUF file: tensors that hold a projection of all of a layer, as each expert's.

    blk.N.ffn_gate_exps [experts, inner, hidden] -> model.layers.N.mlp.experts.0.gate_proj, ...

Owns their names, their types, and which bytes are whose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from headrace_model_folder.description import Experts, Layer, Linear
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.header import GgufHeader, GgufTensor
from headrace_model_folder.safetensors_header import TensorRecord

_MOST_EXPERTS = 1 << 16


def expert_fields(fields: Fields, name: str) -> dict[str, Any]:
    """config.json's fields about experts.

    Args:
        fields: The file's metadata.
        name: Prefix of the family's keys.

    Raises:
        InvalidModelFolder: A way of choosing experts that the family does not have; the key is
            named.
    """
    for key, expected in (
        ("expert_shared_count", (0,)),
        ("expert_weights_norm", (True,)),
        ("expert_gating_func", (0, 1)),
    ):
        value = fields.get(f"{name}.{key}")
        if value is not None and value not in expected:
            raise fields.error(f"{name}.{key}", f"must be {shown(expected[-1])} or absent, is {shown(value)}")
    if fields.number(f"{name}.expert_weights_scale", -1e9, 1e9, 1.0) not in (0.0, 1.0):
        raise fields.error(f"{name}.expert_weights_scale", "must be 1 or absent")
    return {
        "num_experts": fields.integer(f"{name}.expert_count", 1, _MOST_EXPERTS),
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count", 1, _MOST_EXPERTS),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length", 1, 1 << 26),
        "norm_topk_prob": True,
    }


def expert_tensors(layer: Layer) -> dict[str, tuple[Linear, ...]]:
    """Name of each tensor with experts of a layer -> the projections in it."""
    if not isinstance(layer.mlp, Experts):
        return {}
    prefix, experts = f"blk.{layer.name.rpartition('.')[2]}", layer.mlp.experts
    return {
        f"{prefix}.ffn_gate_exps.weight": tuple(expert.gate for expert in experts),
        f"{prefix}.ffn_up_exps.weight": tuple(expert.up for expert in experts),
        f"{prefix}.ffn_down_exps.weight": tuple(expert.down for expert in experts),
    }


def expert_records(header: GgufHeader, layer: Layer) -> Iterator[tuple[str, TensorRecord]]:
    """Hugging Face name and record of each projection of each expert of a layer.

    Raises:
        InvalidModelFolder: A tensor is missing or misshapen, or gates are of another type than ups.
    """
    stacks = expert_tensors(layer)
    found = {name: _checked(header, name, linears) for name, linears in stacks.items()}
    names = list(stacks)
    if stacks and found[names[0]].type != found[names[1]].type:
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(names[1])} has type {found[names[1]].type.name}, {names[0]} "
            f"{found[names[0]].type.name}: gates and ups of experts are multiplied together, and must be of one"
        )
    for name, linears in stacks.items():
        tensor = found[name]
        num_bytes = tensor.num_bytes // len(linears)
        whole = TensorRecord(header.file, tensor.type.name, tensor.shape[1:], tensor.offset, num_bytes)
        for number, linear in enumerate(linears):
            yield f"{linear.name}.weight", dataclasses.replace(whole, offset=tensor.offset + number * num_bytes)


def _checked(header: GgufHeader, name: str, linears: tuple[Linear, ...]) -> GgufTensor:
    tensor, shape = header.tensors.get(name), (len(linears), linears[0].outputs, linears[0].inputs)
    if tensor is None:
        raise InvalidModelFolder(f"{header.file}: tensor {shown(name)} is missing")
    if tensor.shape != shape:
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(name)} has shape {list(tensor.shape)}, {list(shape)} expected from the "
            "metadata"
        )
    return tensor
