"""What is looked at once the weights of a folder that another tool quantized are there, before any request is.

Owns the limits and the answer that operators see. There is no original to compare with, so what can be seen is whether the numbers look like those of a weight at all, and whether each product is the one that the numbers
stand for.

A zero point that is one off, and bits that are read in another order than they were written in, show in int4 (`layer_statistics`). What does not show: scales of another layer of the same shape, inputs or
outputs in another order within a layer, and 8-bit zero points that are a step off.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.quantization.self_check import check_product
from headrace_backend.quantization.staged_layer import StagedLayer
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_model_folder import FolderQuantization

# Steps of int4 by which the middle of a layer's numbers may be off 0.
_MOST_MEAN = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class FolderSummary:
    """How a folder's layers are quantized."""

    # Its format and its numbers, the most frequent first, such as "gptq int4" or "compressed-tensors int4+int8".
    scheme: str
    # Inputs that share a scale; 0: all of an output's, or not the same for all layers.
    group_size: int
    # What the quantized weights take in memory, scales and zero points included, per weight.
    bits_per_weight: float


def summarize_folder(
    quantization: FolderQuantization, layers: Sequence[StagedLayer], weights: Mapping[str, LowBitWeight]
) -> FolderSummary:
    """Checks all quantized weights of a model.

    Args:
        quantization: What config.json says.
        layers: All of them, loaded.
        weights: Path in the model -> weight.

    Raises:
        QuantizationRefused: A layer's numbers are not those of a weight, or a product differs from its reference. The layer is named.
    """
    for layer in layers:
        _check_middle(layer)
    for path, weight in weights.items():
        check_product(path, weight)
    numbers = Counter(form.number for form in quantization.layers.values())
    groups = {128 if form.scales == "block" else form.group_size for form in quantization.layers.values()}
    num_bytes = sum(weight.num_bytes for weight in weights.values())
    num_weights = sum(weight.num_weights for weight in weights.values())
    return FolderSummary(
        f"{quantization.method} {'+'.join(number for number, _ in numbers.most_common())}",
        groups.pop() if len(groups) == 1 else 0,
        8 * num_bytes / num_weights,
    )


def _check_middle(layer: StagedLayer) -> None:
    found = layer.statistics.mean_and_spread()
    if layer.bits != 4 or found is None:
        return
    mean, spread = found
    if abs(mean) > _MOST_MEAN:
        raise QuantizationRefused(
            f"layer {layer.layer!r}: its numbers are {mean:+.2f} steps off their zero points on average, at a spread of {spread:.2f}; more than {_MOST_MEAN} is what a zero point that is one off, or another way of storing it, makes"
        )
