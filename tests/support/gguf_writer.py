"""Writes GGUF files byte by byte, with numpy alone, so that each test can break exactly one thing.

It writes Hugging Face folders as GGUF files too.

Independent of the product's reader: written from the format's description.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.torch
import torch
from tests.support.gguf_families import (
    ARCHITECTURES,
    Typed,
    gguf_name,
    in_layers,
    metadata_of,
    rope_factors,
    stacks,
)
from tests.support.gguf_layouts import layout
from tests.support.gguf_numbers import KINDS, decode, quantize

# Type of a metadata value -> number in files and struct's letter.
_TYPES = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip


@dataclasses.dataclass
class Gguf:
    """What goes into a file."""

    metadata: dict[str, Any]
    # Name -> type, shape as torch has it, data.
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
    version: int = 3
    alignment: int = 32

    def header(self) -> tuple[bytes, int]:
        """All before the data, with padding, and the size of the data."""
        parts = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))]
        for key, value in self.metadata.items():
            parts += [text(key), encoded(value)]
        end = 0
        for name, (kind, shape, data) in self.tensors.items():
            sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
            parts += [text(name), struct.pack("<I", len(shape)), sizes, struct.pack("<IQ", KINDS[kind].number, end)]
            end += -(-len(data) // self.alignment) * self.alignment
        raw = b"".join(parts)
        return raw.ljust(-(-len(raw) // self.alignment) * self.alignment, b"\0"), end

    def write(self, path: pathlib.Path) -> pathlib.Path:
        """The file."""
        raw, _ = self.header()
        with path.open("wb") as file:
            file.write(raw)
            for _, _, data in self.tensors.values():
                file.write(data.ljust(-(-len(data) // self.alignment) * self.alignment, b"\0"))
        return path


def text(value: str) -> bytes:
    """A string with its length."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def encoded(value: Any) -> bytes:
    """A metadata value with its type."""
    number, data = _encoded(value)
    return struct.pack("<I", number) + data


def _encoded(value: Any) -> tuple[int, bytes]:
    match value:
        case Typed():
            number, letter = _TYPES[value.type]
            return number, struct.pack("<" + letter, value.value)
        case bool():
            return 7, bytes([value])
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case list():
            entries = [_encoded(entry) for entry in value]
            kind = entries[0][0] if entries else 4
            return 9, struct.pack("<IQ", kind, len(value)) + b"".join(data for _, data in entries)
    raise TypeError(value)


Choice = Callable[[str, tuple[int, ...]], str]


def from_folder(folder: pathlib.Path, choose: Choice | str) -> tuple[Gguf, dict[str, torch.Tensor]]:
    """A Hugging Face folder's model, without its tokenizer.

    Args:
        folder: With config.json and model.safetensors.
        choose: Type of a matrix by Hugging Face name and shape; a name: of all matrices. Where a
            type's blocks do not divide the inputs it is Q8_0, or F16.

    Returns:
        The file's contents, and the numbers its tensors stand for, by Hugging Face name, in the
        order of Hugging Face.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    exact: dict[str, torch.Tensor] = {}
    stored = safetensors.torch.load_file(folder / "model.safetensors")

    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        return "F32" if len(shape) == 1 else _fitting(choose if isinstance(choose, str) else choose(name, shape), shape)

    for theirs, tensor in stored.items():
        name = in_layers(config, theirs)
        if ".experts." in name or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        change = layout(arch, config, name)
        values = change.to_file(tensor.float().numpy())
        kind = kind_of(name, values.shape)
        rows = quantize(kind, values if values.ndim == 2 else values[None])
        exact[theirs] = torch.from_numpy(change.back(decode(kind, rows).reshape(values.shape)).copy()).view(
            tensor.shape
        )
        tensors[gguf_name(arch, name)] = (kind, tuple(values.shape), rows.tobytes())
    for name, stack in stacks(stored).items():
        shape = stack.values.shape
        kind = kind_of(stack.names[0], shape[1:])
        rows = quantize(kind, stack.values.reshape(-1, shape[-1]))
        stack.restore(exact, decode(kind, rows).reshape(shape))
        tensors[name] = (kind, shape, rows.tobytes())
    factors = {
        name: ("F32", values.shape, values.astype(np.float32).tobytes()) for name, values in rope_factors(config)
    }
    return Gguf(metadata_of(arch, config), tensors | factors), exact


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    if shape[1] % KINDS[kind].inputs == 0:
        return kind
    return "Q8_0" if shape[1] % 32 == 0 else "F16"


def demo_tokenizer(folder: pathlib.Path) -> dict[str, Any]:
    """Metadata of a folder's tokenizer: a whole tokenizer.json, special tokens and template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{token["content"]: token["id"] for token in tokenizer["added_tokens"]},
    }
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    return {
        "tokenizer.huggingface.json": (folder / "tokenizer.json").read_text(),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.ggml.eot_token_id": vocabulary["<|eos|>"],
        "tokenizer.chat_template": settings["chat_template"],
    }
