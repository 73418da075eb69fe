"""Cases of products with block weights: those of a decoder layer of an 8B Llama.

Owns the data; the shapes, and cuBLAS with weights in bf16 as the rival, are `small_linear`'s. Any
bits are a valid weight once its factors are, and no kernel's time depends on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.kernel_cases import small_linear
from benchmarks.kernel_cases.small_linear import Case, Shape
from headrace_kernels.linear import block_quantized as block_linear
from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight, allocate

SHAPES = small_linear.SHAPES
KINDS = (BlockKind.Q4_0, BlockKind.Q8_0, BlockKind.Q4_K, BlockKind.Q5_K, BlockKind.Q6_K, BlockKind.NF4)
ROWS = (1, 8, 16, 32, 256)


def random_weight(kind: BlockKind, shape: Shape, seed: int = 0) -> BlockWeight:
    """Random bits under factors of ordinary size."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = allocate(kind, shape.weight_rows, shape.num_inputs, torch.bfloat16, torch.device("cuda"))
    for part in weight.parts:
        if part.is_floating_point():
            part.uniform_(0.001, 0.002, generator=generator)
        else:
            part.view(torch.uint8).random_(0, 256, generator=generator)
    return weight


def _case(kind: BlockKind, shape: Shape, num_rows: int) -> Case:
    weight = random_weight(kind, shape)
    x = torch.randn(num_rows, shape.num_inputs, device="cuda", dtype=torch.bfloat16)
    moved = weight.num_bytes + x.nbytes + 2 * num_rows * weight.num_outputs
    return (
        functools.partial(block_linear.linear, x, weight),
        moved,
        2 * weight.num_outputs * weight.num_inputs * num_rows,
    )


def products() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Every kind, shape and number of rows."""
    for kind in KINDS:
        for name, shape in SHAPES.items():
            for num_rows in ROWS:
                yield f"{kind.value} {name} M={num_rows}", functools.partial(_case, kind, shape, num_rows)
