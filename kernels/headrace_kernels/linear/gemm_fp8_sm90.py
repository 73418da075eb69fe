"""The GEMM of FP8 weights and tokens rounded to e4m3, for sm_90.

It is for some tens to some hundreds of rows, and GPUs whose warp groups multiply FP8: as fast
as the weight comes from memory.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying;
`fp8_activations` says what the product is, and which runs when is `linear.quantized`'s.

Y^T = W X^T, so that outputs take the 64 rows of an instruction and tokens its columns. A step is
128 inputs of BLOCK_N outputs and of BLOCK_M tokens, which the copy engine brings to shared memory
SLOTS - 1 steps ahead, as they lie in memory. The steps of all tiles of outputs are one line, tile
after tile, and a program does a share of it: some tiles whole, a part of one, or the end of one and
the beginning of the next, so that every multiprocessor reads as much of the weight whatever its
sizes. Hopper's sums of FP8 products keep 14 bits, so those of a step begin at 0 and are added in
fp32. Where each tile is one program's, it stores results; otherwise sums of pieces go to memory,
and `_end_kernel` adds them in the order of the inputs. Sums so depend on the tile alone.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace_kernels import card
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Inputs that are multiplied before their sums are added in fp32: as many bytes as the copy engine's
# widest pattern has.
_STEP_INPUTS = 128
# Shared memory of a program of sm_90, and beside its slots: barriers.
_SHARED_BYTES = 227 << 10
_BARRIER_BYTES = 1 << 10
# Results of a program of the kernel that ends a product in pieces.
_END_OUTPUTS = 1024


class Fp8GemmTile(NamedTuple):
    """How a product is cut."""

    # Outputs of a step: 64 or more for every four warps.
    block_n: int
    # Tokens of a program.
    block_m: int
    # Tokens that are multiplied at a time: sums of a step are registers beside those of all.
    columns: int
    num_warps: int
    # Steps in shared memory, at least 2.
    slots: int
    # A program does this part of a tile's steps; 0: the line of steps is cut into as many equal
    # shares as programs run at a time.
    splits: int = 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a program takes."""
        return self.slots * _STEP_INPUTS * (self.block_n + self.block_m) + _BARRIER_BYTES

    @property
    def overlaps(self) -> bool:
        """Whether there are registers for the sums of two products.

        Then one is added up while the next is under way.
        """
        sums = self.block_n * (self.block_m + 2 * self.columns) // (32 * self.num_warps)
        return self.columns < self.block_m and sums <= 160

    def programs_at_a_time(self) -> int:
        """Programs that a multiprocessor of sm_90 holds, by registers and shared memory."""
        sums = self.block_n * (self.block_m + self.columns) // (32 * self.num_warps)
        by_registers = 65_536 // (32 * self.num_warps * (128 if sums <= 64 else 255))
        return max(1, min(by_registers, (_SHARED_BYTES + _BARRIER_BYTES) // self.shared_bytes))


@gluon.jit
def _copy_step(
    weight_desc, token_desc, arrived, weight_smem, token_smem, slot, first_n, first_m, k,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """128 inputs from k on. Outputs and tokens beyond the end come as zeros."""
    mbarrier.expect(arrived.index(slot), 128 * (BLOCK_N + BLOCK_M))
    tma.async_copy_global_to_shared(weight_desc, [first_n, k], arrived.index(slot), weight_smem.index(slot))
    tma.async_copy_global_to_shared(token_desc, [first_m, k], arrived.index(slot), token_smem.index(slot))


@gluon.jit
def _next_step(first_n, k, num_inputs, BLOCK_N: gl.constexpr):
    """First output and input of the next step on the line of steps."""
    k += 128
    return gl.where(k == num_inputs, first_n + BLOCK_N, first_n), gl.where(k == num_inputs, 0, k)


@gluon.jit
def _products(
    weight_smem, token_smem, totals, slot,
    MMA: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Adds a step's products to the sums of all parts of the tokens."""
    added = ()
    before = totals[0]
    for part in gl.static_range(PARTS):
        tokens = token_smem.index(slot).slice(part * COLUMNS, COLUMNS, 0).permute((1, 0))
        # Not read: the first instruction of a product begins at 0.
        nothing = gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout=MMA)
        product = warpgroup_mma(weight_smem.index(slot), tokens, nothing, use_acc=False, is_async=True)
        if OVERLAPS:
            if part > 0:
                # The part before is multiplied, this one may be under way.
                added = added + (totals[part - 1] + warpgroup_mma_wait(1, deps=[before]),)
            before = product
        else:
            added = added + (totals[part] + warpgroup_mma_wait(0, deps=[product]),)
    if OVERLAPS:
        added = added + (totals[PARTS - 1] + warpgroup_mma_wait(0, deps=[before]),)
    return added


@gluon.jit(do_not_specialize=["M", "N", "steps", "share"])
def _gemm_fp8_kernel(
    weight_desc, token_desc, token_scale_ptr, scale_ptr, bias_ptr, out_ptr,
    M, N, steps, share,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr,
    OVERLAPS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_M tokens and `share` steps of the line, in which each tile has `steps`.

    If tiles are SPLIT, `out` is fp32 [pieces, M, N] of sums.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 32])
    PARTS: gl.constexpr = BLOCK_M // COLUMNS
    first_m = gl.program_id(0) * BLOCK_M
    program = gl.program_id(1)
    first = program * share
    last = gl.minimum(first + share, (N + (BLOCK_N - 1)) // BLOCK_N * steps)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [SLOTS, BLOCK_N, 128], weight_desc.layout)
    token_smem = gl.allocate_shared_memory(token_desc.dtype, [SLOTS, BLOCK_M, 128], token_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(place), count=1)
    # The copy engine sees them.
    fence_async_shared()
    gl.thread_barrier()
    # Where the next step is that is copied.
    ahead_n = first // steps * BLOCK_N
    ahead_k = first % steps * 128
    for place in gl.static_range(SLOTS - 1):
        if first + place < last:
            _copy_step(
                weight_desc,
                token_desc,
                arrived,
                weight_smem,
                token_smem,
                place,
                ahead_n,
                first_m,
                ahead_k,
                BLOCK_N,
                BLOCK_M,
            )
        ahead_n, ahead_k = _next_step(ahead_n, ahead_k, steps * 128, BLOCK_N)
    slot = 0
    # Of a slot's barrier: whether steps have come to it an odd number of times.
    phase = 0
    for tile in range(first // steps, (last + (steps - 1)) // steps):
        totals = ()
        for _part in gl.static_range(PARTS):
            totals = totals + (gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout=MMA),)
        for step in range(gl.maximum(first, tile * steps), gl.minimum(last, (tile + 1) * steps)):
            mbarrier.wait(arrived.index(slot), phase)
            # All warps are through with the slot before this one.
            gl.thread_barrier()
            free_slot = gl.where(slot == 0, SLOTS - 1, slot - 1)
            if step + (SLOTS - 1) < last:
                _copy_step(
                    weight_desc,
                    token_desc,
                    arrived,
                    weight_smem,
                    token_smem,
                    free_slot,
                    ahead_n,
                    first_m,
                    ahead_k,
                    BLOCK_N,
                    BLOCK_M,
                )
            ahead_n, ahead_k = _next_step(ahead_n, ahead_k, steps * 128, BLOCK_N)
            totals = _products(weight_smem, token_smem, totals, slot, MMA, BLOCK_N, COLUMNS, PARTS, OVERLAPS)
            phase = gl.where(slot == SLOTS - 1, 1 - phase, phase)
            slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
        piece = program - tile * steps // share
        for part in gl.static_range(PARTS):
            _finish(
                totals[part],
                token_scale_ptr,
                scale_ptr,
                bias_ptr,
                out_ptr,
                piece,
                first_m + part * COLUMNS,
                tile * BLOCK_N,
                M,
                N,
                BLOCK_N,
                COLUMNS,
                SPLIT,
                MMA,
            )


@gluon.jit
def _finish(
    total, token_scale_ptr, scale_ptr, bias_ptr, out_ptr, piece, first_m, first_n, M, N,
    BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, SPLIT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA)), 1)
    m = gl.expand_dims(first_m + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA)), 0)
    mask = (m < M) & (n < N)
    if SPLIT:
        # Eight outputs of four bytes are a sector: no other layout would store better.
        gl.store(out_ptr + piece.to(gl.int64) * M * N + (m * N + n), total, mask=mask)
    else:
        total = total * gl.load(token_scale_ptr + m, mask=m < M, other=0.0)
        total = total * gl.load(scale_ptr + n, mask=n < N, other=0.0)
        if bias_ptr is not None:
            total += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        # Half sectors, which the cache puts together: another layout would take shared memory that
        # steps are copied to.
        gl.store(out_ptr + (m * N + n), total.to(out_ptr.dtype.element_ty), mask=mask)


# N is a multiple of 16, and vectors are loaded.
@triton.jit(do_not_specialize=["M", "steps", "share"])
def _end_kernel(
    sums_ptr, token_scale_ptr, scale_ptr, bias_ptr, out_ptr, M, N, steps, share,
    PIECES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds [PIECES, M, N] in order; most tiles have fewer pieces, and others are not read."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = n // BLOCK_N
    pieces = ((tile + 1) * steps - 1) // share - tile * steps // share + 1
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        total += tl.load(sums_ptr + (piece * M + row) * N + n, mask=(n < N) & (piece < pieces), other=0.0)
    total = total * tl.load(token_scale_ptr + row)
    if scale_ptr is not None:
        total = total * tl.load(scale_ptr + n, mask=n < N, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def takes_gemm_fp8(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    Of the weights that `gemm_fp8.can_scale` it takes FP8 with scales of outputs, and inputs of
    whole steps.
    """
    return (
        card.has_warpgroup_instructions(weight.device)
        and weight.kind is QuantKind.FP8
        and not weight.is_grouped
        and weight.num_inputs % _STEP_INPUTS == 0
        # Rows of results begin where the copy engine and vectors of stores may.
        and weight.num_outputs % 16 == 0
    )


@functools.cache
def shared_out(
    tile: Fp8GemmTile, num_rows: int, num_outputs: int, num_inputs: int, multiprocessors: int
) -> tuple[int, int]:
    """Steps of a program, and the most pieces that a tile of outputs so has.

    Asked by every launch, and few sizes ask.
    """
    steps, tiles = num_inputs // _STEP_INPUTS, triton.cdiv(num_outputs, tile.block_n)
    if tile.splits:
        share = triton.cdiv(steps, tile.splits)
    else:
        places = multiprocessors * tile.programs_at_a_time() // triton.cdiv(num_rows, tile.block_m)
        share = triton.cdiv(tiles * steps, max(1, places))
    return share, max(((each + 1) * steps - 1) // share - each * steps // share + 1 for each in range(tiles))


def _descriptor(numbers: Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine reads `rows` rows of a step from."""
    numbers = numbers if numbers.is_contiguous() and numbers.data_ptr() % 16 == 0 else numbers.contiguous().clone()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(numbers, [rows, _STEP_INPUTS], layout)


def multiply_gemm_fp8(
    tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, tile: Fp8GemmTile
) -> None:
    """X W^T + b as `fp8_activations.scaled_linear_reference` says.

    Args:
        tokens: [num_rows, K] in e4m3.
        weight: One that the kernel `takes_gemm_fp8`.
        bias: [N].
        out: [num_rows, N], written.
        tile: The sizes.
    """
    (num_rows, num_inputs), num_outputs = tokens.numbers.shape, weight.num_outputs
    assert num_inputs == weight.num_inputs and out.shape == (num_rows, num_outputs) and out.is_contiguous()
    assert tokens.numbers.dtype == torch.float8_e4m3fn and num_inputs % _STEP_INPUTS == 0 and tile.slots >= 2
    assert tile.block_n % (16 * tile.num_warps) == 0 and tile.block_m % tile.columns == 0
    assert num_rows * num_outputs < 1 << 31
    steps = num_inputs // _STEP_INPUTS
    share, pieces = shared_out(tile, num_rows, num_outputs, num_inputs, card.multiprocessors(weight.device))
    target = out if pieces == 1 else out.new_empty(pieces, num_rows, num_outputs, dtype=torch.float32)
    programs = triton.cdiv(triton.cdiv(num_outputs, tile.block_n) * steps, share)
    # Programs of the same outputs follow each other, so that their weight is read from memory once.
    _gemm_fp8_kernel[(triton.cdiv(num_rows, tile.block_m), programs)](
        _descriptor(weight.packed, tile.block_n), _descriptor(tokens.numbers, tile.block_m), tokens.scales,
        weight.scales, bias, target,
        num_rows, num_outputs, steps, share,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, COLUMNS=tile.columns, SLOTS=tile.slots,
        OVERLAPS=tile.overlaps, SPLIT=pieces > 1, num_warps=tile.num_warps, maxnreg=None,
    )  # fmt: skip
    if pieces > 1:
        _end_kernel[(triton.cdiv(num_outputs, _END_OUTPUTS), num_rows)](
            target, tokens.scales, weight.scales, bias, out, num_rows, num_outputs, steps, share,
            PIECES=pieces, BLOCK_N=tile.block_n, BLOCK=_END_OUTPUTS,
        )  # fmt: skip


# Outputs, tokens, tokens at a time, warps, slots, by the most rows that they are for.
_VARIANTS = {
    64: [(128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (256, 64, 64, 8, 5), (128, 64, 64, 8, 8), (64, 64, 64, 4, 4)],
    128: [
        (128, 128, 128, 8, 6),
        (128, 128, 64, 8, 6),
        (256, 128, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (64, 128, 128, 4, 4),
    ],
    256: [
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 4),
        (128, 128, 128, 8, 6),
        (128, 128, 64, 8, 6),
        (128, 128, 64, 4, 3),
    ],
}


def fitted(tile: Fp8GemmTile, num_rows: int, num_outputs: int, num_inputs: int, multiprocessors: int) -> Fp8GemmTile:
    """The tile with splits for a weight.

    Where it names 1 split, there are as many as one wave of programs has room for; where 2, half
    as many.

    Equal shares (0) are left as they are.
    """
    if tile.splits == 0:
        return tile
    places = multiprocessors * tile.programs_at_a_time() // tile.splits
    tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outputs, tile.block_n)
    return tile._replace(splits=max(1, min(places // tiles, num_inputs // _STEP_INPUTS)))


def gemm_fp8_variants(num_rows: int, weight: QuantizedWeight) -> list[Fp8GemmTile]:
    """Tiles that are worth timing for up to 256 rows.

    They have splits for a wave and for half of one, and equal shares.
    """
    sizes = (num_rows, weight.num_outputs, weight.num_inputs, card.multiprocessors(weight.device))
    found: list[Fp8GemmTile] = []
    for tile in itertools.starmap(Fp8GemmTile, _VARIANTS[min(most for most in _VARIANTS if most >= num_rows)]):
        found += dict.fromkeys(fitted(tile._replace(splits=each), *sizes) for each in (1, 2, 0))
    return found
