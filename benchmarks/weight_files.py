"""Safetensors files of the right size for a folder without weights, so that loading can be measured without a checkpoint.

Owns their form. Values are Gaussian (standard deviation 0.02, norms 1) in bf16, cut out of one block at another place for each tensor: fast to make, finite, and never zero.
The files lie in the page cache afterwards, as those of a server that was restarted do.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np

from headrace_model_folder import ModelFolder, expected_tensors

_SHARD_BYTES = 4 << 30
_BLOCK_VALUES = 16 << 20
_ONE = 0x3F80


def write_weights(folder: pathlib.Path, seed: int = 0) -> int:
    """Writes all tensors that the folder's config.json calls for, in shards. Returns their bytes."""
    config = ModelFolder.open(folder, require_weights=False).config
    block = _bf16(np.random.default_rng(seed).standard_normal(_BLOCK_VALUES, np.float32) * np.float32(0.02))
    shards = list(_shards(dict(expected_tensors(config))))
    weight_map = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, tensors, block)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(2 * math.prod(shape) for tensors in shards for shape in tensors.values())


def _bf16(values: np.ndarray) -> bytes:
    """The bytes of float32 values cut to bf16."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _shards(tensors: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors in order, dealt into files."""
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in tensors.items():
        if shard and size + 2 * math.prod(shape) > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += 2 * math.prod(shape)
    yield shard


def _write_shard(path: pathlib.Path, tensors: dict[str, tuple[int, ...]], block: bytes) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            for piece in _pieces(name, 2 * math.prod(shape), len(shape) == 1, block):
                file.write(piece)


def _pieces(name: str, num_bytes: int, norm: bool, block: bytes) -> Iterator[memoryview]:
    """One tensor's bytes."""
    if norm and name.endswith("norm.weight"):
        yield memoryview(_ONE.to_bytes(2, "little") * (num_bytes // 2))
        return
    view = memoryview(block)
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % (len(block) // 2) * 2
    while num_bytes:
        piece = view[start : start + num_bytes]
        yield piece
        num_bytes, start = num_bytes - len(piece), 0
