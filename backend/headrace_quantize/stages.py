"""A decoder layer as quantization sees it: four products in forward order, with their sources.

    input_layernorm -> q, k, v -> attention -> o
                             v --------------^
    post_attention_layernorm -> gate, up -> SwiGLU -> down
                                      up -------------^

Linear attention has queries, keys, values and gates in place of q, k and v. Of a mixture of experts
the last two are those of its shared expert, if it has one; experts have stages of their own
(`quantize_experts`). Owns the names, and where scales of inputs may be folded:
a norm's weight, or the outputs of v (attention mixes tokens, not channels) and of up (the gate
multiplies channel by channel).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from headrace_model_folder import ModelConfig
from headrace_model_folder.description import GatedDeltaNet, Layer, Linear, Mlp

# The product of attention's output, and the norm before a layer's attention.
_OUTPUT, _ATTENTION_NORM = "self_attn.o_proj", "input_layernorm"


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One product of a layer: projections that share their inputs."""

    # The module that multiplies, as a path in our layer.
    product: str
    # As paths in the checkpoint's layer, in the order of the product's outputs; those that the
    # checkpoint keeps in one tensor are one.
    projections: tuple[str, ...]
    # What makes the inputs: a norm, or a projection whose outputs become them.
    source: str


def stages_of(layer: Layer) -> tuple[Stage, ...]:
    """The stages of a layer, in forward order; of a mixture without its experts'."""
    return *_attention_stages(layer), *_mlp_stages(layer)


def _attention_stages(layer: Layer) -> Iterator[Stage]:
    attention = layer.attention
    if isinstance(attention, GatedDeltaNet):
        mixed = (attention.query, attention.key, attention.value, attention.gate)
        yield _stage(layer, "self_attn.in_proj", mixed, _ATTENTION_NORM)
    else:
        yield _stage(layer, "self_attn.qkv_proj", attention.projected, _ATTENTION_NORM)
    yield _stage(layer, _OUTPUT, (attention.output,), "self_attn.v_proj")


def _mlp_stages(layer: Layer) -> Iterator[Stage]:
    if isinstance(layer.mlp, Mlp):
        yield from _gated_stages(layer, layer.mlp, "mlp")
    elif layer.mlp.shared is not None:
        yield from _gated_stages(layer, layer.mlp.shared.mlp, "mlp.shared.mlp")


def _gated_stages(layer: Layer, mlp: Mlp, block: str) -> Iterator[Stage]:
    yield _stage(layer, f"{block}.gate_up_proj", (mlp.gate, mlp.up), "post_attention_layernorm")
    yield _stage(layer, f"{block}.down_proj", (mlp.down,), mlp.up.name.removeprefix(f"{layer.name}."))


def _stage(layer: Layer, product: str, linears: Iterable[Linear], source: str) -> Stage:
    names = (linear.stored.name.removeprefix(f"{layer.name}.") for linear in linears)
    return Stage(product, tuple(dict.fromkeys(names)), source)


def num_inputs(stage: Stage, layer: Layer) -> int:
    """Number of inputs of the stage's product."""
    name = f"{layer.name}.{stage.projections[0]}"
    return next(linear.inputs for linear in layer.linears if linear.stored.name == name)


def tie(stage: Stage, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Makes scales of the inputs equal where one output of the source becomes several.

    These are the inputs of heads that share a value head.
    """
    if stage.product != _OUTPUT:
        return lambda scales: scales

    attention = config.description.attention

    def over_group(scales: Tensor) -> Tensor:
        heads = scales.view(attention.num_kv_heads, -1, attention.head_dim)
        return heads.mean(1, keepdim=True).expand_as(heads).flatten()

    return over_group


def of_source(stage: Stage, config: ModelConfig, scales: Tensor) -> Tensor:
    """Scales of the inputs -> those of the source's outputs: one for each."""
    if stage.product != _OUTPUT:
        return scales
    attention = config.description.attention
    return scales.view(attention.num_kv_heads, -1, attention.head_dim)[:, 0].flatten()
