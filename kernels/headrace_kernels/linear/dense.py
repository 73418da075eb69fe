"""A linear layer's multiplication, and the order in memory in which it likes its weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.linear.cublas.plain import tiled_linear
from headrace_kernels.linear.dense_small_batch import fuses, small_linear

# oneDNN's matrix product, which PyTorch uses for low precision only; for fp32 it takes MKL, which
# is 2 to 3 times slower on AMD processors. 28 MB of weights, 2 threads, MKL against oneDNN: 4.7 to
# 1.9 ms for 2 tokens, 9 to 4.2 ms for 32, 51 to 18 ms for 256. For a single token MKL's vector
# product streams the weight as fast (2.9 to 2.5 ms) without waking a thread, which on a busy
# machine costs more than the product.
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


# With 8,192 rows of an 8B Llama on an H200 the down projection takes 1,453 us with the addition in
# it and 1,496 with that behind it, attention's output 437 and 471; up to 1,024 rows it is 2 us.
_LEAST_ADDED_ROWS = 1024


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """X W^T + b. See `linear`."""
    return functional.linear(x, weight, bias).to(out_dtype or x.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    is_parameter: bool = True,
) -> Tensor:
    """Multiplies by a weight.

    Args:
        x: [num_tokens, in].
        weight: [out, in] in the type of x, in any order in memory; `empty_weight` makes the best
            one.
        bias: [out].
        out_dtype: Dtype of the result; None: the dtype of x. On a GPU fp32 is the unrounded sum.
        out: [num_tokens, out] of that type, contiguous, to be written; None: a new tensor.
        is_parameter: No kernel writes the weight, so that it may be read before earlier kernels
            have ended. A buffer of dequantized numbers is none.

    Returns:
        [num_tokens, out], summed in fp32; `out` if given.
    """
    if fuses(x.shape[0], weight):
        return small_linear(x, weight, bias, out_dtype, out, is_parameter)
    if x.is_cuda and out_dtype == torch.float32 != x.dtype and bias is None:
        if out is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    product = _by_a_library(x, weight, bias, out_dtype)
    return product if out is None else out.copy_(product)


def adds(num_rows: int, weight: Tensor) -> bool:
    """Whether a product of so many rows that do not fuse is added to another tensor as it is made.

    Args:
        num_rows: Rows of the step.
        weight: [out, in].
    """
    return weight.is_cuda and weight.dtype != torch.float32 and num_rows >= _LEAST_ADDED_ROWS


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Adds a product to the residual stream, where `adds` says so.

    Args:
        x: [num_tokens, in].
        weight: [out, in].
        residual: [num_tokens, out] changed in place, in the type of x. The sum is rounded once, and
            parts of the product as well where the library splits its inputs (few outputs).
    """
    residual.addmm_(x, weight.t())


def _by_a_library(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    # In lower precision PyTorch takes oneDNN by itself where the processor has the instructions;
    # this call would raise where it has not.
    if _HAS_ONEDNN and x.is_cpu and x.dtype == torch.float32 and x.shape[0] > 1:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result
    tiled = tiled_linear(x, weight, bias) if out_dtype in (None, x.dtype) else None
    return linear_reference(x, weight, bias, out_dtype) if tiled is None else tiled


def empty_weight(num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized weight [out, in].

    On a CPU the outputs of one input lie together in memory, so that a product streams through it.
    """
    if device.type == "cpu":
        return torch.empty(num_inputs, num_outputs, dtype=dtype).t()
    return torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
