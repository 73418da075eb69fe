"""Tensors that an architecture needs, by Hugging Face name and shape, compared with a folder's.

The model's description names them. Where another tool quantized a layer, the tensors of its format
stand in the folder in place of its weight (`formats.layer_format`). An output layer that
config.json ties to the embedding may be there all the same: training that no longer shared the two
leaves such folders, and then it is used, as by transformers. Copies of the embedding are common,
and stay one weight.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace_model_folder.bounded_files import MIB, open_inside
from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import ModelDescription, Shape
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.formats.layer_format import LayerFormat
from headrace_model_folder.formats.mxfp4_config import mxfp4_shapes
from headrace_model_folder.safetensors_header import TensorRecord

WEIGHT_DTYPES = ("F32", "F16", "BF16")
# Read at a time where two tensors are compared.
_PIECE = 4 * MIB
# Old checkpoints carry the rotary frequencies, which follow from the config.
_TOLERATED = re.compile(r"model\.(layers\.\d{1,4}\.self_attn\.)?rotary_emb\.inv_freq")


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of the model, weights as [out, in].

    The output layer's is absent if embeddings are tied.
    """
    return dict(config.description.tensors())


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model; tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


class _Expected(NamedTuple):
    """A tensor of a folder: any of these shapes and types."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = WEIGHT_DTYPES
    is_required: bool = True


def check_tensors(config: ModelConfig, found: Mapping[str, TensorRecord]) -> None:
    """Compares a folder's tensors with the expected ones.

    Raises:
        InvalidModelFolder: a tensor is missing, misshapen, of a dtype that can't be loaded, or
            surplus; or a layer's sizes do not suit its format.
    """
    expected, unused = _folder_tensors(config), config.description.unused
    for name, wanted in expected.items():
        if name in found:
            _check_record(name, wanted, found[name])
        elif wanted.is_required:
            raise InvalidModelFolder(f"{_likely_file(name, found)}: tensor {shown(name)} is missing{_why(config)}")
    for name, record in found.items():
        if name not in expected and not name.startswith(unused) and not _TOLERATED.fullmatch(name):
            raise InvalidModelFolder(
                f"{record.file}: tensor {shown(name)} is surplus: {config.architecture} with this config.json has none"
            )


def _folder_tensors(config: ModelConfig) -> dict[str, _Expected]:
    """What a folder holds, with what it may hold."""
    tensors, layers = config.description.stored_tensors(), _stored_formats(config)
    expected: dict[str, _Expected] = {}
    for name, shape in tensors.items():
        form = layers.get(name.removesuffix(".weight"))
        if form is None or not name.endswith(".weight"):
            expected[name] = _Expected((shape,))
            continue
        layer = name.removesuffix(".weight")
        form.check_sizes(layer, *shape)
        for part in form.tensors(*shape):
            expected[f"{layer}.{part.suffix}"] = _Expected(part.shapes, part.dtypes, part.is_required)
    for experts in config.description.expert_layers:
        if experts.stacked is not None and (form := layers.get(experts.down.name)) is not None:
            for name in (experts.stacked.gate_up, experts.stacked.down):
                # Of the plain tensor in whose place these stand: inputs before outputs.
                count, num_inputs, num_outputs = tensors[name]
                form.check_sizes(name, num_outputs, num_inputs)
                del expected[name]
                for end, shape in mxfp4_shapes(count, num_outputs, num_inputs).items():
                    expected[f"{name}{end}"] = _Expected((shape,), ("U8",))
    stored = config.description.stored_linears()
    biases = _needless_biases(config, {name: (stored[name].outputs,) for name in layers}, tensors)
    expected.update((name, _Expected((shape,), is_required=False)) for name, shape in biases.items())
    if config.description.head.tied:
        name, shape = config.description.head_tensor()
        expected[name] = _Expected((shape,), is_required=False)
    return expected


def needless_biases(config: ModelConfig) -> dict[str, Shape]:
    """Names of biases that a folder may have though the architecture has none.

    Tools for GPTQ and AWQ write zeros for each layer that they quantize.
    """
    layers = config.quantization.layers if config.quantization else {}
    outputs: dict[str, Shape] = {linear.name: (linear.outputs,) for linear in config.description.linears}
    return _needless_biases(config, {name: outputs[name] for name in layers}, expected_tensors(config))


def _needless_biases(
    config: ModelConfig, layers: Mapping[str, Shape], tensors: Mapping[str, Shape]
) -> dict[str, Shape]:
    if config.quantization is None or config.quantization.method not in ("gptq", "awq"):
        return {}
    biases = {f"{layer}.bias": shape for layer, shape in layers.items()}
    return {name: shape for name, shape in biases.items() if name not in tensors}


def _stored_formats(config: ModelConfig) -> dict[str, LayerFormat]:
    """Formats of the projections by the names that the folder has for them."""
    layers = config.quantization.layers if config.quantization else {}
    return {linear.stored.name: layers[linear.name] for linear in config.description.linears if linear.name in layers}


def _check_record(name: str, wanted: _Expected, record: TensorRecord) -> None:
    if record.shape not in wanted.shapes:
        shapes = " or ".join(str(list(shape)) for shape in wanted.shapes)
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} has shape {list(record.shape)}, {shapes} expected from config.json"
        )
    if record.dtype not in wanted.dtypes and (record.nf4 is None or ".layers." not in name):
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} has dtype {record.dtype}, one of {', '.join(wanted.dtypes)} expected"
        )


def _why(config: ModelConfig) -> str:
    method = config.quantization and config.quantization.method
    return f", which quantization_config ({method}) in config.json asks for" if method else ""


def _likely_file(name: str, found: Mapping[str, TensorRecord]) -> str:
    """The file to name for a missing tensor: the only one, the one with its neighbours, or any."""
    prefix = name.rsplit(".", 3)[0]
    files = [record.file for other, record in found.items() if other.startswith(prefix)] or [
        r.file for r in found.values()
    ]
    return files[0] if files else "model.safetensors"


def untied_where_different(
    folder: pathlib.Path, config: ModelConfig, tensors: Mapping[str, TensorRecord]
) -> ModelConfig:
    """Returns the config, untied if the folder's output layer differs from its embedding.

    Reads both tensors up to the first piece in which they differ.

    Args:
        folder: The model folder.
        config: Its configuration.
        tensors: The folder's tensors, by the names of the description.
    """
    model = config.description
    head, embedding = (tensors.get(f"{part.name}.weight") for part in (model.head, model.embedding))
    if not model.head.tied or head is None or embedding is None or _are_equal(folder, head, embedding):
        return config
    mtp = None if config.mtp is None else dataclasses.replace(config.mtp, description=_untied(config.mtp.description))
    return dataclasses.replace(config, description=_untied(model), mtp=mtp)


def _untied(model: ModelDescription) -> ModelDescription:
    mtp = None if model.mtp is None else _untied(model.mtp)
    return dataclasses.replace(model, head=dataclasses.replace(model.head, tied=False), mtp=mtp)


def _are_equal(folder: pathlib.Path, head: TensorRecord, embedding: TensorRecord) -> bool:
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    pieces = zip(_pieces(folder, head), _pieces(folder, embedding), strict=True)
    return all(one == other for one, other in pieces)


def _pieces(folder: pathlib.Path, record: TensorRecord) -> Iterator[bytes]:
    descriptor, _ = open_inside(folder, record.file)
    try:
        for first in range(0, record.num_bytes, _PIECE):
            yield os.pread(descriptor, min(_PIECE, record.num_bytes - first), record.offset + first)
    finally:
        os.close(descriptor)
