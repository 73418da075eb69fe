"""INT4 weights rounded to e4m3 for a product of many tokens, in the card's buffer.

Owns the rounding, its kernel and its reference. Each output gets one scale, so that a library's
product of FP8 by FP8 takes the weight: step = max over groups of |s| max(z, 15 - z) / 448, and the
number is (q - z) (s / step) to the nearest e4m3, ties to even. That adds a rounding of at most 1/16
of each weight to INT4's own; `linear.w4a8.gemm_sm90` multiplies without it.

Launch rule: 16 outputs and four tiles of words a program, not swept. Each program finds the scales
of its outputs anew, from all of their groups, which is a tenth of what it reads and writes.
"""

# Triton's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton_runtime import uses_triton
from headrace_kernels.weight_formats.conversions import numbers_of
from headrace_kernels.weight_formats.kernel_layout import bits_of, layout_of
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, dequantize_ordered_rows

_LARGEST = 448.0
# The smallest step, for outputs whose scales are all 0.
_LEAST_STEP = 1e-30
_BLOCK_N = 16
_TILES = 4


def round_to_e4m3_reference(weight: QuantizedWeight, rows: range) -> tuple[Tensor, Tensor]:
    """Specification of `round_to_e4m3`, in plain PyTorch."""
    assert weight.zeros is not None
    outputs = slice(rows.start, rows.stop)
    scales, zeros = weight.scales[:, outputs].float(), weight.zeros[:, outputs].float()
    steps = (scales.abs() * torch.maximum(zeros, 15 - zeros)).amax(0) * (1 / _LARGEST)
    steps = steps.clamp_(min=_LEAST_STEP)
    numbers = torch.empty(len(rows), weight.num_inputs, dtype=torch.float32, device=weight.device)
    dequantize_ordered_rows(weight, outputs, numbers)
    numbers = numbers.mul_(steps.reciprocal()[:, None]).clamp_(-_LARGEST, _LARGEST)
    return numbers.to(torch.float8_e4m3fn), steps


@triton.jit(do_not_specialize=["N", "first_row", "num_rows"])
def _round_to_e4m3_kernel(
    word_ptr, scale_ptr, zero_ptr, out_ptr, step_ptr,
    N, first_row, num_rows,
    LAYOUT: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Rows first_row and on of W as e4m3 `out` [num_rows, K], with a step for each."""
    K: tl.constexpr = LAYOUT.num_inputs
    WORDS: tl.constexpr = LAYOUT.num_words
    GROUP: tl.constexpr = LAYOUT.group
    PLANE: tl.constexpr = LAYOUT.plane
    r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(first_row + r, N - 1)
    g = tl.arange(0, GROUPS)[:, None]
    mask_g = g < (K + GROUP - 1) // GROUP
    scales = tl.load(scale_ptr + g * N + n[None, :], mask=mask_g, other=0.0).to(tl.float32)
    zeros = tl.load(zero_ptr + g * N + n[None, :], mask=mask_g, other=0).to(tl.float32)
    steps = tl.max(tl.abs(scales) * tl.maximum(zeros, 15.0 - zeros), axis=0) * (1.0 / 448.0)
    steps = tl.maximum(steps, 1e-30)
    if tl.program_id(0) == 0:
        tl.store(step_ptr + r, steps, mask=r < num_rows)
    inverse = tl.math.div_rn(steps * 0.0 + 1.0, steps)[:, None]
    j = tl.arange(0, PLANE)[None, :]
    for each in tl.static_range(TILES):
        tile = tl.program_id(0) * TILES + each
        word = tile * PLANE + j
        words = tl.load(word_ptr + n.to(tl.int64)[:, None] * WORDS + word, mask=word < WORDS, other=0)
        for i in tl.static_range(4):
            piece = (tile * 4 + i) * PLANE
            places = (tl.minimum(piece, K - 1) // GROUP * N + n)[:, None]
            # 128 + q in bf16, exact, as is what the zero point leaves of it.
            numbers = numbers_of(words, i, "int4", tl.bfloat16, LAYOUT.is_plain).to(tl.float32)
            numbers = numbers - (tl.load(zero_ptr + places).to(tl.float32) + 128.0)
            numbers = numbers * tl.load(scale_ptr + places).to(tl.float32) * inverse
            numbers = tl.minimum(tl.maximum(numbers, -448.0), 448.0)
            k = piece + j
            out_places = out_ptr + r.to(tl.int64)[:, None] * K + k
            tl.store(out_places, numbers.to(tl.float8e4nv), mask=(r < num_rows)[:, None] & (k < K))


def round_to_e4m3(weight: QuantizedWeight, rows: range, out: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds some outputs of a weight to e4m3, with a scale for each output.

    Args:
        weight: INT4.
        rows: The outputs.
        out: [len(rows), K] e4m3, contiguous, written.

    Returns:
        `out`, and the outputs' scales [len(rows)] fp32.
    """
    assert weight.kind is QuantKind.INT4 and out.shape == (len(rows), weight.num_inputs) and out.is_contiguous()
    if not uses_triton(weight.packed):
        numbers, steps = round_to_e4m3_reference(weight, rows)
        return out.copy_(numbers), steps
    layout = layout_of(weight, weight.dtype)
    steps = torch.empty(len(rows), dtype=torch.float32, device=weight.device)
    grid = (triton.cdiv(layout.num_words, layout.plane * _TILES), triton.cdiv(len(rows), _BLOCK_N))
    _round_to_e4m3_kernel[grid](
        *bits_of(weight), out, steps, weight.num_outputs, rows.start, len(rows),
        LAYOUT=layout, GROUPS=triton.next_power_of_2(len(weight.scales)), BLOCK_N=_BLOCK_N, TILES=_TILES, num_warps=4,
    )  # fmt: skip
    return out, steps
