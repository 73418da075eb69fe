"""What families of mixtures of experts share: numbers of experts with bounds, and layers with them.

A family states the names of its tensors; everything else about experts is alike.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from headrace_model_folder.description import Experts, Layer, Linear, Mlp
from headrace_model_folder.fields import Fields

# As of other sizes (`families.decoder`): far above any model that exists. Each expert of each layer
# has names of its own, which is why their number is bounded too.
_MAX_EXPERTS = 1024
_MAX_EXPERTS_TOGETHER = 1 << 16
_MAX_WIDTH = 1 << 20


class ExpertNames(NamedTuple):
    """What a family's checkpoints call the parts of a mixture of experts."""

    # Behind the layer's name: the block, and in it the router. Experts are `experts.<number>`.
    block: str
    router: str
    # Projections of an expert.
    gate: str
    up: str
    down: str


class Routing(NamedTuple):
    """How many experts a layer has, how large they are, and how they are chosen."""

    num_experts: int
    # Experts that compute a token.
    per_token: int
    # Elements between the projections of an expert.
    inner: int
    # Whether a token's weights are divided by their sum.
    renormalized: bool
    # Whether router and projections have biases.
    has_biases: bool = False


def read_routing(
    fields: Fields,
    num_experts: str,
    inner: str,
    num_layers: int,
    renormalized: bool,
    default: int | None = None,
    per_token: str = "num_experts_per_tok",
) -> Routing:
    """Reads the numbers of experts.

    Args:
        fields: The fields of config.json, defaults filled in.
        num_experts: The family's name of the number of experts.
        inner: The family's name of the number of elements between an expert's projections.
        num_layers: Layers of the model.
        renormalized: Whether a token's weights are divided by their sum.
        default: Number of experts where config.json states none.
        per_token: The family's name of the number of experts that compute a token.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    count = fields.integer(num_experts, 1, _MAX_EXPERTS, default)
    if count * num_layers > _MAX_EXPERTS_TOGETHER:
        raise fields.error(
            num_experts, f"of {count} in {num_layers} layers makes more than {_MAX_EXPERTS_TOGETHER} experts"
        )
    return Routing(count, fields.integer(per_token, 1, count), fields.integer(inner, 1, _MAX_WIDTH), renormalized)


def with_experts(layer: Layer, routing: Routing, names: ExpertNames) -> Layer:
    """Returns the layer with a mixture of experts in place of its MLP."""
    hidden, block = layer.attention.linears[0].inputs, f"{layer.name}.{names.block}"
    bias = routing.has_biases
    router = Linear(f"{block}.{names.router}", routing.num_experts, hidden, bias, keeps_dtype=True)
    experts = tuple(
        _expert(f"{block}.experts.{number}", hidden, routing.inner, names, bias)
        for number in range(routing.num_experts)
    )
    return dataclasses.replace(layer, mlp=Experts(router, experts, routing.per_token, routing.renormalized))


def _expert(name: str, hidden: int, inner: int, names: ExpertNames, bias: bool) -> Mlp:
    return Mlp(
        gate=Linear(f"{name}.{names.gate}", inner, hidden, bias),
        up=Linear(f"{name}.{names.up}", inner, hidden, bias),
        down=Linear(f"{name}.{names.down}", hidden, inner, bias),
    )
