"""The mixture of experts of a decoder layer: a router, and experts that each compute few tokens.

Several ranks have a part of every expert's inner elements each, or some experts whole, and the
whole router. So all choose alike and their outputs add up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_backend.layers.linear import ColumnLinear
from headrace_backend.layers.mlp import GatedMlp
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.quantization.expert_weight import make_expert_weight
from headrace_backend.quantization.linear_weight import PlainWeight
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.experts import mixture
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.gating import GELU, SILU, Gating, gated_reference
from headrace_kernels.experts.router import choose_after_norm, chooses_at_once
from headrace_kernels.experts.routing import Choice, choose_experts
from headrace_kernels.experts.scored_routing import Scoring, choose_scored_experts
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import Activations, as_taken, unrounded
from headrace_model_folder import description
from headrace_model_folder.description import Experts, Linear, SigmoidScores


class ExpertLinear(ShardedModule):
    """A projection of every expert, or gate and up of every expert, in one weight."""

    def __init__(
        self,
        projections: Sequence[Linear],
        rows: range,
        columns: range,
        num_experts: int,
        part: ExpertPart | None,
        placement: Placement,
        has_bias: bool,
    ) -> None:
        """Allocates the weight.

        Args:
            projections: The projections of the first expert, then of the next; all of one size.
            rows: Outputs of each projection that this rank keeps.
            columns: Inputs of each projection that this rank keeps.
            num_experts: Number of experts that this rank has.
            part: Which ones; None: all of the layer.
            placement: Type and device.
            has_bias: Whether this rank keeps the projections' biases.
        """
        super().__init__()
        self._names = tuple(part.name for part in projections)
        self._rows, self._columns, self._part = rows, columns, part
        size = len(rows) * len(projections)
        self.weight = make_expert_weight(rows, columns, num_experts, placement.of(*self._names))
        self.bias = placement.empty(size) if has_bias else None

    @property
    def weights(self) -> ExpertWeights:
        """The projections as products take them."""
        return dataclasses.replace(self.weight.experts, bias=self.bias, part=self._part)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The projections in order."""
        for number, name in enumerate(self._names):
            kept = range(number * len(self._rows), (number + 1) * len(self._rows))
            target = WeightTarget(self.weight.destination(kept), self._rows, self._columns)
            yield CheckpointPart(f"{name}.weight", target)
            if self.bias is not None:
                yield CheckpointPart(f"{name}.bias", WeightTarget.of(self.bias[kept.start : kept.stop], self._rows))


class SigmoidRouting(ShardedModule):
    """Chooses a token's experts by sigmoid scores and a correction, which stays in fp32."""

    def __init__(self, experts: Experts, scores: SigmoidScores, placement: Placement) -> None:
        super().__init__()
        self._name, self._per_token = scores.correction, experts.per_token
        self.correction = dataclasses.replace(placement, dtype=torch.float32).empty(scores.num_experts)
        self.scoring = Scoring(scores.num_groups, scores.top_groups, experts.renormalized, scores.scale)

    def forward(self, logits: Tensor) -> Choice:
        """[num_tokens, num_experts] of the router -> the experts of each token."""
        return choose_scored_experts(logits, self.correction, self._per_token, self.scoring)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The correction, whole on every rank."""
        yield CheckpointPart(self._name, WeightTarget.of(self.correction, range(len(self.correction))))


class SharedExpert(nn.Module):
    """An MLP that computes every token, times the sigmoid of a gate where there is one."""

    def __init__(self, shared: description.SharedExpert, placement: Placement) -> None:
        super().__init__()
        # Shared out over ranks as a dense MLP is, also where experts are whole.
        self.mlp = GatedMlp(shared.mlp, placement)
        # Whole on every rank, in the model's type whatever the MLP has.
        plain = dataclasses.replace(placement, scheme=None)
        self.gate = None if shared.gate is None else ColumnLinear((shared.gate,), (range(1),), plain)

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, of several ranks this one's part of it."""
        out: Tensor = self.mlp(as_taken(x, self.mlp.rounds_to(len(x))))
        return out if self.gate is None else out.mul_(self.gate(unrounded(x)).sigmoid())

    def fuses(self, num_tokens: int) -> bool:
        """Whether `gated` and `add_down` of its MLP can take the place of `forward`."""
        return self.gate is None and self.mlp.fuses(num_tokens)

    def launch_kind(self) -> Hashable:
        """What decides, beside tokens, which kernels the products launch."""
        return self.mlp.launch_kind(), None if self.gate is None else self.gate.weight.launch_kind()


class ExpertMlp(nn.Module):
    """The weighted sum of a token's experts, each down(gated(gate(x), up(x))), and a shared one."""

    # The router's product takes the model's type, whatever the experts' take.
    reads_unrounded = True

    def __init__(self, experts: Experts, placement: Placement) -> None:
        super().__init__()
        count, hidden = len(experts.experts), experts.router.inputs
        inner, own = placement.shard.split_inner(experts.inner), placement.shard.split_experts(count)
        kept = experts.experts[own.start : own.stop]
        # In the model's type whatever the experts have: its product decides what is computed.
        self.router = ColumnLinear((experts.router,), (range(count),), dataclasses.replace(placement, scheme=None))
        gates_and_ups = list(itertools.chain.from_iterable((expert.gate, expert.up) for expert in kept))
        downs = [expert.down for expert in kept]
        part = ExpertPart(own.start, count) if len(own) < count else None
        bias = experts.down.bias
        self.gate_up_proj = ExpertLinear(gates_and_ups, inner, range(hidden), len(own), part, placement, bias)
        # The ranks' outputs are added up, so each bias is one rank's.
        adds_bias = bias and (placement.shard.whole_experts or placement.shard.rank == 0)
        self.down_proj = ExpertLinear(downs, range(hidden), inner, len(own), part, placement, adds_bias)
        self.scores = None if experts.scores is None else SigmoidRouting(experts, experts.scores, placement)
        self._per_token, self._renormalized = experts.per_token, experts.renormalized
        self.shared = None if experts.shared is None else SharedExpert(experts.shared, placement)
        self._gating = _gating(experts)
        # Counts the programs of a choice of few tokens, and is 0 between two of them.
        self._done = torch.zeros(1, dtype=torch.int32, device=placement.device)

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, of several ranks this one's part of it."""
        out = self.mixed(x, self.choose(unrounded(x)))
        return out if self.shared is None else out.add_(self.shared(x))

    def in_parts(self, x: Activations) -> Tensor:
        """`forward` where it is whole, or its parts [num_tokens, parts, hidden_size].

        Parts are left to the norm behind, which adds them up. For experts of one rank that are
        alone.
        """
        assert self.shared is None, "a shared expert's output is added to whole ones"
        return mixture.mixture_in_parts(x, self.choose(unrounded(x)), *self._weights, self._gating)

    def mixed(self, x: Activations, choice: Choice) -> Tensor:
        """The chosen experts' weighted sum, [num_tokens, hidden_size] -> the same shape."""
        return mixture.mixture(x, choice, *self._weights, self._gating)

    def choose(self, x: Tensor) -> Choice:
        """The experts of tokens [num_tokens, hidden_size], and their weights."""
        return self._choice(self.router(x))

    def inner(self, x: Tensor, index: int) -> Tensor:
        """Inner elements [num_tokens, inner] of the index-th expert that is here, for any tokens.

        For those who look at experts one by one; `forward` computes all together.
        """
        weights = self.gate_up_proj.weights
        return gated_reference(functional.linear(x, weights.expert(index), weights.expert_bias(index)), self._gating)

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes so many tokens may round them for `forward`; None: not at all."""
        return mixture.rounds_to(num_tokens, *self._weights)

    def fuses(self, num_tokens: int) -> bool:
        """Whether products of so many tokens take norm, SwiGLU and addition inside."""
        return (
            self.router.weight.fuses(num_tokens)
            and all(mixture.fuses(num_tokens, self._per_token, weights) for weights in self._weights)
            and (self.shared is None or self.shared.fuses(num_tokens))
        )

    def launch_kind(self) -> Hashable:
        """What decides, beside tokens, which kernels the products launch."""
        linears = (self.router, self.gate_up_proj, self.down_proj)
        weights = tuple(linear.weight.launch_kind() for linear in linears)
        shared = None if self.shared is None else self.shared.launch_kind()
        scoring = None if self.scores is None else self.scores.scoring
        return self._per_token, self._renormalized, self._gating, scoring, shared, weights

    def add_to(self, residual: Tensor, norm: RmsNorm) -> None:
        """`residual += forward(norm(residual))`, for steps that fuse."""
        choice = self._choice_after(norm, residual)
        # Of the stream before the mixture is added to it.
        inner = None if self.shared is None else self.shared.mlp.gated(residual, norm)
        mixture.add_mixture(residual, norm.weight, norm.eps, choice, *self._weights, self._gating)
        if self.shared is not None and inner is not None:
            self.shared.mlp.add_down(residual, inner)

    @property
    def can_be_captured(self) -> bool:
        """Whether a graph can hold the products' launches."""
        return all(mixture.takes_kernels(weights) for weights in self._weights)

    @property
    def _weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        return self.gate_up_proj.weights, self.down_proj.weights

    def _choice_after(self, norm: RmsNorm, residual: Tensor) -> Choice:
        router = self.router.weight
        assert isinstance(router, PlainWeight), "a router has the model's type"
        if self.scores is not None or not chooses_at_once(len(residual), router.tensor):
            return self._choice(self.router.after_norm(norm, residual))
        norm_and_eps, rule = (norm.weight, norm.eps), (self._per_token, self._renormalized)
        return choose_after_norm(residual, norm_and_eps, router.tensor, self.router.bias, *rule, self._done)

    def _choice(self, logits: Tensor) -> Choice:
        if self.scores is None:
            return choose_experts(logits, self._per_token, self._renormalized)
        choice: Choice = self.scores(logits)
        return choice


def _gating(experts: Experts) -> Gating:
    """What the kernels compute between an expert's projections."""
    clamped = experts.gating
    if clamped is not None:
        return Gating(True, clamped.alpha, clamped.limit)
    return GELU if experts.experts[0].activation == "gelu_tanh" else SILU
