"""Products of a filled weight against the numbers that its bits stand for.

Owns the rows that are multiplied and how far a product may be from its reference. Every weight of
few bits asks here once it is filled (`LinearWeight.finish`), before any request is run. Nothing
here says how good answers are: that needs the unquantized model, which is not kept;
docs/accuracy.md compares the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.input_rounding import InputRounding, rounded_inputs
from headrace_kernels.linear import block_quantized
from headrace_kernels.linear.quantized import input_rounding
from headrace_kernels.weight_formats import block_weight
from headrace_kernels.weight_formats.block_weight import BlockWeight
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, dequantize_rows

# Rows of the products that are compared: a vector, few rows, more than few. A card multiplies some
# tens and many rows in other ways, a CPU does not; of FP8 in blocks each 64 rows up to 256 may have
# a tile of their own (`linear.cublas.tiles`).
_ROW_COUNTS = (1, 8, 32)
_CARD_ROW_COUNTS = (*_ROW_COUNTS, 64, 96, 192, 256, 300)
# Relative error of a product, sums in fp32 and the result rounded to its type; on the demo model's
# weights it is an eighth of that at most.
_PRODUCT_LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Where a card rounds inputs: it divides otherwise than `rounded_inputs`, so that single numbers are
# a step apart.
_ROUNDED_PRODUCT_LIMIT = 0.05
# Numbers of a weight that are dequantized at a time: few enough for a CPU's caches, and enough that
# the products of 300 rows give most of a card work, 64 MB in fp32. Not measured on cards.
_CPU_NUMBERS = 1 << 22
_CARD_NUMBERS = 1 << 24
_SEED = 0x10B175
# Numbers of inputs that a model's layers have, for which rows are kept: 5 MB each of a large model.
_KEPT_SIZES = 4
# Weights in blocks: on a card one number of rows for each kernel there is, on a CPU, where few rows
# are multiplied as many are, one.
_BLOCK_CARD_ROW_COUNTS = (1, 8, 12, 32, 96)
_BLOCK_ROW_COUNTS = (8,)


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
                f"layer {layer!r}: its {quantized.kind.value} product of {count} rows differs from the reference by "
                f"{error:.2%}, more than {limit:.2%}"
            )


def check_block_product(layer: str, weight: BlockWeight) -> None:
    """Checks the product of a weight in blocks as `check_product` does."""
    counts = _BLOCK_CARD_ROW_COUNTS if weight.device.type == "cuda" else _BLOCK_ROW_COUNTS
    rows = random_rows(max(counts), weight.num_inputs, weight.dtype).to(weight.device)
    expected = exact_product(
        rows, weight.num_outputs, weight.num_inputs, functools.partial(block_weight.dequantize_rows, weight)
    )
    for count in counts:
        found = block_quantized.linear(rows[:count].contiguous(), weight).float()
        error = float((found - expected[:count]).norm() / expected[:count].norm().clamp(min=1e-30))
        limit = _PRODUCT_LIMITS[weight.dtype]
        if not error <= limit:
            raise QuantizationRefused(
                f"layer {layer!r}: its {weight.kind.value} product of {count} rows differs from the reference by "
                f"{error:.2%}, more than {limit:.2%}"
            )


@functools.lru_cache(maxsize=_KEPT_SIZES)
def random_rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """Returns random rows [num_rows, num_inputs] on the CPU, alike for all weights of such a size.

    Drawing them takes longer than multiplying them.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(num_rows, num_inputs, generator=generator).to(dtype)


def _product_limit(weight: QuantizedWeight, num_rows: int) -> float:
    limit = _PRODUCT_LIMITS[weight.dtype]
    is_rounded = weight.device.type == "cuda" and input_rounding(num_rows, weight) is not None
    return max(limit, _ROUNDED_PRODUCT_LIMIT) if is_rounded else limit


def exact_product(rows: Tensor, num_outputs: int, num_inputs: int, restore: Callable[[slice, Tensor], None]) -> Tensor:
    """Multiplies rows by the numbers that a weight stands for, in fp32, some outputs at a time.

    Args:
        rows: [n, num_inputs] on the weight's device.
        num_outputs: Number of outputs of the weight.
        num_inputs: Number of inputs of the weight.
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
