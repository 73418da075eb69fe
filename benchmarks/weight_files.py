"""Safetensors files of the right size for a folder without weights.

So loading can be measured without a checkpoint.

Owns their form. Values are Gaussian (standard deviation 0.02, norms 1), cut out of one block at
another place for each tensor: fast to make, finite, and hardly ever zero. All in bf16, or the
layers' matrices in e4m3, with a scale for each output, as compressed-tensors has them, or for
blocks of 128 by 128, as `quant_method` fp8 has them, with config.json saying so. Several files are
written at a time: their memory has to be made. They lie in the page cache afterwards, as those of a
server that was restarted do.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headrace_model_folder import ModelFolder, expected_tensors

FORMATS = ("bf16", "fp8", "fp8_blocks")
# Inputs and outputs of a block of FP8.
_BLOCK_SIZE = 128
# What routes to experts is plain in folders that people publish.
_ROUTER = ".mlp.gate.weight"
_SHARD_BYTES = 4 << 30
_BLOCK_VALUES = 16 << 20
_NUM_WRITERS = 16
_DEVIATION = 0.02
# Of the numbers that layers in fp8 are made of, whose largest is 448: five times it is in reach.
_FP8_DEVIATION = 80.0
_WIDTHS = {"BF16": 2, "F8_E4M3": 1}


class _Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    # What it is cut out of.
    block: bytes
    # Begins with the block, because all of it is one number.
    is_even: bool = False

    @property
    def num_bytes(self) -> int:
        return _WIDTHS[self.dtype] * math.prod(self.shape)


def write_weights(folder: pathlib.Path, seed: int = 0, layers: str = "bf16") -> int:
    """Writes all tensors that the folder's config.json calls for, in shards. Returns their bytes.

    Args:
        folder: Model folder with a config.json, which is changed where layers are in fp8.
        seed: Seed of the values.
        layers: One of FORMATS.
    """
    if layers != "bf16":
        _say_fp8(folder / "config.json", in_blocks=layers == "fp8_blocks")
    config = ModelFolder.open(folder, require_weights=False).config
    tensors = list(_tensors(expected_tensors(config), seed, layers))
    shards = list(_shards(tensors))
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    with concurrent.futures.ThreadPoolExecutor(_NUM_WRITERS) as writers:
        list(writers.map(_write_shard, [folder / name for name in names], shards))
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(tensor.num_bytes for tensor in tensors)


def _say_fp8(path: pathlib.Path, in_blocks: bool) -> None:
    """Writes what llm-compressor writes for FP8_DYNAMIC, or `quant_method` fp8 in blocks."""
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK_SIZE, _BLOCK_SIZE],
    }
    if not in_blocks:
        quantization = _fp8_of_outputs()
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": quantization}, indent=2))


def _fp8_of_outputs() -> dict[str, Any]:
    """FP8_DYNAMIC: a scale for each output, and tokens rounded as they come."""
    numbers: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = numbers | {"strategy": "channel", "dynamic": False}
    tokens = numbers | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _tensors(shapes: Mapping[str, tuple[int, ...]], seed: int, layers: str) -> Iterator[_Tensor]:
    drawn = np.random.default_rng(seed).standard_normal(_BLOCK_VALUES, np.float32)
    plain, one = _bf16(drawn * np.float32(_DEVIATION)), _bf16(np.ones(_BLOCK_VALUES, np.float32))
    numbers = _e4m3(drawn * np.float32(_FP8_DEVIATION)) if layers != "bf16" else b""
    scale = _bf16(np.full(_BLOCK_VALUES, _DEVIATION / _FP8_DEVIATION, np.float32)) if numbers else b""
    for name, shape in shapes.items():
        if numbers and len(shape) == 2 and ".layers." in name and not name.endswith(_ROUTER):
            yield _Tensor(name, "F8_E4M3", shape, numbers)
            if layers == "fp8_blocks":
                blocks = -(-shape[0] // _BLOCK_SIZE), -(-shape[1] // _BLOCK_SIZE)
                yield _Tensor(f"{name}_scale_inv", "BF16", blocks, scale, is_even=True)
            else:
                yield _Tensor(f"{name}_scale", "BF16", (shape[0], 1), scale, is_even=True)
        elif len(shape) == 1 and name.endswith("norm.weight"):
            yield _Tensor(name, "BF16", shape, one, is_even=True)
        else:
            yield _Tensor(name, "BF16", shape, plain)


def _bf16(values: np.ndarray) -> bytes:
    """The bytes of float32 values cut to bf16."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _e4m3(values: np.ndarray) -> bytes:
    """The bytes of float32 values rounded to e4m3fn; larger ones become its largest."""
    numbers = _e4m3_numbers()
    nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.abs(values)).astype(np.uint8)
    patterns: bytes = (nearest | np.signbit(values).astype(np.uint8) << 7).tobytes()
    return patterns


@functools.cache
def _e4m3_numbers() -> np.ndarray:
    """The e4m3 values that are not negative, as float32, in the order of their bytes.

    The last pattern is NaN and left out.
    """
    patterns = np.arange(127)
    exponents, fractions = patterns >> 3, (patterns & 7) / 8
    normal = np.ldexp(1 + fractions, exponents - 7)
    return np.where(exponents == 0, np.ldexp(fractions, -6), normal).astype(np.float32)


def _shards(tensors: Iterable[_Tensor]) -> Iterator[list[_Tensor]]:
    """The tensors in order, dealt into files."""
    shard: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def _write_shard(path: pathlib.Path, tensors: list[_Tensor]) -> None:
    header, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in _pieces(tensor):
                file.write(piece)


def _pieces(tensor: _Tensor) -> Iterator[memoryview]:
    """One tensor's bytes."""
    view, num_bytes = memoryview(tensor.block), tensor.num_bytes
    digest = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "little")
    start = 0 if tensor.is_even else digest % (len(view) // 2) * 2
    while num_bytes:
        piece = view[start : start + num_bytes]
        yield piece
        num_bytes, start = num_bytes - len(piece), 0
