"""The Triton kernels behind `dense_small_batch`.

A product of a few rows reads its weight from memory once.

Owns the kernels, their launch, and the list of tile sizes that are worth trying; which of them runs
when is `small_linear`'s. Weights are [out, in] with `in` contiguous.

`_vector_kernel` multiplies on the ordinary cores: each thread keeps its own products of every row
in registers and the sum over them comes last. It is for one row, two or four. It may be launched
early (`early_launch`): then a program asks for as many of its weights as registers hold, and only
then waits for the kernel before, which wrote x. So a weight is on its way while attention computes.
`_tile_kernel` uses the tensor cores with the rows padded to 16, so that up to 16 rows cost the
same. All end in `finish`: bias, SwiGLU or residual stream, one rounding, store. Sums are in fp32
and in an order that depends on the tile alone: no atomics, the same bits every time.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.triton_runtime import INTERPRETED

# Rows of the tensor cores' tile. More rows than this are not small.
MAX_ROWS = 16
# Inputs that a warp loads at once, 16 bytes a thread. With more warps loads would be shorter.
_WARP_INPUTS = 256
# Registers of a thread for weights that a product launched early asks for before it waits: a
# quarter of those that there are.
AHEAD_REGISTERS = 64


class Tile(NamedTuple):
    """How a product is cut: which kernel, and the sizes of a program's part."""

    # `vector` or `tile`.
    kernel: str
    # Outputs of one program (with SwiGLU as many again, for the gate).
    block_n: int
    # Inputs that are multiplied at a time.
    block_k: int
    num_warps: int
    # Tiles that are loaded ahead; `tile` only.
    num_stages: int = 1
    # Parts of block_k that are summed apart, by different warps, and added at the end; `tile` only.
    slices: int = 1


@triton.jit
def finish(y, up, m, n, bias_ptr, out_ptr, M, N, GATED: tl.constexpr, ADD: tl.constexpr):
    """Makes the result of the sums y (and up) at rows m and outputs n, and stores it.

    m and n broadcast to the shape of the sums.
    """
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    places = out_ptr + m * N + n
    mask = (m < M) & (n < N)
    if ADD:
        y += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def stream_at(m, n, out_ptr, M, N):
    """The residual stream at rows m and outputs n, fp32, which stands in `out_ptr`.

    A kernel that adds to it asks for it before its sums, so that nothing waits for it behind them.
    """
    return tl.load(out_ptr + m * N + n, mask=(m < M) & (n < N), other=0.0).to(tl.float32)


@triton.jit
def _weight_block(rows, k, offs_k, gate_size, K: tl.constexpr, GATED: tl.constexpr):
    """Inputs k + offs_k of rows, and of the ups to those gates; without GATED the same twice."""
    mask = k + offs_k < K
    w = tl.load(rows + k, mask=mask, other=0.0, eviction_policy="evict_first")
    w_up = w
    if GATED:
        w_up = tl.load(rows + gate_size + k, mask=mask, other=0.0, eviction_policy="evict_first")
    return w, w_up


@triton.jit(do_not_specialize=["M", "N"])
def _vector_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr,
    M, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] w[n, k] for BLOCK_N outputs and all rows.

    With norm_ptr = g, x is x g / rms(x). AHEAD: blocks of a weight that no kernel writes which the
    kernel, launched early, asks for before it waits; 0: launched as usual.

    The norm needs no pass of its own: y = (sum_k x g w) / sqrt(sum_k x^2 / K + eps), both sums over
    the same loads of x.
    """
    # Outputs and rows beyond the end repeat the last one, and are not stored.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    offs_w = tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K + offs_k
    offs_x = tl.minimum(m, M - 1)[:, None, None] * K + offs_k
    products = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    up_products = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, 1, BLOCK_K], tl.float32)
    gate_size = N.to(tl.int64) * K
    ahead = ()
    if AHEAD:
        for k in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
            ahead = ahead + (_weight_block(weight_ptr + offs_w, k, offs_k, gate_size, K, GATED),)
        grid_behind_may_start()
        grid_before_is_done()
    residual = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if AHEAD and ADD:
        residual = stream_at(m[:, None], n[None, :], out_ptr, M, N)
    # Unrolled, so that the loads of several tiles are under way at once.
    for k in tl.static_range(0, K, BLOCK_K):
        mask = k + offs_k < K
        if AHEAD:
            w, w_up = ahead[k // BLOCK_K]
        else:
            w, w_up = _weight_block(weight_ptr + offs_w, k, offs_k, gate_size, K, GATED)
        x = tl.load(x_ptr + offs_x + k, mask=mask, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x = x * tl.load(norm_ptr + offs_k + k, mask=mask, other=0.0).to(tl.float32)
        products += x * w.to(tl.float32)
        if GATED:
            up_products += x * w_up.to(tl.float32)
        if AHEAD and k + AHEAD * BLOCK_K < K:
            following = _weight_block(weight_ptr + offs_w, k + AHEAD * BLOCK_K, offs_k, gate_size, K, GATED)
            ahead = ahead + (following,)
    y, up = tl.sum(products, 2), tl.sum(up_products, 2)
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        y, up = y * rstd, up * rstd
    finish(y + residual, up, m[:, None], n[None, :], bias_ptr, out_ptr, M, N, GATED, ADD and not AHEAD)


@triton.jit
def _sliced_dot(w, x, total, FP32_DOT: tl.constexpr):
    if FP32_DOT:
        return total + tl.dot(w.to(tl.float32), x.to(tl.float32))
    return tl.dot(w, x, total)


@triton.jit(do_not_specialize=["M", "N"])
def _tile_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    M, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_N outputs and ROWS rows.

    Slice s of a tile holds its inputs s BLOCK_K / SLICES and on; each slice has sums of its own.
    """
    SLICE_K: tl.constexpr = BLOCK_K // SLICES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    slices = tl.arange(0, SLICES)[:, None, None] * SLICE_K
    ks = tl.arange(0, SLICE_K)
    k_of_w, k_of_x = (
        slices + ks[None, None, :],
        slices + ks[None, :, None],
    )  # [SLICES, 1, SLICE_K], [SLICES, SLICE_K, 1]
    w_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K + k_of_w
    x_ptrs = x_ptr + m[None, None, :] * K + k_of_x
    gate_size = N.to(tl.int64) * K
    total = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    up_total = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        mask_w = k + k_of_w < K
        # Rows that only fill the tile are not read: every program reads all of x, which adds up in
        # the cache.
        x = tl.load(x_ptrs + k, mask=(k + k_of_x < K) & (m < M)[None, None, :], other=0.0)
        w = tl.load(w_ptrs + k, mask=mask_w, other=0.0, eviction_policy="evict_first")
        total = _sliced_dot(w, x, total, FP32_DOT)
        if GATED:
            w_up = tl.load(w_ptrs + gate_size + k, mask=mask_w, other=0.0, eviction_policy="evict_first")
            up_total = _sliced_dot(w_up, x, up_total, FP32_DOT)
    finish(tl.sum(total, 0), tl.sum(up_total, 0), m[None, :], n[:, None], bias_ptr, out_ptr, M, N, GATED, ADD)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
    early: bool = False,
) -> None:
    """Multiplies few rows by a plain weight, by the kernel of their number.

    Args:
        x: [num_rows, K], at most MAX_ROWS of them.
        weight: [N, K], or [2 N, K] with the gate first. K is a multiple of 8, rows are contiguous.
        bias: One per row of weight.
        out: [num_rows, N], written, or with `add` added to.
        tile: The kernel and its sizes.
        norm: Weight and epsilon of an RMS norm of x. A kernel of its own before `tile`, whose x
            goes to the tensor cores as it lies in memory.
        gated: SwiGLU of the two halves.
        add: The result is added to `out`.
        early: `vector` only: the kernel starts while the one before it runs, with the weight, which
            no kernel writes then.
    """
    assert x.shape[0] <= MAX_ROWS and weight.shape == (out.shape[1] * (2 if gated else 1), x.shape[1])
    assert weight.is_contiguous() and out.is_contiguous()
    if tile.kernel == "vector":
        _multiply_vectors(x.contiguous(), weight, bias, out, tile, norm, gated, add, early)
    else:
        normed = x.contiguous() if norm is None else rms_norm(x, *norm)
        _multiply_tiles(normed, weight, bias, out, tile, gated, add)


def _multiply_vectors(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    norm: tuple[Tensor, float] | None,
    gated: bool,
    add: bool,
    early: bool,
) -> None:
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    norm_weight, eps = norm or (None, 0.0)
    block_k = min(tile.block_k, triton.next_power_of_2(num_inputs))
    num_warps = min(tile.num_warps, triton.cdiv(block_k, _WARP_INPUTS))
    block_bytes = tile.block_n * (2 if gated else 1) * block_k * weight.element_size()
    _vector_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        x, norm_weight, weight, bias, out, num_rows, num_outputs, eps,
        K=num_inputs, ROWS=triton.next_power_of_2(num_rows), BLOCK_N=tile.block_n, BLOCK_K=block_k,
        GATED=gated, ADD=add,
        AHEAD=loads_ahead(block_bytes, num_warps, triton.cdiv(num_inputs, block_k)) if early else 0,
        num_warps=num_warps, launch_pdl=early,
    )  # fmt: skip


def loads_ahead(load_bytes: int, num_warps: int, num_loads: int) -> int:
    """How many of a program's loads of a weight go out before it waits for the kernel before it.

    Args:
        load_bytes: Bytes of one.
        num_warps: Warps of the program.
        num_loads: How many it has, at least 1.

    Returns:
        1 to `num_loads`, and from 2 on no more than AHEAD_REGISTERS of each thread hold.
    """
    registers = load_bytes // (4 * 32 * num_warps)
    return min(num_loads, max(1, AHEAD_REGISTERS // max(1, registers)))


def _multiply_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile, gated: bool, add: bool
) -> None:
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    assert INTERPRETED or x.dtype != torch.float32, "tensor cores would cut fp32 to tf32"
    rows = 8 if num_rows <= 8 else MAX_ROWS
    stage_bytes = tile.block_k * x.element_size() * (tile.block_n * (2 if gated else 1) + rows)
    _tile_kernel[(triton.cdiv(num_outputs, tile.block_n),)](
        x, weight, bias, out, num_rows, num_outputs,
        K=num_inputs, ROWS=rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SLICES=tile.slices,
        GATED=gated, ADD=add, FP32_DOT=INTERPRETED,
        num_warps=tile.num_warps, num_stages=min(tile.num_stages, _most_stages(x.device, stage_bytes)),
    )  # fmt: skip


def _most_stages(device: torch.device, stage_bytes: int) -> int:
    """What fits the shared memory: a tile for each stage but the one that is being multiplied."""
    return 1 + card.shared_bytes(device) // stage_bytes


def variants(num_rows: int, num_outputs: int, gated: bool) -> list[Tile]:
    """Tiles that are worth timing for a product of that size.

    They keep a GPU busy and its registers free.
    """
    # (outputs, inputs, warps). Products of every row and output are held in registers, so both are
    # few.
    vectors = {
        1: [(1, 1024, 2), (1, 1024, 4), (1, 2048, 2), (1, 2048, 4), (1, 4096, 4), (2, 1024, 4), (2, 2048, 4)],
        2: [(1, 1024, 4), (1, 2048, 4), (2, 1024, 4)],
        4: [(1, 1024, 4)],
    }
    # (outputs, inputs, warps, stages, slices). A program has outputs x inputs x 2 bytes under way
    # for each stage but one, and some programs share a multiprocessor's 200 KB.
    tiles = [(16, 256, 4, 4, 4), (16, 512, 4, 3, 4), (32, 256, 4, 3, 4), (32, 256, 4, 4, 2), (64, 128, 4, 4, 1)]
    tiles += [] if gated else [(32, 256, 2, 4, 2), (64, 256, 4, 3, 2), (128, 64, 4, 5, 1)]
    # At least half a wave of programs on 132 multiprocessors.
    tiles = [sizes for sizes in tiles if num_outputs // sizes[0] >= 66 or sizes[0] == 16]
    return [Tile("vector", *sizes) for sizes in vectors.get(num_rows, [])] + [
        Tile("tile", *sizes) for sizes in tiles[2 if num_rows == 1 else 0 : 3 if num_rows == 1 else None]
    ]
