"""A decoder layer as quantization sees it: four products in forward order, with their sources.

    input_layernorm -> q, k, v -> attention -> o
                             v --------------^
    post_attention_layernorm -> gate, up -> SwiGLU -> down
                                      up -------------^

Of a mixture of experts the last two are those of its shared expert, if it has one; experts have
stages of their own (`quantize_experts`). Owns the names, and where scales of inputs may be folded:
a norm's weight, or the outputs of v (attention mixes tokens, not channels) and of up (the gate
multiplies channel by channel).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from headrace_model_folder import ModelConfig
from headrace_model_folder.description import Layer, Mlp


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One product of a layer: projections that share their inputs."""

    # The module that multiplies, as a path in our layer.
    product: str
    # As paths in the checkpoint's layer, in the order of the product's outputs.
    projections: tuple[str, ...]
    # What makes the inputs: a norm, or a projection whose outputs become them.
    source: str


STAGES = (
    Stage("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Stage("self_attn.o_proj", ("self_attn.o_proj",), "self_attn.v_proj"),
    Stage("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    Stage("mlp.down_proj", ("mlp.down_proj",), "mlp.up_proj"),
)


# Of a mixture's shared expert, which has the norm of all experts before it.
_SHARED = (
    Stage(
        "mlp.shared.mlp.gate_up_proj",
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "post_attention_layernorm",
    ),
    Stage("mlp.shared.mlp.down_proj", ("mlp.shared_experts.down_proj",), "mlp.shared_experts.up_proj"),
)


def stages_of(layer: Layer) -> tuple[Stage, ...]:
    """The stages of a layer, in forward order; of a mixture without its experts'."""
    if isinstance(layer.mlp, Mlp):
        return STAGES
    return STAGES[:2] + (() if layer.mlp.shared is None else _SHARED)


def num_inputs(stage: Stage, layer: Layer) -> int:
    """Number of inputs of the stage's product."""
    return next(linear.inputs for linear in layer.linears if linear.name == f"{layer.name}.{stage.projections[0]}")


def tie(stage: Stage, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Makes scales of the inputs equal where one output of the source becomes several.

    These are the inputs of heads that share a value head.
    """
    if stage.product != "self_attn.o_proj":
        return lambda scales: scales

    attention = config.description.attention

    def over_group(scales: Tensor) -> Tensor:
        heads = scales.view(attention.num_kv_heads, -1, attention.head_dim)
        return heads.mean(1, keepdim=True).expand_as(heads).flatten()

    return over_group


def of_source(stage: Stage, config: ModelConfig, scales: Tensor) -> Tensor:
    """Scales of the inputs -> those of the source's outputs: one for each."""
    if stage.product != "self_attn.o_proj":
        return scales
    attention = config.description.attention
    return scales.view(attention.num_kv_heads, -1, attention.head_dim)[:, 0].flatten()
