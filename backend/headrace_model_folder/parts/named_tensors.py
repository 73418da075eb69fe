"""What a description's parts consist of: projections, norms and vectors, by their tensors' names.

Owns names and shapes. What the parts are is `description`'s and
`linear_attention`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

Shape = tuple[int, ...]
# What an MLP's gate passes through: x * sigmoid(x), or GELU in its approximation by tanh.
Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """Projections of one input that the checkpoint keeps as one, outputs after outputs."""

    # Path of its tensors without the last word, such as model.layers.0.self_attn.qkv_proj.
    name: str
    # Outputs of all projections in it.
    outputs: int
    # Where one projection's outputs begin.
    first: int


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """One projection: a weight [outputs, inputs] and, if it has one, a bias [outputs]."""

    # Path of its tensors without the last word, such as model.layers.0.self_attn.q_proj.
    name: str
    outputs: int
    inputs: int
    bias: bool = False
    # The tensors of the checkpoint that hold it among others; None: it has tensors of its own.
    fused: Fused | None = None
    # Whether `--quantize` leaves it in the model's dtype, as it does routers.
    keeps_dtype: bool = False

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each of its tensors."""
        yield f"{self.name}.weight", (self.outputs, self.inputs)
        if self.bias:
            yield f"{self.name}.bias", (self.outputs,)

    @property
    def size(self) -> int:
        """Number of its weights."""
        return self.outputs * self.inputs

    @property
    def stored(self) -> Linear:
        """The projection as the checkpoint has it: this one, or the one that holds it."""
        if self.fused is None:
            return self
        return Linear(self.fused.name, self.fused.outputs, self.inputs, self.bias)


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over `size` elements."""

    name: str
    size: int
    eps: float
    # Whether its factors are 1 more than the tensor's numbers.
    adds_one: bool = False
    # Whether results are rounded behind the factors alone, which are fp32 then, and not before too.
    rounds_once: bool = False

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of its weight."""
        yield f"{self.name}.weight", (self.size,)


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """Numbers of a layer that are no product's: one for each head, or some for each channel."""

    # The tensor's whole name.
    name: str
    shape: Shape

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of the numbers."""
        yield self.name, self.shape


@dataclasses.dataclass(frozen=True, slots=True)
class Sinks:
    """One learned logit for each head, which joins the denominator of attention's softmax alone."""

    # The tensor's whole name.
    name: str
    num_heads: int

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of the logits."""
        yield self.name, (self.num_heads,)


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """One row of `hidden_size` elements for each token of the vocabulary."""

    name: str
    vocab_size: int
    hidden_size: int
    # What multiplies the rows; as the output layer's weight they are not multiplied.
    scale: float = 1.0

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of its table."""
        yield f"{self.name}.weight", (self.vocab_size, self.hidden_size)
