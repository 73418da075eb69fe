"""The experts of a GGUF file: tensors that hold a projection of all of a layer, as each expert's.

    blk.N.ffn_gate_exps [experts, inner, hidden] -> model.layers.N.mlp.experts.0.gate_proj, ...
    blk.N.ffn_gate_up_exps [experts, 2 inner, hidden], in some files in place of gates and ups

Owns how they are chosen, in config.json's words, the tensors' types, and which bytes are whose.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_model_folder.description import Experts, Layer, Linear
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import WEIGHT_DTYPES
from headrace_model_folder.families.family import GgufNaming
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.header import MXFP4_TYPE, GgufHeader, GgufTensor
from headrace_model_folder.gguf.names import GgufNames
from headrace_model_folder.safetensors_header import TensorRecord

_MOST_EXPERTS = 1 << 16
_MAX_WIDTH = 1 << 26
# Types in which experts' products add biases.
_WITH_BIASES = (*WEIGHT_DTYPES, "Q8_0", "Q4_0", MXFP4_TYPE)


# Kinds of scores by number, as files name them: softmax over all experts or over the chosen ones,
# which are the same once weights add up to 1, and sigmoid. 0: the family's own.
_SOFTMAX, _SIGMOID = (0, 3, 1), (0, 2)
# The projections of one expert in one tensor, in the order of its outputs, for each expert.
Stack = tuple[tuple[Linear, ...], ...]


def expert_fields(fields: Fields, naming: GgufNaming) -> dict[str, Any]:
    """config.json's fields about experts.

    Args:
        fields: The file's metadata.
        naming: What files of the family differ in.

    Raises:
        InvalidModelFolder: A way of choosing experts that the family does not have; the key is
            named.
    """
    name = naming.name
    _refuse_other_scores(fields, naming)
    count = fields.integer(f"{name}.expert_count", 1, _MOST_EXPERTS)
    inner = f"{name}.expert_feed_forward_length"
    if fields.get(inner) is None:
        # Mixtral's files state one size.
        inner = f"{name}.feed_forward_length"
    return {
        # Families call it either.
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count", 1, _MOST_EXPERTS),
        "moe_intermediate_size": fields.integer(inner, 1, _MAX_WIDTH),
        "norm_topk_prob": True,
    }


def _refuse_other_scores(fields: Fields, naming: GgufNaming) -> None:
    rules: list[tuple[str, tuple[Any, ...]]] = [
        ("expert_gating_func", _SIGMOID if naming.has_sigmoid_scores else _SOFTMAX)
    ]
    if not naming.has_sigmoid_scores:
        rules += [("expert_shared_count", (0,)), ("expert_weights_norm", (True,)), ("expert_weights_scale", (0.0, 1.0))]
    for key, expected in rules:
        value = fields.get(f"{naming.name}.{key}")
        if value is not None and value not in expected:
            raise fields.error(f"{naming.name}.{key}", f"must be {shown(expected[-1])} or absent, is {shown(value)}")


def expert_tensors(header: GgufHeader, layer: Layer, names: GgufNames) -> dict[str, Stack]:
    """Name of each tensor with experts of a layer -> the projections in it, biases last."""
    if not isinstance(layer.mlp, Experts):
        return {}
    experts = layer.mlp.experts
    both = names.experts(layer.name, "gate_up")
    if f"{both}.weight" in header.tensors:
        stacks: dict[str, Stack] = {both: tuple((expert.gate, expert.up) for expert in experts)}
    else:
        stacks = {
            names.experts(layer.name, "gate"): tuple((expert.gate,) for expert in experts),
            names.experts(layer.name, "up"): tuple((expert.up,) for expert in experts),
        }
    stacks[names.experts(layer.name, "down")] = tuple((expert.down,) for expert in experts)
    ends = ("weight", "bias") if layer.mlp.down.bias else ("weight",)
    return {f"{stack}.{end}": linears for end in ends for stack, linears in stacks.items()}


def expert_records(header: GgufHeader, layer: Layer, names: GgufNames) -> Iterator[tuple[str, TensorRecord]]:
    """Hugging Face name and record of each projection of each expert of a layer.

    Raises:
        InvalidModelFolder: A tensor is missing or misshapen, or projections that are multiplied
            together are of types that can't be.
    """
    stacks = expert_tensors(header, layer, names)
    found = {name: _checked(header, name, stack) for name, stack in stacks.items()}
    if stacks:
        _check_types(header.file, found)
    for name, stack in stacks.items():
        tensor, end = found[name], name.rpartition(".")[2]
        linears = tuple(itertools.chain.from_iterable(stack))
        num_bytes = tensor.num_bytes // len(linears)
        shape = (linears[0].outputs, *tensor.shape[2:])
        whole = TensorRecord(header.file, tensor.type.name, shape, tensor.offset, num_bytes)
        for number, linear in enumerate(linears):
            yield f"{linear.name}.{end}", dataclasses.replace(whole, offset=tensor.offset + number * num_bytes)


def _check_types(file: str, found: Mapping[str, GgufTensor]) -> None:
    """Gates and ups are of one type, down projections too if one is MXFP4; biases limit them."""
    types = {name: tensor.type.name for name, tensor in found.items() if name.endswith(".weight")}
    gate, *_, down = types

    def refused(name: str, rule: str) -> InvalidModelFolder:
        return InvalidModelFolder(f"{file}: tensor {shown(name)} has type {types[name]}, {rule}")

    for up in list(types)[1:-1]:
        if types[gate] != types[up]:
            raise refused(
                up, f"{gate} {types[gate]}: gates and ups of experts are multiplied together, and must be of one"
            )
    if (types[gate] == MXFP4_TYPE) != (types[down] == MXFP4_TYPE):
        raise refused(down, f"{gate} {types[gate]}: of a layer's experts all or none are in {MXFP4_TYPE}")
    for name, kind in types.items():
        if f"{name.removesuffix('weight')}bias" in found and kind not in _WITH_BIASES:
            raise refused(name, f"one of {', '.join(_WITH_BIASES)} expected for experts with biases")


def _checked(header: GgufHeader, name: str, stack: Stack) -> GgufTensor:
    tensor, is_bias = header.tensors.get(name), name.endswith(".bias")
    outputs = sum(linear.outputs for linear in stack[0])
    shape = (len(stack), outputs) if is_bias else (len(stack), outputs, stack[0][0].inputs)
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
