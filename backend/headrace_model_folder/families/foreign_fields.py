"""Fields of config.json by which other families change what a model computes.

Owns their names, and the values with which they change nothing. A family names those that it reads
itself (`Family.knows`); any other one with a value that means something is refused, so that a model
which only resembles a family is not served as one. Fields that no part of a model follows (dropout,
what training alone uses, whose code made the file) are not in the table, nor are those that change
tensors' names or shapes, which are compared with the folder's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_model_folder.errors import shown
from headrace_model_folder.families.family import Family
from headrace_model_folder.families.layer_types import FULL
from headrace_model_folder.fields import Fields

_Neutral = Callable[[Any], bool]


def refuse_foreign_fields(stated: Fields, family: Family) -> None:
    """Refuses what another family computes by its fields, and this one does not.

    Args:
        stated: The fields of config.json, without the family's defaults.
        family: The family that config.json names.

    Raises InvalidModelFolder naming the field and its value.
    """
    for name, is_neutral in _FOREIGN.items():
        value = stated.get(name)
        if value is not None and name not in family.knows and not is_neutral(value):
            raise stated.error(name, f"must be absent: {family.architecture} computes nothing by it, is {shown(value)}")


def _only(*values: object) -> _Neutral:
    """Whether a field has one of a few values."""

    def is_neutral(value: Any) -> bool:
        return any(value == neutral for neutral in values)

    return is_neutral


def _all_are(neutral: object) -> _Neutral:
    """Whether a field is a list whose entries are all alike."""

    def is_neutral(value: Any) -> bool:
        return isinstance(value, list) and all(entry == neutral for entry in value)

    return is_neutral


_OFF, _ONE, _NEVER, _SILU = _only(False, 0), _only(1), _only(), _only("silu", "swish")
_FOREIGN: Mapping[str, _Neutral] = {
    # What multiplies embeddings, scores, what is added to the residual stream, and logits.
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), _ONE),
    **dict.fromkeys(("scale_emb", "lm_head_multiplier", "key_multiplier", "mup_width_scale"), _ONE),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attention_scale", "softmax_scale"), _NEVER),
    **dict.fromkeys(("scale_depth", "dim_model_base"), _NEVER),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "router_logit_softcapping"), _NEVER),
    "attn_temperature_tuning": _OFF,
    # Which tokens a token sees.
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "use_bidirectional_attention"), _OFF),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), _OFF),
    "is_causal": _only(True),
    "layer_types": _all_are(FULL),
    # Where tokens stand.
    **dict.fromkeys(("alibi", "use_alibi", "rope_interleave", "rope_interleaved", "no_rope_layer_interval"), _OFF),
    **dict.fromkeys(("rotary_pct", "rope_pct", "rope_ratio"), _ONE),
    **dict.fromkeys(("rope_local_base_freq", "local_rope_theta", "swa_rope_theta"), _NEVER),
    "no_rope_layers": _all_are(1),
    "position_embedding_type": _only("rope", "rotary"),
    # Norms, and the order of a layer's parts.
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "apply_layernorm_1p"), _OFF),
    **dict.fromkeys(("use_parallel_residual", "parallel_residual", "parallel_attn"), _OFF),
    "apply_residual_connection_post_layernorm": _OFF,
    **dict.fromkeys(("norm_type", "normalization_type"), _only("rms", "rmsnorm", "rms_norm", "RMSNorm")),
    "clip_qkv": _NEVER,
    # Biases: dummy weights have no tensors that would show them.
    **dict.fromkeys(("attention_bias", "attention_out_bias", "qkv_bias", "mlp_bias", "lm_head_bias"), _OFF),
    **dict.fromkeys(("use_bias", "add_qkv_bias", "bias"), _OFF),
    # Attention and MLPs of other kinds.
    **dict.fromkeys(("attn_output_gate", "attention_k_eq_v", "num_kv_shared_layers", "kv_lora_rank"), _OFF),
    **dict.fromkeys(("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"), _OFF),
    **dict.fromkeys(("mlp_hidden_act", "activation_function", "hidden_activation", "output_gate_type"), _SILU),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "full_attn_mod", "interpolation_factor"), _ONE),
    # How experts are chosen, and what their outputs are multiplied by.
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "n_group", "topk_group"), _ONE),
    "norm_topk_prob": _only(True),
    "scoring_func": _only("softmax"),
    "topk_method": _only("greedy"),
    "moe_layer_freq": _ONE,
}
