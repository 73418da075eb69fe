"""Cases of an output layer in 8 bits: an 8B Llama's, beside its weight in bf16.

Activations stay as they are, and results are fp32.

Owns the data; the shape, and cuBLAS as the rival, are `small_linear`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.kernel_cases import small_linear
from benchmarks.kernel_cases.small_linear import Case
from headrace_kernels.linear import dense as linear
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    quantize_rows,
)

SHAPE = small_linear.SHAPES["lm_head"]
KINDS = (QuantKind.INT8, QuantKind.FP8)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Rows that are drawn and rounded at a time.
_PIECE_ROWS = 8192


def random_weight(kind: QuantKind, seed: int = 0) -> QuantizedWeight:
    """Gaussian numbers, rounded."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = (SHAPE.num_outputs, SHAPE.num_inputs, SHAPE.num_inputs)
    kept = Arrangement(keeps_activations=True)
    weight = allocate(kind, *sizes, torch.bfloat16, torch.device("cuda"), kept)
    for first in range(0, SHAPE.num_outputs, _PIECE_ROWS):
        count = min(_PIECE_ROWS, SHAPE.num_outputs - first)
        rows = torch.randn(count, SHAPE.num_inputs, generator=generator, device="cuda", dtype=torch.bfloat16)
        quantize_rows(rows.mul_(0.02), weight, first)
    return weight


def _case(kind: QuantKind, num_rows: int) -> Case:
    weight = random_weight(kind)
    x = torch.randn(num_rows, SHAPE.num_inputs, device="cuda", dtype=torch.bfloat16)
    moved = weight.num_bytes + x.nbytes + 4 * num_rows * SHAPE.num_outputs
    product = functools.partial(quantized_linear.linear, x, weight, None, torch.float32)
    return product, moved, 2 * SHAPE.num_outputs * SHAPE.num_inputs * num_rows


def _plain_case(num_rows: int) -> Case:
    operands = small_linear.Operands(SHAPE, num_rows)
    product = functools.partial(linear.linear, operands.x, operands.weight, None, torch.float32)
    return product, *operands.bytes_and_flops()


def output_layer_of_an_8b_llama() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Both kinds and the plain weight, at 1 to 512 rows."""
    for num_rows in ROWS:
        for kind in KINDS:
            yield f"{kind.value} {num_rows}", functools.partial(_case, kind, num_rows)
        yield f"bf16 {num_rows}", functools.partial(_plain_case, num_rows)
