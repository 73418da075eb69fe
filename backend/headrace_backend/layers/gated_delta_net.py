"""Linear attention by the gated delta rule, with a state for each row of the batch.

Projections, a short convolution, the recurrence, norm and gate of each head, output projection. A
layer's states are one tensor, a line for each row: its matrices, then the inputs of its last tokens
that the convolution still sees; in workers that draft what drafts leave (`recurrence.pending`) too.

Of several ranks each has some value heads, with the key heads that these share and the channels of
both; where there are more ranks than key heads, several have the same one. Their outputs' parts add
up, as those of attention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from headrace_backend.layers.linear import ColumnLinear, RowLinear
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.layers.step_metadata import StepMetadata, recurrent_entries
from headrace_backend.quantization.linear_weight import LinearWeight
from headrace_backend.weights.destination import LoggedRates, PickedColumns, PickedRows, TensorRows
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.recurrence.delta_net import DeltaWeights, ProjectedTokens, delta_net
from headrace_kernels.recurrence.gated_delta import DeltaHeads
from headrace_kernels.recurrence.pending import states_of
from headrace_kernels.rounded_tokens import Activations
from headrace_model_folder import description


class ShortConvolution(ShardedModule):
    """Factors of a causal convolution of each of a rank's channels, [channels, kernel_size]."""

    def __init__(self, convolution: description.Vector, channels: Sequence[range], placement: Placement) -> None:
        """Allocates the factors of these channels, which follow each other."""
        super().__init__()
        self._num_channels, _, self.kernel_size = convolution.shape
        self._name, self._channels = convolution.name, channels
        self.weight = placement.empty(sum(map(len, channels)), self.kernel_size)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The factors: a tensor of all ranks' channels, of which some are kept."""
        kept = PickedRows(self.weight, self._num_channels, self._channels)
        yield CheckpointPart(self._name, WeightTarget(kept, range(self._num_channels), range(self.kernel_size)))


class DecayRates(ShardedModule):
    """How fast the matrix of each of a rank's heads decays, in fp32: log of a rate, and a bias."""

    def __init__(self, attention: description.GatedDeltaNet, heads: range, placement: Placement) -> None:
        super().__init__()
        wide = dataclasses.replace(placement, dtype=torch.float32)
        self._attention, self._heads = attention, heads
        self.log_decay, self.bias = wide.empty(len(heads)), wide.empty(len(heads))

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Rates and biases of the rank's heads."""
        rates = (LoggedRates if self._attention.has_rates else TensorRows)(self.log_decay)
        yield CheckpointPart(self._attention.log_decay.name, WeightTarget(rates, self._heads))
        yield CheckpointPart(self._attention.decay_bias.name, WeightTarget.of(self.bias, self._heads))


class ByPlaceLinear(RowLinear):
    """An output projection whose inputs are value heads by their place among those of a key.

    Files in blocks have them so, and blocks of 256 inputs reach over heads of 128: their order
    can't be undone while they are read. So the heads' outputs are put into the file's order.
    """

    def __init__(self, attention: description.GatedDeltaNet, heads: range, placement: Placement) -> None:
        """Allocates the weight.

        Args:
            attention: The layer.
            heads: The value heads of this rank, side by side by key.
            placement: Type and device.
        """
        dim = attention.value_dim
        super().__init__(attention.output, range(heads.start * dim, heads.stop * dim), placement)
        places = min(attention.values_per_key, len(heads))
        self._shape = (len(heads) // places, places, dim)
        self._num_inputs = attention.output.inputs
        self._kept = list(_pieces(attention, heads))

    def forward(self, x: Activations) -> Tensor:
        """[num_tokens, len(inputs)] of heads side by side -> [num_tokens, output_size]."""
        return super().forward(self._by_place(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += forward(x)`, for steps that fuse."""
        super().add_to(residual, self._by_place(x))

    def _by_place(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor), "the layer gives tokens in the model's type"
        return x.view(-1, *self._shape).transpose(1, 2).flatten(1)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight, of which a rank keeps a piece for each place."""
        rows = range(self.weight.num_outputs)
        kept = PickedColumns(self.weight.destination(rows), self._num_inputs, self._kept)
        yield CheckpointPart(f"{self._name}.weight", WeightTarget(kept, rows, range(self._num_inputs)))


class GatedDeltaNet(nn.Module):
    """Linear attention of one layer, or a rank's part of it. It takes the place of `Attention`."""

    def __init__(self, attention: description.GatedDeltaNet, placement: Placement) -> None:
        super().__init__()
        key_dim, value_dim, shard = attention.key_dim, attention.value_dim, placement.shard
        key = shard.split_kv_heads(attention.num_key_heads, key_dim)
        value = shard.split(attention.value.outputs, value_dim)
        heads = range(value.start // value_dim, value.stop // value_dim)
        self._heads = DeltaHeads(len(key) // key_dim, len(heads), key_dim, value_dim)
        wide, parts = (attention.query, attention.key, attention.value, attention.gate), (key, key, value, value)
        narrow, logits = (attention.correction, attention.decay), (heads, heads)
        # Logits are in the model's type whatever the others have: they decide what is remembered.
        # Where these have it too, one product computes all.
        is_one = _is_plain(placement.of(*(part.name for part in wide)))
        plain = dataclasses.replace(placement, scheme=None)
        self.in_proj = ColumnLinear(
            (*wide, *narrow) if is_one else wide, (*parts, *logits) if is_one else parts, placement
        )
        self.gate_proj = None if is_one else ColumnLinear(narrow, logits, plain)
        firsts = (0, attention.query.outputs, attention.query.outputs + attention.key.outputs)
        channels = [
            range(first + part.start, first + part.stop) for first, part in zip(firsts, (key, key, value), strict=True)
        ]
        self.convolution = ShortConvolution(attention.convolution, channels, placement)
        self.decay = DecayRates(attention, heads, placement)
        self.norm = RmsNorm(attention.norm, placement)
        self.o_proj = (
            ByPlaceLinear(attention, heads, placement)
            if attention.output_by_place
            else RowLinear(attention.output, value, placement)
        )

    def heads(self, x: Activations, rotations: Tensor, states: Tensor, metadata: StepMetadata) -> Tensor:
        """Computes what lies before the output projection; states change in place.

        Args:
            x: [num_tokens, hidden_size].
            rotations: Not read: tokens are told apart by their order alone.
            states: fp32 [num_rows, state_elements] of this layer (`CausalLM.state_elements`).
            metadata: The step.

        Returns:
            [num_tokens, all heads' outputs].
        """
        assert isinstance(x, Tensor), "the layer takes tokens in the model's type"
        projected: Tensor = self.in_proj(x)
        return self._between(projected, None if self.gate_proj is None else self.gate_proj(x), states, metadata)

    def add_to(
        self, residual: Tensor, norm: RmsNorm, rotations: Tensor, states: Tensor, metadata: StepMetadata
    ) -> None:
        """Computes `residual += o_proj(heads(norm(residual)))`, for steps that fuse.

        Norm and addition happen inside the projections.
        """
        logits = None if self.gate_proj is None else self.gate_proj.after_norm(norm, residual)
        projected = self.in_proj.after_norm(norm, residual)
        self.o_proj.add_to(residual, self._between(projected, logits, states, metadata))

    def _between(self, projected: Tensor, logits: Tensor | None, states: Tensor, metadata: StepMetadata) -> Tensor:
        """What lies between the projections; logits None: they stand behind the others."""
        heads, kernel = self._heads, self.convolution.kernel_size
        channels, count = heads.num_channels, heads.num_value_heads
        mixed, gate, *narrow = projected.tensor_split((channels, channels + count * heads.value_dim), dim=1)
        correction, decay = (narrow[0] if logits is None else logits).tensor_split((count,), dim=1)
        return delta_net(
            ProjectedTokens(mixed, gate, correction, decay),
            DeltaWeights(
                self.convolution.weight, self.decay.log_decay, self.decay.bias, self.norm.weight, self.norm.eps
            ),
            states_of(states, heads, kernel),
            recurrent_entries(metadata),
            heads,
        )

    def rounds_to(self, num_tokens: int) -> InputRounding | None:
        """How what makes tokens may round them for `heads`: not at all."""
        return None

    def launch_kind(self) -> Hashable:
        """What decides which kernels `heads` launches, beside step and states."""
        logits = None if self.gate_proj is None else self.gate_proj.weight.launch_kind()
        return self._heads, self.convolution.kernel_size, logits

    @property
    def weights(self) -> tuple[LinearWeight, ...]:
        """The projections before and behind the heads."""
        logits = () if self.gate_proj is None else (self.gate_proj.weight,)
        return self.in_proj.weight, *logits, self.o_proj.weight


def _pieces(attention: description.GatedDeltaNet, heads: range) -> Iterator[range]:
    """Inputs of some value heads in the order of their places; those side by side are one piece."""
    by_key = (divmod(head, attention.values_per_key) for head in heads)
    found = sorted(place * attention.num_key_heads + key for key, place in by_key)
    for _, run in itertools.groupby(enumerate(found), key=lambda entry: entry[1] - entry[0]):
        own = [head * attention.value_dim for _, head in run]
        yield range(own[0], own[-1] + attention.value_dim)


def _is_plain(placement: Placement) -> bool:
    """Whether projections are stored in the model's type."""
    return placement.scheme is None and placement.block_kinds is None and not any(placement.layer_formats)
