"""Products with weights of 8 and 4 bits, and what stands before and after them in a layer.

The operations of `linear` and `small_linear` for a `QuantizedWeight`. Owns which path runs for how
many rows. Where Triton does not run, the weight is dequantized in blocks of rows, each used and
given up, so that nothing of it is kept beside its bits; inputs are rounded as the weight's scheme
says, however many rows there are.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from headrace_kernels.input_rounding import InputRounding, rounded_inputs
from headrace_kernels.linear import gemm_fp8, gemm_int8
from headrace_kernels.linear.dense import linear_reference as plain_linear_reference
from headrace_kernels.linear.few_bits.stream_sm90 import multiply_bit_streams
from headrace_kernels.linear.gemm_dequantized import dequantized_linear, multiply_in_blocks
from headrace_kernels.linear.gemm_weight_only import multiply_gemm
from headrace_kernels.linear.gemm_weight_only_sm90 import takes_warpgroups
from headrace_kernels.linear.gemv_8bit import multiply_gemv, takes_gemv
from headrace_kernels.linear.input_order import take_inputs
from headrace_kernels.linear.launch_rules import (
    bit_stream_rule,
    gemm_rule,
    gemv_rule,
    norms_inside,
    small_batch_8bit_rule,
    small_batch_rule,
)
from headrace_kernels.linear.small_batch import MAX_SMALL_BATCH_ROWS, multiply_small_batch, takes
from headrace_kernels.linear.small_batch_8bit_sm90 import (
    multiply_small_batch_8bit,
)
from headrace_kernels.linear.w4a8 import products as w4a8
from headrace_kernels.rms_norm import rms_norm, rms_norm_reference, rounded_rms_norm
from headrace_kernels.rounded_tokens import RoundedTokens, round_tokens
from headrace_kernels.swiglu import swiglu, swiglu_reference
from headrace_kernels.triton_runtime import uses_triton
from headrace_kernels.weight_formats import dequantized_buffer
from headrace_kernels.weight_formats.quantized_weight import INPUT_NUMBERS, QuantizedWeight, QuantKind, dequantize

# Rows up to which the GEMM multiplies by the bits; more rows take dequantized weights and cuBLAS
# (INT4, 128 rows: 8.4 ms against 9.1; docs/experiments.md, "Launch rules of products").
_MOST_GEMM_ROWS = {QuantKind.INT8: 256, QuantKind.INT4: 128, QuantKind.FP8: 128}
# The same where warp groups multiply (INT4, 512 rows: 11.7 ms against 14.1).
_MOST_WARPGROUP_ROWS = 512
# Rows from which INT8 weights whose scheme says so take activations of 8 bits where the GPU can.
_FEWEST_INT8_ROWS = 65


# Numbers of rows that between them take every kernel there is for a weight, so that a server that
# has run them compiles or loads nothing later: those at the ends of the rules' ranges, and the
# multiples of 64 for which cuBLAS may be given another tile.
WARM_ROWS = (1, 8, 16, 32, 64, 128, 192, 256, 257, 320, 384, 448, 512, 513)


_SCALED = {
    QuantKind.FP8: gemm_fp8.scaled_linear,
    QuantKind.INT8: gemm_int8.scaled_linear,
    QuantKind.INT4: w4a8.scaled_linear,
}


class Path(enum.Enum):
    """How a product is computed."""

    # Without Triton: rows of the weight are dequantized, multiplied and given up.
    BLOCKS = "blocks"
    # By the kernels of one row and of small batches, with what is fused.
    SMALL_BATCH = "small batch"
    GEMM = "gemm"
    # Activations in 8 bits.
    SCALED = "scaled"
    # Dequantized into the GPU's buffer, then cuBLAS.
    DEQUANTIZED = "dequantized"


def path_rule(num_rows: int, weight: QuantizedWeight) -> Path:
    """Which path a product takes, by sizes, kind and card alone."""
    if not uses_triton(weight.packed):
        return Path.BLOCKS
    if gemm_fp8.takes_rows(num_rows, weight):
        return Path.SCALED
    if takes(weight) and 1 <= num_rows <= MAX_SMALL_BATCH_ROWS or small_batch_8bit_rule(num_rows, weight) is not None:
        return Path.SMALL_BATCH
    if num_rows >= w4a8.FEWEST_W4A8_ROWS and w4a8.can_scale(weight):
        return Path.SCALED
    if num_rows >= _FEWEST_INT8_ROWS and gemm_int8.can_scale(weight):
        return Path.SCALED
    most = _MOST_WARPGROUP_ROWS if takes_warpgroups(weight) else _MOST_GEMM_ROWS[weight.kind]
    return Path.GEMM if takes(weight) and num_rows <= most else Path.DEQUANTIZED


def fuses(num_rows: int, weight: QuantizedWeight) -> bool:
    """Whether a fused product of `num_rows` rows is faster than its operations one by one.

    Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: The layer's weight.
    """
    return path_rule(num_rows, weight) is Path.SMALL_BATCH


def scratch_bytes(weight: QuantizedWeight) -> int:
    """Bytes that products with this weight share with all others on its device.

    The largest of them counts once.

    They are taken when weights are made.
    """
    if weight.device.type != "cuda":
        return 0
    return dequantized_buffer.scratch_bytes(weight.num_outputs, weight.num_inputs, weight.dtype)


def linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Specification of `linear`, in plain PyTorch."""
    return plain_linear_reference(x, dequantize(weight), bias, out_dtype)


def linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X W^T + b, summed in fp32.

    Args:
        x: [num_tokens, in] in the weight's activation type.
        weight: Filled.
        bias: [out].
        out_dtype: Dtype of the result; None: the dtype of x.
        out: [num_tokens, out] of that type, to be written and returned; None: a new tensor.
    """
    if weight.inputs is not None and path_rule(x.shape[0], weight) is Path.BLOCKS:
        x = rounded_inputs(x, weight.inputs)
    return _ordered_linear(take_inputs(x, weight.order), weight, bias, out_dtype, out)


def _ordered_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`linear` of inputs that are in the weight's order already."""
    path = path_rule(x.shape[0], weight)
    if path is Path.SCALED:
        product = rounded_linear(round_tokens(x, _scaled_rounding(weight)), weight, bias).to(out_dtype or x.dtype)
        return product if out is None else out.copy_(product)
    if path is Path.DEQUANTIZED:
        return dequantized_linear(x, weight, bias, out_dtype, out)
    if out is None:
        out = x.new_empty(x.shape[0], weight.num_outputs, dtype=out_dtype)
    if path is Path.BLOCKS:
        multiply_in_blocks(x, weight, bias, out)
    elif path is Path.SMALL_BATCH:
        _multiply_fused(x, weight, bias, out)
    else:
        multiply_gemm(x, weight, bias, out, gemm_rule(x.shape[0], weight))
    return out


def _multiply_fused(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """A product of few rows by the kernel and tile of the rules, with what is fused to it.

    Arguments are those of `multiply_small_batch`.
    """
    if (streams := bit_stream_rule(x.shape[0], weight, gated)) is not None:
        if norm is not None and not norms_inside(x.shape[0], x.dtype):
            x, norm = rms_norm(x, *norm), None
        multiply_bit_streams(x, weight, bias, out, streams, norm, gated, add)
    elif (tile := small_batch_8bit_rule(x.shape[0], weight, gated)) is not None:
        multiply_small_batch_8bit(x, weight, bias, out, tile, norm, gated, add)
    elif x.shape[0] == 1 and takes_gemv(weight):
        multiply_gemv(x, weight, bias, out, gemv_rule(weight, gated), norm, gated, add)
    else:
        multiply_small_batch(x, weight, bias, out, small_batch_rule(x.shape[0], weight, gated), norm, gated, add)


def _scaled_rounding(weight: QuantizedWeight) -> InputRounding:
    """How tokens are rounded for products in 8 bits with this weight."""
    if weight.kind is QuantKind.FP8:
        return gemm_fp8.rounding(weight)
    return weight.inputs or InputRounding(INPUT_NUMBERS[weight.kind])


def rounds_to(num_rows: int, weight: QuantizedWeight) -> InputRounding | None:
    """How what makes `num_rows` tokens may round them for `rounded_linear`.

    None: they are for `linear`, in the model's type. Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: The layer's weight.
    """
    # Inputs are put in order before they are rounded, and a kernel of its own alone knows static
    # scales.
    if weight.order is not None or path_rule(num_rows, weight) is not Path.SCALED:
        return None
    rounding = _scaled_rounding(weight)
    return rounding if rounding.scale is None else None


def input_rounding(num_rows: int, weight: QuantizedWeight) -> InputRounding | None:
    """How a product of so many rows rounds them first; None: it multiplies them as they are.

    Args:
        num_rows: Rows of the step, padding included.
        weight: The layer's weight.
    """
    path = path_rule(num_rows, weight)
    if path is Path.SCALED:
        return _scaled_rounding(weight)
    return weight.inputs if path is Path.BLOCKS else None


def rounded_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`linear` of tokens that are rounded already.

    Args:
        tokens: [num_tokens, in], rounded as `rounds_to` says.
        weight: One for which it says so.
        bias: [out].

    Returns:
        [num_tokens, out] in the weight's activation type.
    """
    assert tokens.is_rounded_by(_scaled_rounding(weight)), "tokens in other numbers or groups"
    return _SCALED[weight.kind](tokens, weight, bias)


def norm_linear_reference(
    x: Tensor, norm_weight: Tensor, eps: float, weight: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    """Specification of `norm_linear`, in plain PyTorch."""
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
    rounding = rounds_to(x.shape[0], weight)
    if rounding is not None:
        return rounded_linear(rounded_rms_norm(x, norm_weight, eps, rounding), weight, bias)
    if weight.order is not None or not fuses(x.shape[0], weight):
        return linear(rms_norm(x, norm_weight, eps), weight, bias)
    out = x.new_empty(x.shape[0], weight.num_outputs)
    _multiply_fused(x, weight, bias, out, norm=(norm_weight, eps))
    return out


def linear_add_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor) -> None:
    """Specification of `linear_add`, in plain PyTorch."""
    residual.add_(linear_reference(x, weight, bias))


def linear_add(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor) -> None:
    """Adds a product to the residual stream.

    Args:
        x: [num_rows, in].
        weight: [out, in].
        bias: [out].
        residual: [num_rows, out] changed in place, in the type of x.
    """
    if not fuses(x.shape[0], weight):
        residual.add_(linear(x, weight, bias))
    else:
        x = take_inputs(x, weight.order)
        _multiply_fused(x, weight, bias, residual, add=True)


def norm_swiglu_reference(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    """Specification of `norm_swiglu`, in plain PyTorch."""
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
    if not fuses(x.shape[0], gate_up_weight):
        return swiglu(norm_linear(x, norm_weight, eps, gate_up_weight, bias))
    out = x.new_empty(x.shape[0], gate_up_weight.num_outputs // 2)
    norm = (norm_weight, eps)
    if gate_up_weight.order is None:
        _multiply_fused(x, gate_up_weight, bias, out, norm=norm, gated=True)
    else:
        normed = take_inputs(rms_norm(x, *norm), gate_up_weight.order)
        _multiply_fused(normed, gate_up_weight, bias, out, gated=True)
    return out
