"""Quantization scheme of a model's layers: kind of number, and inputs that share a scale.

Owns the scheme as loaders and layers see it. What a kind of number is, and how it lies in memory,
is `headrace_kernels.weight_formats.quantized_weight`'s; whether a scheme suits a model is
`quantize_rules`'s.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from headrace_kernels.weight_formats.block_weight import FORMATS, BlockKind
from headrace_kernels.weight_formats.quantized_weight import QuantKind


class QuantizationRefused(ValueError):
    """A weight is not what its scheme promises, or can't be.

    The message names layer or tensor, rule and value.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """One way to quantize: all products of the decoder layers, or the output layer.

    Embedding, norms and biases stay.
    """

    kind: QuantKind | BlockKind
    # Inputs that share a scale; 0: all of an output's.
    group_size: int = 0
    # INT4: whether products of many tokens round these to e4m3.
    rounds_inputs: bool = False

    @classmethod
    def named(cls, quantize: str, group_size: int, activations: str = "auto") -> Scheme | None:
        """The scheme of `quantize`, `quantize_group` and `quantize_activations`; None for "off"."""
        if quantize == "off":
            return None
        if quantize == "nf4":
            return cls(BlockKind.NF4, FORMATS[BlockKind.NF4].group)
        kind = QuantKind[quantize.upper()]
        return cls(kind, group_size if kind is QuantKind.INT4 else 0, activations == "fp8")

    @property
    def name(self) -> str:
        """Name of the scheme as the setting spells it."""
        return self.kind.name.lower()

    def group(self, num_inputs: int) -> int:
        """Inputs of a weight that share a scale.

        Raises:
            QuantizationRefused: The groups do not divide the inputs.
        """
        if self.group_size and num_inputs % self.group_size:
            raise QuantizationRefused(
                f"quantize_group is {self.group_size}, which does not divide {num_inputs} inputs of a layer"
            )
        return self.group_size or num_inputs


class Schemes(NamedTuple):
    """What the settings ask for. None: as plain weights, or as the folder has them."""

    layers: Scheme | None = None
    # One scale per output.
    head: Scheme | None = None

    @classmethod
    def named(cls, quantize: str, group_size: int, quantize_head: str, activations: str = "auto") -> Schemes:
        """Makes the schemes of the settings `quantize`, `_group`, `_head` and `_activations`."""
        return cls(Scheme.named(quantize, group_size, activations), Scheme.named(quantize_head, 0))
