"""Reads files of a model folder: regular ones inside the folder, up to a size, and strict JSON.

Does not know what the files mean. Everything that can go wrong is an `InvalidModelFolder` that
starts with the file's name.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from headrace_model_folder.errors import InvalidModelFolder, shown

MIB = 1 << 20
# Bytes of a file's name, by the file systems that there are.
_LONGEST_NAME = 255
# A model's file is told from another of the same shapes by so many pieces of a page, spread evenly:
# training changes all of them, and reading them takes milliseconds whatever the file's size.
_SAMPLES = 32
_SAMPLE_BYTES = 4096


def resolve_inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The real path of `folder/name`, which must stay in the folder.

    Links are followed. In a Hugging Face cache a snapshot's files are links into the `blobs` folder
    beside `snapshots`, where a blob may be a link into the `blobs` folder that all models share;
    those are the only links that may leave the folder.

    Raises:
        InvalidModelFolder: the name has a separator or climbs, or a link leads out of the folder.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InvalidModelFolder(f"{shown(name)}: a file name inside the model folder was expected, not a path")
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise InvalidModelFolder(f"{shown(name)}: is no name that a file can have") from None
    if length > _LONGEST_NAME:
        raise InvalidModelFolder(f"{shown(name)}: a file's name has at most {_LONGEST_NAME} bytes, this has {length}")
    root = folder.resolve()
    target = (root / name).resolve()
    if not any(target.is_relative_to(place) for place in (root, *_blob_folders(root))):
        raise InvalidModelFolder(f"{name}: is a link that leads out of the model folder")
    return target


def _blob_folders(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders of the bytes of a snapshot that this folder is, or lies in."""
    for folder in (root, *root.parents):
        if folder.parent.name == "snapshots":
            repository = folder.parent.parent
            yield repository / "blobs"
            if repository.name.startswith("models--"):
                yield repository.parent / "blobs"


def open_inside(folder: pathlib.Path, name: str) -> tuple[int, int]:
    """Opens a regular file of the folder.

    Returns its descriptor (the caller closes it) and its size in bytes.

    Raises:
        InvalidModelFolder: it is missing, unreadable, not a regular file, or outside the folder.
    """
    path = resolve_inside(folder, name)
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidModelFolder(f"{name}: can't be opened: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidModelFolder(f"{name}: is not a regular file")
    return descriptor, status.st_size


def exists_inside(folder: pathlib.Path, name: str) -> bool:
    """Whether the folder has an entry of that name.

    A broken link counts: reading it then says what is wrong.
    """
    return os.path.lexists(folder / name)


def read_bytes(folder: pathlib.Path, name: str, limit: int) -> bytes:
    """The whole file, which may have at most `limit` bytes.

    Raises:
        InvalidModelFolder: see `open_inside`; or the file is larger than the limit.
    """
    descriptor, size = open_inside(folder, name)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit:
            raise InvalidModelFolder(f"{name}: has {size} bytes, at most {limit} are read")
        return file.read(limit)


def read_samples(folder: pathlib.Path, name: str) -> bytes:
    """Returns pieces of a file of any size, which lie at even distances from its first byte on.

    Raises:
        InvalidModelFolder: see `open_inside`.
    """
    descriptor, size = open_inside(folder, name)
    with os.fdopen(descriptor, "rb") as file:
        places = sorted({size * index // _SAMPLES for index in range(_SAMPLES)})
        return b"".join(os.pread(file.fileno(), _SAMPLE_BYTES, place) for place in places)


def read_text(folder: pathlib.Path, name: str, limit: int) -> str:
    """The whole file as UTF-8 text.

    Raises InvalidModelFolder as `read_bytes`, or for bytes that are not UTF-8.
    """
    try:
        return read_bytes(folder, name, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModelFolder(f"{name}: is not UTF-8 at byte {error.start}") from None


def read_json_object(folder: pathlib.Path, name: str, limit: int) -> dict[str, Any]:
    """The file as a JSON object.

    Raises InvalidModelFolder as `read_bytes` and `parse_json_object` do.
    """
    return parse_json_object(read_bytes(folder, name, limit), name)


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """Strict JSON: UTF-8, an object on top, no NaN or Infinity, no key twice in one object.

    Python's parser takes the last of two equal keys and reads NaN; both would let two readers of
    one file disagree.

    Raises:
        InvalidModelFolder: anything else, nesting beyond the parser's depth included.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except InvalidModelFolder as error:
        raise InvalidModelFolder(f"{name}: {error}") from None
    except RecursionError:
        raise InvalidModelFolder(f"{name}: JSON is nested too deeply") from None
    # JSONDecodeError, UnicodeDecodeError, an integer of too many digits
    except ValueError as error:
        raise InvalidModelFolder(f"{name}: is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise InvalidModelFolder(f"{name}: a JSON object was expected")
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidModelFolder(f"the key {shown(twice)} occurs twice")
    return result


def _refuse_constant(constant: str) -> float:
    raise InvalidModelFolder(f"{constant} is not a JSON value")
