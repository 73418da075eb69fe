"""Experts that compute the residual stream beside a layer's MLP, and not what its norm gives.

    stream ─┬─> the layer's norm ─> MLP ─────────────────────────> norm ─┐
            ├─> norm ─> experts, weighted by expert and choice ──> norm ─┴─> sum
            └─> the router's norm ─> router ─> choice ────┘

Of several ranks each norm behind adds up the ranks' parts, so that the sum is whole on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

from torch import Tensor, nn

from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_backend.layers.mlp import GatedMlp
from headrace_backend.layers.norm import RmsNorm, residual_norm
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.experts.routing import Choice
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.rounded_tokens import Activations
from headrace_model_folder.description import BesideMlp, Experts


class StreamRouting(ShardedModule):
    """What stands before and behind the router's product: a norm, and numbers of the experts."""

    def __init__(self, beside: BesideMlp, placement: Placement) -> None:
        super().__init__()
        self._beside = beside
        self.factors = placement.empty(*beside.router_factors.shape)
        self.expert_factors = placement.empty(*beside.expert_factors.shape)

    def read(self, residual: Tensor) -> Tensor:
        """The stream as the router reads it, [num_tokens, hidden_size]."""
        return rms_norm(residual, self.factors, self._beside.eps).mul_(self._beside.router_scale)

    def weighted(self, choice: Choice) -> Choice:
        """The choice with each expert's number in its weights."""
        return Choice(choice.experts, choice.weights * self.expert_factors.float()[choice.experts.long()])

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The norm's factors and the experts' numbers, whole on every rank."""
        for vector, tensor in (
            (self._beside.router_factors, self.factors),
            (self._beside.expert_factors, self.expert_factors),
        ):
            yield CheckpointPart(vector.name, WeightTarget.of(tensor, range(len(tensor))))


class ExpertsBeside(nn.Module):
    """A layer's MLP and the experts beside it, whose normed outputs are added up."""

    # The MLP alone is given the layer's norm.
    reads_unrounded = False

    def __init__(self, experts: Experts, placement: Placement) -> None:
        super().__init__()
        beside, shared = experts.beside, experts.shared
        assert beside is not None and shared is not None, "other experts are behind the layer's norm"
        self.experts = ExpertMlp(dataclasses.replace(experts, shared=None, beside=None), placement)
        self.mlp = GatedMlp(shared.mlp, placement)
        self.routing = StreamRouting(beside, placement)
        self.input_norm = RmsNorm(beside.input_norm, placement)
        self.output_norm = residual_norm(beside.output_norm, placement)
        self.mlp_output_norm = residual_norm(beside.mlp_output_norm, placement)

    def forward(self, normed: Activations, residual: Tensor) -> Tensor:
        """Computes both, of several ranks whole.

        Args:
            normed: [num_tokens, hidden_size] what the layer's norm gives, for the MLP.
            residual: [num_tokens, hidden_size] the stream, with nothing pending.

        Returns:
            [num_tokens, hidden_size].
        """
        dense = self.mlp_output_norm.of_output(self.mlp(normed))
        choice = self.routing.weighted(self.experts.choose(self.routing.read(residual)))
        # The router has a norm of its own, so this one is stored in one form.
        tokens = self.input_norm.of_sum(None, residual, self.experts.rounds_to(len(residual)))
        mixed = self.experts.mixed(tokens, choice)
        return dense.add_(self.output_norm.of_output(mixed))

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes so many tokens may round them for the MLP; None: not at all."""
        return self.mlp.rounds_to(num_tokens)

    def fuses(self, num_tokens: int) -> bool:
        """Whether norms and additions are inside products: never."""
        return False

    def launch_kind(self) -> Hashable:
        """What decides, beside tokens, which kernels the products launch."""
        return self.mlp.launch_kind(), self.experts.launch_kind()
