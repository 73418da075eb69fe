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
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.description import as_in_file
from headrace_model_folder.gguf.experts import expert_fields
from headrace_model_folder.gguf.family_fields import family_fields
from headrace_model_folder.gguf.header import GgufHeader
from headrace_model_folder.gguf.layer_numbers import numbers_of_layers
from headrace_model_folder.gguf.rope import (
    longrope_fields,
    proportional_fields,
    rope_fields,
    shortest,
    with_rope_factors,
)
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
        config = parse_config(values | family_fields(fields, family.gguf.name, values, header.tensors))
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
    name, tensors = naming.name, header.tensors

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
    share = {"partial_rotary_factor": rotary_dim / head_dim} | proportional_fields(folder, header, rotary_dim)
    rope = rope_fields(fields, name) | longrope_fields(folder, header, name, rotary_dim)
    # Behind the model's layers stand those that predict further tokens.
    num_blocks = integer("block_count", high=1 << 16)
    num_layers = num_blocks - fields.integer(f"{name}.nextn_predict_layers", 0, num_blocks - 1, 0)
    window = fields.integer(f"{name}.attention.sliding_window", 0, _LIMIT, 0)
    has_experts = fields.integer(f"{name}.expert_count", 0, _LIMIT, 0) > 0
    experts = expert_fields(fields, naming) if has_experts else {}
    inner = experts.get("moe_intermediate_size")
    return experts | {
        "architectures": [naming.windowed if naming.windowed and window else family.architecture],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _of_all(fields, naming, "attention.head_count_kv", num_blocks, heads),
        "head_dim": head_dim,
        "intermediate_size": _of_all(fields, naming, "feed_forward_length", num_blocks, inner),
        "vocab_size": _vocab_size(fields, name, header),
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": shortest(fields.number(f"{name}.attention.layer_norm_rms_epsilon", 1e-12, 1.0)),
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
        # Qwen's layers below this number see all.
        "max_window_layers": 0,
        # Families that rotate whole heads refuse another share.
        "rope_parameters": rope | share,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(theirs.endswith(".attn_q.bias") for theirs in tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "has_head_norms": any(theirs.endswith(".attn_q_norm.weight") for theirs in tensors),
        "torch_dtype": _dtype(header),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [header.metadata[key] for key in EOS_KEYS if key in header.metadata],
    }


def _of_all(fields: Fields, naming: GgufNaming, key: str, num_blocks: int, default: int | None) -> int:
    """The number of all layers; of families whose layers differ that of the first one.

    Raises InvalidModelFolder for layers that differ where those of the family do not.
    """
    key = f"{naming.name}.{key}"
    numbers = numbers_of_layers(fields, key, num_blocks, default)
    if len(set(numbers)) > 1 and not naming.has_varied_layers:
        raise fields.error(key, f"must be one number: layers of this architecture are alike, is {shown(numbers)}")
    return numbers[0]


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
