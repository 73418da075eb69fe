"""What is looked at once all weights are quantized, before any request is: each tensor's distance
from its original, and each product against the numbers it should multiply by.

Owns the limits and the answer that operators see. Nothing here says how good answers are: that
needs the unquantized model, which is not kept; docs/accuracy.md compares the two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace_backend.quantization.low_bit_weight import LowBitWeight, QuantizedRows
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_kernels.linear.quantized import input_rounding
from headrace_kernels.weight_formats.input_rounding import InputRounding, rounded_inputs
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, dequantize_rows

# A tensor may be this many times as far from its original as rounding can bring it: scales are
# rounded too.
_ROUNDING_SLACK = 1.1
# Rows of the products that are compared: a vector, few rows, more than few. A card multiplies some
# tens and many rows in other ways, a CPU does not.
_ROW_COUNTS = (1, 8, 32)
_CARD_ROW_COUNTS = (*_ROW_COUNTS, 64, 96, 300)
# Relative error of a product, sums in fp32 and the result rounded to its type; on the demo model's
# weights it is an eighth of that at most.
_PRODUCT_LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Where a card rounds inputs: it divides otherwise than `rounded_inputs`, so that single numbers are
# a step apart.
_ROUNDED_PRODUCT_LIMIT = 0.05
# Numbers of a weight that are restored at a time: few enough for a CPU's caches, and enough that
# the products of 300 rows give most of a card work, 64 MB in fp32. Not measured on cards.
_CPU_NUMBERS = 1 << 22
_CARD_NUMBERS = 1 << 24
_SEED = 0x10B175
# Numbers of inputs that a model's layers have, for which rows are kept: 5 MB each of a large model.
_KEPT_SIZES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationSummary:
    """How a model was quantized.

    Relative errors are ||quantized - original|| / ||original|| of checkpoint tensors.
    """

    scheme: Scheme
    # What the weights take in memory, scales and zero points included, per weight.
    bits_per_weight: float
    mean_relative_error: float
    worst_relative_error: float
    worst_tensor: str


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSummary:
    """How a folder or file has the weights that somebody else quantized.

    There is no original to state a distance from.
    """

    # A folder's format and its numbers, such as "gptq int4" or "compressed-tensors int4+int8", or
    # the kinds of blocks, such as "Q4_K+Q6_K"; the most frequent first.
    scheme: str
    # Inputs that share a scale; 0: all of an output's, or not the same for all weights.
    group_size: int
    # What the quantized weights take in memory, scales and zero points included, per weight.
    bits_per_weight: float


def summarize(
    scheme: Scheme, targets: Mapping[str, WeightTarget], weights: Mapping[str, LowBitWeight]
) -> QuantizationSummary:
    """Checks all quantized weights of a model and says how far they are from what was read.

    Args:
        scheme: What they were quantized by.
        targets: Those of the layers, filled.
        weights: Path in the model -> weight.

    Raises:
        QuantizationRefused: A tensor is farther from its original than rounding can bring it, or a
            product differs from its reference. Tensor or layer is named.
    """
    rows = {name: target.destination for name, target in targets.items()}
    errors = {name: checked_error(name, into) for name, into in rows.items() if isinstance(into, QuantizedRows)}
    for path, weight in weights.items():
        check_layer(path, weight)
    num_weights = sum(weight.num_weights for weight in weights.values())
    num_bytes = sum(weight.num_bytes for weight in weights.values())
    worst = max(errors, key=errors.__getitem__)
    mean = sum(errors.values()) / len(errors)
    return QuantizationSummary(scheme, 8 * num_bytes / num_weights, mean, errors[worst], worst)


def checked_error(name: str, rows: QuantizedRows) -> float:
    """A tensor's relative error. Raises QuantizationRefused where rounding does not explain it."""
    error, most = rows.error.read()
    if not error <= most * _ROUNDING_SLACK:
        raise QuantizationRefused(
            f"tensor {name!r} is not what was read: quantized it is off by {error:.3%}, and rounding explains {most:.3%}"
        )
    return error


def check_layer(path: str, weight: LowBitWeight) -> None:
    """`check_product` of a layer's weight, by its path in the model."""
    check_product(path.removesuffix(".weight"), weight.quantized, lambda rows: weight.multiply(rows, None))


def check_product(layer: str, quantized: QuantizedWeight, multiply: Callable[[Tensor], Tensor]) -> None:
    """Multiplies random rows by a weight, as steps will.

    Args:
        layer: For the message.
        quantized: The weight.
        multiply: Rows by that weight.

    Raises:
        QuantizationRefused: A product differs from its reference; the layer is named.
    """
    counts = _CARD_ROW_COUNTS if quantized.device.type == "cuda" else _ROW_COUNTS
    rows = random_rows(max(counts), quantized.num_inputs, quantized.dtype).to(quantized.device)
    sizes, restore = (quantized.num_outputs, quantized.num_inputs), functools.partial(dequantize_rows, quantized)
    expected: dict[InputRounding | None, Tensor] = {}
    for count in counts:
        rounding = input_rounding(count, quantized)
        if rounding not in expected:
            expected[rounding] = exact_product(
                rows if rounding is None else rounded_inputs(rows, rounding), *sizes, restore
            )
        exact = expected[rounding][:count]
        found = multiply(rows[:count].contiguous()).float()
        error = float((found - exact).norm() / exact.norm().clamp(min=1e-30))
        limit = _product_limit(quantized, count)
        if not error <= limit:
            raise QuantizationRefused(
                f"layer {layer!r}: its {quantized.kind.value} product of {count} rows differs from the reference by {error:.2%}, more than {limit:.2%}"
            )


@functools.lru_cache(maxsize=_KEPT_SIZES)
def random_rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, num_inputs] on the CPU, alike for all weights of so many inputs: to draw them
    takes longer than to multiply them.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(num_rows, num_inputs, generator=generator).to(dtype)


def _product_limit(weight: QuantizedWeight, num_rows: int) -> float:
    limit = _PRODUCT_LIMITS[weight.dtype]
    is_rounded = weight.device.type == "cuda" and input_rounding(num_rows, weight) is not None
    return max(limit, _ROUNDED_PRODUCT_LIMIT) if is_rounded else limit


def exact_product(rows: Tensor, num_outputs: int, num_inputs: int, restore: Callable[[slice, Tensor], None]) -> Tensor:
    """Rows times the numbers that a weight stands for, in fp32, some outputs at a time.

    Args:
        rows: [n, num_inputs] on the weight's device.
        num_outputs: Of the weight.
        num_inputs: Of the weight.
        restore: Fills fp32 [len(outputs), num_inputs] with the numbers of some outputs.

    Returns:
        [n, num_outputs] fp32.
    """
    wide = rows.float()
    step = max((_CPU_NUMBERS if rows.device.type == "cpu" else _CARD_NUMBERS) // num_inputs, 1)
    parts = []
    for first in range(0, num_outputs, step):
        outputs = slice(first, min(first + step, num_outputs))
        numbers = torch.empty(outputs.stop - first, num_inputs, dtype=torch.float32, device=rows.device)
        restore(outputs, numbers)
        parts.append(wide @ numbers.t())
    return torch.cat(parts, dim=1)
