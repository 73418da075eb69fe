"""What GGUF files of a family leave to those who read them, in config.json's words.

Owns, for each architecture, what its files state under keys of their own and what they state
nowhere, because every reader has it built in: which layers have a window, by what these rotate, and
what multiplies scores. Source: llama.cpp's `src/models`, a file for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace_model_folder.errors import shown
from headrace_model_folder.fields import Fields

# What config.json states so far, which a family's fields are added to.
Values = dict[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Layers of Gemma 3 27B, whose scores alone are not divided by the root of a head's size.
_GEMMA3_27B_LAYERS = 62


def family_fields(fields: Fields, name: str, values: Values) -> Values:
    """The fields that a family's files have beside those of most, or in another form.

    Args:
        fields: The file's metadata.
        name: The architecture, which is the prefix of its keys.
        values: config.json's fields, as most families have them.

    Raises:
        InvalidModelFolder: A key says what no model of the family has.
    """
    own = _OWN.get(name)
    return {} if own is None else own(fields, name, values)


def _gpt_oss(fields: Fields, name: str, values: Values) -> Values:
    rope = dict(values["rope_parameters"])
    if rope.get("rope_type") == "yarn":
        # As the models were trained; files do not state it.
        rope["truncate"] = False
    return {
        "intermediate_size": values["moe_intermediate_size"],
        "layer_types": _layer_types(fields, name, values, 2),
        "rope_parameters": rope,
    }


def _gemma3(fields: Fields, name: str, values: Values) -> Values:
    local = fields.number(f"{name}.rope.freq_base_swa", 1.0, 1e12, 10_000.0)
    is_largest = values["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    per_head = values["hidden_size"] // values["num_attention_heads"] if is_largest else values["head_dim"]
    return {
        "layer_types": _layer_types(fields, name, values, 6),
        "query_pre_attn_scalar": per_head,
        "rope_parameters": _by_type(values, {"rope_type": "default", "rope_theta": local}),
        "final_logit_softcapping": fields.get(f"{name}.final_logit_softcapping"),
    }


def _olmo(fields: Fields, name: str, values: Values) -> Values:
    if not values["sliding_window"]:
        return {}
    # Layers with a window rotate without what stretches the others' context.
    theta = fields.number(f"{name}.rope.freq_base_swa", 1.0, 1e12, values["rope_parameters"]["rope_theta"])
    return {
        "layer_types": _layer_types(fields, name, values, 4),
        "rope_parameters": _by_type(values, {"rope_type": "default", "rope_theta": theta}),
    }


def _by_type(values: Values, sliding: Values) -> Values:
    return {_FULL: {"rope_type": "default", **values["rope_parameters"]}, _SLIDING: sliding}


def _layer_types(fields: Fields, name: str, values: Values, usual: int) -> list[str]:
    """The kind of each layer: every `usual`-th sees all, unless the file has a pattern."""
    key, count = f"{name}.attention.sliding_window_pattern", values["num_hidden_layers"]
    if not values["sliding_window"]:
        raise fields.error(f"{name}.attention.sliding_window", "is missing or 0: layers of this architecture have one")
    stated = fields.get(key)
    if isinstance(stated, list):
        if len(stated) != count or any(type(entry) is not bool for entry in stated):
            raise fields.error(key, f"must be an array of {count} booleans or a period, is {shown(stated)}")
        return [_SLIDING if slides else _FULL for slides in stated]
    period = fields.integer(key, 1, 1 << 20, usual)
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(count)]


_OWN: dict[str, Callable[[Fields, str, Values], Values]] = {"gpt-oss": _gpt_oss, "gemma3": _gemma3, "olmo2": _olmo}
