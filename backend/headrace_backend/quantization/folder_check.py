"""What is looked at once the weights of a folder that another tool quantized are there, before any
request is.

Owns the answer that operators see. There is no original to compare with: what is seen is whether
each product is the one that the numbers stand for. Whether the layers look packed as the folder says
is not asked here (`headrace_backend.packing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.quantization.self_check import StoredSummary, check_layer
from headrace_model_folder import FolderQuantization


def summarize_folder(
    quantization: FolderQuantization,
    weights: Mapping[str, LowBitWeight],
) -> StoredSummary:
    """Checks all quantized weights of a model.

    Args:
        quantization: What config.json says.
        weights: Path in the model -> weight.

    Raises:
        QuantizationRefused: A product differs from its reference. The layer is named.
    """
    for path, weight in weights.items():
        check_layer(path, weight)
    numbers = Counter(form.number for form in quantization.layers.values())
    groups = {128 if form.scales == "block" else form.group_size for form in quantization.layers.values()}
    num_bytes = sum(weight.num_bytes for weight in weights.values())
    num_weights = sum(weight.num_weights for weight in weights.values())
    return StoredSummary(
        f"{quantization.method} {'+'.join(number for number, _ in numbers.most_common())}",
        groups.pop() if len(groups) == 1 else 0,
        8 * num_bytes / num_weights,
    )
