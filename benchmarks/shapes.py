"""Model folders without weights: a published model's architecture as config.json.

They are for `--load dummy`.

Owns the architectures' numbers, which are public, and the folder. The text in it is our own, and so
is the tokenizer (`synthetic_tokenizer`), which only benchmarks with text need.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.synthetic_tokenizer import write_tokenizer
from headrace_model_folder import ModelFolder
from headrace_model_folder.formats.quantization_config import MXFP4


@dataclasses.dataclass(frozen=True, slots=True)
class LinearLayers:
    """Layers with linear attention by the gated delta rule, whose rows have states of a size."""

    count: int
    key_heads: int
    value_heads: int
    # Of keys and of values alike.
    head_dim: int
    # Tokens that the convolution sees.
    kernel: int = 4

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    def parameters(self, hidden_size: int) -> int:
        """Parameters of a layer's projections."""
        values = self.value_heads * self.head_dim
        return hidden_size * (self.channels + 2 * values + 2 * self.value_heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's states in all of these layers, in fp32."""
        return 4 * self.count * (self.value_heads * self.head_dim**2 + self.kernel * self.channels)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer. Sizes in elements, positions in tokens."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-5
    tied: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    # Of every layer, in place of an MLP; 0: none. `intermediate_size` is then one expert's.
    num_experts: int = 0
    experts_per_token: int = 0
    # Whether experts are in MXFP4, in a folder that says so, and all else is plain.
    mxfp4: bool = False
    # Layers that see no further back than so many tokens; 0: none.
    windowed_layers: int = 0
    window: int = 0
    # Layers with linear attention; the others' attention has gates then. None: there are none.
    linear: LinearLayers | None = None

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices that every step reads, whatever the batch."""
        queries = (3 if self.linear else 2) * self.num_heads
        attention = self.kv_layers * self.hidden_size * self.head_dim * (queries + 2 * self.num_kv_heads)
        linear = self.linear.count * self.linear.parameters(self.hidden_size) if self.linear else 0
        mlp = self.num_experts if self.num_experts else 3 * self.intermediate_size
        return attention + linear + self.num_layers * self.hidden_size * mlp

    @property
    def kv_layers(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers - (self.linear.count if self.linear else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's states, which a step that computes the row reads and writes."""
        return self.linear.state_bytes if self.linear else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.num_layers * self.num_experts * 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_share(self) -> float:
        """Share of a layer's experts that compute one token."""
        return self.experts_per_token / self.num_experts if self.num_experts else 0.0

    def read_experts(self, tokens: int) -> float:
        """Experts' parameters that a step of so many tokens reads, each of which may choose any."""
        return self.expert_parameters * (1.0 - (1.0 - self.expert_share) ** tokens)

    def seen(self, context: float, tokens: int) -> float:
        """Tokens that a layer reads of contexts, summed and on average over layers.

        Args:
            context: Tokens that so many tokens would see without windows, summed.
            tokens: Tokens that look back.
        """
        windowed = min(context, tokens * self.window)
        return context + (windowed - context) * self.windowed_layers / self.num_layers

    @property
    def multiplied_parameters(self) -> float:
        """Parameters of all layers that a token is multiplied by."""
        return self.layer_parameters + self.expert_share * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values over all layers."""
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """config.json."""
        experts: dict[str, Any] = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
        }
        if self.mxfp4:
            # Windows by turns are the family's default.
            experts = {
                "num_local_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "quantization_config": {"quant_method": "mxfp4"},
            }
        return (
            (experts if self.num_experts else {})
            | self._linear_config()
            | {
                "architectures": [self.architecture],
                "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocab_size,
                "max_position_embeddings": self.max_position_embeddings,
                "rms_norm_eps": self.rms_norm_eps,
                "rope_theta": self.rope_theta,
                "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
                "tie_word_embeddings": self.tied,
                "hidden_act": "silu",
                "torch_dtype": "bfloat16",
                # The last 256 ids are the synthetic tokenizer's special ones.
                "bos_token_id": self.vocab_size - 256,
                "eos_token_id": self.vocab_size - 255,
            }
        )

    def _linear_config(self) -> dict[str, Any]:
        """What config.json says of linear attention, which all but each fourth layer have."""
        if self.linear is None:
            return {}
        assert self.linear.count == self.num_layers - self.num_layers // 4, "each fourth layer has keys and values"
        return {
            "linear_num_key_heads": self.linear.key_heads,
            "linear_num_value_heads": self.linear.value_heads,
            "linear_key_head_dim": self.linear.head_dim,
            "linear_value_head_dim": self.linear.head_dim,
            "linear_conv_kernel_dim": self.linear.kernel,
        }


# Layers alternate between windows of 128 tokens and all, as the family's defaults have it.
_GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_LLAMA31_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Shape] = {
    "llama-3.2-1b": Shape(
        "LlamaForCausalLM",
        2048,
        16,
        32,
        8,
        64,
        8192,
        128_256,
        131_072,
        500_000.0,
        tied=True,
        rope_scaling=_LLAMA31_SCALING | {"factor": 32.0},
    ),
    "llama-3.1-8b": Shape(
        "LlamaForCausalLM", 4096, 32, 32, 8, 128, 14336, 128_256, 131_072, 500_000.0, rope_scaling=_LLAMA31_SCALING
    ),
    "llama-3.1-70b": Shape(
        "LlamaForCausalLM", 8192, 80, 64, 8, 128, 28672, 128_256, 131_072, 500_000.0, rope_scaling=_LLAMA31_SCALING
    ),
    "qwen3-4b": Shape(
        "Qwen3ForCausalLM", 2560, 36, 32, 8, 128, 9728, 151_936, 40_960, 1e6, rms_norm_eps=1e-6, tied=True
    ),
    "qwen3-8b": Shape("Qwen3ForCausalLM", 4096, 36, 32, 8, 128, 12288, 151_936, 40_960, 1e6, rms_norm_eps=1e-6),
    "qwen3-30b-a3b": Shape(
        "Qwen3MoeForCausalLM",
        2048,
        48,
        32,
        4,
        128,
        768,
        151_936,
        40_960,
        1e6,
        rms_norm_eps=1e-6,
        num_experts=128,
        experts_per_token=8,
    ),
    # The text part's numbers are the defaults of its class in transformers.
    "qwen3.5-9b": Shape(
        "Qwen3_5ForCausalLM",
        4096,
        32,
        16,
        4,
        256,
        12288,
        248_320,
        32_768,
        10_000.0,
        rms_norm_eps=1e-6,
        linear=LinearLayers(24, 16, 32, 128),
    ),
    "gpt-oss-20b": Shape(
        "GptOssForCausalLM",
        2880,
        24,
        64,
        8,
        64,
        2880,
        201_088,
        131_072,
        150_000.0,
        rope_scaling=_GPT_OSS_SCALING,
        num_experts=32,
        experts_per_token=4,
        mxfp4=True,
        windowed_layers=12,
        window=128,
    ),
    "gpt-oss-120b": Shape(
        "GptOssForCausalLM",
        2880,
        36,
        64,
        8,
        64,
        2880,
        201_088,
        131_072,
        150_000.0,
        rope_scaling=_GPT_OSS_SCALING,
        num_experts=128,
        experts_per_token=4,
        mxfp4=True,
        windowed_layers=18,
        window=128,
    ),
    # models/demo's own numbers.
    "demo": Shape("LlamaForCausalLM", 256, 8, 8, 4, 32, 704, 4096, 2048, 10_000.0, tied=True),
}


def write_model_folder(name: str, parent: pathlib.Path, *, tokenizer: bool = False) -> pathlib.Path:
    """Writes the folder of a shape.

    Args:
        name: One of SHAPES.
        parent: Folder in which the shape's own is made, under the shape's name.
        tokenizer: Whether text is wanted too: a BPE with as many entries as the vocabulary; takes
            about a second.

    Returns:
        The folder.
    """
    shape = SHAPES[name]
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    if tokenizer:
        write_tokenizer(folder / "tokenizer.json", shape.vocab_size)
    return folder


def write_head_folder(model: pathlib.Path, parent: pathlib.Path, draft_vocab_size: int = 32_000) -> pathlib.Path:
    """Writes the folder of an EAGLE-3 head with a model's sizes, without weights.

    Args:
        model: The model's folder.
        parent: Folder in which the head's own is made.
        draft_vocab_size: Tokens that the head knows, or all where the model has fewer.

    Returns:
        The folder.
    """
    config = shape_of(model).config()
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    own["draft_vocab_size"] = min(draft_vocab_size, config["vocab_size"])
    folder = parent / "eagle-3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | own, indent=2))
    return folder


def shape_of(folder: pathlib.Path) -> Shape:
    """The shape of a model folder's config.json.

    Raises InvalidModelFolder for one that is no model. Experts are in every layer, or in none.
    """
    config = ModelFolder.open(folder, require_weights=False).config
    model, attention = config.description, config.description.attention
    experts, recurrent = model.expert_layers, model.recurrent_layers
    assert len(experts) in (0, len(model.layers)), "a benchmark's shape has experts in every layer or in none"
    return Shape(
        config.architecture,
        model.hidden_size,
        len(model.layers),
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        model.layers[0].mlp.inner,
        model.vocab_size,
        config.max_position_embeddings,
        model.rope.theta,
        model.norm.eps,
        model.head.tied,
        num_experts=len(experts[0].experts) if experts else 0,
        experts_per_token=experts[0].per_token if experts else 0,
        mxfp4=config.quantized_by == MXFP4,
        windowed_layers=sum(attention.window is not None for attention in model.attentions),
        window=model.window or 0,
        linear=LinearLayers(
            len(recurrent),
            recurrent[0].num_key_heads,
            recurrent[0].num_value_heads,
            recurrent[0].key_dim,
            recurrent[0].kernel_size,
        )
        if recurrent
        else None,
    )
