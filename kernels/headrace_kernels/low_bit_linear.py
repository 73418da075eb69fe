"""Products with weights of 8 and 4 bits, and with what stands before and after them in a decoder layer.

The operations of `linear` and `small_linear` for a `QuantizedWeight`. Owns which path runs for how many rows. Where Triton does not run, the weight is restored in blocks of rows, each used and given
up, so that nothing of it is kept beside its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.linear import linear as plain_linear
from headrace_kernels.linear import linear_reference as plain_linear_reference
from headrace_kernels.quantized_weight import QuantizedWeight, dequantize, dequantize_rows
from headrace_kernels.rms_norm import rms_norm, rms_norm_reference
from headrace_kernels.swiglu import swiglu, swiglu_reference

# Numbers of a weight that are restored at a time without a card: 8 MB in fp32, which a processor's cache may hold until they are multiplied.
_BLOCK_NUMBERS = 1 << 21


def fuses(num_rows: int, weight: QuantizedWeight) -> bool:
    """Whether products of so many rows with this weight are faster together with the operations around them. Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: Of the layer.
    """
    return False


def scratch_bytes(weight: QuantizedWeight) -> int:
    """Bytes that products with this weight share with those of all others on the device: the largest of them counts once."""
    return 0


def linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `linear`."""
    return plain_linear_reference(x, dequantize(weight), bias, out_dtype)


def linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """X W^T + b.

    Args:
        x: [num_tokens, in] in the weight's activation type.
        weight: Filled.
        bias: [out].
        out_dtype: Of the result; None: the type of x.

    Returns:
        [num_tokens, out], summed in fp32.
    """
    return _linear_in_blocks(x, weight, bias, out_dtype)


def _linear_in_blocks(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.num_outputs, dtype=out_dtype or x.dtype)
    step = min(weight.num_outputs, max(1, _BLOCK_NUMBERS // weight.num_inputs))
    block = torch.empty(step, weight.num_inputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.num_outputs, step):
        rows = slice(first, min(first + step, weight.num_outputs))
        numbers = block[: rows.stop - first]
        dequantize_rows(weight, rows, numbers)
        out[:, rows] = plain_linear(x, numbers, None if bias is None else bias[rows], out_dtype)
    return out


def norm_linear_reference(
    x: Tensor, norm_weight: Tensor, eps: float, weight: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    """See `norm_linear`."""
    return linear_reference(rms_norm_reference(x, norm_weight, eps), weight, bias)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
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
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def linear_add_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor) -> None:
    """See `linear_add`."""
    residual.add_(linear_reference(x, weight, bias))


def linear_add(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor) -> None:
    """Adds a product to the residual stream.

    Args:
        x: [num_rows, in].
        weight: [out, in].
        bias: [out].
        residual: [num_rows, out] changed in place, in the type of x.
    """
    residual.add_(linear(x, weight, bias))


def norm_swiglu_reference(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    """See `norm_swiglu`."""
    return swiglu_reference(norm_linear_reference(x, norm_weight, eps, gate_up_weight, bias))


def norm_swiglu(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: QuantizedWeight, bias: Tensor | None
) -> Tensor:
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
    return swiglu(norm_linear(x, norm_weight, eps, gate_up_weight, bias))
