"""Folders written by transformers, and both models read from them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tests.support.model_builds import load_model

from headrace_backend.models.causal_lm import CausalLM
from headrace_model_folder import ModelFolder

VOCAB_SIZE = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    # Ten times the usual: random models with small weights hardly depend on their context, and
    # would forgive a wrong mask.
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

_GEMMA3 = {
    **_BASE,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA3_STRETCHED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}

# Full layers have heads of their own, whose keys are the values, and turn a quarter of each.
_GEMMA4 = {
    **_BASE,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
# The last two layers read keys and values of others, and every layer has an input of each token.
_GEMMA4_SMALL = _GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
_GEMMA4_PARTS = {"vision_config": None, "audio_config": None}

# Heads of sizes that are no power of two, and two value heads to a key. Weights are half as large
# as others': states add up what is rounded, and with larger ones transformers' two forms of the
# recurrence differ by 2e-3 from each other. Logits still depend on the context by 0.2.
_QWEN3_5 = {
    **_BASE,
    "initializer_range": 0.1,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.5,
}

_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
_MINISTRAL3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 160,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
}

LONGROPE = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.5, 7.0, 31.5]}


def _llama(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**{**_BASE, **changes})


def _glm4(**changes: Any) -> transformers.PreTrainedConfig:
    config = transformers.Glm4Config(**{**_BASE, **changes})
    # A config without one is given those of the published models.
    config.eos_token_id = None
    return config


def _glm4_moe(**changes: Any) -> transformers.PreTrainedConfig:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    config = transformers.Glm4MoeConfig(**{**_BASE, "head_dim": 16, **experts, **changes})
    config.eos_token_id = None
    return config


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **parameters}}


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    # A vocabulary that no number of ranks divides.
    "llama-uneven-tied": lambda: _llama(vocab_size=101, tie_word_embeddings=True),
    "gemma4-uneven": lambda: transformers.Gemma4TextConfig(**_GEMMA4 | {"vocab_size": 99}, tie_word_embeddings=False),
    "llama-llama3": lambda: _llama(**_rope("llama3", **_LLAMA3)),
    "llama-linear": lambda: _llama(**_rope("linear", factor=4.0)),
    "llama-dynamic": lambda: _llama(**_rope("dynamic", factor=4.0)),
    "llama-yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-mscale": lambda: _llama(
        **_rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.5, truncate=False)
    ),
    # transformers takes the long factors beyond 2 tokens, and we for all.
    "llama-longrope": lambda: _llama(
        **_rope("longrope", original_max_position_embeddings=2, attention_factor=1.0, **LONGROPE)
    ),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-mha": lambda: _llama(num_key_value_heads=8),
    "llama-group-8": lambda: _llama(num_key_value_heads=1, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**_BASE, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**_BASE, sliding_window=21),
    # As Mistral Small 3: text and vision, of which the text is read.
    "mistral3-part": lambda: transformers.Mistral3Config(
        text_config={**_BASE, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
        vision_config=_PIXTRAL,
        image_token_index=VOCAB_SIZE - 1,
        tie_word_embeddings=False,
    ),
    # As Ministral 3, whose queries are scaled behind the original context, where contexts end here.
    "ministral3-part": lambda: transformers.Mistral3Config(
        text_config={**_BASE, "model_type": "ministral3", "head_dim": 16, **_MINISTRAL3},
        vision_config=_PIXTRAL,
        image_token_index=VOCAB_SIZE - 1,
        tie_word_embeddings=True,
    ),
    "ministral3": lambda: transformers.Ministral3Config(**_BASE, head_dim=16, **_MINISTRAL3),
    "qwen2": lambda: transformers.Qwen2Config(**_BASE),
    "qwen2-window-tied": lambda: transformers.Qwen2Config(
        **_BASE, use_sliding_window=True, sliding_window=19, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_BASE, head_dim=24),
    "qwen3-tied-bias": lambda: transformers.Qwen3Config(
        **_BASE, head_dim=8, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen3-window": lambda: transformers.Qwen3Config(
        **_BASE, head_dim=16, use_sliding_window=True, sliding_window=19, max_window_layers=2
    ),
    # Text and vision, of which the text is read.
    "qwen3-vl-part": lambda: transformers.Qwen3VLConfig(
        text_config={
            **_BASE,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 4, 4]},
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 64,
            "depth": 1,
            "num_heads": 2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=VOCAB_SIZE - 1,
        video_token_id=VOCAB_SIZE - 2,
        vision_start_token_id=VOCAB_SIZE - 3,
        vision_end_token_id=VOCAB_SIZE - 4,
        tie_word_embeddings=True,
    ),
    "phi3": lambda: transformers.Phi3Config(**_BASE),
    "phi3-window-tied": lambda: transformers.Phi3Config(
        **_BASE | {"num_key_value_heads": 1}, sliding_window=21, tie_word_embeddings=True
    ),
    # As Phi-4-mini: three quarters of a head are rotated. transformers takes the long factors
    # beyond 2 tokens, and we for all.
    "phi3-partial": lambda: transformers.Phi3Config(
        **_BASE | {"hidden_size": 128, "num_key_value_heads": 2},
        original_max_position_embeddings=2,
        sliding_window=512,
        **_rope(
            "longrope",
            original_max_position_embeddings=2,
            attention_factor=1.25,
            partial_rotary_factor=0.75,
            short_factor=[1.0] * 6,
            long_factor=[1.0, 1.5, 2.5, 4.0, 7.0, 31.5],
        ),
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_BASE, head_dim=24, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    # Dense layers between sparse ones, by both fields that say so.
    "qwen3-moe-dense-layers": lambda: transformers.Qwen3MoeConfig(
        **_BASE | {"num_hidden_layers": 5},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    # Unlike in dense models, all layers have the window; weights are not normed.
    "qwen3-moe-window": lambda: transformers.Qwen3MoeConfig(
        **_BASE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        use_sliding_window=True,
        sliding_window=19,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_BASE, num_local_experts=5),
    "mixtral-window-tied": lambda: transformers.MixtralConfig(
        **_BASE, num_local_experts=4, num_experts_per_tok=1, sliding_window=21, tie_word_embeddings=True
    ),
    # The second layer of three does not rotate.
    "smollm3": lambda: transformers.SmolLM3Config(**_BASE, no_rope_layer_interval=2, tie_word_embeddings=False),
    "smollm3-window-tied": lambda: transformers.SmolLM3Config(
        **_BASE, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=21, attention_bias=True
    ),
    # As GGUF files state it: every fourth layer does not rotate.
    "smollm3-file": lambda: transformers.SmolLM3Config(
        **_BASE | {"num_hidden_layers": 4, "intermediate_size": 128}, tie_word_embeddings=True
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_BASE | {"num_key_value_heads": 2}),
    "olmo2-bias-tied": lambda: transformers.Olmo2Config(**_BASE, attention_bias=True, tie_word_embeddings=True),
    # The window's layers rotate without the scaling of the third, and with another base.
    "olmo3": lambda: transformers.Olmo3Config(
        **_BASE,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),  # fmt: skip
    "seed-oss": lambda: transformers.SeedOssConfig(**_BASE, head_dim=16),
    "seed-oss-biases-tied": lambda: transformers.SeedOssConfig(
        **_BASE, head_dim=8, attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    # Layers with the window rotate, the others do not.
    "exaone4": lambda: transformers.Exaone4Config(
        **_BASE | {"num_key_value_heads": 2}, sliding_window=21, sliding_window_pattern=3
    ),
    "exaone4-tied": lambda: transformers.Exaone4Config(
        **_BASE, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
    ),
    # As GGUF files state it: every fourth layer sees all.
    "exaone4-file": lambda: transformers.Exaone4Config(**_BASE | {"num_hidden_layers": 4}, sliding_window=21),
    "glm4": lambda: _glm4(head_dim=16),
    "glm4-tied": lambda: _glm4(
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=True,
        attention_bias=False,
        **_rope("default", partial_rotary_factor=1.0),
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GEMMA3, tie_word_embeddings=False),
    # As Gemma 3 4B: text and vision, of which the text is read.
    "gemma3-part": lambda: transformers.Gemma3Config(
        text_config=_GEMMA3 | _GEMMA3_STRETCHED,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=VOCAB_SIZE - 1,
        boi_token_index=VOCAB_SIZE - 2,
        eoi_token_index=VOCAB_SIZE - 3,
    ),  # fmt: skip
    # As GGUF files state it: tied, and scores divided by the root of a head's size.
    "gemma3-file": lambda: transformers.Gemma3TextConfig(
        **_GEMMA3 | _GEMMA3_STRETCHED | {"query_pre_attn_scalar": 16, "intermediate_size": 128}
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**_GEMMA4, tie_word_embeddings=False),
    "gemma4-small": lambda: transformers.Gemma4TextConfig(**_GEMMA4_SMALL, tie_word_embeddings=True),
    # As published: a text part beside others; with biases, and values of their own.
    "gemma4-part": lambda: transformers.Gemma4Config(
        text_config=_GEMMA4_SMALL | {"attention_bias": True, "num_kv_shared_layers": 2, "pad_token_id": 0},
        **_GEMMA4_PARTS,
    ),
    # As the 26B: experts beside the MLP of each layer.
    "gemma4-moe": lambda: transformers.Gemma4TextConfig(
        **_GEMMA4, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=40
    ),
    "gemma4-unified": lambda: transformers.Gemma4UnifiedTextConfig(
        **{name: value for name, value in _GEMMA4.items() if name != "hidden_size_per_layer_input"},
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    # Windows in every other layer, sinks, biases, clamped gates and yarn: all at their defaults but
    # for sizes that reach each.
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_BASE | {"num_hidden_layers": 4, "num_key_value_heads": 2},
        head_dim=16,
        sliding_window=21,
        num_local_experts=5,
        num_experts_per_tok=3,
        swiglu_limit=1.5,
        **_rope("yarn", factor=32.0, original_max_position_embeddings=8, truncate=False),
    ),
    # Other kinds of layers in another order, one expert a token, no biases of attention.
    "gpt-oss-order-tied": lambda: transformers.GptOssConfig(
        **_BASE,
        sliding_window=19,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        num_local_experts=3,
        num_experts_per_tok=1,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**_QWEN3_5),
    # Other kinds of layers in another order, of other sizes.
    "qwen3.5-order-tied": lambda: transformers.Qwen3_5TextConfig(
        **_QWEN3_5 | {"num_hidden_layers": 3, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    # Of three stages the last has no linear attention, and of two each has.
    "qwen3.5-staged": lambda: transformers.Qwen3_5TextConfig(
        **_QWEN3_5 | {"num_hidden_layers": 5},
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention", "full_attention"],
    ),
    "qwen3.5-moe-staged": lambda: transformers.Qwen3_5MoeTextConfig(
        **{name: size for name, size in _QWEN3_5.items() if name != "intermediate_size"},
        layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=24,
    ),
    # Sizes that NF4's blocks and nested scales divide, also on two ranks.
    "qwen3.5-wide": lambda: transformers.Qwen3_5TextConfig(
        **_QWEN3_5
        | {"hidden_size": 128, "intermediate_size": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        | {"head_dim": 32, "num_attention_heads": 4},
    ),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **{name: size for name, size in _QWEN3_5.items() if name != "intermediate_size"},
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=24,
    ),
    # Sizes that blocks of 128 divide, in experts on two ranks too.
    "qwen3.5-moe-wide": lambda: transformers.Qwen3_5MoeTextConfig(
        **{name: size for name, size in _QWEN3_5.items() if name != "intermediate_size"}
        | {"hidden_size": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        | {"head_dim": 32, "num_attention_heads": 8},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
    ),
    # Sizes that groups of 32 divide, also on two ranks.
    "llama-wide": lambda: _llama(intermediate_size=128, attention_bias=True, mlp_bias=True),
    "mixtral-wide": lambda: transformers.MixtralConfig(**_BASE | {"intermediate_size": 64}, num_local_experts=4),
    # A dense layer, groups of experts, a shared expert, half of each head rotated, norms of heads.
    "glm4-moe": lambda: _glm4_moe(use_qk_norm=True, n_group=4, topk_group=2, routed_scaling_factor=1.75),
    # As GLM-4.5-Air: one group, biases; and weights that are not normed.
    "glm4-moe-bias-tied": lambda: _glm4_moe(
        attention_bias=True,
        norm_topk_prob=False,
        n_shared_experts=2,
        first_k_dense_replace=2,
        tie_word_embeddings=True,
        **_rope("default", partial_rotary_factor=0.25),
    ),
    # Also on two ranks, of which each has whole blocks of 128 inner elements.
    "qwen3-moe-blocks": lambda: transformers.Qwen3MoeConfig(
        **_BASE | {"hidden_size": 160, "num_hidden_layers": 2, "intermediate_size": 256},
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "gemma4-moe-wide": lambda: transformers.Gemma4TextConfig(
        **_GEMMA4 | {"intermediate_size": 128},
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
    "glm4-moe-wide": lambda: _glm4_moe(moe_intermediate_size=64, intermediate_size=128, num_hidden_layers=2),
    "qwen3-moe-wide": lambda: transformers.Qwen3MoeConfig(
        **_BASE | {"num_hidden_layers": 2, "intermediate_size": 128},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    # Inputs that blocks of 256 divide, also on two ranks.
    "qwen3-moe-long": lambda: transformers.Qwen3MoeConfig(
        **_BASE | {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 512},
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        norm_topk_prob=True,
    ),
    "gpt-oss-wide": lambda: transformers.GptOssConfig(
        **_BASE | {"intermediate_size": 128},
        sliding_window=21,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_rope("yarn", factor=32.0, original_max_position_embeddings=8, truncate=False),
    ),
    # Inputs that blocks of 128 divide, also on two ranks; outputs of keys and values that they do
    # not.
    "llama-blocks": lambda: _llama(head_dim=32, intermediate_size=256),
    # Outputs of every projection that blocks of 128 divide, in fused tensors.
    "phi3-blocks": lambda: transformers.Phi3Config(
        **_BASE | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
    ),
    # Inputs of all layers that blocks of 128 divide.
    "llama-whole-blocks": lambda: _llama(hidden_size=128, head_dim=32, intermediate_size=256),
    # Inputs that blocks of 256 divide, also on two ranks.
    "llama-long": lambda: _llama(head_dim=64, intermediate_size=512),
    # Sizes that blocks of 64 divide, also on two ranks.
    "llama-wide-heads": lambda: _llama(head_dim=16, intermediate_size=128, attention_bias=True, mlp_bias=True),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One folder, read by transformers and by us, in fp32."""

    name: str
    path: pathlib.Path
    theirs: transformers.PreTrainedModel
    ours: CausalLM


def write_pair(path: pathlib.Path, name: str, **options: Any) -> Pair:
    """Saves a model of CONFIGS and reads it back into ours."""
    return Pair(name, path, write_checkpoint(path, name, **options), load(path))


def ignore_progress(phase: str, done: int, total: int, unit: str) -> None:
    """A progress callback for those who don't care."""


def load(path: pathlib.Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    folder = ModelFolder.open(path)
    return load_model(folder, folder.config, dtype, torch.device("cpu"), "folder", 0, ignore_progress)


def write_checkpoint(path: pathlib.Path, name: str, **options: Any) -> transformers.PreTrainedModel:
    """Saves a random model of CONFIGS, norms and biases randomized too."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = make_model(CONFIGS[name]())
    randomize_vectors(model)
    model.save_pretrained(path, **options)
    return model


def make_model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """A random model in fp32; transformers counts some that see among no language models."""
    sees = config.model_type in ("qwen3_vl", "mistral3")
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    made: transformers.PreTrainedModel = auto.from_config(config).float().eval()
    return made


def randomize_vectors(model: torch.nn.Module) -> None:
    """Adds noise to norms, biases, sinks and corrections, which start at ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases of stacked experts have two dimensions.
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
