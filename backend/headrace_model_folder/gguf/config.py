"""The metadata of a GGUF file as a `ModelConfig`: what config.json says elsewhere.

Owns which of a file's keys mean what. The result passes
through `parse_config`, so that the bounds are the same whatever the file. Numbers that GGUF keeps
in fp32 (epsilon, rotary base) are taken as the shortest decimals that they can have been.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any

from headrace_model_folder.bounded_files import open_inside
from headrace_model_folder.config import ModelConfig, parse_config
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.families.family import GgufNaming
from headrace_model_folder.families.registry import GGUF_FAMILIES
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.experts import expert_fields
from headrace_model_folder.gguf.header import GgufHeader, GgufTensor
from headrace_model_folder.gguf.tensors import gguf_family

_ROPE_FACTORS = "rope_freqs.weight"
_LIMIT = 1 << 26
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf_config(folder: pathlib.Path, header: GgufHeader) -> ModelConfig:
    """The configuration that a file's metadata and tensors state.

    Raises:
        InvalidModelFolder: an architecture that is not ours, or a value out of range; file, key and
            rule are named.
    """
    fields = Fields(header.file, header.metadata)
    family = gguf_family(header)
    _refuse_unsupported(fields, family)
    try:
        config = parse_config(_config_values(fields, family, header))
    except InvalidModelFolder as error:
        raise InvalidModelFolder(f"{header.file}: metadata, in config.json's words: {error}") from None
    factors = _rope_factors(folder, header, config.description.attention.rotary_dim)
    return config if factors is None else _with_factors(header.file, config, factors)


def _refuse_unsupported(fields: Fields, family: GgufNaming) -> None:
    name = family.name
    if fields.integer("split.count", 0, 1 << 16, 0) > 1:
        raise fields.error(
            "split.count", f"is {fields.get('split.count')}: a model split among files must be merged first"
        )
    if fields.integer(f"{name}.expert_count", 0, 1 << 16, 0) and not family.has_experts:
        raise fields.error(f"{name}.expert_count", "must be 0: experts of this architecture are not supported")
    if fields.text(f"{name}.tensor_data_layout", "reference") not in ("reference", "Meta AI original pth"):
        raise fields.error(
            f"{name}.tensor_data_layout", f"must be 'reference', is {shown(fields.get(f'{name}.tensor_data_layout'))}"
        )


def _config_values(fields: Fields, family: GgufNaming, header: GgufHeader) -> dict[str, Any]:
    """config.json's fields."""
    name = family.name

    def integer(key: str, high: int = _LIMIT, default: int | None = None) -> int:
        return fields.integer(f"{name}.{key}", 1, high, default)

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", default=max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, default=head_dim) != head_dim:
            raise fields.error(f"{name}.{key}", f"must be the length of a head's key ({head_dim}), is {integer(key)}")
    window = fields.integer(f"{name}.attention.sliding_window", 0, _LIMIT, 0)
    return (expert_fields(fields, name) if family.has_experts else {}) | {
        "architectures": [family.windowed if family.windowed and window else GGUF_FAMILIES[name].architecture],
        "hidden_size": hidden,
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "intermediate_size": integer("feed_forward_length"),
        "vocab_size": _vocab_size(fields, name, header),
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": _shortest(fields.number(f"{name}.attention.layer_norm_rms_epsilon", 1e-12, 1.0)),
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
        # Qwen's layers below this number see all.
        "max_window_layers": 0,
        "rope_parameters": _rope(fields, name),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "torch_dtype": _dtype(header),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [header.metadata[key] for key in EOS_KEYS if key in header.metadata],
    }


def _vocab_size(fields: Fields, name: str, header: GgufHeader) -> int:
    """The embedding's rows, which metadata must not contradict."""
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise InvalidModelFolder(f"{header.file}: tensor 'token_embd.weight' must be there and have 2 dimensions")
    rows = table.shape[0]
    if fields.integer(f"{name}.vocab_size", 1, 1 << 22, rows) != rows:
        raise fields.error(
            f"{name}.vocab_size",
            f"must be the rows of 'token_embd.weight' ({rows}), is {fields.get(f'{name}.vocab_size')}",
        )
    return rows


def _rope(fields: Fields, name: str) -> dict[str, Any]:
    """The rotary embedding in config.json's words."""
    prefix = f"{name}.rope.scaling."
    rope: dict[str, Any] = {"rope_theta": _shortest(fields.number(f"{name}.rope.freq_base", 1.0, 1e12, 10_000.0))}
    old_factor = fields.number(f"{name}.rope.scale_linear", 0.0, 1e6, 0.0)
    kind = fields.text(f"{prefix}type", "linear" if old_factor > 1 else "none")
    factor = _shortest(fields.number(f"{prefix}factor", 0.0, 1e6, old_factor or 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.error(f"{prefix}type", f"must be none, linear or yarn, is {shown(kind)}")
    if fields.get(f"{prefix}yarn_log_multiplier") or fields.number(f"{prefix}yarn_ext_factor", -1.0, 1.0, 1.0) != 1.0:
        raise fields.error(f"{prefix}yarn_log_multiplier", "and yarn_ext_factor are not supported but as 0 and 1")
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer(f"{prefix}original_context_length", 1, _LIMIT),
        "beta_fast": fields.number(f"{prefix}yarn_beta_fast", 0.0, 1e6, 32.0),
        "beta_slow": fields.number(f"{prefix}yarn_beta_slow", 0.0, 1e6, 1.0),
    }
    # A factor on what follows from the stretching, where config.json has the whole.
    sharper = fields.number(f"{prefix}yarn_attn_factor", 0.0, 1e3, fields.number(f"{prefix}attn_factor", 0.0, 1e3, 1.0))
    if sharper != 1.0:
        yarn["attention_factor"] = sharper * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return rope | yarn


def _rope_factors(folder: pathlib.Path, header: GgufHeader, rotary_dim: int) -> tuple[float, ...] | None:
    """Divisor of each frequency of the rotary embedding; None if the file has none.

    Llama 3.1's files state it as a tensor.
    """
    tensor = header.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(_ROPE_FACTORS)} must be F32 [{rotary_dim // 2}], is {tensor.type.name} "
            f"{list(tensor.shape)}"
        )
    factors = struct.unpack(f"<{rotary_dim // 2}f", _data(folder, header, tensor))
    if not all(math.isfinite(factor) and 1e-6 <= factor <= 1e6 for factor in factors):
        raise InvalidModelFolder(f"{header.file}: tensor {shown(_ROPE_FACTORS)} must hold numbers from 1e-6 to 1e6")
    return factors


def _data(folder: pathlib.Path, header: GgufHeader, tensor: GgufTensor) -> bytes:
    descriptor, _ = open_inside(folder, header.file)
    try:
        data = os.pread(descriptor, tensor.num_bytes, tensor.offset)
    finally:
        os.close(descriptor)
    if len(data) != tensor.num_bytes:
        raise InvalidModelFolder(
            f"{header.file}: is truncated: tensor {shown(_ROPE_FACTORS)} ends before its last byte"
        )
    return data


def _with_factors(file: str, config: ModelConfig, factors: tuple[float, ...]) -> ModelConfig:
    rope = config.description.rope
    if rope.rope_type != "default":
        raise InvalidModelFolder(
            f"{file}: tensor {shown(_ROPE_FACTORS)} and rope.scaling.type {rope.rope_type} stretch the context twice"
        )
    rope = dataclasses.replace(rope, frequency_divisors=factors)
    return dataclasses.replace(config, description=config.description.with_rope(rope))


def _dtype(header: GgufHeader) -> str:
    """Type of what is not in blocks, and of activations: the widest that the matrices need."""
    kinds = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F16", "F32"}:
        return "float16" if "F16" in kinds else "float32"
    return _DTYPES["BF16"]


def _shortest(value: float) -> float:
    return float(f"{value:.7g}")
