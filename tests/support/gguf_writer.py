"""Writes GGUF files byte by byte, with numpy alone, so that each test can break exactly one thing.

It writes Hugging Face folders as GGUF files too.

Independent of the product's reader: written from the format's description.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from tests.support.gguf_numbers import KINDS, Bytes, Floats, decode, quantize

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
# Type of a metadata value -> number in files and struct's letter.
_TYPES = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


@dataclasses.dataclass(frozen=True)
class Typed:
    """A metadata value of a type of its own; plain ints are u32, floats f32."""

    type: str
    value: Any


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


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *inner, parameter = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(inner)]}.{parameter}"


def alternating(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of queries or keys as Llama's files have them: the two halves of each head alternate."""
    heads = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


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
    arch = _ARCHITECTURES[config["architectures"][0]]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    exact: dict[str, torch.Tensor] = {}
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if ".experts." in name:
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        values = tensor.float().numpy()
        kind = (
            "F32"
            if values.ndim == 1
            else _fitting(choose if isinstance(choose, str) else choose(name, values.shape), values.shape)
        )
        rows = quantize(kind, values.reshape(len(values), -1) if values.ndim == 2 else values[None])
        exact[name] = torch.from_numpy(_decoded(kind, rows).reshape(values.shape).copy())
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads"] if ".q_proj." in name else config["num_key_value_heads"]
            rows = alternating(rows.reshape(len(values), -1), heads)
        tensors[gguf_name(name)] = (kind, tuple(values.shape), rows.tobytes())
    for name, stack in _stacks(stored).items():
        values = np.stack([stored[part].float().numpy() for part in stack])
        kind = _fitting(choose if isinstance(choose, str) else choose(stack[0], values.shape[1:]), values.shape[1:])
        rows = quantize(kind, values.reshape(-1, values.shape[2]))
        decoded = _decoded(kind, rows).reshape(values.shape)
        exact.update((part, torch.from_numpy(each.copy())) for part, each in zip(stack, decoded, strict=True))
        tensors[name] = (kind, tuple(values.shape), rows.tobytes())
    return Gguf(_metadata(arch, config), tensors), exact


def _stacks(stored: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Name of each tensor with all experts of a layer -> names of the experts' own, in order."""
    found: dict[str, list[str]] = {}
    experts = [name for name in stored if ".experts." in name]
    for name in sorted(experts, key=lambda name: int(name.split(".")[5])):
        part = name.split(".")[6].removesuffix("_proj")
        found.setdefault(f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", []).append(name)
    return found


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    if shape[1] % KINDS[kind].inputs == 0:
        return kind
    return "Q8_0" if shape[1] % 32 == 0 else "F16"


def _decoded(kind: str, rows: Bytes) -> Floats:
    return decode(kind, rows)


def _metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": Typed("u64", heads),
        f"{arch}.attention.head_count_kv": config.get("num_key_value_heads", heads),
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    }
    if arch == "qwen3moe":
        for key, field in (
            ("expert_count", "num_local_experts"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
        ):
            metadata[f"{arch}.{key}"] = config[field]
    return metadata


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
