"""Small-batch products with what stands before and after them in a decoder layer.

Norm, bias, SwiGLU and residual addition are fused.

Such a product reads a whole weight to compute a row or a few; its time is the weight's way from
memory. The operations around it would each cost a launch and a trip of their rows through memory,
so they ride along. Owns the rule of when that pays (`fuses`) and which tile runs; the kernels are
`dense_small_batch_kernels`'s and `dense_small_batch_sm90`'s. Each operation is its reference where
Triton does not run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels import card
from headrace_kernels.hopper.row_streams import MAX_WARPGROUP_ROWS, rows_class
from headrace_kernels.linear.dense_small_batch_kernels import Tile, multiply
from headrace_kernels.linear.dense_small_batch_sm90 import StreamTile, multiply_streams, takes_streams
from headrace_kernels.rms_norm import rms_norm, rms_norm_reference
from headrace_kernels.swiglu import swiglu_reference
from headrace_kernels.triton_runtime import uses_triton

# Rows up to which the kernels replace cuBLAS and the separate operations: an 8B Llama's products in
# bf16 take 4.08 ms at 8 rows on an H200, otherwise 4.22 (docs/experiments.md, "Launch rules of
# products"). fp32 on a GPU serves tests that want exact sums.
_MOST_ROWS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 1}
# Outputs from which a product is an output head's: so long that wider tiles pay.
_HEAD_OUTPUTS = 65_536
# Rows from which the kernel for sm_90 multiplies.
_FEWEST_STREAM_ROWS = 2
# Inputs from which the rows of a weight are so long that a program takes four.
_LONG_INPUTS = 8192
# Warps of a product of one row that is launched early, and inputs of a block for each: four ask for
# all of a gate's and an up row of _LONG_INPUTS inputs together, of longer ones eight do. Without
# SwiGLU four are faster however long the rows are: a step of an 8B Llama takes an H200 4.00 ms so
# and 4.07 if eight multiply down's 14,336 inputs.
_EARLY_WARPS, _LONG_GATED_WARPS, _EARLY_WARP_INPUTS = 4, 8, 256
# Inputs up to which their programs have four outputs, without SwiGLU: a layer of gpt-oss-20b takes
# 46.8 us so, and 48.0 if those of 2,880 inputs have two; if those of 4,096 have four, 48.5.
_MOST_INPUTS_OF_FOUR = 3072


class _StreamTiles(NamedTuple):
    """The tiles of the kernel for sm_90, by what is multiplied."""

    gate_up: StreamTile
    head: StreamTile
    # Enough outputs for two programs of 64 to three multiprocessors.
    many_outputs: StreamTile
    few_outputs: StreamTile


# By the class of rows. A step of an 8B Llama takes an H200 4.00 ms with 8 rows and 4.20 with 16,
# and 4.16 and 4.40 with a copy for each 64 inputs and the tiles that were best then. With 32 rows
# attention's output takes 9.5 us, by cuBLAS with the addition 13.7 (docs/experiments.md, "one copy
# for a step of few rows").
_TILES = {
    8: _StreamTiles(StreamTile(2, 2, 3), StreamTile(2, 2, 4), StreamTile(1, 2, 10), StreamTile(2, 2, 8)),
    16: _StreamTiles(StreamTile(1, 4, 3), StreamTile(1, 2, 5), StreamTile(1, 4, 5), StreamTile(2, 2, 8)),
    32: _StreamTiles(StreamTile(1, 2, 5), StreamTile(1, 2, 4), StreamTile(1, 4, 4), StreamTile(2, 2, 6)),
}
# Outputs from which more than 16 rows are multiplied so: enough for half of the multiprocessors.
# Not measured: with fewer, libraries split the inputs.
_LEAST_OUTPUTS_OF_32 = 2048


def launch_rule(num_rows: int, num_outputs: int, num_inputs: int, gated: bool = False, early: bool = False) -> Tile:
    """The tile of a product, chosen on an H200.

    What lost stands in docs/experiments.md, "Launch rules of products" and "all products of one row
    start early". Tiles of 2 to 8 rows are within 2% of the best of every product.
    """
    is_head = num_outputs >= _HEAD_OUTPUTS
    if early:
        block_n = 4 if num_inputs <= _MOST_INPUTS_OF_FOUR and not gated else 2
        num_warps = _LONG_GATED_WARPS if gated and 2 * num_inputs > _LONG_INPUTS else _EARLY_WARPS
        return Tile("vector", block_n, _EARLY_WARP_INPUTS * num_warps, num_warps)
    if num_rows == 1:
        return Tile("vector", 4 if is_head or num_inputs > _LONG_INPUTS else 2, block_k=2048, num_warps=8)
    if is_head:
        return Tile("tile", block_n=32, block_k=256, num_warps=2, num_stages=4, slices=2)
    return Tile("tile", block_n=16, block_k=512, num_warps=4, num_stages=3, slices=4)


def launches_early(num_rows: int, weight: Tensor, is_parameter: bool = True) -> bool:
    """Whether a product of one row starts, with its weight, while the kernel before it runs.

    An output head does not: its tile is another one, and its beginning counts for little (an 8B
    Llama's step on an H200: 4.03 ms, early 4.07).

    Args:
        num_rows: Rows of the step.
        weight: [out, in], with a gate and an up projection both.
        is_parameter: No kernel writes the weight.
    """
    is_head = weight.shape[0] >= _HEAD_OUTPUTS
    return num_rows == 1 and is_parameter and not is_head and card.launches_early(weight.device)


def stream_rule(num_rows: int, weight: Tensor, gated: bool = False) -> StreamTile | None:
    """The tile of a product by `dense_small_batch_sm90`; None: other kernels multiply."""
    if not _FEWEST_STREAM_ROWS <= num_rows <= MAX_WARPGROUP_ROWS or not takes_streams(weight):
        return None
    rows = rows_class(num_rows)
    if rows == MAX_WARPGROUP_ROWS and weight.shape[0] < _LEAST_OUTPUTS_OF_32:
        return None
    tiles = _TILES[rows]
    if gated:
        return tiles.gate_up
    if weight.shape[0] >= _HEAD_OUTPUTS:
        return tiles.head
    has_many = 3 * weight.shape[0] >= 2 * 64 * card.multiprocessors(weight.device)
    return tiles.many_outputs if has_many else tiles.few_outputs


def _norms_inside(x: Tensor, tile: StreamTile, gated: bool) -> bool:
    """Whether the kernel for sm_90 norms x itself, which it does in bf16 alone.

    With more than 8 rows in slices side by side that takes longer than a launch before it (8B's QKV
    takes an H200 17.4 us so, and 14.9 without a norm, which takes 0.6 alone), and with more than 16
    beside a gate's sums as well (66 us and 57).
    """
    if x.dtype != torch.bfloat16:
        return False
    return len(x) <= 8 or (tile.slices == 1 and (len(x) <= 16 or not gated))


def fuses(num_rows: int, weight: Tensor) -> bool:
    """Whether a fused product of `num_rows` rows is faster than its operations one by one.

    Decided on the host, by sizes alone.

    Args:
        num_rows: Rows of the step, padding included.
        weight: [out, in].
    """
    if not uses_triton(weight) or num_rows < 1:
        return False
    if num_rows > _MOST_ROWS.get(weight.dtype, 0):
        return stream_rule(num_rows, weight) is not None
    # The kernels read 16 bytes at a time.
    return weight.is_contiguous() and weight.shape[1] % 8 == 0


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    is_parameter: bool = True,
) -> Tensor:
    """X W^T + b by Triton, for `linear`, whose description holds here too.

    Args:
        x: [num_rows, in], such that `fuses(num_rows, weight)`.
        weight: [out, in].
        bias: [out].
        out_dtype: Dtype of the result; None: the dtype of x.
        out: [num_rows, out] of that type, to be written; None: a new tensor.
        is_parameter: No kernel writes the weight.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    _multiply(x, weight, bias, out, is_parameter=is_parameter)
    return out


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
    is_parameter: bool = True,
) -> None:
    """A product by the kernel and tile of the rules; arguments are those of `multiply_streams`."""
    streams = stream_rule(x.shape[0], weight, gated)
    if streams is None:
        early = launches_early(x.shape[0], weight, is_parameter)
        tile = launch_rule(x.shape[0], out.shape[1], x.shape[1], gated, early)
        multiply(x, weight, bias, out, tile, norm, gated, add, early)
    else:
        if norm is not None and not _norms_inside(x, streams, gated):
            x, norm = rms_norm(x, *norm), None
        multiply_streams(x, weight, bias, out, streams, norm, gated, add, is_parameter)


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Specification of `norm_linear`, in plain PyTorch."""
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
    _multiply(x, weight, bias, out, norm=(norm_weight, eps))
    return out


def linear_add_reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Specification of `linear_add`, in plain PyTorch."""
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
    _multiply(x, weight, bias, residual, add=True)


def norm_swiglu_reference(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Specification of `norm_swiglu`, in plain PyTorch."""
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
    _multiply(x, gate_up_weight, bias, out, norm=(norm_weight, eps), gated=True)
    return out
