"""The rotary embedding of a GGUF file in config.json's words.

Owns the metadata's keys, and the tensors in which files state what frequencies are divided by:
Llama 3.1's one set, Gemma 4's, which only says what keeps still, and Phi's two, for short contexts
and long ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any

from headrace_model_folder.bounded_files import open_inside
from headrace_model_folder.config import ModelConfig
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.header import GgufHeader, GgufTensor

_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_LIMIT = 1 << 26
# What files divide a frequency by that is to be 0.
_STILL = 1e30


def rope_fields(fields: Fields, name: str) -> dict[str, Any]:
    """The rotary embedding that metadata state.

    Args:
        fields: The file's metadata.
        name: Prefix of the family's keys.

    Raises:
        InvalidModelFolder: A way of stretching the context that is not served; the key is named.
    """
    prefix = f"{name}.rope.scaling."
    rope: dict[str, Any] = {"rope_theta": shortest(fields.number(f"{name}.rope.freq_base", 1.0, 1e12, 10_000.0))}
    old_factor = fields.number(f"{name}.rope.scale_linear", 0.0, 1e6, 0.0)
    kind = fields.text(f"{prefix}type", "linear" if old_factor > 1 else "none")
    factor = shortest(fields.number(f"{prefix}factor", 0.0, 1e6, old_factor or 1.0))
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


def longrope_fields(folder: pathlib.Path, header: GgufHeader, name: str, rotary_dim: int) -> dict[str, Any]:
    """LongRoPE's two sets of divisors and the original context; nothing if the file has none.

    Args:
        folder: The file's folder.
        header: The file's header.
        name: Prefix of the family's keys.
        rotary_dim: Elements of a head that are rotated.

    Raises:
        InvalidModelFolder: One set without the other, or numbers that can't be divisors.
    """
    found = [key for key in (_LONG_FACTORS, _SHORT_FACTORS) if key in header.tensors]
    if not found:
        return {}
    if len(found) == 1:
        raise InvalidModelFolder(f"{header.file}: of {_LONG_FACTORS} and {_SHORT_FACTORS} only {found[0]} is there")
    fields = Fields(header.file, header.metadata)
    sharper = fields.get(f"{name}.rope.scaling.attn_factor")
    stated = {} if sharper is None else {"attention_factor": shortest(float(sharper))}
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": fields.integer(f"{name}.rope.scaling.original_context_length", 1, _LIMIT),
        "long_factor": [shortest(factor) for factor in _factors(folder, header, _LONG_FACTORS, rotary_dim)],
        "short_factor": [shortest(factor) for factor in _factors(folder, header, _SHORT_FACTORS, rotary_dim)],
        **stated,
    }


def proportional_fields(folder: pathlib.Path, header: GgufHeader, rotary_dim: int) -> dict[str, Any]:
    """The share of a head's planes that turn, where a file says that the last ones keep still.

    Args:
        folder: The file's folder.
        header: The file's header.
        rotary_dim: Elements of a head that are rotated, those that keep still too.

    Returns:
        Fields of a proportional rotation; nothing if all planes turn.

    Raises:
        InvalidModelFolder: Planes that keep still before others, or others that turn by anything
            but their own frequencies.
    """
    if _FACTORS not in header.tensors:
        return {}
    divisors = _numbers(folder, header, _FACTORS, rotary_dim)
    num_turning = sum(divisor < _STILL for divisor in divisors)
    if num_turning == len(divisors):
        return {}
    if any(divisor != 1.0 for divisor in divisors[:num_turning]):
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(_FACTORS)} must be 1 for the first planes of a head and {_STILL:g} for the "
            "others where some keep still"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": num_turning / len(divisors)}


def with_rope_factors(folder: pathlib.Path, header: GgufHeader, config: ModelConfig) -> ModelConfig:
    """Returns the config with what the file divides frequencies by, as Llama 3.1's files state it.

    Raises:
        InvalidModelFolder: Numbers that can't be divisors, or metadata that stretch too.
    """
    if _FACTORS not in header.tensors or any(
        attention.rope.rope_type == "proportional" for attention in config.description.attentions
    ):
        return config
    factors, rope = _factors(folder, header, _FACTORS, config.description.attention.rotary_dim), config.description.rope
    if rope.rope_type != "default":
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(_FACTORS)} and rope.scaling.type {rope.rope_type} stretch the context twice"
        )
    rope = dataclasses.replace(rope, frequency_divisors=factors)
    return dataclasses.replace(config, description=config.description.with_rope(rope))


def shortest(value: float) -> float:
    """The shortest decimal that a number in fp32 can have been."""
    return float(f"{value:.7g}")


def _factors(folder: pathlib.Path, header: GgufHeader, name: str, rotary_dim: int) -> tuple[float, ...]:
    """Divisor of each frequency, as a tensor states it, checked."""
    factors = _numbers(folder, header, name, rotary_dim)
    if not all(math.isfinite(factor) and 1e-6 <= factor <= 1e6 for factor in factors):
        raise InvalidModelFolder(f"{header.file}: tensor {shown(name)} must hold numbers from 1e-6 to 1e6")
    return factors


def _numbers(folder: pathlib.Path, header: GgufHeader, name: str, rotary_dim: int) -> tuple[float, ...]:
    """The numbers of a tensor with one for each plane of a head."""
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise InvalidModelFolder(
            f"{header.file}: tensor {shown(name)} must be F32 [{rotary_dim // 2}], is {tensor.type.name} "
            f"{list(tensor.shape)}"
        )
    return struct.unpack(f"<{rotary_dim // 2}f", _data(folder, header, name, tensor))


def _data(folder: pathlib.Path, header: GgufHeader, name: str, tensor: GgufTensor) -> bytes:
    descriptor, _ = open_inside(folder, header.file)
    try:
        data = os.pread(descriptor, tensor.num_bytes, tensor.offset)
    finally:
        os.close(descriptor)
    if len(data) != tensor.num_bytes:
        raise InvalidModelFolder(f"{header.file}: is truncated: tensor {shown(name)} ends before its last byte")
    return data
