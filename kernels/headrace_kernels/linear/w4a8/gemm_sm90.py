"""The GEMM of INT4 weights and tokens rounded to e4m3, for sm_90.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying;
`linear.w4a8.products` says what the product is, and which rows take it. It is written in Gluon,
because the order of copies, conversions and products is what it is about.

Y^T = W X^T, so that outputs take the 64 rows of an instruction and tokens its columns. A weight is
w = s (q - z) with q from 0 to 15, and the byte q read as e4m3 is q 2^-9: below 8 it is a number
without a leading 1, and from 8 on the exponent's last bit is set. So four words of INT4 become four
weights by a shift, a permutation of bytes and a mask, exact, in the registers that the tensor cores
read them from.

A step is the 4 P inputs of a tile of words (P is the layout's plane: 128 or 64), four sub-steps of
P inputs, each within one group. For each, the tensor cores sum q x over its P inputs, beginning at
0, because Hopper's sums of FP8 products keep 14 bits; the sum is scaled by the group's s and added
in fp32. What zero points take off, the sum over groups of s z (sum of the group's x), is a product
of its own, of 8 inputs a step in tf32, with the sums of tokens that `token_sums` makes.

The copy engine brings tokens three sub-steps ahead, words and sums of tokens a step
(`hopper.ring`). Programs share the line of all steps out (`hopper.stream_k`).
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from headrace_kernels import card
from headrace_kernels.hopper import stream_k
from headrace_kernels.hopper.launch import programs_at_a_time, tile_descriptor
from headrace_kernels.hopper.ring import begin_product, new_barriers, publish_barriers
from headrace_kernels.hopper.stream_k import add_products, added_here, end_pieces, finish
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, plane_inputs

# Sub-steps of a step, and tiles of tokens in shared memory: slot i holds sub-step i of a step.
_PARTS = 4
# Steps of the weight in shared memory.
_WORD_SLOTS = 2
# Numbers of a step's row in the sums of tokens: four groups and as many zeros.
SUMS_OF_STEP = 8


class W4A8Tile(NamedTuple):
    """How a product is cut."""

    # Outputs of a step: 64 for every four warps.
    block_n: int
    # Tokens of a program.
    block_m: int
    # Tokens that are multiplied at a time: sums of a sub-step are registers beside those of all.
    columns: int
    num_warps: int
    # Whether the sums of two such products are held, so that one is added while the next runs.
    overlaps: bool
    # A program does this part of a tile's steps; 0: the line of steps is cut into as many equal
    # shares as programs run at a time.
    splits: int = 0

    def slot_bytes(self, plane: int) -> int:
        """Shared memory of a program without barriers."""
        tokens = _PARTS * self.block_m * plane
        return tokens + _WORD_SLOTS * (self.block_n * plane * 2 + self.block_m * SUMS_OF_STEP * 4)

    def programs_at_a_time(self, plane: int) -> int:
        """Programs that a multiprocessor of sm_90 holds, by registers and shared memory."""
        return programs_at_a_time(self.num_warps, 255, self.slot_bytes(plane))


@gluon.jit
def _copy_tokens(desc, arrived, smem, slot: gl.constexpr, first_m, k, BYTES: gl.constexpr):
    """One sub-step's tokens, from input k on."""
    mbarrier.expect(arrived.index(slot), BYTES)
    tma.async_copy_global_to_shared(desc, [first_m, k], arrived.index(slot), smem.index(slot))


@gluon.jit
def _copy_words(
    word_desc, sum_desc, arrived, word_smem, sum_smem, slot, first_n, first_m, step,
    PLANE: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """One step's words, and its sums of tokens."""
    mbarrier.expect(arrived.index(slot), BYTES)
    tma.async_copy_global_to_shared(word_desc, [first_n, step * PLANE], arrived.index(slot), word_smem.index(slot))
    tma.async_copy_global_to_shared(sum_desc, [first_m, step * 8], arrived.index(slot), sum_smem.index(slot))


@gluon.jit
def _bytes(words, HIGH: gl.constexpr):
    """The low or the high bytes of words: nibbles 0 and 1, or 2 and 3."""
    TAKEN: gl.constexpr = "prmt.b32 $0, $1, $2, 0x7531;" if HIGH else "prmt.b32 $0, $1, $2, 0x6420;"
    return gl.inline_asm_elementwise(TAKEN, "=r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def _weights(pairs, HIGH: gl.constexpr):
    """Nibbles of bytes as weights q 2^-9."""
    SHIFTED: gl.constexpr = "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }"
    NIBBLES: gl.constexpr = SHIFTED if HIGH else "and.b32 $0, $1, 0x0F0F0F0F;"
    return gl.inline_asm_elementwise(NIBBLES, "=r,r", [pairs], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _found_here(number):
    """The number, from which nothing is computed before this place.

    The compiler would find the places of all results before the loop, and hold them in registers
    that sums need.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _less_zero_points(
    totals, sum_smem, slot, zeros,
    MMA: gl.constexpr, TF32: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Takes a step's zero points off: adds the product of -s z and the sums of tokens."""
    less = ()
    for part in gl.static_range(PARTS):
        sums = sum_smem.index(slot).slice(part * COLUMNS, COLUMNS, 0).permute((1, 0))
        product = begin_product(zeros, sums, BLOCK_N, COLUMNS, TF32)
        less = less + (added_here(totals[part], gl.convert_layout(warpgroup_mma_wait(0, deps=[product]), MMA), 1.0),)
    return less


@gluon.jit(do_not_specialize=["M", "steps", "share"])
def _gemm_w4a8_kernel(
    word_desc, token_desc, sum_desc, token_scale_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    M, N, steps, share,
    GROUP_PLANES: gl.constexpr, PLANE: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, OVERLAPS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_M tokens and `share` steps of the line; each tile has `steps`.

    If tiles are SPLIT, `out` is fp32 [pieces, M, N] of sums.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 32])
    TF32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ZEROS: gl.constexpr = gl.DotOperandLayout(0, TF32, 1)
    PARTS: gl.constexpr = BLOCK_M // COLUMNS
    TOKEN_BYTES: gl.constexpr = BLOCK_M * PLANE
    WORD_BYTES: gl.constexpr = BLOCK_N * PLANE * 2 + BLOCK_M * 32
    first_m = gl.program_id(0) * BLOCK_M
    program = gl.program_id(1)
    first = program * share
    last = gl.minimum(first + share, (N + (BLOCK_N - 1)) // BLOCK_N * steps)
    word_smem = gl.allocate_shared_memory(word_desc.dtype, [2, BLOCK_N, PLANE], word_desc.layout)
    token_smem = gl.allocate_shared_memory(token_desc.dtype, [4, BLOCK_M, PLANE], token_desc.layout)
    sum_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, 8], sum_desc.layout)
    words_arrived = new_barriers(2)
    tokens_arrived = new_barriers(4)
    publish_barriers()
    if first < last:
        _copy_words(
            word_desc, sum_desc, words_arrived, word_smem, sum_smem, 0,
            first // steps * BLOCK_N, first_m, first % steps, PLANE, WORD_BYTES,
        )  # fmt: skip
        for part in gl.static_range(3):
            k = (first % steps * 4 + part) * PLANE
            _copy_tokens(token_desc, tokens_arrived, token_smem, part, first_m, k, TOKEN_BYTES)
    word_slot = 0
    # Whether as many steps as words have come to a slot of words, and to those of tokens, is odd.
    word_phase = 0
    token_phase = 0
    for tile in range(first // steps, (last + (steps - 1)) // steps):
        n = gl.minimum(tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA)), N - 1)
        n_zeros = gl.minimum(tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ZEROS)), N - 1)
        group_of_step = gl.arange(0, 8, layout=gl.SliceLayout(0, ZEROS))
        totals = ()
        for _part in gl.static_range(PARTS):
            totals = totals + (gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout=MMA),)
        for step in range(gl.maximum(first, tile * steps), gl.minimum(last, (tile + 1) * steps)):
            inner = step - tile * steps
            # Of the step's four groups; the other four columns meet sums of 0.
            groups = (inner * 4 + group_of_step % 4) // GROUP_PLANES
            places = gl.expand_dims(groups, 0) * N + gl.expand_dims(n_zeros, 1)
            zeros = gl.load(scale_ptr + places).to(gl.float32) * -gl.load(zero_ptr + places).to(gl.float32)
            mbarrier.wait(words_arrived.index(word_slot), word_phase)
            for part in gl.static_range(4):
                # q is multiplied as q 2^-9.
                scales = gl.load(scale_ptr + (inner * 4 + part) // GROUP_PLANES * N + n).to(gl.float32) * 512.0
                mbarrier.wait(tokens_arrived.index(part), token_phase)
                # All warps are through with the sub-step before this one, and at the first with the
                # words of the step before.
                gl.thread_barrier()
                if part == 0:
                    following = step + 1
                    if following < last:
                        _copy_words(
                            word_desc, sum_desc, words_arrived, word_smem, sum_smem, 1 - word_slot,
                            following // steps * BLOCK_N, first_m, following % steps, PLANE, WORD_BYTES,
                        )  # fmt: skip
                ahead = step + (part + 3) // 4
                if ahead < last:
                    k = (ahead % steps * 4 + (part + 3) % 4) * PLANE
                    _copy_tokens(token_desc, tokens_arrived, token_smem, (part + 3) % 4, first_m, k, TOKEN_BYTES)
                if part % 2 == 0:
                    # Twice, so that half as many registers hold them.
                    pairs = _bytes(word_smem.index(word_slot).load(LEFT), part == 2)
                w = _weights(pairs, part % 2 == 1)
                totals = add_products(
                    w, token_smem, totals, gl.expand_dims(scales, 1), _found_here(part), MMA, BLOCK_N, COLUMNS, PARTS,
                    OVERLAPS,
                )  # fmt: skip
            totals = _less_zero_points(totals, sum_smem, word_slot, zeros, MMA, TF32, BLOCK_N, COLUMNS, PARTS)
            word_phase = gl.where(word_slot == 1, 1 - word_phase, word_phase)
            word_slot = 1 - word_slot
            token_phase = 1 - token_phase
        piece = program - tile * steps // share
        for part in gl.static_range(PARTS):
            finish(
                totals[part], token_scale_ptr, bias_ptr, out_ptr, piece, _found_here(first_m + part * COLUMNS),
                tile * BLOCK_N, M, _found_here(N), BLOCK_N, COLUMNS, SPLIT, MMA,
            )  # fmt: skip


def takes_w4a8_gemm(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes groups of 64 inputs and more, inputs of whole steps, and rows of results that begin
    where vectors of stores may.
    """
    if not card.has_warpgroup_instructions(weight.device) or weight.kind is not QuantKind.INT4:
        return False
    plane = plane_inputs(weight.num_inputs, weight.group_size)
    return (
        plane >= 64
        and weight.num_inputs % (4 * plane) == 0
        and weight.num_outputs % 16 == 0
        and weight.dtype.itemsize == 2
    )


@functools.cache
def shared_out(
    tile: W4A8Tile, num_rows: int, num_outputs: int, num_inputs: int, plane: int, multiprocessors: int
) -> tuple[int, int]:
    """Steps of a program, and the most pieces that a tile of outputs so has.

    Asked by every launch, and few sizes ask.
    """
    places = multiprocessors * tile.programs_at_a_time(plane) // triton.cdiv(num_rows, tile.block_m)
    tiles = triton.cdiv(num_outputs, tile.block_n)
    return stream_k.shared_out(num_inputs // (_PARTS * plane), tiles, tile.splits, places)


def multiply_w4a8(
    tokens: RoundedTokens, sums: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, tile: W4A8Tile
) -> None:
    """X W^T + b of tokens in e4m3 and a weight of INT4.

    Args:
        tokens: [num_rows, K] in e4m3.
        sums: [num_rows, K / (4 P) * 8] fp32, as `token_sums` makes them.
        weight: One that the kernel `takes_w4a8_gemm`.
        bias: [N].
        out: [num_rows, N], written.
        tile: The sizes.
    """
    (num_rows, num_inputs), num_outputs = tokens.numbers.shape, weight.num_outputs
    plane = plane_inputs(num_inputs, weight.group_size)
    assert num_inputs == weight.num_inputs and out.shape == (num_rows, num_outputs) and out.is_contiguous()
    assert tile.block_n == 16 * tile.num_warps and tile.block_m % tile.columns == 0
    assert num_rows * num_outputs < 1 << 31 and weight.zeros is not None
    steps = num_inputs // (_PARTS * plane)
    sizes = (num_rows, num_outputs, num_inputs, plane, card.multiprocessors(weight.device))
    share, pieces = shared_out(tile, *sizes)
    target = out if pieces == 1 else out.new_empty(pieces, num_rows, num_outputs, dtype=torch.float32)
    programs = triton.cdiv(triton.cdiv(num_outputs, tile.block_n) * steps, share)
    _gemm_w4a8_kernel[(triton.cdiv(num_rows, tile.block_m), programs)](
        tile_descriptor(weight.packed, tile.block_n, plane),
        tile_descriptor(tokens.numbers, tile.block_m, plane),
        tile_descriptor(sums, tile.block_m, SUMS_OF_STEP),
        tokens.scales, weight.scales, weight.zeros, bias, target,
        num_rows, num_outputs, steps, share,
        GROUP_PLANES=weight.group_size // plane, PLANE=plane, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
        COLUMNS=tile.columns, OVERLAPS=tile.overlaps, SPLIT=pieces > 1, num_warps=tile.num_warps, maxnreg=None,
    )  # fmt: skip
    if pieces > 1:
        end_pieces(target, tokens.scales, bias, out, steps, share, tile.block_n)
