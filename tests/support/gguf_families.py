"""How llama.cpp's converters write each family: names of tensors, metadata, and changed numbers.

Written from its `conversion` and `src/models`, and independently of the product's reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tests.support.gguf_numbers import Floats

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GptOssForCausalLM": "gpt-oss",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Glm4ForCausalLM": "glm4",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "SeedOssForCausalLM": "seed_oss",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma4ForCausalLM": "gemma4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
# Parameters that folders do not call weight or bias.
_OTHERS = {
    "sinks": "attn_sinks.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "scale": "ffn_gate_inp.scale",
    "layer_scalar": "layer_output_scale.weight", "e_score_correction_bias": "exp_probs_b.bias",
    "per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
_POST_ATTENTION = ("gpt-oss", "gemma3", "olmo2", "gemma4", "glm4moe", "qwen35", "qwen35moe", "seed_oss", "exaone4")
# Every which layer sees all.
_PERIODS = {"gpt-oss": 2, "gemma3": 6, "olmo2": 4}
_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


_BESIDE_MTP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def in_layers(config: Mapping[str, Any], name: str) -> str:
    """The name of a tensor as if Qwen's layer for further tokens stood behind the last layer."""
    if not name.startswith("mtp."):
        return name
    layer, rest = f"model.layers.{config['num_hidden_layers']}.", name.removeprefix("mtp.")
    if rest.startswith("layers.0."):
        return layer + rest.removeprefix("layers.0.")
    part, _, parameter = rest.rpartition(".")
    return f"{layer}{_BESIDE_MTP[part]}.{parameter}"


@dataclasses.dataclass(frozen=True)
class Typed:
    """A metadata value of a type of its own; plain ints are u32, floats f32."""

    type: str
    value: Any


def gguf_name(arch: str, name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *inner, parameter = name.split(".")
    if parameter in _OTHERS:
        return f"blk.{layer}.{_OTHERS[parameter]}"
    words = ".".join(inner)
    is_post = words == "post_attention_layernorm" and arch in _POST_ATTENTION
    return f"blk.{layer}.{'post_attention_norm' if is_post else _NAMES[words]}.{parameter}"


@dataclasses.dataclass(frozen=True)
class Stack:
    """A projection of all experts of a layer, or its biases: a tensor of a file."""

    # [experts, outputs, inputs] or [experts, outputs].
    values: Floats
    # The folder's tensors that it is of.
    names: list[str]
    # Of a tensor with gates and ups alternating: 0 or 1; None: the tensors are this projection's.
    parity: int | None = None
    # Whether the file has the folder's tensor as it is.
    is_whole: bool = False

    def restore(self, exact: dict[str, torch.Tensor], values: Floats) -> None:
        """Puts numbers into tensors as the folder has them."""
        if self.is_whole:
            exact[self.names[0]] = torch.from_numpy(values.copy())
            return
        if not self.names[0].split(".")[5].isdigit():
            own = torch.from_numpy(values.copy())
            own = own.transpose(1, 2) if own.dim() == 3 else own
            if self.parity is None:
                exact[self.names[0]] = own.contiguous()
                return
            both = exact.setdefault(self.names[0], torch.empty(*own.shape[:-1], 2 * own.shape[-1]))
            both[..., self.parity :: 2] = own
            return
        exact.update((name, torch.from_numpy(each.copy())) for name, each in zip(self.names, values, strict=True))


def stacks(stored: Mapping[str, torch.Tensor]) -> dict[str, Stack]:
    """Name of each tensor with all experts of a layer -> what is in it."""
    found: dict[str, list[str]] = {}
    stacked: dict[str, Stack] = {}
    for name in (name for name in stored if ".experts." in name):
        if ".mlp." not in name and ".block_sparse_moe." not in name:
            # Gemma 4's: all experts, outputs before inputs, gates before ups.
            _, _, layer, _, part = name.split(".")
            file = f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"
            stacked[file] = Stack(stored[name].float().numpy(), [name], is_whole=True)
            continue
        layer, _, _, part = name.split(".")[2:6]
        if part.isdigit():
            part = name.split(".")[6].removesuffix("_proj")
            found.setdefault(f"blk.{layer}.ffn_{_PARTS.get(part, part)}_exps.weight", []).append(name)
        else:
            stacked.update(_of_stacked(layer, part, name, stored[name]))
    for names in found.values():
        names.sort(key=lambda name: int(name.split(".")[5]))
    own = {file: np.stack([stored[name].float().numpy() for name in names]) for file, names in found.items()}
    return {file: Stack(values, found[file]) for file, values in own.items()} | stacked


def _of_stacked(layer: str, part: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Stack]]:
    """gpt-oss' tensors: inputs before outputs, gates and ups alternating."""
    end = "bias" if part.endswith("_bias") else "weight"
    values = (tensor if end == "bias" else tensor.transpose(1, 2)).float().numpy()
    if part.startswith("down"):
        yield f"blk.{layer}.ffn_down_exps.{end}", Stack(np.ascontiguousarray(values), [name])
        return
    for parity, own in enumerate(("gate", "up")):
        yield f"blk.{layer}.ffn_{own}_exps.{end}", Stack(np.ascontiguousarray(values[:, parity::2]), [name], parity)


def rope_factors(config: Mapping[str, Any]) -> Iterator[tuple[str, Floats]]:
    """Names and numbers of LongRoPE's divisors, and of planes of a head that keep still."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":
        planes = _global_head_dim(config) // 2
        turning = int(planes * full["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (planes - turning), np.float32)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)


def metadata_of(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a model, without its tokenizer."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = dict(config.get("rope_parameters") or {})
    rope = dict(rope.get("full_attention") or rope)
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config.get("intermediate_size"),
        f"{arch}.attention.head_count": Typed("u64", heads),
        f"{arch}.attention.head_count_kv": config.get("num_key_value_heads", heads),
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    metadata |= _scaling(arch, rope) | _windows(arch, config) | _experts(arch, config) | _gemma4(arch, config)
    return metadata | _linear_attention(arch, config) | _layers_behind(arch, config)


def _global_head_dim(config: Mapping[str, Any]) -> int:
    by_layer = config.get("per_layer_config") or {}
    return next((heads["head_dim"] for heads in by_layer.values()), config["head_dim"])


def _gemma4(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if arch != "gemma4":
        return {}
    by_layer, types = config["per_layer_config"], config["layer_types"]
    shared, head_dim = config["num_kv_shared_layers"], _global_head_dim(config)
    metadata: dict[str, Any] = {
        f"{arch}.attention.shared_kv_layers": shared,
        f"{arch}.embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        f"{arch}.attention.sliding_window": config["sliding_window"],
        f"{arch}.attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.key_length_swa": config["head_dim"],
        f"{arch}.attention.value_length_swa": config["head_dim"],
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.dimension_count_swa": config["head_dim"],
        f"{arch}.rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        f"{arch}.final_logit_softcapping": float(config["final_logit_softcapping"]),
    }
    heads = [by_layer.get(str(layer), {}).get("num_key_value_heads") for layer in range(len(types))]
    if any(heads):
        usual = config["num_key_value_heads"]
        metadata[f"{arch}.attention.head_count_kv"] = [own or usual for own in heads]
    if config["use_double_wide_mlp"]:
        inner, first = config["intermediate_size"], len(types) - shared
        metadata[f"{arch}.feed_forward_length"] = [inner * (1 + (layer >= first)) for layer in range(len(types))]
    return metadata


def _linear_attention(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if not arch.startswith("qwen35"):
        return {}
    values = config["linear_num_value_heads"]
    linear = [kind == "linear_attention" for kind in config["layer_types"]]
    interval = linear.index(False) + 1
    usual = [(layer + 1) % interval != 0 for layer in range(len(linear))]
    kinds = (
        {f"{arch}.full_attention_interval": interval}
        if linear == usual
        else {f"{arch}.attention.recurrent_layers": linear}
    )
    return {
        f"{arch}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
        f"{arch}.ssm.state_size": config["linear_key_head_dim"],
        f"{arch}.ssm.group_count": config["linear_num_key_heads"],
        f"{arch}.ssm.time_step_rank": values,
        f"{arch}.ssm.inner_size": values * config["linear_value_head_dim"],
        **kinds,
        f"{arch}.rope.dimension_sections": [1, 1, 1, 0],
    }


def _layers_behind(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """One more block for each layer that predicts further tokens."""
    count = config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 0))
    if not count:
        return {}
    return {f"{arch}.block_count": config["num_hidden_layers"] + count, f"{arch}.nextn_predict_layers": count}


def _scaling(arch: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind, prefix = rope.get("rope_type", "default"), f"{arch}.rope.scaling."
    original = {f"{prefix}original_context_length": rope.get("original_max_position_embeddings")}
    if kind == "longrope":
        return original | {f"{prefix}attn_factor": float(rope["attention_factor"])}
    if kind in ("linear", "yarn"):
        stated = {f"{prefix}type": kind, f"{prefix}factor": float(rope["factor"])}
        return stated | (original if kind == "yarn" else {})
    return {}


def _windows(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if arch not in ("gpt-oss", "gemma3", "phi3", "olmo2", "exaone4") or not config.get("sliding_window"):
        return {}
    metadata = {f"{arch}.attention.sliding_window": config["sliding_window"]}
    if period := _PERIODS.get(arch):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        # Files of the usual order state none.
        if slides != [bool((layer + 1) % period) for layer in range(len(slides))]:
            metadata[f"{arch}.attention.sliding_window_pattern"] = slides
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    return metadata | ({f"{arch}.rope.freq_base_swa": float(local["rope_theta"])} if local else {})


def _experts(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if count is None:
        return {}
    inner = {"gpt-oss": "intermediate_size", "llama": None}.get(arch, "moe_intermediate_size")
    metadata = {
        f"{arch}.expert_count": count,
        f"{arch}.expert_used_count": config.get("num_experts_per_tok", config.get("top_k_experts")),
        **({f"{arch}.expert_feed_forward_length": config[inner]} if inner else {}),
    }
    if arch == "qwen35moe":
        metadata[f"{arch}.expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if arch != "glm4moe":
        return metadata
    return metadata | {
        f"{arch}.expert_shared_count": config["n_shared_experts"],
        f"{arch}.leading_dense_block_count": config["first_k_dense_replace"],
        f"{arch}.expert_gating_func": 2,
        f"{arch}.expert_weights_scale": float(config["routed_scaling_factor"]),
        f"{arch}.expert_weights_norm": config["norm_topk_prob"],
        f"{arch}.expert_group_count": config["n_group"],
        f"{arch}.expert_group_used_count": config["topk_group"],
    }
