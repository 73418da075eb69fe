"""What GGUF files of a family leave to those who read them, in config.json's words.

Owns, for each architecture, what its files state under keys of their own and what they state
nowhere, because every reader has it built in: which layers have a window, by what these rotate, and
what multiplies scores. Source: llama.cpp's `src/models`, a file for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_model_folder.errors import shown
from headrace_model_folder.families.layer_types import FULL
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.gemma4_fields import gemma4_fields
from headrace_model_folder.gguf.layer_numbers import layer_types
from headrace_model_folder.gguf.rope import shortest

# What config.json states so far, which a family's fields are added to.
Values = dict[str, Any]
_SLIDING, _LINEAR = "sliding_attention", "linear_attention"
_LIMIT = 1 << 26
# Layers of Gemma 3 27B, whose scores alone are not divided by the root of a head's size.
_GEMMA3_27B_LAYERS = 62


def family_fields(fields: Fields, name: str, values: Values, tensors: Mapping[str, object]) -> Values:
    """The fields that a family's files have beside those of most, or in another form.

    Args:
        fields: The file's metadata.
        name: The architecture, which is the prefix of its keys.
        values: config.json's fields, as most families have them.
        tensors: The file's tensors, by name.

    Raises:
        InvalidModelFolder: A key says what no model of the family has.
    """
    if name == "gemma4":
        return gemma4_fields(fields, name, values, tensors)
    own = _OWN.get(name)
    return {} if own is None else own(fields, name, values)


def _gpt_oss(fields: Fields, name: str, values: Values) -> Values:
    rope = dict(values["rope_parameters"])
    if rope.get("rope_type") == "yarn":
        # As the models were trained; files do not state it.
        rope["truncate"] = False
    return {
        "intermediate_size": values["moe_intermediate_size"],
        "layer_types": layer_types(fields, name, values, 2),
        "rope_parameters": rope,
    }


def _gemma3(fields: Fields, name: str, values: Values) -> Values:
    local = fields.number(f"{name}.rope.freq_base_swa", 1.0, 1e12, 10_000.0)
    is_largest = values["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    per_head = values["hidden_size"] // values["num_attention_heads"] if is_largest else values["head_dim"]
    return {
        "layer_types": layer_types(fields, name, values, 6),
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
        "layer_types": layer_types(fields, name, values, 4),
        "rope_parameters": _by_type(values, {"rope_type": "default", "rope_theta": theta}),
    }


def _exaone4(fields: Fields, name: str, values: Values) -> Values:
    return {"layer_types": layer_types(fields, name, values, 4)} if values["sliding_window"] else {}


def _by_type(values: Values, sliding: Values) -> Values:
    return {FULL: {"rope_type": "default", **values["rope_parameters"]}, _SLIDING: sliding}


def _glm4_moe(fields: Fields, name: str, values: Values) -> Values:
    count = values["num_experts"]
    return {
        "n_routed_experts": count,
        "n_shared_experts": fields.integer(f"{name}.expert_shared_count", 1, _LIMIT),
        "first_k_dense_replace": fields.integer(f"{name}.leading_dense_block_count", 0, _LIMIT, 0),
        "n_group": fields.integer(f"{name}.expert_group_count", 1, _LIMIT, 1),
        "topk_group": fields.integer(f"{name}.expert_group_used_count", 1, _LIMIT, 1),
        "routed_scaling_factor": shortest(fields.number(f"{name}.expert_weights_scale", 0.0, 1e6, 1.0)) or 1.0,
        "norm_topk_prob": fields.boolean(f"{name}.expert_weights_norm", False),
        "use_qk_norm": values["has_head_norms"],
        "num_nextn_predict_layers": fields.integer(f"{name}.nextn_predict_layers", 0, _LIMIT, 0),
    }


def _qwen_hybrid(fields: Fields, name: str, values: Values) -> Values:
    ssm = f"{name}.ssm."
    num_values = fields.integer(f"{ssm}time_step_rank", 1, _LIMIT)
    inner = fields.integer(f"{ssm}inner_size", 1, _LIMIT)
    if inner % num_values:
        raise fields.error(f"{ssm}inner_size", f"must be a multiple of time_step_rank ({num_values}), is {inner}")
    own = {
        "linear_conv_kernel_dim": fields.integer(f"{ssm}conv_kernel", 1, _LIMIT),
        "linear_key_head_dim": fields.integer(f"{ssm}state_size", 1, _LIMIT),
        "linear_value_head_dim": inner // num_values,
        "linear_num_key_heads": fields.integer(f"{ssm}group_count", 1, _LIMIT),
        "linear_num_value_heads": num_values,
        "layer_types": _recurrent_layers(fields, name, values["num_hidden_layers"]),
        "mtp_num_hidden_layers": fields.integer(f"{name}.nextn_predict_layers", 0, _LIMIT, 0),
    }
    if "num_experts" not in values:
        return own
    shared = fields.integer(f"{name}.expert_shared_feed_forward_length", 1, _LIMIT)
    return own | {"shared_expert_intermediate_size": shared}


def _recurrent_layers(fields: Fields, name: str, count: int) -> list[str]:
    """The kind of each layer: every fourth sees all, unless the file says which have states."""
    key = f"{name}.attention.recurrent_layers"
    stated = fields.get(key)
    if stated is None:
        interval = fields.integer(f"{name}.full_attention_interval", 1, _LIMIT, 4)
        stated = [(layer + 1) % interval != 0 for layer in range(count)]
    # Behind the model's own layers stands one that predicts the token after the next.
    if not isinstance(stated, list) or len(stated) < count or any(entry not in (0, 1) for entry in stated):
        raise fields.error(key, f"must be an array of {count} booleans, is {shown(stated)}")
    return [_LINEAR if is_linear else FULL for is_linear in stated[:count]]


_OWN: dict[str, Callable[[Fields, str, Values], Values]] = {
    "gpt-oss": _gpt_oss,
    "gemma3": _gemma3,
    "olmo2": _olmo,
    "exaone4": _exaone4,
    "glm4moe": _glm4_moe,
    "qwen35": _qwen_hybrid,
    "qwen35moe": _qwen_hybrid,
}
