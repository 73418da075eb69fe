"""Products of few rows, with what stands before and after them in a decoder layer: norm, bias,
SwiGLU, residual addition.

Such a product reads a whole weight to compute a row or a few; its time is the weight's way from
memory. The operations around it would each cost a launch and a trip of their rows through memory,
so they ride along. Owns the rule of when that pays (`fuses`) and which tile runs; the kernels are
`small_linear_kernels`'s. Each operation is its reference where Triton does not run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.linear.dense_small_batch_kernels import Tile, multiply
from headrace_kernels.rms_norm import rms_norm_reference
from headrace_kernels.swiglu import swiglu_reference
from headrace_kernels.triton_runtime import uses_triton

# Up to so many rows the kernels replace cuBLAS and the separate operations. All products of an 8B
# Llama with what is fused to them, bf16, H200, one by one in graphs (benchmarks/sweep_small_linear,
# 2026-11-21), best tiles against cuBLAS and separate operations: 1 row 3.91 and 4.29 ms, 2 rows
# 4.01 and 4.21, 4 rows 4.00 and 4.20, 8 rows 4.08 and 4.22, 16 rows 4.36 and 4.28. No server runs
# fp32 on a card; there it serves tests that want exact sums.
_MOST_ROWS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 1}
# Outputs from which a product is an output head's: so long that wider tiles pay.
_HEAD_OUTPUTS = 65_536
# Inputs from which the rows of a weight are so long that a program takes four.
_LONG_INPUTS = 8192


def launch_rule(num_rows: int, num_outputs: int, num_inputs: int) -> Tile:
    """The launch rule, on an H200 (2026-11-21).

    One row, by the time of a whole captured step of an 8B Llama (context 640): 1 output a program
    and 4 warps 4.51 ms, 2 outputs 4.24, 8 warps and 4 outputs for the longest products 4.165.
    Programs that stream rows through shared memory (4.25 to 4.54) and prefetching the next weight
    (0.1 ms more) lost. 2 to 8 rows, from the sweep: within 2% of the best tile of every product.
    """
    is_head = num_outputs >= _HEAD_OUTPUTS
    if num_rows == 1:
        return Tile("vector", 4 if is_head or num_inputs > _LONG_INPUTS else 2, block_k=2048, num_warps=8)
    if is_head:
        return Tile("tile", block_n=32, block_k=256, num_warps=2, num_stages=4, slices=2)
    return Tile("tile", block_n=16, block_k=512, num_warps=4, num_stages=3, slices=4)


def fuses(num_rows: int, weight: Tensor) -> bool:
    """Whether products of so many rows with this weight are faster here than one by one with the
    operations around them.

    Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: [out, in].
    """
    if not uses_triton(weight) or not 1 <= num_rows <= _MOST_ROWS.get(weight.dtype, 0):
        return False
    # The kernels read 16 bytes at a time.
    return weight.is_contiguous() and weight.shape[1] % 8 == 0


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X W^T + b by Triton, for `linear`, whose description holds here too.

    Args:
        x: [num_rows, in], such that `fuses(num_rows, weight)`.
        weight: [out, in].
        bias: [out].
        out_dtype: Of the result; None: the type of x.
        out: [num_rows, out] of that type, to be written; None: a new tensor.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    multiply(x, weight, bias, out, launch_rule(x.shape[0], out.shape[1], x.shape[1]))
    return out


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `norm_linear`."""
    return functional.linear(rms_norm_reference(x, norm_weight, eps), weight, bias)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of the RMS norm of x.

    Args:
        x: [num_rows, in].
        norm_weight: [in].
        eps: Added to the mean square.
        weight: [out, in].
        bias: [out].

    Returns:
        [num_rows, out] in the type of x.
    """
    if not uses_triton(weight):
        return norm_linear_reference(x, norm_weight, eps, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply(x, weight, bias, out, launch_rule(x.shape[0], out.shape[1], x.shape[1]), norm=(norm_weight, eps))
    return out


def linear_add_reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """See `linear_add`."""
    residual.add_(functional.linear(x, weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Adds a product to the residual stream.

    Args:
        x: [num_rows, in].
        weight: [out, in].
        bias: [out].
        residual: [num_rows, out] changed in place, in the type of x. The sum is rounded once.
    """
    if not uses_triton(weight):
        return linear_add_reference(x, weight, bias, residual)
    multiply(x, weight, bias, residual, launch_rule(x.shape[0], residual.shape[1], x.shape[1]), add=True)


def norm_swiglu_reference(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, bias: Tensor | None
) -> Tensor:
    """See `norm_swiglu`."""
    return swiglu_reference(norm_linear_reference(x, norm_weight, eps, gate_up_weight, bias))


def norm_swiglu(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, bias: Tensor | None) -> Tensor:
    """The first half of a gated MLP: norm, gate and up projections, silu(gate) * up.

    Args:
        x: [num_rows, in].
        norm_weight: [in].
        eps: Added to the mean square.
        gate_up_weight: [2 * size, in], the gate in the first half.
        bias: [2 * size].

    Returns:
        [num_rows, size] in the type of x.
    """
    if not uses_triton(gate_up_weight):
        return norm_swiglu_reference(x, norm_weight, eps, gate_up_weight, bias)
    out = x.new_empty(x.shape[0], gate_up_weight.shape[0] // 2)
    multiply(
        x,
        gate_up_weight,
        bias,
        out,
        launch_rule(x.shape[0], out.shape[1], x.shape[1]),
        norm=(norm_weight, eps),
        gated=True,
    )
    return out
