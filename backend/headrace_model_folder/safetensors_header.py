"""The header of one safetensors file: where each tensor lies.

It is checked so strictly that a reader may trust every offset.

Layout of a file: 8 bytes little-endian header length, the header as JSON (name -> dtype, shape,
data_offsets), then the data without gaps. Only the header is read to find them, never a weight.
Source: the safetensors format description.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from headrace_model_folder.bounded_files import open_inside, parse_json_object
from headrace_model_folder.errors import InvalidModelFolder, shown

_HEADER_LIMIT = 100_000_000
_MAX_DIMENSIONS = 8
_BYTES_PER_ELEMENT = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class RowOrder:
    """Groups of rows that a file has as [outer, inner, run], and modules as [inner, outer, run].

    Of queries and keys whose halves alternate a group is a head, [places, 2]; of value heads that
    stand by their place among those of a key it is all of them, [values of a key, keys, head].
    """

    outer: int
    inner: int
    run: int = 1
    # Rows before the first group, which stand as modules take them.
    first: int = 0

    @property
    def size(self) -> int:
        """Rows of a group."""
        return self.outer * self.inner * self.run


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRecord:
    """The place of a tensor's bytes: file, offset and size.

    `file` is a name inside the folder, `offset` counts from the start of that file.
    """

    file: str
    # As safetensors spells it: F32, BF16, ...
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    # How rows stand in the file; None: as modules take them.
    order: RowOrder | None = None
    # First column, and columns of a row in the file, of a tensor that is some columns of a larger
    # one; None: rows follow each other.
    columns: tuple[int, int] | None = None
    # Where the scales of a weight in NF4 are; None: it is none.
    nf4: Nf4State | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Nf4State:
    """What bitsandbytes keeps beside a weight in NF4."""

    absmax: TensorRecord
    # NF4's numbers.
    table: TensorRecord
    # What the scales' 8 bits mean; None where they are fp32.
    nested: TensorRecord | None = None
    nested_table: TensorRecord | None = None
    offset: float = 0.0
    # Rows before this weight's in the tensor that the scales are of, where it is a part of one.
    first_row: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """One file's tensors, its size and its raw header (for the revision hash)."""

    tensors: dict[str, TensorRecord]
    file_size: int
    raw: bytes


def read_header(folder: pathlib.Path, file: str) -> SafetensorsHeader:
    """Reads and checks the header of `folder/file`.

    Raises:
        InvalidModelFolder: naming the file and, where one is at fault, the tensor: a header that
            does not fit the file or is not strict JSON, a name twice, an unknown dtype, a shape
            whose bytes differ from the offsets, tensors that overlap, leave holes or end elsewhere
            than the file does.
    """
    descriptor, size = open_inside(folder, file)
    try:
        raw = _raw_header(descriptor, size, file)
    finally:
        os.close(descriptor)
    entries = parse_json_object(raw, file)
    _check_metadata(entries.pop("__metadata__", {}), file)
    data_start = 8 + len(raw)
    tensors = {name: _record(file, name, entry, data_start) for name, entry in entries.items()}
    _check_layout(tensors, file, data_start, size)
    return SafetensorsHeader(tensors, size, raw)


def _raw_header(descriptor: int, size: int, file: str) -> bytes:
    if size < 8:
        raise InvalidModelFolder(f"{file}: is truncated: {size} bytes, a header needs at least 8")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= _HEADER_LIMIT:
        raise InvalidModelFolder(f"{file}: header length must be from 2 to {_HEADER_LIMIT} bytes, is {length}")
    if 8 + length > size:
        raise InvalidModelFolder(
            f"{file}: is truncated: a header of {length} bytes is announced, the file has {size} bytes"
        )
    raw = os.pread(descriptor, length, 8)
    if len(raw) != length:
        raise InvalidModelFolder(f"{file}: is truncated: it shrank while it was read")
    return raw


def _check_metadata(metadata: object, file: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidModelFolder(f"{file}: __metadata__ must be an object of strings")


def _record(file: str, name: str, entry: Any, data_start: int) -> TensorRecord:
    def error(rule: str) -> InvalidModelFolder:
        return InvalidModelFolder(f"{file}: tensor {shown(name)} {rule}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise error("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES_PER_ELEMENT:
        raise error(f"has the unknown dtype {shown(dtype)}")
    if not _is_naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise error(f"has a shape that is not a list of at most {_MAX_DIMENSIONS} sizes")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error("has data_offsets that are not [begin, end]")
    num_bytes = _BYTES_PER_ELEMENT[dtype]
    for size in shape:
        num_bytes *= size
    if num_bytes != offsets[1] - offsets[0]:
        raise error(
            f"needs {shown(num_bytes)} bytes for {dtype} {shown(tuple(shape))}, its offsets span "
            f"{shown(offsets[1] - offsets[0])}"
        )
    return TensorRecord(file, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _is_naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


def _check_layout(tensors: dict[str, TensorRecord], file: str, data_start: int, size: int) -> None:
    """The tensors in order of offset must tile the data exactly: no overlap, no hole, no rest."""
    end = data_start
    for name, record in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if record.offset != end:
            what = "overlaps the tensor before it" if record.offset < end else "leaves a hole before it"
            raise InvalidModelFolder(f"{file}: tensor {shown(name)} {what}: begins at {record.offset}, {end} expected")
        end += record.num_bytes
        if end > size:
            raise InvalidModelFolder(
                f"{file}: is truncated: tensor {shown(name)} ends at byte {end}, the file has {size} bytes"
            )
    if end != size:
        raise InvalidModelFolder(f"{file}: has {size - end} bytes after its last tensor")


def read_tensor(folder: pathlib.Path, name: str, record: TensorRecord) -> bytes:
    """The bytes of one tensor, for those few that are looked at before the weights are read.

    Raises:
        InvalidModelFolder: The file can't be opened, or ends early.
    """
    descriptor, _ = open_inside(folder, record.file)
    try:
        data = os.pread(descriptor, record.num_bytes, record.offset)
    finally:
        os.close(descriptor)
    if len(data) != record.num_bytes:
        raise InvalidModelFolder(f"{record.file}: is truncated: tensor {shown(name)} ends early")
    return data
