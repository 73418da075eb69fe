"""Products with weights of 8 and 4 bits, and with what stands before and after them in a decoder
layer.

The operations of `linear` and `small_linear` for a `QuantizedWeight`. Owns which path runs for how
many rows. Where Triton does not run, the weight is restored in blocks of rows, each used and given
up, so that nothing of it is kept beside its bits; inputs are rounded as the weight's scheme says,
however many rows there are.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear import gemm_fp8 as fp8_activations
from headrace_kernels.linear import gemm_int8 as int8_activations
from headrace_kernels.linear.dense import linear_reference as plain_linear_reference
from headrace_kernels.linear.gemm_dequantized import multiply_in_blocks, restored_linear
from headrace_kernels.linear.gemm_weight_only import WideTile, multiply_wide
from headrace_kernels.linear.gemm_weight_only_sm90 import WarpgroupTile, splittings, takes_warpgroups
from headrace_kernels.linear.gemv_8bit import RowTile, multiply_row, takes_row
from headrace_kernels.linear.gemv_int4 import NibbleRowTile
from headrace_kernels.linear.input_order import take_inputs
from headrace_kernels.linear.small_batch import MAX_SMALL_ROWS, SmallTile, multiply_small, takes
from headrace_kernels.linear.small_batch_8bit_sm90 import MAX_FEW_ROWS, FewTile, multiply_few, rows_of, takes_few
from headrace_kernels.rms_norm import rms_norm, rms_norm_reference, rounded_rms_norm
from headrace_kernels.rounded_tokens import RoundedTokens, round_tokens
from headrace_kernels.swiglu import swiglu, swiglu_reference
from headrace_kernels.triton_runtime import uses_triton
from headrace_kernels.weight_formats import dequantized_buffer as restored_weights
from headrace_kernels.weight_formats.input_rounding import InputRounding, rounded_inputs
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, dequantize

# Up to so many rows the wide kernels multiply; beyond, weights are restored for cuBLAS. The four
# products of 32 layers of an 8B Llama on an H200, tile against restored: INT4 8.4 to 9.1 ms at 128
# rows and 15.2 to 10.3 at 256; INT8 10.7 to 10.9 at 256; FP8 6.2 to 9.7 at 128, 11.4 to 11.0 at
# 256.
_MOST_WIDE_ROWS = {QuantKind.INT8: 256, QuantKind.INT4: 128, QuantKind.FP8: 128}
# The same where warp groups multiply: INT4 6.5 to 10.3 ms at 256 rows, 11.7 to 14.1 at 512, but no
# more than 43.4 to 45.0 at 2,048; INT8 7.4 to 10.9 at 256, 13.3 to 14.6 at 512.
_MOST_WARPGROUP_ROWS = 512
# From so many rows on FP8 weights, and INT8 ones whose scheme says so, take activations of 8 bits
# too, where the card can; FP8 from fewer where `fp8_activations.scaled_rule` names a tile. FP8 by
# `_scaled_mm`, the products of 32 layers of an 8B Llama on an H200, without and with what rounds
# the tokens: 3.5 and 3.9 ms at 65 rows, by the tiles 4.5 at 64; at 256 rows 4.1 and 4.4, restored
# 11.0.
_FEWEST_SCALED_ROWS = 65


# Numbers of rows that between them take every kernel there is for a weight, so that a server that
# has run them compiles nothing later: those at the ends of the rules' ranges.
WARM_ROWS = (1, 8, 16, 32, 64, 128, 192, 256, 257, 512, 513)


class Path(enum.Enum):
    """How a product is computed."""

    # Without Triton: rows of the weight are restored, multiplied and given up.
    BLOCKS = "blocks"
    # By the kernels of few rows, with what is fused.
    SMALL = "small"
    WIDE = "wide"
    # Activations in 8 bits.
    SCALED = "scaled"
    # Restored into the card's buffer, then cuBLAS.
    RESTORED = "restored"


def path_rule(num_rows: int, weight: QuantizedWeight) -> Path:
    """Which path a product takes, by sizes, kind and card alone."""
    if not uses_triton(weight.packed):
        return Path.BLOCKS
    if fp8_activations.scaled_rule(num_rows, weight) is not None:
        # It names a tile where rounded tokens are faster than words restored for products of few
        # rows, too.
        return Path.SCALED
    if takes(weight) and 1 <= num_rows <= MAX_SMALL_ROWS or few_rule(num_rows, weight) is not None:
        return Path.SMALL
    if num_rows >= _FEWEST_SCALED_ROWS and (fp8_activations.can_scale(weight) or int8_activations.can_scale(weight)):
        return Path.SCALED
    most = _MOST_WARPGROUP_ROWS if takes_warpgroups(weight) else _MOST_WIDE_ROWS[weight.kind]
    return Path.WIDE if takes(weight) and num_rows <= most else Path.RESTORED


# Tiles of one row for a gate and up projection, for products whose outputs are few (they are added
# to the residual stream), and for others: the best of sweeps of an 8B Llama's products on an H200,
# 2026-11-21, everything fused included. 32 layers take 1.43 ms in INT4, 1.99 in FP8 and 2.04 in
# INT8; by `small_rule` and a norm of its own it was 2.28, 2.35 and 2.34. A fourth of 70B's 80
# layers take 3.5 ms in INT4.
_ROW_TILES: dict[QuantKind, tuple[RowTile | NibbleRowTile, ...]] = {
    QuantKind.INT4: (NibbleRowTile(16, 2, 1, 128), NibbleRowTile(16, 4, 4), NibbleRowTile(16, 4, 2)),
    QuantKind.FP8: (RowTile(2, 4, True), RowTile(8, 4, True), RowTile(8, 2, True)),
    QuantKind.INT8: (RowTile(4, 4, True), RowTile(8, 4, True), RowTile(4, 2, True)),
}


def row_rule(weight: QuantizedWeight, gated: bool = False) -> RowTile | NibbleRowTile:
    """The tile of one row."""
    gate_up, few_outputs, others = _ROW_TILES[weight.kind]
    if gated:
        if isinstance(gate_up, NibbleRowTile) and weight.num_inputs > 4096:
            # A warp has inputs of its own: with twice as many, twice the warps (70B's 8,192: 20.6
            # us).
            return NibbleRowTile(gate_up.block_n, 2 * gate_up.num_warps, gate_up.run, gate_up.max_registers)
        return gate_up
    return few_outputs if weight.num_outputs <= weight.num_inputs else others


# Tiles of 2 to 64 rows of 8 bits where `linear.small_batch_8bit_sm90` is faster than the other kernels, by
# kind and class of rows, in the order of `_ROW_TILES`. An 8B Llama's 32 layers on an H200,
# 2026-11-21, all that is fused or around included, ms, with the other kernels in brackets: FP8 2.29
# (2.36), 2.44 (2.76), 2.66 (3.62), 3.93 (4.07) at 8, 16, 32, 64 rows; INT8 2.36 (2.32), 2.43
# (2.80), 2.78 (3.82), 3.80 (4.28).
_FEW_TILES: dict[tuple[QuantKind, int], tuple[FewTile, FewTile, FewTile]] = {
    (QuantKind.FP8, 8): (FewTile(64, 2, 4, 3, 1), FewTile(64, 1, 4, 5, 4), FewTile(64, 1, 4, 5, 3)),
    (QuantKind.FP8, 16): (FewTile(64, 2, 4, 3, 1), FewTile(64, 1, 4, 5, 4), FewTile(64, 2, 4, 4, 4)),
    (QuantKind.FP8, 32): (FewTile(64, 2, 4, 4, 1), FewTile(64, 2, 4, 4, 8), FewTile(64, 2, 4, 4, 5)),
    (QuantKind.FP8, 64): (FewTile(64, 2, 4, 3, 1), FewTile(64, 2, 4, 3, 8), FewTile(64, 2, 4, 3, 5)),
    (QuantKind.INT8, 16): (FewTile(64, 2, 4, 3, 1), FewTile(64, 1, 4, 5, 4), FewTile(64, 1, 4, 5, 3)),
    (QuantKind.INT8, 32): (FewTile(64, 2, 4, 4, 1), FewTile(64, 2, 4, 4, 8), FewTile(64, 2, 4, 4, 5)),
    (QuantKind.INT8, 64): (FewTile(64, 2, 4, 3, 1), FewTile(64, 2, 4, 3, 8), FewTile(64, 2, 4, 3, 5)),
}


def few_rule(num_rows: int, weight: QuantizedWeight, gated: bool = False) -> FewTile | None:
    """The tile of some rows of 8 bits; None: other kernels multiply."""
    if not 2 <= num_rows <= MAX_FEW_ROWS or not takes_few(weight):
        return None
    tiles = _FEW_TILES.get((weight.kind, rows_of(num_rows)))
    if tiles is None:
        return None
    gate_up, few_outputs, others = tiles
    tile = gate_up if gated else few_outputs if weight.num_outputs <= weight.num_inputs else others
    # Inputs are split where outputs alone would leave multiprocessors idle; a head's sums would be
    # more bytes than its words.
    programs = math.ceil(weight.num_outputs / (tile.side_n * tile.sides))
    return tile if programs < 2 * card.multiprocessors(weight.device) else tile._replace(splits=1)


def small_rule(num_rows: int, weight: QuantizedWeight, gated: bool = False) -> SmallTile:
    """The tile of few rows.

    The four products of 32 layers of an 8B Llama on an H200, 2026-11-21: within 2% of each one's
    best, norms by a kernel of their own.

    1 to 8 rows: INT4 2.28 to 2.39 ms, FP8 2.35 to 2.39, INT8 2.34; 16 rows: INT4 3.14, FP8 2.97,
    INT8 2.81. With the norm inside, the products before which it is took 1.2 (8 bits) to 2 times
    (INT4) as long.
    """
    # Products that are added to the residual stream: their outputs are few, so that a program has
    # more under way.
    has_few_outputs = not gated and weight.num_outputs <= weight.num_inputs
    if weight.kind is not QuantKind.INT4:
        return SmallTile(16, 128, 4, 4, 5 if has_few_outputs and num_rows <= 8 else 3, norm_inside=False)
    if has_few_outputs or num_rows > 8:
        return SmallTile(16, 128, 4, 4, 3, norm_inside=False)
    return SmallTile(16, 64, 4, 4, 4, norm_inside=False)


def wide_rule(num_rows: int, weight: QuantizedWeight) -> WideTile | WarpgroupTile:
    """The tile of more rows.

    Products with weights of an 8B Llama on an H200 have one within some percent of their best.
    """
    if takes_warpgroups(weight):
        return _warpgroup_rule(num_rows, weight)
    is_int4 = weight.kind is QuantKind.INT4
    if num_rows > 64:
        # A word is four inputs of INT4 and one of the others. Older cards keep operands in
        # registers, and would have to spill some.
        rows = 128 if card.has_warpgroup_products(weight.device) else 64
        tile, programs = WideTile(128, rows, 64 if is_int4 else 128, 8, 3), 96
    elif is_int4:
        tile, programs = WideTile(128, 64, 32, 4, 4) if num_rows > 32 else WideTile(128, 32, 64, 8, 4), 192
    else:
        tile, programs = WideTile(64, 64 if num_rows > 32 else 32, 128, 4, 3), 256
    # Inputs are split where outputs alone would leave multiprocessors idle.
    alone = math.ceil(weight.num_outputs / tile.block_n) * math.ceil(num_rows / tile.block_m)
    return tile._replace(splits=next((splits for splits in (1, 2, 4) if splits * alone >= programs), 8))


def _warpgroup_rule(num_rows: int, weight: QuantizedWeight) -> WarpgroupTile:
    """The tile where warp groups multiply: the products of 32 layers of an 8B Llama take 2.5, 3.0,
    4.2, 6.5, 11.7 ms on an H200 in INT4 and 3.5, 3.9, 5.1, 7.4, 13.3 in INT8, at 32, 64, 128, 256,
    512 rows.
    """
    is_int4 = weight.kind is QuantKind.INT4
    if num_rows <= 32:
        tile, rows = WarpgroupTile(64, 32, 4, 4, 4 if is_int4 else 2), 32
    elif num_rows <= 64:
        # Two programs of 128 outputs for every multiprocessor restore and copy less than four of
        # 64.
        many = weight.num_outputs >= 128 * card.multiprocessors(weight.device)
        few = WarpgroupTile(64, 64, 4, 4, 3 if is_int4 else 2)
        tile, rows = WarpgroupTile(128, 64, 8, 8 if is_int4 else 4, 2) if many else few, 64
    elif num_rows <= 128 or 256 < num_rows <= 384:
        # A third tile of 128 rows is less than a second one of 256.
        tile, rows = WarpgroupTile(64, 128, 4, 4, 2), 128 if num_rows <= 128 else 384
    else:
        tile, rows = WarpgroupTile(128, 256, 8, 4, 2), 256 if num_rows <= 256 else 512
    # Splits suit the most rows of a class, so that a class has one tile.
    return splittings(tile, rows, weight)[0]


def fuses(num_rows: int, weight: QuantizedWeight) -> bool:
    """Whether products of so many rows with this weight are faster together with the operations
    around them.

    Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: Of the layer.
    """
    return path_rule(num_rows, weight) is Path.SMALL


def scratch_bytes(weight: QuantizedWeight) -> int:
    """Bytes that products with this weight share with those of all others on its device: the
    largest of them counts once.

    They are taken when weights are made.
    """
    if weight.device.type != "cuda":
        return 0
    return restored_weights.scratch_bytes(weight.num_outputs, weight.num_inputs, weight.dtype)


def linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `linear`."""
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
        out_dtype: Of the result; None: the type of x.
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
        tokens = round_tokens(x, _number(weight), None if weight.inputs is None else weight.inputs.scale)
        product = rounded_linear(tokens, weight, bias).to(out_dtype or x.dtype)
        return product if out is None else out.copy_(product)
    if path is Path.RESTORED:
        return restored_linear(x, weight, bias, out_dtype, out)
    if out is None:
        out = x.new_empty(x.shape[0], weight.num_outputs, dtype=out_dtype)
    if path is Path.BLOCKS:
        multiply_in_blocks(x, weight, bias, out)
    elif path is Path.SMALL:
        _multiply_fused(x, weight, bias, out)
    else:
        multiply_wide(x, weight, bias, out, wide_rule(x.shape[0], weight))
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
    """A product of few rows by the kernel and tile of the rules, with what is fused to it: see
    `multiply_small`.
    """
    few_tile = few_rule(x.shape[0], weight, gated)
    if few_tile is not None:
        multiply_few(x, weight, bias, out, few_tile, norm, gated, add)
    elif x.shape[0] == 1 and takes_row(weight):
        multiply_row(x, weight, bias, out, row_rule(weight, gated), norm, gated, add)
    else:
        multiply_small(x, weight, bias, out, small_rule(x.shape[0], weight, gated), norm, gated, add)


def _number(weight: QuantizedWeight) -> torch.dtype:
    """Of 8-bit activations of a weight."""
    return torch.float8_e4m3fn if weight.kind is QuantKind.FP8 else torch.int8


def rounds_to(num_rows: int, weight: QuantizedWeight) -> torch.dtype | None:
    """The 8-bit type to which `linear` rounds so many tokens first, so that what makes them may do
    it (`rounded_linear`); None: it takes them as they are.

    Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: Of the layer.
    """
    # Inputs are put in order before they are rounded, and what makes tokens knows scales of their
    # own alone.
    is_static = weight.inputs is not None and weight.inputs.scale is not None
    is_scaled = weight.order is None and not is_static and path_rule(num_rows, weight) is Path.SCALED
    return _number(weight) if is_scaled else None


def input_rounding(num_rows: int, weight: QuantizedWeight) -> InputRounding | None:
    """How a product of so many rows rounds them first; None: it multiplies them as they are.

    Args:
        num_rows: Rows of the step, padding included.
        weight: Of the layer.
    """
    path = path_rule(num_rows, weight)
    if path is Path.SCALED:
        return weight.inputs or InputRounding(_number(weight))
    return weight.inputs if path is Path.BLOCKS else None


def rounded_linear(tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`linear` of tokens that are rounded to the weight's type of 8 bits.

    Args:
        tokens: [num_tokens, in].
        weight: One that `rounds_to` tells a type of.
        bias: [out].

    Returns:
        [num_tokens, out] in the weight's activation type.
    """
    assert tokens.numbers.dtype == _number(weight)
    is_fp8 = weight.kind is QuantKind.FP8
    scaled_linear = fp8_activations.scaled_linear if is_fp8 else int8_activations.scaled_linear
    return scaled_linear(tokens, weight, bias)


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
    number = rounds_to(x.shape[0], weight)
    if number is not None:
        return rounded_linear(rounded_rms_norm(x, norm_weight, eps, number), weight, bias)
    if weight.order is not None or not fuses(x.shape[0], weight):
        return linear(rms_norm(x, norm_weight, eps), weight, bias)
    out = x.new_empty(x.shape[0], weight.num_outputs)
    _multiply_fused(x, weight, bias, out, norm=(norm_weight, eps))
    return out


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
    if not fuses(x.shape[0], weight):
        residual.add_(linear(x, weight, bias))
    else:
        x = take_inputs(x, weight.order)
        _multiply_fused(x, weight, bias, residual, add=True)


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
