"""All tensors of a folder: one `model.safetensors`, or the shards that an index names.

The index is `model.safetensors.index.json`.

Owns agreement between index and shards. Which tensors a model needs is `expected_tensors`'
business.
"""

from __future__ import annotations

import dataclasses
import pathlib

from headrace_model_folder.bounded_files import MIB, exists_inside, read_json_object
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.safetensors_header import SafetensorsHeader, TensorRecord, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_INDEX_LIMIT = 64 * MIB
_MAX_SHARDS = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class TensorIndex:
    """Every tensor by name, and the headers they came from by file."""

    tensors: dict[str, TensorRecord]
    headers: dict[str, SafetensorsHeader]


def read_tensor_index(folder: pathlib.Path) -> TensorIndex:
    """Reads the headers of all weight files.

    Like `transformers`, prefers the single file where a folder has both.

    Raises:
        InvalidModelFolder: no weights, an index that names paths or disagrees with its shards, a
            tensor in two shards, or a bad header.
    """
    if exists_inside(folder, SINGLE_FILE):
        header = read_header(folder, SINGLE_FILE)
        return TensorIndex(dict(header.tensors), {SINGLE_FILE: header})
    if not exists_inside(folder, INDEX_FILE):
        raise InvalidModelFolder(
            f"{SINGLE_FILE}: is missing, and so is {INDEX_FILE}; weights are read from safetensors only"
        )
    return _read_shards(folder, _weight_map(folder))


def tensor_names(folder: pathlib.Path) -> frozenset[str]:
    """Names of all tensors, as the single file or the index has them: shards are not looked at.

    Raises:
        InvalidModelFolder: There is neither, or it is not valid.
    """
    if exists_inside(folder, SINGLE_FILE) or not exists_inside(folder, INDEX_FILE):
        return frozenset(read_tensor_index(folder).tensors)
    return frozenset(_weight_map(folder))


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    weight_map = read_json_object(folder, INDEX_FILE, _INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InvalidModelFolder(f"{INDEX_FILE}: weight_map must be an object of tensor name to file name")
    if len(set(weight_map.values())) > _MAX_SHARDS:
        raise InvalidModelFolder(f"{INDEX_FILE}: weight_map names more than {_MAX_SHARDS} files")
    for name, file in weight_map.items():
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise InvalidModelFolder(
                f"{INDEX_FILE}: tensor {shown(name)} must name a .safetensors file of the folder, names {shown(file)}"
            )
    return weight_map


def _read_shards(folder: pathlib.Path, weight_map: dict[str, str]) -> TensorIndex:
    headers = {file: read_header(folder, file) for file in sorted(set(weight_map.values()))}
    tensors: dict[str, TensorRecord] = {}
    for file, header in headers.items():
        for name, record in header.tensors.items():
            if name in tensors:
                raise InvalidModelFolder(f"{file}: tensor {shown(name)} is also in {tensors[name].file}")
            if weight_map.get(name) != file:
                raise InvalidModelFolder(
                    f"{file}: holds tensor {shown(name)}, which {INDEX_FILE} places {_place(weight_map.get(name))}"
                )
            tensors[name] = record
    for name, file in weight_map.items():
        if name not in tensors:
            raise InvalidModelFolder(f"{file}: tensor {shown(name)} is missing, {INDEX_FILE} places it there")
    return TensorIndex(tensors, headers)


def _place(file: str | None) -> str:
    return "nowhere" if file is None else f"in {file}"
