"""The GEMM of FP8 weights and tokens rounded to e4m3, for sm_90.

It is for some tens to some hundreds of rows, and GPUs whose warp groups multiply FP8: as fast
as the weight comes from memory.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying;
`gemm_fp8` says what the product is, and which runs when is `linear.quantized`'s.

Y^T = W X^T, so that outputs take the 64 rows of an instruction and tokens its columns. A step is
128 inputs of BLOCK_N outputs and of BLOCK_M tokens, which the copy engine brings to shared memory
SLOTS - 1 steps ahead, as they lie in memory (`hopper.ring`). Programs share the line of all steps
out, and add each step's products in fp32 (`hopper.stream_k`).

With few rows a program starts while the kernel before still runs, and has its first steps' weight
copied before it waits for what that kernel writes (`dense_small_batch_sm90`).
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
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from headrace_kernels import card
from headrace_kernels.hopper import stream_k
from headrace_kernels.hopper.launch import BARRIER_BYTES, aligned, programs_at_a_time, tile_descriptor
from headrace_kernels.hopper.ring import (
    advance,
    grid_before_is_done,
    grid_behind_may_start,
    new_barriers,
    publish_barriers,
    slot_before,
)
from headrace_kernels.hopper.stream_k import add_products, end_pieces, finish
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

# Inputs that are multiplied before their sums are added in fp32: as many bytes as the copy engine's
# widest pattern has.
_STEP_INPUTS = 128
# Rows up to which a product starts early: a step of an 8B Llama takes an H200 4.62 ms so with 64
# rows, and 4.72 otherwise; with 128 rows 6.38 and 6.30 (docs/experiments.md, "one copy for a step
# of few rows").
_MOST_EARLY_ROWS = 64


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
    def slot_bytes(self) -> int:
        """Shared memory of a program without barriers."""
        return self.slots * _STEP_INPUTS * (self.block_n + self.block_m)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        return self.slot_bytes + BARRIER_BYTES

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
        return programs_at_a_time(self.num_warps, 128 if sums <= 64 else 255, self.slot_bytes)


@gluon.jit
def _copy_weight(
    weight_desc, arrived, weight_smem, slot, first_n, k, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """A step's weight: 128 inputs from k on. Outputs beyond the end come as zeros."""
    mbarrier.expect(arrived.index(slot), 128 * (BLOCK_N + BLOCK_M))
    tma.async_copy_global_to_shared(weight_desc, [first_n, k], arrived.index(slot), weight_smem.index(slot))


@gluon.jit
def _copy_tokens(token_desc, arrived, token_smem, slot, first_m, k):
    """A step's inputs of all tokens; those beyond the end come as zeros."""
    tma.async_copy_global_to_shared(token_desc, [first_m, k], arrived.index(slot), token_smem.index(slot))


@gluon.jit
def _next_step(first_n, k, num_inputs, BLOCK_N: gl.constexpr):
    """First output and input of the next step on the line of steps."""
    k += 128
    return gl.where(k == num_inputs, first_n + BLOCK_N, first_n), gl.where(k == num_inputs, 0, k)


@gluon.jit(do_not_specialize=["M", "N", "steps", "share"])
def _gemm_fp8_kernel(
    weight_desc, token_desc, token_scale_ptr, scale_ptr, bias_ptr, out_ptr,
    M, N, steps, share,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr,
    OVERLAPS: gl.constexpr, SPLIT: gl.constexpr, EARLY: gl.constexpr,
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
    arrived = new_barriers(SLOTS)
    publish_barriers()
    # Where the next step is that is copied.
    ahead_n = first // steps * BLOCK_N
    ahead_k = first % steps * 128
    for place in gl.static_range(SLOTS - 1):
        if first + place < last:
            _copy_weight(weight_desc, arrived, weight_smem, place, ahead_n, ahead_k, BLOCK_N, BLOCK_M)
        ahead_n, ahead_k = _next_step(ahead_n, ahead_k, steps * 128, BLOCK_N)
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    for place in gl.static_range(SLOTS - 1):
        if first + place < last:
            _copy_tokens(token_desc, arrived, token_smem, place, first_m, (first + place) % steps * 128)
    slot = 0
    phase = 0
    for tile in range(first // steps, (last + (steps - 1)) // steps):
        totals = ()
        for _part in gl.static_range(PARTS):
            totals = totals + (gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout=MMA),)
        for step in range(gl.maximum(first, tile * steps), gl.minimum(last, (tile + 1) * steps)):
            mbarrier.wait(arrived.index(slot), phase)
            # All warps are through with the slot before this one.
            gl.thread_barrier()
            free_slot = slot_before(slot, SLOTS)
            if step + (SLOTS - 1) < last:
                _copy_weight(weight_desc, arrived, weight_smem, free_slot, ahead_n, ahead_k, BLOCK_N, BLOCK_M)
                _copy_tokens(token_desc, arrived, token_smem, free_slot, first_m, ahead_k)
            ahead_n, ahead_k = _next_step(ahead_n, ahead_k, steps * 128, BLOCK_N)
            totals = add_products(
                weight_smem, token_smem, totals, None, slot, MMA, BLOCK_N, COLUMNS, PARTS, OVERLAPS, True
            )
            slot, phase = advance(slot, phase, SLOTS)
        piece = program - tile * steps // share
        for part in gl.static_range(PARTS):
            finish(
                totals[part], token_scale_ptr, scale_ptr, bias_ptr, out_ptr, piece, first_m + part * COLUMNS,
                tile * BLOCK_N, M, N, BLOCK_N, COLUMNS, SPLIT, MMA,
            )  # fmt: skip


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
    places = multiprocessors * tile.programs_at_a_time() // triton.cdiv(num_rows, tile.block_m)
    tiles = triton.cdiv(num_outputs, tile.block_n)
    return stream_k.shared_out(num_inputs // _STEP_INPUTS, tiles, tile.splits, places)


def multiply_gemm_fp8(
    tokens: RoundedTokens, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, tile: Fp8GemmTile
) -> None:
    """X W^T + b as `gemm_fp8.scaled_linear_reference` says.

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
    steps, early = num_inputs // _STEP_INPUTS, num_rows <= _MOST_EARLY_ROWS
    share, pieces = shared_out(tile, num_rows, num_outputs, num_inputs, card.multiprocessors(weight.device))
    target = out if pieces == 1 else out.new_empty(pieces, num_rows, num_outputs, dtype=torch.float32)
    programs = triton.cdiv(triton.cdiv(num_outputs, tile.block_n) * steps, share)
    # Programs of the same outputs follow each other, so that their weight is read from memory once.
    _gemm_fp8_kernel[(triton.cdiv(num_rows, tile.block_m), programs)](
        tile_descriptor(aligned(weight.packed), tile.block_n, _STEP_INPUTS),
        tile_descriptor(aligned(tokens.numbers), tile.block_m, _STEP_INPUTS),
        tokens.scales, weight.scales, bias, target,
        num_rows, num_outputs, steps, share,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, COLUMNS=tile.columns, SLOTS=tile.slots,
        OVERLAPS=tile.overlaps, SPLIT=pieces > 1, EARLY=early, num_warps=tile.num_warps, maxnreg=None,
        launch_pdl=early,
    )  # fmt: skip
    if pieces > 1:
        end_pieces(target, tokens.scales, weight.scales, bias, out, steps, share, tile.block_n, early)


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
