"""What is looked at once weights that a file has in blocks are there, before any request is:
scales, and each product against the numbers it should multiply by.

Owns the limits and what operators are told. Nothing was rounded here, so the distance from the file
is none; what quantizing cost only its maker can say.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from headrace_backend.quantization.block_linear_weight import BlockLinearWeight, BlockRows
from headrace_backend.quantization.self_check import StoredSummary, exact_product, random_rows
from headrace_backend.weights.destination import RotatedRows
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.linear.block_quantized import linear
from headrace_kernels.weight_formats.block_weight import BlockWeight, dequantize_rows, has_negative_scales, is_finite
from headrace_model_folder import TensorRecord

# Rows of the products that are compared: on a card one for each kernel there is, on a CPU, where
# few rows are multiplied as many are, one.
_CARD_ROW_COUNTS = (1, 8, 12, 32, 96)
_ROW_COUNTS = (8,)
# Relative error of a product, sums in fp32 and the result rounded to its type.
_PRODUCT_LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def summarize_blocks(
    targets: Mapping[str, WeightTarget],
    weights: Mapping[str, BlockLinearWeight],
    records: Mapping[str, TensorRecord],
) -> StoredSummary:
    """Checks all weights in blocks of a model, of which there is at least one.

    Args:
        targets: All targets of the model, filled.
        weights: Path in the model -> weight.
        records: The checkpoint's tensors, by name.

    Raises:
        QuantizationRefused: A scale is not finite or can't be, or a product differs from its
            reference. Tensor or layer is named.
    """
    for name, rows in block_targets(targets):
        if not is_finite(rows.weight, rows.outputs):
            raise QuantizationRefused(f"{records[name].file}: tensor {name!r} holds a scale that is not finite")
        if has_negative_scales(rows.weight):
            raise QuantizationRefused(f"{records[name].file}: tensor {name!r} holds a scale that is negative")
    for path, weight in weights.items():
        for part in weight.blocks:
            check_block_product(path.removesuffix(".weight"), part)
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        for part in weight.blocks:
            sizes[part.kind.value] += part.num_outputs * part.num_inputs
    num_bytes = sum(weight.num_bytes for weight in weights.values())
    return StoredSummary("+".join(kind for kind, _ in sizes.most_common()), 0, 8 * num_bytes / sizes.total())


def block_targets(targets: Mapping[str, WeightTarget]) -> Iterator[tuple[str, BlockRows]]:
    """Checkpoint name and what takes the rows of each tensor that the file has in blocks."""
    for name, target in targets.items():
        into = target.destination
        into = into.into if isinstance(into, RotatedRows) else into
        if isinstance(into, BlockRows):
            yield name, into


def check_block_product(layer: str, weight: BlockWeight) -> None:
    """Multiplies random rows by a weight, as steps will."""
    counts = _CARD_ROW_COUNTS if weight.device.type == "cuda" else _ROW_COUNTS
    rows = random_rows(max(counts), weight.num_inputs, weight.dtype).to(weight.device)
    expected = exact_product(rows, weight.num_outputs, weight.num_inputs, functools.partial(dequantize_rows, weight))
    for count in counts:
        found = linear(rows[:count].contiguous(), weight).float()
        error = float((found - expected[:count]).norm() / expected[:count].norm().clamp(min=1e-30))
        limit = _PRODUCT_LIMITS[weight.dtype]
        if not error <= limit:
            raise QuantizationRefused(
                f"layer {layer!r}: its {weight.kind.value} product of {count} rows differs from the reference by {error:.2%}, more than {limit:.2%}"
            )
