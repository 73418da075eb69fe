"""Linear attention as data: layers whose sequences have a state of fixed size.

Owns sizes and tensors. What it computes is the backend's `layers.gated_delta_net`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from headrace_model_folder.parts.named_tensors import Linear, Norm, Shape, Vector


@dataclasses.dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule: what a sequence has seen is a state of fixed size.

    Queries, keys and values pass a short causal convolution of each channel. Each value head keeps
    a matrix, which every token lets decay and corrects towards its value at its key. Outputs are
    normed and gated. Several value heads share a query and a key.
    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464.
    """

    num_key_heads: int
    num_value_heads: int
    # Elements of a head's query and key, and of its value.
    key_dim: int
    value_dim: int
    # Tokens that the convolution sees, the token's own included.
    kernel_size: int
    # Queries, keys and values of all heads.
    query: Linear
    key: Linear
    value: Linear
    # Gates of the outputs.
    gate: Linear
    # One logit for each value head: by how much its state is corrected, and how fast it decays.
    correction: Linear
    decay: Linear
    output: Linear
    # [channels of queries, keys and values, 1, kernel_size].
    convolution: Vector
    # [num_value_heads] the logarithm of each head's decay, and what is added to `decay`.
    log_decay: Vector
    decay_bias: Vector
    # Over each value head's output.
    norm: Norm
    # Whether the tensor of `log_decay` has the rates themselves, negated: -exp of the logarithms.
    has_rates: bool = False
    # Whether the inputs of `output` are the first value head of every key, then the second of every
    # key, and so on, in place of all heads of a key side by side.
    output_by_place: bool = False

    @property
    def values_per_key(self) -> int:
        """Value heads that share a query and a key."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Channels that are convolved."""
        return self.query.outputs + self.key.outputs + self.value.outputs

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices that a sequence has in the layer."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements that a sequence has in the layer.

        These are its matrices, and the inputs of as many tokens as the convolution sees.
        """
        return self.matrix_elements + self.kernel_size * self.num_channels

    def drafted_state_elements(self, num_drafts: int) -> int:
        """Elements of a sequence where steps verify up to `num_drafts` drafts of it.

        A step may turn down drafts, and matrices can't give anything back. So they are behind
        (`headrace_kernels.recurrence.pending`): kept besides are inputs of a step's own tokens, a
        power of two, keys, values and two logits a head of pending tokens and of drafts, and how
        far each matrix is.
        """
        if not num_drafts:
            return self.state_elements
        inputs = ((1 << num_drafts.bit_length()) + self.kernel_size - 1) * self.num_channels
        token = self.key.outputs + self.value.outputs + 2 * self.num_value_heads
        pending = (2 * num_drafts + 1) * token + self.num_value_heads
        return -(-(self.matrix_elements + inputs + pending) // 4) * 4

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The projections in the order of a forward pass."""
        return self.query, self.key, self.value, self.gate, self.correction, self.decay, self.output

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of its tensors."""
        own: tuple[Vector | Norm, ...] = (self.convolution, self.log_decay, self.decay_bias, self.norm)
        parts: tuple[Linear | Vector | Norm, ...] = (*self.linears, *own)
        return itertools.chain.from_iterable(part.tensors() for part in parts)
