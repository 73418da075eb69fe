"""Both names of each tensor of a GGUF file: Hugging Face's, which other rooms use, and the file's.

Owns the words. A layer is `blk.N`, where the layer that predicts the token after the next (MTP)
stands behind the last one.
"""

from __future__ import annotations

import dataclasses
import re

from headrace_model_folder.description import ModelDescription
from headrace_model_folder.families.family import GgufNaming

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{block}.{part}_proj": f"ffn_{part}_shexp"
        for block in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "post_mlp_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
# Tensors that folders do not call weight or bias, by their whole names in a layer.
_WHOLE = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Qwen's MTP layer and what stands beside it, in the words of families that have all in one layer.
_MTP = "mtp."
_MTP_LAYER = "mtp.layers.0"
_BESIDE_MTP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


@dataclasses.dataclass(frozen=True, slots=True)
class GgufNames:
    """The names of one file's tensors."""

    naming: GgufNaming
    # Layers of the model without the one that predicts the token after the next.
    num_layers: int

    @classmethod
    def of(cls, naming: GgufNaming, model: ModelDescription) -> GgufNames:
        """The names of a model's tensors in files of its family."""
        return cls(naming, len(model.layers))

    def tensor(self, name: str) -> str:
        """The file's name of a tensor."""
        match = _LAYER_NAME.fullmatch(self._in_layer(name))
        if match is None:
            return _OUTER[name]
        if match[2] in _WHOLE:
            return f"blk.{match[1]}.{_WHOLE[match[2]]}"
        part, _, parameter = match[2].rpartition(".")
        words = self.naming.post_attention if part == "post_attention_layernorm" else _OF_LAYER[part]
        return f"blk.{match[1]}.{words}.{parameter}"

    def experts(self, layer: str, projection: str) -> str:
        """The file's name of a projection of all experts of a layer, without its last word.

        Args:
            layer: The layer's name, such as model.layers.3.
            projection: gate, up, down, or gate_up for gates and ups in one tensor.
        """
        number = self._in_layer(layer).rpartition(".")[2]
        return f"blk.{number}.ffn_{projection}_exps"

    def is_behind(self, theirs: str) -> bool:
        """Whether a tensor of the file belongs to a layer behind the model's last one."""
        match = re.match(r"blk\.(\d{1,5})\.", theirs)
        return match is not None and int(match[1]) >= self.num_layers

    def _in_layer(self, name: str) -> str:
        """The name as if the MTP layer were the one behind the last, and all beside it in it."""
        own = f"model.layers.{self.num_layers}"
        if name.startswith(_MTP_LAYER):
            return own + name.removeprefix(_MTP_LAYER)
        if name.startswith(_MTP):
            part, _, parameter = name.removeprefix(_MTP).rpartition(".")
            return f"{own}.{_BESIDE_MTP[part]}.{parameter}"
        return name
