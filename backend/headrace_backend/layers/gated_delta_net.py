"""Linear attention by the gated delta rule, with a state for each row of the batch.

Projections, a short convolution, the recurrence, norm and gate of each head, output projection. A
layer's states are one tensor, a line for each row: its matrices, then the inputs of its last tokens
that the convolution still sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from headrace_backend.layers.linear import ColumnLinear, RowLinear
from headrace_backend.layers.norm import RmsNorm
from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.layers.step_metadata import StepMetadata, recurrent_entries
from headrace_backend.quantization.linear_weight import LinearWeight
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.recurrence.convolution import causal_convolution
from headrace_kernels.recurrence.gated_delta import DeltaGates, DeltaHeads, gated_delta
from headrace_kernels.recurrence.output_norm import gated_rms_norm
from headrace_kernels.rounded_tokens import Activations
from headrace_model_folder import description


class ShortConvolution(ShardedModule):
    """Factors of a causal convolution of each channel, [channels, kernel_size]."""

    def __init__(self, convolution: description.Vector, placement: Placement) -> None:
        super().__init__()
        channels, _, self.kernel_size = convolution.shape
        self._name = convolution.name
        self.weight = placement.empty(channels, self.kernel_size)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The factors."""
        rows, columns = (range(size) for size in self.weight.shape)
        yield CheckpointPart(self._name, WeightTarget.of(self.weight, rows, columns))


class DecayRates(ShardedModule):
    """How fast each head's matrix decays, in fp32: the logarithm of a rate, and a bias."""

    def __init__(self, attention: description.GatedDeltaNet, placement: Placement) -> None:
        super().__init__()
        wide, heads = dataclasses.replace(placement, dtype=torch.float32), attention.num_value_heads
        self._names = attention.log_decay.name, attention.decay_bias.name
        self.log_decay, self.bias = wide.empty(heads), wide.empty(heads)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Rates and biases."""
        for name, values in zip(self._names, (self.log_decay, self.bias), strict=True):
            yield CheckpointPart(name, WeightTarget.of(values, range(len(values))))


class GatedDeltaNet(nn.Module):
    """Linear attention of one layer. It takes the place of `Attention`, on one rank."""

    def __init__(self, attention: description.GatedDeltaNet, placement: Placement) -> None:
        super().__init__()
        assert placement.shard.world_size == 1, "ranks do not share it"
        self._heads = DeltaHeads(
            attention.num_key_heads, attention.num_value_heads, attention.key_dim, attention.value_dim
        )
        wide, narrow = (attention.mixed, attention.gate), (attention.correction, attention.decay)
        self.in_proj = ColumnLinear(wide, [range(part.outputs) for part in wide], placement)
        # In the model's type whatever the others have: they decide what is remembered.
        plain = dataclasses.replace(placement, scheme=None)
        self.gate_proj = ColumnLinear(narrow, [range(part.outputs) for part in narrow], plain)
        self.convolution = ShortConvolution(attention.convolution, placement)
        self.decay = DecayRates(attention, placement)
        self.norm = RmsNorm(attention.norm, placement)
        self.o_proj = RowLinear(attention.output, range(attention.output.inputs), placement)
        self._matrix_elements = attention.matrix_elements

    def heads(self, x: Activations, rotations: Tensor, states: Tensor, metadata: StepMetadata) -> Tensor:
        """Computes what lies before the output projection; states change in place.

        Args:
            x: [num_tokens, hidden_size].
            rotations: Not read: tokens are told apart by their order alone.
            states: fp32 [num_rows, state_elements] of this layer.
            metadata: The step.

        Returns:
            [num_tokens, all heads' outputs].
        """
        assert isinstance(x, Tensor), "the layer takes tokens in the model's type"
        entries, heads = recurrent_entries(metadata), self._heads
        channels, count = heads.num_channels, heads.num_value_heads
        mixed, gate = self.in_proj(x).tensor_split((channels,), dim=1)
        matrices, tails = states.tensor_split((self._matrix_elements,), dim=1)
        tails = tails.view(-1, self.convolution.kernel_size - 1, channels)
        mixed = causal_convolution(mixed.contiguous(), self.convolution.weight, tails, entries)
        correction, decay = self.gate_proj(x).tensor_split((count,), dim=1)
        gates = DeltaGates(correction, decay, self.decay.log_decay, self.decay.bias)
        matrices = matrices.view(-1, count, heads.key_dim, heads.value_dim)
        out = gated_delta(mixed, gates, matrices, entries, heads)
        gate = gate.view(-1, count, heads.value_dim)
        return gated_rms_norm(out, gate, self.norm.weight, self.norm.eps).flatten(1)

    def rounds_to(self, num_tokens: int) -> torch.dtype | None:
        """The 8-bit type in which `heads` may be given tokens: none."""
        return None

    def launch_kind(self) -> Hashable:
        """What decides which kernels `heads` launches, beside step and states."""
        return self._heads, self.convolution.kernel_size, self.gate_proj.weight.launch_kind()

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight]:
        """The large projections before and behind the heads."""
        return self.in_proj.weight, self.o_proj.weight
