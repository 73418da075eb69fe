"""Experts of Gemma 4, which compute the residual stream beside a layer's MLP."""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import BesideMlp, Experts, Layer, Linear, Mlp, Norm, SharedExpert, Vector
from headrace_model_folder.families.mixtures.experts import Routing, read_routing
from headrace_model_folder.fields import Fields


def read_gemma4_routing(fields: Fields, num_layers: int) -> Routing | None:
    """Reads how many experts a layer has and how they are chosen; None: there are none.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    if not fields.boolean("enable_moe_block", False):
        return None
    return read_routing(
        fields,
        "num_experts",
        "moe_intermediate_size",
        num_layers,
        renormalized=True,
        per_token="top_k_experts",
    )


def with_experts_beside(layer: Layer, routing: Routing, eps: float) -> Layer:
    """Returns the layer with experts beside its MLP.

    Args:
        layer: A layer with a dense MLP.
        routing: Number and size of the experts.
        eps: Added to mean squares.
    """
    assert isinstance(layer.mlp, Mlp), "the MLP stays"
    hidden = layer.mlp.gate.inputs

    def norm(name: str) -> Norm:
        return Norm(f"{layer.name}.{name}", hidden, eps, rounds_once=True)

    beside = BesideMlp(
        Vector(f"{layer.name}.router.scale", (hidden,)),
        hidden**-0.5,
        eps,
        Vector(f"{layer.name}.router.per_expert_scale", (routing.num_experts,)),
        norm("pre_feedforward_layernorm_2"),
        norm("post_feedforward_layernorm_2"),
        norm("post_feedforward_layernorm_1"),
    )
    experts = Experts(
        Linear(f"{layer.name}.router.proj", routing.num_experts, hidden, keeps_dtype=True),
        tuple(
            _expert(f"{layer.name}.experts.{number}", hidden, routing.inner) for number in range(routing.num_experts)
        ),
        routing.per_token,
        routing.renormalized,
        shared=SharedExpert(layer.mlp),
        joined=f"{layer.name}.experts",
        beside=beside,
    )
    return dataclasses.replace(layer, mlp=experts)


def _expert(name: str, hidden: int, inner: int) -> Mlp:
    return Mlp(
        Linear(f"{name}.gate_proj", inner, hidden),
        Linear(f"{name}.up_proj", inner, hidden),
        Linear(f"{name}.down_proj", hidden, inner),
        activation="gelu_tanh",
    )
