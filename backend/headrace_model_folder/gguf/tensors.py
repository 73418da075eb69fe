"""The tensors of a GGUF file under Hugging Face's names, which all rooms behind this one use.

Owns which tensors must be there, in which shapes and types, and which may be there besides.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import Experts, GatedDeltaNet, Layer, ModelDescription
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import WEIGHT_DTYPES
from headrace_model_folder.families.family import Family
from headrace_model_folder.families.registry import GGUF_FAMILIES
from headrace_model_folder.fields import Fields
from headrace_model_folder.fused_tensors import split_fused
from headrace_model_folder.gguf.experts import expert_records, expert_tensors
from headrace_model_folder.gguf.header import MXFP4_TYPE, GgufHeader, GgufTensor
from headrace_model_folder.gguf.names import GgufNames
from headrace_model_folder.gguf.row_orders import row_orders
from headrace_model_folder.safetensors_header import TensorRecord

# What follows from metadata or was read with them.
_TOLERATED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d{1,4}\.attn_rot_embd")


def gguf_family(header: GgufHeader) -> Family:
    """Returns the family that the file says it is of.

    Raises InvalidModelFolder for one that is not served.
    """
    fields = Fields(header.file, header.metadata)
    name = fields.text("general.architecture")
    known = sorted({known for known, _ in GGUF_FAMILIES})
    if name not in known:
        raise fields.error("general.architecture", f"must be one of {', '.join(known)}, is {shown(name)}")
    has_experts = fields.integer(f"{name}.expert_count", 0, 1 << 16, 0) > 0
    family = GGUF_FAMILIES.get((name, has_experts))
    if family is None:
        rule = "must be 0: experts of this architecture are not supported" if has_experts else "must be at least 1"
        raise fields.error(f"{name}.expert_count", rule)
    return family


def gguf_records(folder: pathlib.Path, header: GgufHeader, config: ModelConfig) -> Mapping[str, TensorRecord]:
    """Hugging Face name -> where the tensor lies, each projection by itself.

    Args:
        folder: The file's folder.
        header: The file's header.
        config: What its metadata state.

    Raises:
        InvalidModelFolder: a tensor is missing, misshapen, surplus, or of a type that it can't
            have.
    """
    names = _names(header, config)
    # Files of models with a layer behind the last one may leave it out.
    has_behind = any(names.is_behind(theirs) for theirs in header.tensors)
    configs = [config, config.mtp] if config.mtp is not None and has_behind else [config]
    records: dict[str, TensorRecord] = {}
    known: set[str] = set()
    for each in configs:
        found, theirs = _records_of(header, each.description, names)
        records.update(split_fused(folder, each, found))
        known |= theirs
        for name, order in row_orders(each.description, names.naming).items():
            records[name] = dataclasses.replace(records[name], order=order)
    _refuse_surplus(header, config, known | set(_left_out(config, names)), names)
    return records


def _records_of(
    header: GgufHeader, model: ModelDescription, names: GgufNames
) -> tuple[dict[str, TensorRecord], set[str]]:
    """Records of a model's tensors as they are stored, and the file's names of these."""
    records: dict[str, TensorRecord] = {}
    known: set[str] = set()
    for layer in model.layers:
        known.update(expert_tensors(header, layer, names))
        records.update(expert_records(header, layer, names))
    for name, shape in model.stored_tensors().items():
        if name in records:
            continue
        theirs = names.tensor(name)
        tensor = header.tensors.get(theirs)
        if tensor is None:
            raise InvalidModelFolder(f"{header.file}: tensor {shown(theirs)} is missing")
        _check(header.file, theirs, tensor, shape)
        records[name] = TensorRecord(header.file, tensor.type.name, shape, tensor.offset, tensor.num_bytes)
        known.add(theirs)
    return records, known


def _left_out(config: ModelConfig, names: GgufNames) -> Iterator[str]:
    """The file's names of tensors that nothing computes with: keys of layers that read others'."""
    for unused in config.description.unused:
        if unused.startswith("model.layers.") and not unused.endswith("."):
            yield names.tensor(f"{unused}.weight")


def _refuse_surplus(header: GgufHeader, config: ModelConfig, known: set[str], names: GgufNames) -> None:
    num_behind = Fields(header.file, header.metadata).integer(
        f"{names.naming.name}.nextn_predict_layers", 0, 1 << 10, 0
    )
    for theirs in header.tensors:
        if theirs in known or _TOLERATED.fullmatch(theirs) or (num_behind and names.is_behind(theirs)):
            continue
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(theirs)} is surplus: {config.architecture} with these metadata has none"
        )


def shared_blocks(header: GgufHeader, config: ModelConfig) -> tuple[int, int]:
    """Largest blocks, in inputs, of attention's output and of down projections.

    They are `ModelConfig.shared_blocks`.
    """
    layers, names = config.description.layers, _names(header, config)
    downs = (name for layer in layers for name in _downs(header, layer, names))
    return (
        max(_output_block(header, layer, names) for layer in layers),
        max(header.tensors[name].type.block_inputs for name in downs),
    )


def _output_block(header: GgufHeader, layer: Layer, names: GgufNames) -> int:
    """Inputs of attention's output that must lie on one rank, counted as ranks share them.

    Where value heads stand by their place, a rank's inputs are a piece for each place.
    """
    block = header.tensors[names.tensor(f"{layer.attention.output.name}.weight")].type.block_inputs
    if block > 1 and isinstance(layer.attention, GatedDeltaNet) and layer.attention.output_by_place:
        return block * layer.attention.values_per_key
    return block


def _downs(header: GgufHeader, layer: Layer, names: GgufNames) -> Iterator[str]:
    if not isinstance(layer.mlp, Experts):
        yield names.tensor(f"{layer.mlp.down.name}.weight")
        return
    yield f"{names.experts(layer.name, 'down')}.weight"
    if layer.mlp.shared is not None:
        yield names.tensor(f"{layer.mlp.shared.mlp.down.name}.weight")


def _names(header: GgufHeader, config: ModelConfig) -> GgufNames:
    naming = gguf_family(header).gguf
    assert naming is not None, "a family that files are of has names there"
    return GgufNames.of(naming, config.description)


def _check(file: str, name: str, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    # Converters drop dimensions of 1, or keep them.
    if _without_ones(tensor.shape) != _without_ones(shape):
        raise InvalidModelFolder(
            f"{file}: tensor {shown(name)} has shape {list(tensor.shape)}, {list(shape)} expected from the metadata"
        )
    if len(tensor.shape) == 1 and tensor.type.name not in WEIGHT_DTYPES:
        raise InvalidModelFolder(
            f"{file}: tensor {shown(name)} has type {tensor.type.name}, one of {', '.join(WEIGHT_DTYPES)} expected for "
            "norms and biases"
        )
    if tensor.type.name == MXFP4_TYPE:
        raise InvalidModelFolder(
            f"{file}: tensor {shown(name)} has type {MXFP4_TYPE}, which projections of experts alone may have"
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
