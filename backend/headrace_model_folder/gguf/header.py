"""The header of a GGUF file: its metadata and where each tensor lies.

It is checked so strictly that a reader may trust every offset.

Layout of a file: "GGUF", version, number of tensors, number of metadata entries; the entries (key,
type, value); the tensors (name, dimensions, type, offset); then, aligned, the data. All
little-endian. Only what stands before the data is read here. No count is believed before the bytes
behind it are there. Source: the GGUF description (ggml's docs/gguf.md). What metadata mean is
`gguf.config`'s and `gguf.tokenizer`'s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

from headrace_model_folder.bounded_files import MIB, open_inside
from headrace_model_folder.errors import InvalidModelFolder, shown

_VERSIONS = (2, 3)
# Twice what the largest vocabularies take with a whole tokenizer.json beside them, tensor list and
# all.
_HEADER_LIMIT = 64 * MIB
_CHUNK = 4 * MIB
_MAX_TENSORS = 1 << 17
_MAX_ENTRIES = 1 << 16
_MAX_KEY_BYTES = (1 << 16) - 1
_MAX_NAME_BYTES = 64
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
# Of all arrays together: an entry of eight bytes may become an object of sixty. The largest
# vocabularies have some 2^20, merges included.
_MAX_ARRAY_ENTRIES = 1 << 22
_MAX_ALIGNMENT = 1 << 20
_KEY = re.compile(r"[\x21-\x7e]+")
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Type number -> struct's letter.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


class GgufType(NamedTuple):
    """How a tensor's numbers are stored: name, inputs of a block, bytes of a block."""

    name: str
    block_inputs: int
    block_bytes: int


# OCP's MXFP4: a power of two as a byte, then numbers of 4 bits.
MXFP4_TYPE = "MXFP4"
# Type number -> what it is. Those of ggml that are not here can't be served.
TYPES = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    20: GgufType("IQ4_NL", 32, 18),
    23: GgufType("IQ4_XS", 256, 136),
    30: GgufType("BF16", 1, 2),
    39: GgufType(MXFP4_TYPE, 32, 17),
}
# For messages only.
_UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `offset` counts from the start of the file."""

    type: GgufType
    # Outermost dimension first, as everywhere here: [out, in].
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the data. Arrays of metadata are lists."""

    file: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    file_size: int
    # SHA-256 of all of it.
    digest: bytes


def read_gguf_header(folder: pathlib.Path, file: str) -> GgufHeader:
    """Reads and checks the header of `folder/file`.

    Raises:
        InvalidModelFolder: naming the file and, where one is at fault, the key or tensor: no GGUF,
            a version or type that is not known, a count or length beyond the file, a key or name
            twice, tensors that overlap, are not aligned or end behind the file.
    """
    descriptor, size = open_inside(folder, file)
    try:
        return _parse(_Cursor(descriptor, size, file))
    finally:
        os.close(descriptor)


class _Cursor:
    """Reads forward, a chunk of the file at a time.

    It never reads more than is asked for by a length that the file has room for.
    """

    def __init__(self, descriptor: int, size: int, file: str) -> None:
        self.file, self.size, self.place = file, size, 0
        # Of arrays, so far.
        self.num_entries = 0
        self.digest = hashlib.sha256()
        self._descriptor = descriptor
        self._buffer, self._start = b"", 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes, which an error calls `what` if they are not there."""
        if count > self.size - self.place:
            raise InvalidModelFolder(
                f"{self.file}: is truncated: {what} needs {shown(count)} bytes from byte {self.place}, the file has "
                f"{self.size}"
            )
        if self.place + count > _HEADER_LIMIT:
            raise InvalidModelFolder(f"{self.file}: metadata and tensor list have more than {_HEADER_LIMIT} bytes")
        first = self.place - self._start
        if first + count > len(self._buffer):
            self._fill(first, count, what)
            first = 0
        self.place += count
        return self._buffer[first : first + count]

    def number(self, letter: str, what: str) -> Any:
        """One number of struct's kind."""
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter), what))[0]

    def text(self, what: str, limit: int) -> str:
        """A string with its length before it."""
        length = self.number("Q", what)
        if length > limit:
            raise InvalidModelFolder(f"{self.file}: {what} has {shown(length)} bytes, at most {limit} are read")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise InvalidModelFolder(f"{self.file}: {what} is not UTF-8 at byte {error.start}") from None

    def _fill(self, first: int, count: int, what: str) -> None:
        rest = self._buffer[first:]
        wanted = max(count - len(rest), _CHUNK)
        more = os.pread(self._descriptor, wanted, self._start + len(self._buffer))
        self.digest.update(more)
        self._buffer, self._start = rest + more, self.place
        if len(self._buffer) < count:
            raise InvalidModelFolder(f"{self.file}: is truncated: it shrank while {what} was read")


def _parse(cursor: _Cursor) -> GgufHeader:
    magic = cursor.take(4, "the header")
    if magic != b"GGUF":
        raise InvalidModelFolder(f"{cursor.file}: is no GGUF file: it begins with {shown(magic)}")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        big = version.bit_length() > 16 and int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        rule = "is big-endian, only little-endian files are read" if big else f"must be 2 or 3, is {version}"
        raise InvalidModelFolder(f"{cursor.file}: version {rule}")
    num_tensors = _count(cursor, "number of tensors", _MAX_TENSORS)
    num_entries = _count(cursor, "number of metadata entries", _MAX_ENTRIES)
    metadata = _metadata(cursor, num_entries)
    alignment = _alignment(cursor.file, metadata)
    infos = [_info(cursor) for _ in range(num_tensors)]
    start = -(-cursor.place // alignment) * alignment
    tensors = _placed(cursor, infos, start, alignment)
    # With the sizes, so that a file that was cut or continued is another one.
    digest = hashlib.sha256(cursor.digest.digest() + cursor.size.to_bytes(8, "little")).digest()
    return GgufHeader(cursor.file, metadata, tensors, cursor.size, digest)


def _count(cursor: _Cursor, what: str, limit: int) -> int:
    count: int = cursor.number("Q", what)
    if count > limit:
        raise InvalidModelFolder(f"{cursor.file}: {what} must be at most {limit}, is {count}")
    return count


def _metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_entries):
        key = cursor.text(f"key of metadata entry {index}", _MAX_KEY_BYTES)
        if not _KEY.fullmatch(key):
            raise InvalidModelFolder(f"{cursor.file}: metadata key {shown(key)} must be ASCII without spaces")
        if key in metadata:
            raise InvalidModelFolder(f"{cursor.file}: metadata key {shown(key)} occurs twice")
        metadata[key] = _value(cursor, cursor.number("I", f"type of {key}"), key, 0)
    return metadata


def _value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind == _STRING:
        return cursor.text(key, _HEADER_LIMIT)
    if kind == _ARRAY:
        return _array(cursor, key, depth)
    if kind not in _NUMBERS:
        raise InvalidModelFolder(f"{cursor.file}: metadata {shown(key)} has the unknown type {kind}")
    value = cursor.number(_NUMBERS[kind], key)
    if kind == _BOOL:
        return _bool(cursor.file, key, value)
    return value


def _array(cursor: _Cursor, key: str, depth: int) -> list[Any]:
    if depth == _MAX_NESTING:
        raise InvalidModelFolder(
            f"{cursor.file}: metadata {shown(key)} has arrays nested more than {_MAX_NESTING} deep"
        )
    kind, count = cursor.number("I", key), cursor.number("Q", key)
    least = struct.calcsize("<" + _NUMBERS[kind]) if kind in _NUMBERS else 8
    if count * least > cursor.size - cursor.place:
        raise InvalidModelFolder(
            f"{cursor.file}: is truncated: metadata {shown(key)} announces {shown(count)} entries, the file ends before"
        )
    cursor.num_entries += count
    if cursor.num_entries > _MAX_ARRAY_ENTRIES:
        raise InvalidModelFolder(
            f"{cursor.file}: arrays have {cursor.num_entries} entries together, with metadata {shown(key)}; at most "
            f"{_MAX_ARRAY_ENTRIES} are read"
        )
    if kind in _NUMBERS:
        values = list(struct.unpack(f"<{count}{_NUMBERS[kind]}", cursor.take(count * least, key)))
        return [_bool(cursor.file, key, value) for value in values] if kind == _BOOL else values
    return [_value(cursor, kind, key, depth + 1) for _ in range(count)]


def _bool(file: str, key: str, value: int) -> bool:
    if value not in (0, 1):
        raise InvalidModelFolder(f"{file}: metadata {shown(key)} must be true (1) or false (0), is {value}")
    return bool(value)


def _alignment(file: str, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 8 or value % 8 or value > _MAX_ALIGNMENT:
        raise InvalidModelFolder(
            f"{file}: general.alignment must be a multiple of 8 up to {_MAX_ALIGNMENT}, is {shown(value)}"
        )
    return value


class _Info(NamedTuple):
    name: str
    type: GgufType
    shape: tuple[int, ...]
    # From the start of the data.
    offset: int
    num_bytes: int


def _info(cursor: _Cursor) -> _Info:
    name = cursor.text("name of a tensor", _MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"

    def error(rule: str) -> InvalidModelFolder:
        return InvalidModelFolder(f"{cursor.file}: {what} {rule}")

    num_dimensions = cursor.number("I", what)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise error(f"must have 1 to {_MAX_DIMENSIONS} dimensions, has {num_dimensions}")
    sizes = struct.unpack(f"<{num_dimensions}Q", cursor.take(8 * num_dimensions, what))
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise error(f"has the type {_UNSUPPORTED.get(number, number)}, one of {known} expected")
    kind = TYPES[number]
    num_numbers = math.prod(sizes)
    if num_numbers == 0 or num_numbers >= 1 << 62:
        raise error(f"has {shown(num_numbers)} numbers, at least one expected that a file can hold")
    # The innermost dimension comes first in the file.
    if sizes[0] % kind.block_inputs:
        raise error(f"has rows of {sizes[0]} numbers, which {kind.name} can't cut into blocks of {kind.block_inputs}")
    return _Info(name, kind, tuple(reversed(sizes)), offset, num_numbers // kind.block_inputs * kind.block_bytes)


def _placed(cursor: _Cursor, infos: list[_Info], start: int, alignment: int) -> dict[str, GgufTensor]:
    """The tensors by name; in order of offset none may begin before the one before it ends."""
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for info in sorted(infos, key=lambda info: (info.offset, info.num_bytes)):
        what = f"{cursor.file}: tensor {shown(info.name)}"
        if info.name in tensors:
            raise InvalidModelFolder(f"{what} occurs twice")
        if info.offset % alignment:
            raise InvalidModelFolder(f"{what} begins at {info.offset}, which is no multiple of {alignment}")
        if info.offset < end:
            raise InvalidModelFolder(
                f"{what} overlaps the tensor before it: begins at {info.offset}, {end} or more expected"
            )
        end = info.offset + info.num_bytes
        if start + end > cursor.size:
            raise InvalidModelFolder(
                f"{cursor.file}: is truncated: tensor {shown(info.name)} ends at byte {start + end}, the file has "
                f"{cursor.size} bytes"
            )
        tensors[info.name] = GgufTensor(info.type, info.shape, start + info.offset, info.num_bytes)
    return tensors
