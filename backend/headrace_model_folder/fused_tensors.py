"""Projections that a checkpoint keeps in one tensor, as records of their own.

    qkv_proj.weight [q + k + v, inputs] -> q_proj.weight, k_proj.weight, v_proj.weight: its rows

Owns which bytes of such a tensor are whose. Whoever reads weights finds each projection under its
own name, as in any other folder, and takes a rank's part of it as usual.
"""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Iterator, Mapping

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import Linear
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.formats.bitsandbytes_tensors import GROUP, NESTED
from headrace_model_folder.formats.layer_format import LayerFormat, Role
from headrace_model_folder.formats.layer_part import LayerPart
from headrace_model_folder.safetensors_header import TensorRecord, read_tensor

Records = Mapping[str, TensorRecord]
# Two numbers.
_SHAPES = {"I64": "<2q", "I32": "<2i"}


def split_fused(folder: pathlib.Path, config: ModelConfig, records: Records) -> Records:
    """Returns the records with each fused tensor replaced by its projections' parts.

    Args:
        folder: The model folder.
        config: Its configuration, which the records agree with.
        records: Checkpoint tensor name -> where it lies.

    Raises:
        InvalidModelFolder: A part would begin within a word, a block or what shares a nested scale
            in its format, or the tensor states another shape.
    """
    fused = [linear for linear in config.description.linears if linear.fused is not None]
    if not fused:
        return records
    layers = config.quantization.layers if config.quantization else {}
    stored = {linear.stored.name for linear in fused}
    _check_shapes(folder, {linear.stored.name: linear.stored for linear in fused}, records)
    kept = {name: record for name, record in records.items() if name.rpartition(".")[0] not in stored}
    for linear in fused:
        kept.update(_parts(linear, layers.get(linear.name), records))
    return kept


def _parts(linear: Linear, form: LayerFormat | None, records: Records) -> Iterator[tuple[str, TensorRecord]]:
    """Name and record of each tensor of one projection."""
    assert linear.fused is not None
    part = LayerPart(range(linear.fused.first, linear.fused.first + linear.outputs), range(linear.inputs))
    if form is not None and (unit := part.cut_unit(form)) is not None:
        raise InvalidModelFolder(
            f"config.json: quantization_config: {linear.name} is outputs {part.outputs.start} to {part.outputs.stop} "
            f"of {linear.fused.name}, which {unit} outputs that share a word or a block do not divide"
        )
    for suffix in ("weight", "bias") if form is None else ("bias",):
        if (record := records.get(f"{linear.fused.name}.{suffix}")) is not None:
            yield f"{linear.name}.{suffix}", _outputs_of(record, part, linear)
    if form is None:
        return
    for tensor in form.tensors(linear.fused.outputs, linear.inputs):
        record = records.get(f"{linear.fused.name}.{tensor.suffix}")
        if record is not None and tensor.role is not Role.SHAPE:
            rows, columns = part.places(form, tensor.role, record.shape or (1,))
            yield f"{linear.name}.{tensor.suffix}", _cut(record, rows, columns)


def _outputs_of(record: TensorRecord, part: LayerPart, linear: Linear) -> TensorRecord:
    """A plain weight's or bias's rows, or those of a GGUF file's blocks, which lie along rows."""
    own = _cut(record, part.outputs, range(linear.inputs) if len(record.shape) == 2 else None)
    if (state := record.nf4) is None:
        return own
    if state.nested is not None and part.outputs.start * (linear.inputs // GROUP) % NESTED:
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(linear.stored.name)} is in NF4, and {linear.name}, from its output "
            f"{part.outputs.start} on, does not begin with a nested scale of {NESTED} blocks"
        )
    return dataclasses.replace(own, nf4=dataclasses.replace(state, first_row=part.outputs.start))


def _cut(record: TensorRecord, rows: range, columns: range | None) -> TensorRecord:
    if not record.shape:
        return record
    row_bytes = record.num_bytes // record.shape[0]
    offset = record.offset + rows.start * row_bytes
    if columns is None or len(columns) == record.shape[1]:
        shape = (len(rows), *record.shape[1:])
        return dataclasses.replace(record, shape=shape, offset=offset, num_bytes=len(rows) * row_bytes)
    width, shape = record.shape[1], (len(rows), len(columns))
    num_bytes = len(rows) * len(columns) * (row_bytes // width)
    return dataclasses.replace(record, shape=shape, offset=offset, num_bytes=num_bytes, columns=(columns.start, width))


def _check_shapes(folder: pathlib.Path, stored: Mapping[str, Linear], records: Records) -> None:
    """Packed tensors state the shape of what they hold, which is all projections together."""
    for layer, linear in stored.items():
        name = f"{layer}.weight_shape"
        if (record := records.get(name)) is None:
            continue
        stated = struct.unpack(_SHAPES[record.dtype], read_tensor(folder, name, record))
        if stated != (linear.outputs, linear.inputs):
            raise InvalidModelFolder(f"{record.file}: tensor {shown(name)} is not the shape that config.json says")
