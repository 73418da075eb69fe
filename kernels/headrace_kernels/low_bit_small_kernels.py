"""The Triton kernel behind `low_bit_linear` for up to 16 rows: each weight is read once, from memory straight into the registers that the tensor cores multiply from.

Owns the kernel, its launch and the tiles that are worth trying; which runs when is `low_bit_linear`'s. Y^T = W X^T, so that weights take the tensor cores' 16-row side and a program has 16 or 32 outputs.
Each warp sums inputs of its own (a slice), and the slices are added at the end. Sums are fp32 in an order that depends on the tile alone: no atomics, the same bits every time.

Nothing passes through shared memory. In the tensor cores' operand, a quad of lanes holds the inputs of 8 outputs, four neighbours (`_LANE_INPUTS`) a lane and turn. A sum does not care for the order of
its inputs; so each lane loads 16 neighbouring bytes, and what it found there is called the inputs that the operand has in that lane. Rows of x are loaded in the same order. The views below say so to the
compiler (lane of the quad, output, slice, eight of outputs, run of 64 bytes, inputs of the lane), whose layouts then agree and nothing moves; were they ever to disagree, results would stay and time be lost.

What a step needs of memory is asked for one step ahead, scales and zero points too: with them in the step itself, each waited for memory (INT4, 8B Llama, H200: 2.28 ms a token's products).
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.low_bit_kernels import bits_of, layout_of, takes
from headrace_kernels.low_bit_numbers import byte_numbers, nibble_numbers
from headrace_kernels.quantized_weight import QuantizedWeight, QuantKind
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.small_linear_kernels import finish

# Rows of the kernel.
MAX_SMALL_ROWS = 16
# Of an operand whose numbers are made of bytes. What Triton 3.6 chooses.
_LANE_INPUTS: tl.constexpr = tl.constexpr(4)
# What a quad of lanes loads of an output at a time.
_RUN_BYTES = 64


class SmallTile(NamedTuple):
    """How a product of few rows is cut."""

    # Outputs of one program (with SwiGLU as many again, for the gate): 16, or without groups 32. Zero points of more would get a layout of their own, and then all moves.
    block_n: int
    # Runs of 64 bytes of an output that a slice takes at a time.
    runs: int
    # Parts of the inputs that are summed apart, each by a warp.
    slices: int
    # Whether the norm of one row is taken where x is loaded, or by a kernel of its own before.
    norm_inside: bool = True


@triton.jit
def _weight_operand(numbers, SLICES: tl.constexpr, EIGHTS: tl.constexpr, RUNS: tl.constexpr, INPUTS: tl.constexpr):
    """[4, 8, SLICES, EIGHTS, RUNS, ...INPUTS of a lane] -> [SLICES, 8 EIGHTS, 4 INPUTS RUNS]."""
    lanes = tl.reshape(numbers, (4, 8, SLICES, EIGHTS, RUNS, INPUTS // _LANE_INPUTS, _LANE_INPUTS))
    return tl.reshape(tl.permute(lanes, (2, 3, 1, 4, 5, 0, 6)), (SLICES, 8 * EIGHTS, 4 * INPUTS * RUNS))


@triton.jit
def _row_operand(x, SLICES: tl.constexpr, EIGHTS: tl.constexpr, RUNS: tl.constexpr, INPUTS: tl.constexpr):
    """Rows of x likewise, [4, 8, SLICES, EIGHTS, RUNS, INPUTS / 8, 8] -> [SLICES, 4 INPUTS RUNS, 8 EIGHTS]."""
    lanes = tl.reshape(x, (4, 8, SLICES, EIGHTS, RUNS, INPUTS // _LANE_INPUTS, _LANE_INPUTS))
    return tl.reshape(tl.permute(lanes, (2, 4, 5, 0, 6, 3, 1)), (SLICES, 4 * INPUTS * RUNS, 8 * EIGHTS))


@triton.jit
def _group_at(step, slices, PART: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """The group of what slices take of part PART in a step; the last one beyond the end."""
    if KIND == "int4":
        PIECES: tl.constexpr = PLANE // PIECE
        first = ((step + slices) // PIECES * 4 + PART) * PLANE
    else:
        first = (step + slices) * PIECE
    return tl.minimum(first, K - 1) // GROUP


@triton.jit
def _scales_ahead(
    step, zero_ptr, scale_ptr, first, last, num_outputs,
    PART: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr, SLICES: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """Zero points [1, 8, SLICES, EIGHTS, 1, 1], if there are any, and scales [SLICES, 8 EIGHTS, 1] of outputs from `first` on for a part of a step."""
    outputs = first + tl.minimum(tl.arange(0, 8 * EIGHTS), last)[None, :, None]
    group = _group_at(step, tl.arange(0, SLICES)[:, None, None], PART, K, PIECE, PLANE, GROUP, KIND)
    stride = (num_outputs + SCALE_OUTPUTS - 1) // SCALE_OUTPUTS
    scales = tl.load(scale_ptr + group * stride + outputs // SCALE_OUTPUTS)
    zeros = scales
    if zero_ptr is not None:
        eights = tl.arange(0, EIGHTS)[None, None, None, :, None, None] * 8
        outputs = first + tl.minimum(tl.arange(0, 8)[None, :, None, None, None, None] + eights, last)
        slices = tl.arange(0, SLICES)[None, None, :, None, None, None]
        zeros = tl.load(zero_ptr + _group_at(step, slices, PART, K, PIECE, PLANE, GROUP, KIND) * num_outputs + outputs)
    return zeros, scales


@triton.jit
def _ahead(
    step, word_ptr, zero_ptr, scale_ptr, first, last, num_outputs,
    K: tl.constexpr, WORDS: tl.constexpr, PIECE: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr, SLICES: tl.constexpr, EIGHTS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """What a step needs of a weight's outputs from `first` on: words [4, 8, SLICES, EIGHTS, RUNS, 4] of 32 bits; with groups, zero points and scales of each part. Beyond the end words are 0."""
    outputs = tl.arange(0, 8)[None, :, None, None, None, None] + tl.arange(0, EIGHTS)[None, None, None, :, None, None] * 8  # fmt: skip
    lane = tl.arange(0, 4)[:, None, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    run = (step + tl.arange(0, SLICES)[None, None, :, None, None, None]) * RUNS + tl.arange(0, RUNS)[None, None, None, None, :, None]  # fmt: skip
    word = run * 16 + lane
    places = word_ptr + (first + tl.minimum(outputs, last)).to(tl.int64) * WORDS + word
    words = tl.load(places, mask=word < WORDS, other=0, eviction_policy="evict_first")
    if GROUPED:
        z0, s0 = _scales_ahead(step, zero_ptr, scale_ptr, first, last, num_outputs, 0, K, PIECE, PLANE, GROUP, KIND, SCALE_OUTPUTS, SLICES, EIGHTS)  # fmt: skip
        if KIND == "int4":
            z1, s1 = _scales_ahead(step, zero_ptr, scale_ptr, first, last, num_outputs, 1, K, PIECE, PLANE, GROUP, KIND, SCALE_OUTPUTS, SLICES, EIGHTS)  # fmt: skip
            z2, s2 = _scales_ahead(step, zero_ptr, scale_ptr, first, last, num_outputs, 2, K, PIECE, PLANE, GROUP, KIND, SCALE_OUTPUTS, SLICES, EIGHTS)  # fmt: skip
            z3, s3 = _scales_ahead(step, zero_ptr, scale_ptr, first, last, num_outputs, 3, K, PIECE, PLANE, GROUP, KIND, SCALE_OUTPUTS, SLICES, EIGHTS)  # fmt: skip
            return words, z0, s0, z1, s1, z2, s2, z3, s3
        else:
            return words, z0, s0
    else:
        return (words,)


@triton.jit
def _summed(
    total, loaded, x,
    PART: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr,
    SLICES: tl.constexpr, EIGHTS: tl.constexpr, RUNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The total plus part PART of what was loaded times x."""
    if KIND == "int4":
        numbers = nibble_numbers(loaded[0], loaded[1 + 2 * PART], PART, DTYPE, PLAIN)
    elif HAS_ZEROS:
        numbers = byte_numbers(loaded[0], loaded[1], KIND, DTYPE, PLAIN, True)
    else:
        numbers = byte_numbers(loaded[0], loaded[0], KIND, DTYPE, PLAIN, False)
    w = _weight_operand(numbers, SLICES, EIGHTS, RUNS, INPUTS)
    if PLAIN:
        x = x.to(tl.float32)
    if GROUPED:
        return total + tl.dot(w, x) * loaded[2 + 2 * PART].to(tl.float32)
    else:
        return tl.dot(w, x, total)


@triton.jit(do_not_specialize=["M", "N"])
def _small_kernel(
    x_ptr, norm_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    M, N, eps,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, EIGHTS: tl.constexpr, ROW_EIGHTS: tl.constexpr, RUNS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for 8 EIGHTS outputs and 8 ROW_EIGHTS rows; WORDS are those of 32 bits. With norm_ptr = g there is one row, and x is x g / rms(x), whose divisor is applied to the sums."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 4 if KIND == "int4" else 1
    # Inputs of a lane and run, in one part, and of a slice's step.
    INPUTS: tl.constexpr = 8 if KIND == "int4" else 16
    PIECE: tl.constexpr = 4 * INPUTS * RUNS
    STEPS: tl.constexpr = (WORDS + 16 * RUNS - 1) // (16 * RUNS)
    first = tl.program_id(0) * (8 * EIGHTS)
    last = N - 1 - first
    num_outputs = N * (2 if GATED else 1)
    m = tl.arange(0, 8)[None, :, None, None, None, None, None] + tl.arange(0, ROW_EIGHTS)[None, None, None, :, None, None, None] * 8  # fmt: skip
    slices = tl.arange(0, SLICES)[None, None, :, None, None, None, None]
    inner = tl.arange(0, RUNS)[None, None, None, None, :, None, None] * (4 * INPUTS) + tl.arange(0, 4)[:, None, None, None, None, None, None] * INPUTS  # fmt: skip
    inner += tl.arange(0, INPUTS // 8)[None, None, None, None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, None, None, None, :]  # fmt: skip
    total = tl.zeros([SLICES, 8 * EIGHTS, 8 * ROW_EIGHTS], tl.float32)
    up_total = tl.zeros([SLICES, 8 * EIGHTS, 8 * ROW_EIGHTS], tl.float32)
    ahead = _ahead(0, word_ptr, zero_ptr, scale_ptr, first, last, num_outputs, K, WORDS, PIECE, PLANE, GROUP, KIND, GROUPED, SCALE_OUTPUTS, SLICES, EIGHTS, RUNS)  # fmt: skip
    if GATED:
        up_ahead = _ahead(0, word_ptr, zero_ptr, scale_ptr, first + N, last, num_outputs, K, WORDS, PIECE, PLANE, GROUP, KIND, GROUPED, SCALE_OUTPUTS, SLICES, EIGHTS, RUNS)  # fmt: skip
    for step in tl.range(0, STEPS, SLICES):
        loaded = ahead
        ahead = _ahead(step + SLICES, word_ptr, zero_ptr, scale_ptr, first, last, num_outputs, K, WORDS, PIECE, PLANE, GROUP, KIND, GROUPED, SCALE_OUTPUTS, SLICES, EIGHTS, RUNS)  # fmt: skip
        if GATED:
            up_loaded = up_ahead
            up_ahead = _ahead(step + SLICES, word_ptr, zero_ptr, scale_ptr, first + N, last, num_outputs, K, WORDS, PIECE, PLANE, GROUP, KIND, GROUPED, SCALE_OUTPUTS, SLICES, EIGHTS, RUNS)  # fmt: skip
        # Or else the compiler would move the loads to where they are used, to save registers.
        tl.debug_barrier()
        for i in tl.static_range(PARTS):
            if KIND == "int4":
                piece = ((step + slices) // (PLANE // PIECE) * 4 + i) * PLANE + (step + slices) % (
                    PLANE // PIECE
                ) * PIECE
            else:
                piece = (step + slices) * PIECE
            k = piece + inner
            # Rows that only fill the tile are not read.
            mask = (k < K) & (m < M)
            x = tl.load(x_ptr + m * K + k, mask=mask, other=0.0)
            if norm_ptr is not None:
                factors = tl.load(norm_ptr + m * 0 + k, mask=mask, other=0.0)
                if PLAIN:
                    x = (x.to(tl.float32) * factors.to(tl.float32)).to(DTYPE)
                else:
                    x = x * factors
            rows = _row_operand(x, SLICES, ROW_EIGHTS, RUNS, INPUTS)
            total = _summed(total, loaded, rows, i, KIND, GROUPED, zero_ptr is not None, DTYPE, PLAIN, SLICES, EIGHTS, RUNS, INPUTS)  # fmt: skip
            if GATED:
                up_total = _summed(up_total, up_loaded, rows, i, KIND, GROUPED, zero_ptr is not None, DTYPE, PLAIN, SLICES, EIGHTS, RUNS, INPUTS)  # fmt: skip
    y, up = tl.sum(total, 0), tl.sum(up_total, 0)
    n = first + tl.arange(0, 8 * EIGHTS)[:, None]
    if not GROUPED:
        y *= tl.load(scale_ptr + tl.minimum(n, N - 1))
        if GATED:
            up *= tl.load(scale_ptr + N + tl.minimum(n, N - 1))
    if norm_ptr is not None:
        rstd = _inverse_rms(x_ptr, eps, K)
        y, up = y * rstd, up * rstd
    finish(y, up, tl.arange(0, 8 * ROW_EIGHTS)[None, :], n, bias_ptr, out_ptr, M, N, GATED, ADD)


@triton.jit
def _inverse_rms(x_ptr, eps, K: tl.constexpr):
    """Of one row."""
    k = tl.arange(0, 1024)
    squares = tl.zeros([1024], tl.float32)
    for begin in tl.static_range(0, K, 1024):
        wide = tl.load(x_ptr + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        squares += wide * wide
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


def takes_small(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight: outputs begin at multiples of 16 bytes, and what a quad of lanes loads lies within one group."""
    if not takes(weight) or weight.packed.shape[1] * weight.packed.element_size() % 16:
        return False
    return weight.kind is QuantKind.INT4 or weight.group_size in (weight.num_inputs, _RUN_BYTES, 2 * _RUN_BYTES)


def multiply_small(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tile: SmallTile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
) -> None:
    """Few rows.

    Args:
        x: [num_rows, K], at most MAX_SMALL_ROWS of them.
        weight: N outputs, or 2 N with the gate first, such that `takes_small(weight)`.
        bias: One per output of the weight.
        out: [num_rows, N], written, or with `add` added to.
        tile: The sizes.
        norm: Weight and epsilon of an RMS norm of x.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
    """
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert num_rows <= MAX_SMALL_ROWS and num_inputs == weight.num_inputs and x.dtype == weight.dtype
    assert tile.block_n == 16 or (tile.block_n == 32 and not weight.is_grouped)
    assert weight.num_outputs == num_outputs * (2 if gated else 1) and out.is_contiguous() and takes_small(weight)
    if norm is not None and (num_rows > 1 or not tile.norm_inside):
        x, norm = rms_norm(x, *norm), None
    norm_weight, eps = norm or (None, 0.0)
    packed, scales, zeros = bits_of(weight)
    words, layout = packed.view(torch.int32), layout_of(weight, x.dtype)
    runs = min(tile.runs, _most_runs(weight, layout["PLANE"]), triton.next_power_of_2(triton.cdiv(words.shape[1], 16)))
    slices = min(tile.slices, triton.next_power_of_2(triton.cdiv(words.shape[1], 16 * runs)))
    _small_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        x.contiguous(), norm_weight, words, scales, zeros, bias, out, num_rows, num_outputs, eps,
        K=num_inputs, WORDS=words.shape[1], GROUP=weight.group_size, PLANE=layout["PLANE"], KIND=weight.kind.value,
        GROUPED=weight.is_grouped, SCALE_OUTPUTS=weight.scale_outputs,
        SLICES=slices, EIGHTS=tile.block_n // 8, ROW_EIGHTS=1 if num_rows <= 8 else 2, RUNS=runs,
        GATED=gated, ADD=add, PLAIN=layout["PLAIN"],
        num_warps=slices, num_stages=1,
    )  # fmt: skip


def _most_runs(weight: QuantizedWeight, plane: int) -> int:
    """Runs that lie within one group: 32 words of INT4, 64 bytes of the others."""
    if weight.kind is QuantKind.INT4:
        return plane // 32
    return 8 if weight.group_size == weight.num_inputs else weight.group_size // _RUN_BYTES


def small_variants(kind: QuantKind, gated: bool, normed: bool) -> list[SmallTile]:
    """Tiles that are worth timing for few rows."""
    # (outputs, runs, slices). Many slices are few steps and much under way; runs take registers, twice as many with a gate.
    sizes = [(16, 1, 4), (16, 2, 4), (16, 1, 8), (16, 2, 8), (16, 2, 16), (16, 1, 16)]
    if not gated:
        sizes += [(16, 4, 4), (16, 4, 8)]
    if kind is not QuantKind.INT4:
        sizes += [(16, 4, 4), (32, 1, 4), (32, 2, 4), (32, 1, 8)] if gated else [(16, 8, 4), (32, 2, 4), (32, 2, 8)]
    return [
        SmallTile(*size, norm_inside=inside) for size in sizes for inside in ((True, False) if normed else (False,))
    ]
