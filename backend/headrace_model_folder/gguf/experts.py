"""The experts of a GGUF file: tensors that hold a projection of all of a layer, as each expert's.

    blk.N.ffn_gate_exps [experts, inner, hidden] -> model.layers.N.mlp.experts.0.gate_proj, ...

Owns their names, their types, and which bytes are whose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_model_folder.description import Experts, Layer, Linear
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import WEIGHT_DTYPES
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.header import MXFP4_TYPE, GgufHeader, GgufTensor
from headrace_model_folder.safetensors_header import TensorRecord

_MOST_EXPERTS = 1 << 16
_MAX_WIDTH = 1 << 26
# Types in which experts' products add biases.
_WITH_BIASES = (*WEIGHT_DTYPES, "Q8_0", "Q4_0", MXFP4_TYPE)


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
        # A softmax, over all experts or over the chosen ones: the same, once weights add up to 1.
        ("expert_gating_func", (0, 3, 1)),
    ):
        value = fields.get(f"{name}.{key}")
        if value is not None and value not in expected:
            raise fields.error(f"{name}.{key}", f"must be {shown(expected[-1])} or absent, is {shown(value)}")
    if fields.number(f"{name}.expert_weights_scale", -1e9, 1e9, 1.0) not in (0.0, 1.0):
        raise fields.error(f"{name}.expert_weights_scale", "must be 1 or absent")
    count = fields.integer(f"{name}.expert_count", 1, _MOST_EXPERTS)
    dense = fields.integer(f"{name}.feed_forward_length", 1, _MAX_WIDTH)
    return {
        # Families call it either.
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count", 1, _MOST_EXPERTS),
        # Mixtral's files state one size.
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length", 1, _MAX_WIDTH, dense),
        "norm_topk_prob": True,
    }


def expert_tensors(layer: Layer) -> dict[str, tuple[Linear, ...]]:
    """Name of each tensor with experts of a layer -> the projections in it, biases last."""
    if not isinstance(layer.mlp, Experts):
        return {}
    experts = layer.mlp.experts
    stacks = {
        _stack(layer, "gate"): tuple(expert.gate for expert in experts),
        _stack(layer, "up"): tuple(expert.up for expert in experts),
        _stack(layer, "down"): tuple(expert.down for expert in experts),
    }
    ends = ("weight", "bias") if layer.mlp.down.bias else ("weight",)
    return {f"{stack}.{end}": linears for end in ends for stack, linears in stacks.items()}


def down_tensor(layer: Layer) -> str:
    """Name of the tensor with a layer's down projections."""
    return f"{_stack(layer, 'down')}.weight"


def expert_records(header: GgufHeader, layer: Layer) -> Iterator[tuple[str, TensorRecord]]:
    """Hugging Face name and record of each projection of each expert of a layer.

    Raises:
        InvalidModelFolder: A tensor is missing or misshapen, or projections that are multiplied
            together are of types that can't be.
    """
    stacks = expert_tensors(layer)
    found = {name: _checked(header, name, linears) for name, linears in stacks.items()}
    if stacks:
        _check_types(header.file, layer, found)
    for name, linears in stacks.items():
        tensor, end = found[name], name.rpartition(".")[2]
        num_bytes = tensor.num_bytes // len(linears)
        whole = TensorRecord(header.file, tensor.type.name, tensor.shape[1:], tensor.offset, num_bytes)
        for number, linear in enumerate(linears):
            yield f"{linear.name}.{end}", dataclasses.replace(whole, offset=tensor.offset + number * num_bytes)


def _stack(layer: Layer, projection: str) -> str:
    return f"blk.{layer.name.rpartition('.')[2]}.ffn_{projection}_exps"


def _check_types(file: str, layer: Layer, found: Mapping[str, GgufTensor]) -> None:
    """Gates and ups are of one type, down projections too if one is MXFP4; biases limit them."""
    gate, up, down = (f"{_stack(layer, projection)}.weight" for projection in ("gate", "up", "down"))
    types = {name: found[name].type.name for name in (gate, up, down)}

    def refused(name: str, rule: str) -> InvalidModelFolder:
        return InvalidModelFolder(f"{file}: tensor {shown(name)} has type {types[name]}, {rule}")

    if types[gate] != types[up]:
        raise refused(up, f"{gate} {types[gate]}: gates and ups of experts are multiplied together, and must be of one")
    if (types[gate] == MXFP4_TYPE) != (types[down] == MXFP4_TYPE):
        raise refused(down, f"{gate} {types[gate]}: of a layer's experts all or none are in {MXFP4_TYPE}")
    for name, kind in types.items():
        if f"{name.removesuffix('weight')}bias" in found and kind not in _WITH_BIASES:
            raise refused(name, f"one of {', '.join(_WITH_BIASES)} expected for experts with biases")


def _checked(header: GgufHeader, name: str, linears: tuple[Linear, ...]) -> GgufTensor:
    tensor, outputs, is_bias = header.tensors.get(name), linears[0].outputs, name.endswith(".bias")
    shape = (len(linears), outputs) if is_bias else (len(linears), outputs, linears[0].inputs)
    if tensor is None:
        raise InvalidModelFolder(f"{header.file}: tensor {shown(name)} is missing")
    if tensor.shape != shape:
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(name)} has shape {list(tensor.shape)}, {list(shape)} expected from the "
            "metadata"
        )
    if is_bias and tensor.type.name not in WEIGHT_DTYPES:
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(name)} has type {tensor.type.name}, one of {', '.join(WEIGHT_DTYPES)} "
            "expected for biases"
        )
    return tensor
