"""The metadata of a GGUF file as a `ModelConfig`: what config.json says elsewhere.

Owns which of a file's keys mean what. The result passes
through `parse_config`, so that the bounds are the same whatever the file. Numbers that GGUF keeps
in fp32 (epsilon, rotary base) are taken as the shortest decimals that they can have been.
"""

from __future__ import annotations

import pathlib
from typing import Any

from headrace_model_folder.config import ModelConfig, parse_config
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.families.family import Family
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.description import as_in_file
from headrace_model_folder.gguf.experts import expert_fields
from headrace_model_folder.gguf.family_fields import family_fields
from headrace_model_folder.gguf.header import GgufHeader
from headrace_model_folder.gguf.rope import longrope_fields, rope_fields, shortest, with_rope_factors
from headrace_model_folder.gguf.tensors import gguf_family

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
    assert family.gguf is not None, "a family that files are of has names there"
    _refuse_unsupported(fields, family.gguf.name)
    values = _config_values(fields, family, header, folder)
    try:
        config = parse_config(values | family_fields(fields, family.gguf.name, values))
    except InvalidModelFolder as error:
        raise InvalidModelFolder(f"{header.file}: metadata, in config.json's words: {error}") from None
    return with_rope_factors(folder, header, as_in_file(config, family.gguf))


def _refuse_unsupported(fields: Fields, name: str) -> None:
    if fields.integer("split.count", 0, 1 << 16, 0) > 1:
        raise fields.error(
            "split.count", f"is {fields.get('split.count')}: a model split among files must be merged first"
        )
    if fields.text(f"{name}.tensor_data_layout", "reference") not in ("reference", "Meta AI original pth"):
        raise fields.error(
            f"{name}.tensor_data_layout", f"must be 'reference', is {shown(fields.get(f'{name}.tensor_data_layout'))}"
        )


def _config_values(fields: Fields, family: Family, header: GgufHeader, folder: pathlib.Path) -> dict[str, Any]:
    """config.json's fields, as most families have them."""
    naming = family.gguf
    assert naming is not None, "a family that files are of has names there"
    name = naming.name

    def integer(key: str, high: int = _LIMIT, default: int | None = None) -> int:
        return fields.integer(f"{name}.{key}", 1, high, default)

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", default=max(hidden // heads, 1))
    if integer("attention.value_length", default=head_dim) != head_dim:
        raise fields.error(
            f"{name}.attention.value_length",
            f"must be the length of a head's key ({head_dim}), is {integer('attention.value_length')}",
        )
    rotary_dim = integer("rope.dimension_count", high=head_dim, default=head_dim)
    rope = rope_fields(fields, name) | longrope_fields(folder, header, name, rotary_dim)
    window = fields.integer(f"{name}.attention.sliding_window", 0, _LIMIT, 0)
    return (expert_fields(fields, name) if naming.has_experts else {}) | {
        "architectures": [naming.windowed if naming.windowed and window else family.architecture],
        "hidden_size": hidden,
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "intermediate_size": integer("feed_forward_length"),
        "vocab_size": _vocab_size(fields, name, header),
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": shortest(fields.number(f"{name}.attention.layer_norm_rms_epsilon", 1e-12, 1.0)),
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
        # Qwen's layers below this number see all.
        "max_window_layers": 0,
        # Families that rotate whole heads refuse another share.
        "rope_parameters": rope | {"partial_rotary_factor": rotary_dim / head_dim},
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


def _dtype(header: GgufHeader) -> str:
    """Type of what is not in blocks, and of activations: the widest that the matrices need."""
    kinds = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F16", "F32"}:
        return "float16" if "F16" in kinds else "float32"
    return _DTYPES["BF16"]
