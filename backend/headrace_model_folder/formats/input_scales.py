"""Reads and checks static scales and zero points by which layers round their inputs.

Owns their reading, some bytes a layer. They are looked at before torch is loaded, as layers of one
input are multiplied together only where they round it alike, which decides how weights are stored
side by side.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import struct
from collections.abc import Mapping

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.formats.layer_format import LayerFormat, Role
from headrace_model_folder.formats.quantization_config import FolderQuantization
from headrace_model_folder.safetensors_header import TensorRecord, read_tensor

# bf16's bits are the upper half of fp32's.
_FORMATS = {"F16": "<e", "F32": "<f", "BF16": "<H", "I8": "<b", "I32": "<i"}
_ZERO_POINTS = range(-128, 128)


def with_input_scales(
    folder: pathlib.Path, quantization: FolderQuantization, tensors: Mapping[str, TensorRecord]
) -> FolderQuantization:
    """Returns the quantization with each layer's static input scale and zero point in its format.

    Args:
        folder: The model folder.
        quantization: What config.json says of its layers; the tensors agree with it.
        tensors: Name -> where the tensor lies.

    Raises:
        InvalidModelFolder: A scale is not above 0, or a zero point is no 8-bit integer; file and
            tensor are named.
    """
    layers = {
        layer: _with_scale(folder, layer, form, tensors) if form.inputs and form.inputs.scales == "static" else form
        for layer, form in quantization.layers.items()
    }
    return dataclasses.replace(quantization, layers=layers)


def _with_scale(
    folder: pathlib.Path, layer: str, form: LayerFormat, tensors: Mapping[str, TensorRecord]
) -> LayerFormat:
    assert form.inputs is not None
    found = {Role.INPUT_SCALE: 1.0, Role.INPUT_ZERO: 0.0}
    # The sizes are the folder's own by now, and only names are asked for.
    for tensor in form.tensors(32, 32):
        if tensor.role in found:
            name = f"{layer}.{tensor.suffix}"
            found[tensor.role] = _checked(name, tensors[name], tensor.role, _read(folder, name, tensors[name]))
    inputs = dataclasses.replace(form.inputs, scale=found[Role.INPUT_SCALE], zero_point=int(found[Role.INPUT_ZERO]))
    return dataclasses.replace(form, inputs=inputs)


def _checked(name: str, record: TensorRecord, role: Role, value: float) -> float:
    rule = None
    if not math.isfinite(value):
        rule = "holds a value that is not finite"
    elif role is Role.INPUT_SCALE and value <= 0:
        rule = "is not above 0"
    elif role is Role.INPUT_ZERO and value not in _ZERO_POINTS:
        rule = f"is {value:g}, no integer from -128 to 127"
    if rule is not None:
        raise InvalidModelFolder(f"{record.file}: tensor {shown(name)} {rule}")
    return value


def _read(folder: pathlib.Path, name: str, record: TensorRecord) -> float:
    (number,) = struct.unpack_from(_FORMATS[record.dtype], read_tensor(folder, name, record))
    if record.dtype == "BF16":
        (number,) = struct.unpack("<f", struct.pack("<I", number << 16))
    return float(number)
