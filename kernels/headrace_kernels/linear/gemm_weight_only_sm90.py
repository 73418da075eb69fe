"""The GEMM of some hundred rows for GPUs whose warp groups multiply (sm_90).

Each weight is dequantized once, in the registers that the tensor cores read it from.

Owns the kernel, its launch, which weights it takes, and the tiles that are worth trying;
`linear.gemm_weight_only` has the same product for other cards and weights, and which runs when is
`linear.quantized`'s. It is written in Gluon, because the order of copies, conversions and products
is what it is about:

Y^T = W X^T, so that outputs take the 64 rows of an instruction and rows of x its columns. A step is
256 inputs, four sub-steps of 64. For each sub-step the words of a weight go from shared memory into
the layout of the product's left operand (no exchange between threads follows), become numbers
there, rounded to the activations' type as `dequantize` does, and are multiplied by a tile of x in
shared memory while the words of the next sub-step are dequantized. Words, scales, zero points and x
are copied ahead by `cp.async`: x some sub-steps, the weight some steps. Sums are fp32 in an order
that depends on the tile alone; with several splits they go to memory, where `_add_splits_kernel` of
`linear.gemm_weight_only` adds them.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace_kernels import card
from headrace_kernels.hopper.launch import programs_at_a_time
from headrace_kernels.hopper.ring import next_slot, slot_before
from headrace_kernels.weight_formats.conversions import byte_assembly, dequantizing_assembly
from headrace_kernels.weight_formats.kernel_layout import WeightLayout
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind, plane_inputs

# Words of an output that are read at a time, and inputs that are multiplied at a time.
_WIDTH = 64
_STEP_INPUTS = 256


class WarpgroupTile(NamedTuple):
    """How a product is cut."""

    # Outputs of one program: 64 or more, for every four warps.
    block_n: int
    # Rows of one program: each weight is dequantized once for all of them.
    block_m: int
    num_warps: int
    # Tiles of x in shared memory: 4 or 8.
    x_slots: int
    # Steps of the weight in shared memory, at least 2.
    word_slots: int
    # Programs among which the inputs are split.
    splits: int = 1

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread, where the compiler would take a few more than fit.

        Two programs of a multiprocessor are to overlap.
        """
        return 128 if (self.block_n, self.num_warps) == (128, 8) and self.block_m <= 64 else None

    def shared_bytes(self, kind: QuantKind) -> int:
        """Shared memory of a program: x, and a step's words with INT4's scales and zero points."""
        step_bytes = _STEP_INPUTS // 2 + 4 * 3 if kind is QuantKind.INT4 else _STEP_INPUTS
        return self.x_slots * self.block_m * _WIDTH * 2 + self.word_slots * self.block_n * step_bytes

    def programs_at_a_time(self, kind: QuantKind) -> int:
        """Programs that a multiprocessor of sm_90 holds, by registers and shared memory."""
        registers = 128 if self.block_n * self.block_m <= 1024 * self.num_warps else 255
        return programs_at_a_time(self.num_warps, registers, self.shared_bytes(kind))


@gluon.jit
def _copy_words(word_smem, word_ptr, tile, first_word, BLOCK_N: gl.constexpr, WORDS: gl.constexpr):
    """Copies 64 words of each output of a program."""
    WIDTH: gl.constexpr = 128 // word_ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WIDTH], [WIDTH // 2, 64 // WIDTH], [gl.num_warps(), 1], [1, 0])
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    places = word_ptr + first_word + (n[:, None] * WORDS + j[None, :])
    async_copy.async_copy_global_to_shared(word_smem.index(tile), places)


@gluon.jit
def _copy_groups(smem, ptr, slot, step, N, GROUP: gl.constexpr, PLANE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The scales or zero points of a step's four sub-steps, one after the other."""
    WIDTH: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([WIDTH], [32], [gl.num_warps()], [0])
    place = gl.arange(0, 4 * BLOCK_N, layout=LAYOUT)
    group = _first_input(step, place // BLOCK_N, PLANE) // GROUP
    async_copy.async_copy_global_to_shared(smem.index(slot), ptr + (group * N + place % BLOCK_N))


@gluon.jit
def _copy_x(x_smem, x_ptr, slot, first_input, rows, M, K: gl.constexpr, LAYOUT: gl.constexpr):
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    places = x_ptr + first_input + (rows[:, None] * K + k[None, :])
    # Rows beyond the end are not read: each would be the last one again, from the same place for
    # all programs. Sums of theirs are not stored.
    async_copy.async_copy_global_to_shared(x_smem.index(slot), places, mask=rows[:, None] < M)


@gluon.jit
def _first_input(step, part, PLANE: gl.constexpr):
    """First input of a sub-step. PLANE is 64 for weights whose words are single inputs."""
    BLOCKS: gl.constexpr = PLANE // 64
    return (step // BLOCKS * 4 + part) * PLANE + step % BLOCKS * 64


@gluon.jit
def _copy_weight(
    word_smem, scale_smem, zero_smem, word_ptr, scale_ptr, zero_ptr, slot, step, part, N,
    WORDS: gl.constexpr, GROUP: gl.constexpr, PLANE: gl.constexpr, INT4: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What a step needs of an INT4 weight, at its part 0; of others what part `part` needs."""
    if INT4:
        if part == 0:
            _copy_words(word_smem, word_ptr, slot, step * 64, BLOCK_N, WORDS)
            _copy_groups(scale_smem, scale_ptr, slot, step, N, GROUP, PLANE, BLOCK_N)
            _copy_groups(zero_smem, zero_ptr, slot, step, N, GROUP, PLANE, BLOCK_N)
    else:
        _copy_words(word_smem, word_ptr, slot * 4 + part, step * 256 + part * 64, BLOCK_N, WORDS)


@gluon.jit
def _restored(
    word_smem, scale_smem, zero_smem, slot, part: gl.constexpr,
    LAYOUT: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The left operand of a sub-step.

    8 bits come without their scales, which are outputs' and applied to the sums.
    """
    BF16: gl.constexpr = DTYPE == gl.bfloat16
    if KIND == "int4":
        words = word_smem.index(slot).load(LAYOUT)
        ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        scales = scale_smem.index(slot).slice(part * BLOCK_N, BLOCK_N, 0).load(ROWS)
        zeros = zero_smem.index(slot).slice(part * BLOCK_N, BLOCK_N, 0).load(ROWS)
        # 128 + zero in bf16, 1024 + zero in fp16: a mantissa that ends where the zero point does.
        shifts = (zeros.to(gl.int16) | (0x4300 if BF16 else 0x6400)).to(DTYPE, bitcast=True)
        NIBBLES: gl.constexpr = dequantizing_assembly(part, BF16)
        operands = [words, gl.expand_dims(shifts, 1), gl.expand_dims(scales, 1)]
        numbers = gl.inline_asm_elementwise(NIBBLES, "=r,r,r,r", operands, dtype=DTYPE.value, is_pure=True, pack=2)
    else:
        words = word_smem.index(slot * 4 + part).load(LAYOUT)
        BYTES: gl.constexpr = byte_assembly(KIND, BF16)
        numbers = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=4)
    return numbers


@gluon.constexpr_function
def _groups_under_way(part, ahead, word_slots, int4):
    """Groups of copies that may be unfinished where a sub-step's x is needed, and next words."""
    if not int4:
        return min(ahead - 1, 4 * word_slots - 6)
    # An INT4 weight comes as a whole; after the last sub-step the next one is needed.
    return ahead - 1 if part < 3 else min(ahead - 1, 4 * word_slots - 6)


@gluon.jit(do_not_specialize=["M", "share"])
def _gemm_sm90_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    M, N, share,
    K: gl.constexpr, WORDS: gl.constexpr, GROUP: gl.constexpr, PLANE: gl.constexpr, KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, X_SLOTS: gl.constexpr, WORD_SLOTS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Y^T = W X^T for BLOCK_N outputs, BLOCK_M rows and `share` steps of the inputs.

    If they are SPLIT, `out` is fp32 [splits, M, N] of sums.
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    INT4: gl.constexpr = KIND == "int4"
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # Eight rows of words lie in as many different banks.
    WORD_LAYOUT: gl.constexpr = (
        gl.SwizzledSharedLayout(8, 1, 8, [1, 0]) if INT4 else gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    )
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # x is copied so many sub-steps ahead, a weight WORD_SLOTS - 1 steps.
    AHEAD: gl.constexpr = X_SLOTS - 1
    HALVES: gl.constexpr = X_SLOTS // 4
    split = gl.program_id(2)
    first = split * share
    last = gl.minimum(first + share, K // 256)
    first_n = gl.program_id(1) * BLOCK_N
    first_m = gl.program_id(0) * BLOCK_M
    word_ptr += first_n.to(gl.int64) * WORDS
    rows = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, X_COPY))
    x_smem = gl.allocate_shared_memory(DTYPE, [X_SLOTS, BLOCK_M, 64], X_LAYOUT)
    WORD_TILES: gl.constexpr = WORD_SLOTS if INT4 else 4 * WORD_SLOTS
    word_smem = gl.allocate_shared_memory(word_ptr.dtype.element_ty, [WORD_TILES, BLOCK_N, 64], WORD_LAYOUT)
    if INT4:
        scale_ptr += first_n
        zero_ptr += first_n
        scale_smem = gl.allocate_shared_memory(DTYPE, [WORD_SLOTS, 4 * BLOCK_N], FLAT)
        zero_smem = gl.allocate_shared_memory(gl.uint8, [WORD_SLOTS, 4 * BLOCK_N], FLAT)
    else:
        scale_smem = word_smem
        zero_smem = word_smem
    # What is copied between two commits is a group, and groups arrive in order: group g holds x of
    # sub-step g.
    for ahead in gl.static_range(AHEAD):
        if ahead < WORD_SLOTS - 1:
            if first + ahead < last:
                for part in gl.static_range(4):
                    _copy_weight(
                        word_smem, scale_smem, zero_smem, word_ptr, scale_ptr, zero_ptr, ahead, first + ahead, part,
                        N, WORDS, GROUP, PLANE, INT4, BLOCK_N,
                    )  # fmt: skip
        if first + ahead // 4 < last:
            _copy_x(x_smem, x_ptr, ahead, _first_input(first + ahead // 4, ahead % 4, PLANE), rows, M, K, X_COPY)
        async_copy.commit_group()
    async_copy.wait_group(AHEAD - 1)
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    w = _restored(word_smem, scale_smem, zero_smem, 0, 0, LEFT, KIND, DTYPE, BLOCK_N)
    slot = 0
    half = 0
    for step in range(first, last):
        coming = next_slot(slot, WORD_SLOTS)
        free_slot = slot_before(slot, WORD_SLOTS)
        for part in gl.static_range(4):
            async_copy.wait_group(_groups_under_way(part, AHEAD, WORD_SLOTS, INT4))
            total = warpgroup_mma(w, x_smem.index(half * 4 + part).permute((1, 0)), total, is_async=True)
            # The product before this one is through with its x, in all warps after the barrier.
            total = warpgroup_mma_wait(1, deps=[total])
            gl.thread_barrier()
            if step + (WORD_SLOTS - 1) < last:
                _copy_weight(
                    word_smem, scale_smem, zero_smem, word_ptr, scale_ptr, zero_ptr, free_slot,
                    step + (WORD_SLOTS - 1), part, N, WORDS, GROUP, PLANE, INT4, BLOCK_N,
                )  # fmt: skip
            x_step = step + (part + AHEAD) // 4
            x_slot = (half + (part + AHEAD) // 4) % HALVES * 4 + (part + AHEAD) % 4
            if x_step < last:
                _copy_x(x_smem, x_ptr, x_slot, _first_input(x_step, (part + AHEAD) % 4, PLANE), rows, M, K, X_COPY)
            async_copy.commit_group()
            # While this one runs. After the last step what is read is not used.
            if part < 3:
                w = _restored(word_smem, scale_smem, zero_smem, slot, part + 1, LEFT, KIND, DTYPE, BLOCK_N)
            else:
                w = _restored(word_smem, scale_smem, zero_smem, coming, 0, LEFT, KIND, DTYPE, BLOCK_N)
        # Registers of a product under way may not cross the loop's end: the assembler would wait
        # after every instruction.
        total = warpgroup_mma_wait(0, deps=[total])
        half = (half + 1) % HALVES
        slot = coming
    async_copy.wait_group(0)
    _finish(total, scale_ptr, bias_ptr, out_ptr, split, first_m, first_n, M, N, BLOCK_N, BLOCK_M, SPLIT, MMA, INT4)


@gluon.jit
def _finish(
    total, scale_ptr, bias_ptr, out_ptr, split, first_m, first_n, M, N,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, SPLIT: gl.constexpr, MMA: gl.constexpr, INT4: gl.constexpr,
):  # fmt: skip
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    if not INT4:
        total *= gl.expand_dims(gl.load(scale_ptr + n), 1)
    if SPLIT:
        # Eight outputs of four bytes are a sector: no other layout would store better.
        m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
        places = out_ptr + split.to(gl.int64) * M * N + (m[None, :] * N + n[:, None])
        gl.store(places, total, mask=m[None, :] < M)
    else:
        if bias_ptr is not None:
            total += gl.expand_dims(gl.load(bias_ptr + n).to(gl.float32), 1)
        OUT: gl.constexpr = out_ptr.dtype.element_ty
        STORE: gl.constexpr = gl.BlockedLayout([128 // OUT.primitive_bitwidth, 1], [16, 2], [1, gl.num_warps()], [0, 1])
        n_out = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE))
        m_out = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
        places = out_ptr + (m_out[None, :] * N + n_out[:, None])
        gl.store(places, gl.convert_layout(total.to(OUT), STORE), mask=m_out[None, :] < M)


def takes_warpgroups(weight: QuantizedWeight) -> bool:
    """Whether the kernel multiplies by this weight on its GPU.

    It takes whole tiles of outputs and inputs, scales of groups of 64 and more (INT4) or of
    outputs (8 bits).
    """
    if not card.has_warpgroup_instructions(weight.device) or weight.dtype.itemsize != 2 or weight.num_outputs % 128:
        return False
    if weight.kind is QuantKind.INT4:
        return plane_inputs(weight.num_inputs, weight.group_size) >= _WIDTH
    return not weight.is_grouped and weight.num_inputs % _STEP_INPUTS == 0


def launch(
    x: Tensor,
    bits: tuple[Tensor, Tensor, Tensor | None],
    bias: Tensor | None,
    target: Tensor,
    layout: WeightLayout,
    tile: WarpgroupTile,
) -> None:
    """Launches the GEMM.

    Args:
        x: [num_rows, K], contiguous.
        bits: Words, scales, zero points of a weight that `takes_warpgroups`.
        bias: [N]; not added to sums of splits.
        target: [num_rows, N], or with several splits fp32 [splits, num_rows, N] for their sums.
        layout: The weight's constants (`layout_of`).
        tile: The sizes.
    """
    num_rows, num_outputs = target.shape[-2:]
    assert num_outputs % tile.block_n == 0 and num_rows * max(x.shape[1], num_outputs) < 1 << 31
    kind = layout.kind
    _gemm_sm90_kernel[(triton.cdiv(num_rows, tile.block_m), num_outputs // tile.block_n, tile.splits)](
        x, *bits, bias, target, num_rows, num_outputs, triton.cdiv(layout.num_inputs, _STEP_INPUTS * tile.splits),
        K=layout.num_inputs, WORDS=layout.num_words, GROUP=layout.group,
        PLANE=layout.plane if kind == "int4" else _WIDTH, KIND=kind,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, X_SLOTS=tile.x_slots, WORD_SLOTS=tile.word_slots,
        SPLIT=tile.splits > 1,
        num_warps=tile.num_warps, maxnreg=tile.max_registers,
    )  # fmt: skip


def splittings(tile: WarpgroupTile, num_rows: int, weight: QuantizedWeight) -> tuple[WarpgroupTile, ...]:
    """The tile with every number of splits that differs, what should be fastest first."""
    multiprocessors = card.multiprocessors(weight.device)
    return _splittings(tile, num_rows, weight.num_outputs, weight.num_inputs, weight.kind, multiprocessors)


@functools.cache
def _splittings(
    tile: WarpgroupTile, num_rows: int, num_outputs: int, num_inputs: int, kind: QuantKind, multiprocessors: int
) -> tuple[WarpgroupTile, ...]:
    """Asked by every launch, and few sizes ask."""
    tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outputs, tile.block_n)
    places, steps = multiprocessors * tile.programs_at_a_time(kind), num_inputs // _STEP_INPUTS

    def steps_in_a_row(share: int, splits: int) -> float:
        # A program's first copies and its end take some steps' time.
        time = triton.cdiv(tiles * splits, places) * (share + 2.0)
        if splits == 1:
            return time
        # Sums are written and read by all programs at once, at about the pace at which steps copy x
        # and words. What a split costs beyond is measured.
        sums = splits * tiles * tile.block_m * tile.block_n * 8
        return time + sums / places / ((tile.block_m * 2 + tile.block_n // 2) * _STEP_INPUTS) + 0.75 * splits

    # Fewer splits whose shares are as long do the same.
    shares = {triton.cdiv(steps, splits): splits for splits in range(min(16, steps), 0, -1)}
    found = sorted(shares.items(), key=lambda each: steps_in_a_row(*each))
    return tuple(tile._replace(splits=splits) for _, splits in found)


# Outputs, rows, warps, tiles of x, steps of the weight, by the most rows that they are for.
_VARIANTS = {
    32: [(128, 32, 8, 8, 3), (128, 32, 8, 4, 4), (256, 32, 8, 4, 3), (64, 32, 4, 4, 4)],
    64: [(128, 64, 8, 4, 3), (128, 64, 8, 8, 2), (256, 64, 8, 4, 3), (64, 64, 4, 4, 3)],
    128: [(128, 128, 8, 4, 2), (128, 128, 8, 8, 3), (256, 128, 8, 4, 2), (256, 128, 8, 8, 2), (64, 128, 4, 4, 2)],
    512: [(256, 128, 8, 8, 2), (256, 128, 8, 4, 2), (128, 256, 8, 4, 2), (128, 128, 8, 4, 2), (64, 128, 4, 4, 2)],
}


def warpgroup_variants(num_rows: int, weight: QuantizedWeight) -> list[WarpgroupTile]:
    """Tiles that are worth timing, for up to 512 rows."""
    tiles = [WarpgroupTile(*size) for size in _VARIANTS[min(most for most in _VARIANTS if most >= num_rows)]]
    if weight.kind is not QuantKind.INT4:
        # A step's words are twice as many bytes.
        tiles = list(dict.fromkeys(tile._replace(word_slots=2) for tile in tiles))
    limit = card.shared_bytes(weight.device)
    fitting = [t for t in tiles if weight.num_outputs % t.block_n == 0 and t.shared_bytes(weight.kind) <= limit]
    return [each for tile in fitting for each in splittings(tile, num_rows, weight)[:3]]
