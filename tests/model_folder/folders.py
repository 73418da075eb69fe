"""Writes small model folders byte by byte, without torch or safetensors.

So each test can break exactly one thing.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from headrace_model_folder.config import parse_config
from headrace_model_folder.expected_tensors import expected_tensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}

Header = dict[str, dict[str, Any]]


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32", width: int = 4) -> tuple[Header, int]:
    """A header that lays the tensors out one after the other, and the size of their data."""
    header: Header = {}
    end = 0
    for name, shape in shapes.items():
        size = width
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return header, end


def write_safetensors(path: pathlib.Path, header: Header | bytes, num_bytes: int) -> None:
    """Writes a file with this header and that many zero bytes of data.

    The data is sparse, so large sizes cost nothing.
    """
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with path.open("r+b") as file:
        file.truncate(8 + len(raw) + num_bytes)


def write_folder(path: pathlib.Path, config: Mapping[str, Any] = CONFIG) -> pathlib.Path:
    """A valid folder with one weight file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header, size = header_of(expected_tensors(parse_config(dict(config))))
    write_safetensors(path / "model.safetensors", header, size)
    return path


def write_sharded_folder(path: pathlib.Path, num_shards: int = 3) -> dict[str, str]:
    """A valid folder with shards. Returns its weight map."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    shapes = expected_tensors(parse_config(CONFIG))
    weight_map = {
        name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(shapes)
    }
    for file in set(weight_map.values()):
        header, size = header_of({name: shapes[name] for name in shapes if weight_map[name] == file})
        write_safetensors(path / file, header, size)
    write_index(path, weight_map)
    return weight_map


def write_index(path: pathlib.Path, weight_map: Mapping[str, Any]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
