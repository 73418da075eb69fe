"""Cases of gate and up products with SwiGLU, of an 8B Llama in bf16: ours, and cuBLAS.

cuBLAS is followed by the kernel of SwiGLU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernel_cases.small_linear import Case
from headrace_kernels.linear.dense import linear
from headrace_kernels.linear.gated.dense import gated_tile
from headrace_kernels.linear.gated.dense_sm90 import GatedTile, multiply_gated
from headrace_kernels.swiglu import swiglu

_INPUTS, _OUTPUTS = 4096, 14_336
_ROWS = (24, 32, 48, 64)
# An H200's.
_TILE = gated_tile(_OUTPUTS, 132)


def _case(num_rows: int, tile: GatedTile | None) -> Case:
    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    x, weight = randn(num_rows, _INPUTS), randn(2 * _OUTPUTS, _INPUTS) * 0.02
    out = x.new_empty(num_rows, _OUTPUTS)
    moved = weight.nbytes + x.nbytes + out.nbytes
    if tile is None:
        return lambda: swiglu(linear(x, weight)), moved, 2 * num_rows * weight.numel()
    return lambda: multiply_gated(x, weight, None, out, tile), moved, 2 * num_rows * weight.numel()


def products_with_swiglu() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Steps of decodes and short mixed steps."""
    for num_rows in _ROWS:
        yield f"swiglu {num_rows}", functools.partial(_case, num_rows, _TILE)
        yield f"swiglu {num_rows}_torch", functools.partial(_case, num_rows, None)
