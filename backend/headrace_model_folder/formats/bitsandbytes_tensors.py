"""Folders whose layers bitsandbytes stored in NF4: bytes, and scales in tensors beside them.

    X.weight                     U8 [outputs * inputs / 2, 1]   two numbers a byte, row after row
    X.weight.absmax              U8 or F32 [blocks]             a scale for each 64 numbers
    X.weight.quant_map           F32 [16]                       NF4's numbers
    X.weight.nested_absmax       F32 [blocks / 256]             scales of scales that are U8
    X.weight.nested_quant_map    F32 [256]                      what such scales' bits mean
    X.weight.quant_state.bitsandbytes__nf4   U8 [bytes]         JSON: shape, block sizes, mean scale

Owns the join of these into one record for each weight, so that what comes behind sees the tensors
that an architecture has. Whether the two tables are NF4's is the reader's of the weights to see.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from headrace_model_folder.bounded_files import open_inside, parse_json_object
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.safetensors_header import Nf4State, TensorRecord

_STATE = ".quant_state.bitsandbytes__nf4"
_ANY_STATE = ".quant_state.bitsandbytes__"
_STATE_LIMIT = 4096
# Inputs that share a scale.
GROUP = 64
NESTED = 256
_MAX_SIZE = 1 << 22


def refuse_other_bitsandbytes(fields: Fields, settings: Mapping[str, Any]) -> None:
    """Refuses what a config.json's `quantization_config` may ask of bitsandbytes besides NF4.

    Raises InvalidModelFolder naming the field.
    """
    expected = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for key, value in expected.items():
        if settings.get(key) != value:
            raise fields.error(
                f"quantization_config.{key}",
                f"must be {shown(value)}: of bitsandbytes only NF4 is read, is {shown(settings.get(key))}",
            )
    if settings.get("load_in_8bit"):
        raise fields.error("quantization_config.load_in_8bit", "must be false: of bitsandbytes only NF4 is read")
    if settings.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise fields.error(
            "quantization_config.bnb_4bit_quant_storage",
            f"must be 'uint8', is {shown(settings['bnb_4bit_quant_storage'])}",
        )


def joined_nf4(folder: pathlib.Path, tensors: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """The tensors with each weight in NF4 as one record of its real shape.

    Raises:
        InvalidModelFolder: no weight in NF4, or one whose tensors are missing or contradict each
            other; file, tensor and rule are named.
    """
    states = [name.removesuffix(_STATE) for name in tensors if name.endswith(_STATE)]
    other = next((name for name in tensors if _ANY_STATE in name and not name.endswith(_STATE)), None)
    if other is not None:
        raise InvalidModelFolder(f"{tensors[other].file}: tensor {shown(other)}: of bitsandbytes only NF4 is read")
    if not states:
        file = next(iter(tensors.values())).file if tensors else "model.safetensors"
        raise InvalidModelFolder(
            f"{file}: has no tensor that ends in {_STATE}, but config.json says that weights are bitsandbytes' NF4"
        )
    joined = dict(tensors)
    for name in states:
        joined[name] = _join(folder, name, joined)
    return joined


class _Parts:
    """The tensors of one weight, each taken out of the folder's once it is understood."""

    def __init__(self, name: str, tensors: dict[str, TensorRecord]) -> None:
        self.name, self._tensors = name, tensors

    def error(self, part: str, rule: str) -> InvalidModelFolder:
        name = self.name + part
        record = self._tensors.get(name) or self._tensors.get(self.name + _STATE)
        file = record.file if record is not None else "model.safetensors"
        return InvalidModelFolder(f"{file}: tensor {shown(name)} {rule}")

    def take(self, part: str, dtypes: tuple[str, ...], num_numbers: int | None = None) -> TensorRecord:
        record = self._tensors.get(self.name + part)
        if record is None:
            raise self.error(part, "is missing")
        size = 1
        for extent in record.shape:
            size *= extent
        if record.dtype not in dtypes:
            raise self.error(part, f"has dtype {record.dtype}, one of {', '.join(dtypes)} expected")
        if num_numbers is not None and size != num_numbers:
            raise self.error(part, f"has {size} numbers, {num_numbers} expected")
        if part:
            del self._tensors[self.name + part]
        return record


def _join(folder: pathlib.Path, name: str, tensors: dict[str, TensorRecord]) -> TensorRecord:
    parts = _Parts(name, tensors)
    state = _state(folder, parts, tensors)
    shape = state.values.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < _MAX_SIZE for n in shape):
        raise parts.error(_STATE, f"must have a shape of 2 sizes, has {shown(shape)}")
    outputs, inputs = shape
    if inputs % GROUP:
        raise parts.error(_STATE, f"has {inputs} inputs, which blocks of {GROUP} do not divide")
    blocks = outputs * inputs // GROUP
    weight = parts.take("", ("U8",), outputs * inputs // 2)
    table = parts.take(".quant_map", ("F32",), 16)
    absmax = parts.take(".absmax", ("U8", "F32"), blocks)
    if absmax.dtype == "F32":
        made = Nf4State(absmax, table)
    else:
        if state.integer("nested_blocksize", 1, 1 << 16) != NESTED:
            raise parts.error(
                ".absmax", f"must have a nested_blocksize of {NESTED}, has {state.get('nested_blocksize')}"
            )
        nested = parts.take(".nested_absmax", ("F32",), -(-blocks // NESTED))
        nested_table = parts.take(".nested_quant_map", ("F32",), 256)
        made = Nf4State(absmax, table, nested, nested_table, state.number("nested_offset", -1e30, 1e30))
    kind = "NF4" if absmax.dtype == "U8" else "NF4_SINGLE"
    return TensorRecord(weight.file, kind, (outputs, inputs), weight.offset, weight.num_bytes, nf4=made)


def _state(folder: pathlib.Path, parts: _Parts, tensors: dict[str, TensorRecord]) -> Fields:
    """The JSON of a weight."""
    if tensors[parts.name + _STATE].num_bytes > _STATE_LIMIT:
        raise parts.error(_STATE, f"has more than {_STATE_LIMIT} bytes")
    record = parts.take(_STATE, ("U8",))
    descriptor, _ = open_inside(folder, record.file)
    try:
        raw = os.pread(descriptor, record.num_bytes, record.offset)
    finally:
        os.close(descriptor)
    where = f"{record.file}: tensor {shown(parts.name + _STATE)}"
    state = Fields(where, parse_json_object(raw, where))
    if state.text("quant_type") != "nf4":
        raise state.error("quant_type", f"must be 'nf4', is {shown(state.get('quant_type'))}")
    if state.integer("blocksize", 1, 1 << 20) != GROUP:
        raise state.error("blocksize", f"must be {GROUP}, is {state.get('blocksize')}")
    return state
