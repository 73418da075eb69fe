"""The weight of all experts of a layer: that of one projection, or of gate and up, side by side.

To loaders it is a weight like any other, with each projection's rows at their place, so whatever is
quantized while it is read is quantized here as well. Products are those of experts alone
(`headrace_kernels.experts`), which take it as `experts`.
"""

from __future__ import annotations

import torch

from headrace_backend.quantization.linear_weight import PlainWeight
from headrace_backend.quantization.low_bit_weight import RoundedWeight
from headrace_backend.weights.placement import Placement
from headrace_backend.weights.scheme import Scheme
from headrace_kernels.experts.expert_weights import ExpertWeights


class PlainExpertWeight(PlainWeight):
    """The experts' weights in the model's type."""

    def __init__(self, num_outputs: int, num_inputs: int, num_experts: int, placement: Placement) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together."""
        super().__init__(torch.empty(num_outputs, num_inputs, dtype=placement.dtype, device=placement.device))
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self.tensor, self.num_experts)


class RoundedExpertWeight(RoundedWeight):
    """The experts' weights, quantized by a scheme of the settings."""

    def __init__(
        self, num_outputs: int, num_inputs: int, num_experts: int, scheme: Scheme, placement: Placement
    ) -> None:
        """Allocates it, empty; `num_outputs` are those of all experts together.

        Raises:
            QuantizationRefused: The scheme's groups do not divide the inputs.
        """
        super().__init__(num_outputs, num_inputs, scheme, placement)
        self.num_experts = num_experts

    @property
    def experts(self) -> ExpertWeights:
        """The weight as products of experts take it."""
        return ExpertWeights(self.quantized, self.num_experts)


def make_expert_weight(
    num_outputs: int, num_inputs: int, num_experts: int, placement: Placement
) -> PlainExpertWeight | RoundedExpertWeight:
    """Makes an empty weight of the placement's type and scheme.

    Args:
        num_outputs: Outputs of all experts together that this rank keeps.
        num_inputs: Inputs of each expert that this rank keeps.
        num_experts: Number of experts.
        placement: Device, type, and how weights are quantized while they are read.

    Raises:
        QuantizationRefused: The scheme's groups do not divide the inputs.
    """
    if placement.scheme is None:
        return PlainExpertWeight(num_outputs, num_inputs, num_experts, placement)
    return RoundedExpertWeight(num_outputs, num_inputs, num_experts, placement.scheme, placement)
