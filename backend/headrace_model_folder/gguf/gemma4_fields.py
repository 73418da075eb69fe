"""What GGUF files of Gemma 4 state of their layers, in config.json's words.

Owns the keys that files of this family have alone: of layers with a window and of those that see
everything, whose heads differ, of layers that read others' keys, and of inputs by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.families.layer_types import FULL
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.layer_numbers import layer_types, numbers_of_layers

_LIMIT = 1 << 26


def gemma4_fields(fields: Fields, name: str, values: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """The fields that files of the family have beside those of most, or in another form.

    Args:
        fields: The file's metadata.
        name: Prefix of the family's keys.
        values: config.json's fields, as most families have them.
        tensors: The file's tensors, by name.

    Raises:
        InvalidModelFolder: A key says what no model of the family has.
    """
    types = layer_types(fields, name, values)
    num_layers, shared = len(types), fields.integer(f"{name}.attention.shared_kv_layers", 0, len(types) - 1, 0)
    inner = numbers_of_layers(fields, f"{name}.feed_forward_length", num_layers)
    is_wide = _is_double_wide(fields, f"{name}.feed_forward_length", inner, num_layers - shared)
    per_layer = fields.integer(f"{name}.embedding_length_per_layer_input", 0, _LIMIT, 0)
    return {
        "layer_types": types,
        "per_layer_config": _heads(fields, name, types),
        "attention_k_eq_v": _keys_are_values(types[: num_layers - shared], tensors),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": values["vocab_size"],
        "rope_parameters": _rotations(fields, name, values),
        "final_logit_softcapping": fields.get(f"{name}.final_logit_softcapping"),
        "enable_moe_block": "num_experts" in values,
        "top_k_experts": values.get("num_experts_per_tok"),
    }


def _heads(fields: Fields, name: str, types: Sequence[str]) -> dict[str, dict[str, int]]:
    """Size and number of each layer's heads of keys."""
    full = fields.integer(f"{name}.attention.key_length", 2, _LIMIT)
    sliding = fields.integer(f"{name}.attention.key_length_swa", 2, _LIMIT)
    if fields.integer(f"{name}.attention.value_length_swa", 2, _LIMIT, sliding) != sliding:
        raise fields.error(
            f"{name}.attention.value_length_swa",
            f"must be the length of a head's key ({sliding}) in layers with a window",
        )
    if fields.integer(f"{name}.rope.dimension_count_swa", 2, _LIMIT, sliding) != sliding:
        raise fields.error(
            f"{name}.rope.dimension_count_swa", f"must be {sliding}: layers with a window rotate whole heads"
        )
    heads = numbers_of_layers(fields, f"{name}.attention.head_count_kv", len(types))
    return {
        str(layer): {"head_dim": full if kind == FULL else sliding, "num_key_value_heads": count}
        for layer, (kind, count) in enumerate(zip(types, heads, strict=True))
    }


def _keys_are_values(types: Sequence[str], tensors: Mapping[str, object]) -> bool:
    """Whether the layers that see everything have no projection of values."""
    full = (layer for layer, kind in enumerate(types) if kind == FULL)
    return any(f"blk.{layer}.attn_v.weight" not in tensors for layer in full)


def _is_double_wide(fields: Fields, key: str, inner: Sequence[int], first: int) -> bool:
    """Whether layers that read others' keys have MLPs of twice the width."""
    own, shared = set(inner[:first]), set(inner[first:])
    if len(own) == 1 and shared <= own:
        return False
    if len(own) != 1 or shared != {2 * size for size in own}:
        raise fields.error(
            key, f"must be one number, or twice that from layer {first} on, which read others' keys; is {shown(inner)}"
        )
    return True


def _rotations(fields: Fields, name: str, values: dict[str, Any]) -> dict[str, Any]:
    rope = values["rope_parameters"]
    if rope.get("rope_type") != "proportional":
        raise InvalidModelFolder(
            f"{fields.name}: tensor 'rope_freqs.weight' must be there, and be 1 for the planes of a head that turn and "
            "1e30 for the others"
        )
    local = fields.number(f"{name}.rope.freq_base_swa", 1.0, 1e12, 10_000.0)
    return {FULL: rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
