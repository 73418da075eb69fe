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
}
# Whose rows of queries and keys alternate, and whose norms are 1 more than folders say.
ALTERNATING, WHOLE_FACTORS = ("llama", "smollm3"), ("gemma3",)
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
}  # fmt: skip
_POST_ATTENTION = ("gpt-oss", "gemma3", "olmo2")
# Every which layer sees all.
_PERIODS = {"gpt-oss": 2, "gemma3": 6, "olmo2": 4}
_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


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
    if parameter == "sinks":
        return f"blk.{layer}.attn_sinks.weight"
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

    def restore(self, exact: dict[str, torch.Tensor], values: Floats) -> None:
        """Puts numbers into tensors as the folder has them."""
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
    """Names and numbers of LongRoPE's divisors."""
    rope = config.get("rope_parameters") or {}
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
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": Typed("u64", heads),
        f"{arch}.attention.head_count_kv": config.get("num_key_value_heads", heads),
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    }
    return metadata | _scaling(arch, rope) | _windows(arch, config) | _experts(arch, config)


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
    if arch not in ("gpt-oss", "gemma3", "phi3", "olmo2") or not config.get("sliding_window"):
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
    if "num_local_experts" not in config:
        return {}
    inner = {"gpt-oss": "intermediate_size", "qwen3moe": "moe_intermediate_size"}.get(arch)
    return {
        f"{arch}.expert_count": config["num_local_experts"],
        f"{arch}.expert_used_count": config["num_experts_per_tok"],
        **({f"{arch}.expert_feed_forward_length": config[inner]} if inner else {}),
    }
