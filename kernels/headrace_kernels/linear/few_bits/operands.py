"""Operands of `linear.few_bits.stream_sm90`: a weight's numbers in registers, and x in their order.

Owns which thread holds which words and which x, and how both become operands of an instruction.

**Which inputs an instruction takes** is free, as long as they are the same ones of the weight and
of x. So a thread reads words as they lie, 16 bytes at a time, and they become numbers in the
registers that instructions take (`words_held`). Of 8 bits, thread t of four has inputs 32 t to 32 t
+ 31 of 128 in a row. Of INT4, whose words have an input of each of four planes, it has inputs 16 t
to 16 t + 15 of 64 in each plane. Eight threads read at a time, of two neighbouring rows, and the
copy engine's pattern puts what they read into different banks.

An instruction's 16 inputs are then four of each thread, and x has to lie in shared memory in that
order. The copy engine can't write it so, since neighbours that stay neighbours are two inputs, 4
bytes. The warps put it in order where it lies (`prepare_x`). A thread holds 32 inputs of a row
there, 8 in a row from each of four places, which are 8 in a row at four other places afterwards:
nothing is exchanged but through the loads and stores. Eight threads that access shared memory at a
time have the same place of eight rows, which lie in different banks.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from headrace_kernels.weight_formats.conversions import bf16_product_assembly, byte_assembly, dequantizing_assembly


@gluon.constexpr_function
def words_held(int4, num_warps):
    """Which thread holds which words of [16 num_warps outputs, 128 bytes].

    Thread 4 g + t of a warp holds a quarter of the words of outputs g and g + 8 of the warp's 16.
    """
    words = 64 if int4 else 128
    quarter = words // 4
    bits = num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 1 << bit] for bit in range(quarter.bit_length() - 1)] + [[8, 0]],
        [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]],
        [[16 << bit, 0] for bit in range(bits)],
        [],
        [16 * num_warps, words],
    )


@gluon.constexpr_function
def _x_held(pieces, slices, rows, int4, num_warps):
    """Which thread holds which inputs of [pieces slices, rows, 64].

    A thread holds eight inputs in a row at four places, which are the four of a thread's quarter of
    the weight: of 8 bits two in each of two pieces, of INT4 four in one. A warp has eight rows of
    two pieces. Warps share out pieces and slices first, whose numbers of a norm's weight are
    different ones.
    """
    shared = [[1 << bit, 0, 0] for bit in range((pieces * slices).bit_length() - 1) if 1 << bit != slices]
    shared += [[0, 1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    bits = num_warps.bit_length() - 1
    warps = (shared + [[0, 0, 0]] * bits)[:bits]
    places, lanes = ([16, 32], [[0, 0, 8], [slices, 0, 0]]) if int4 else ([32], [[0, 0, 8], [0, 0, 16]])
    registers = [[0, 0, place] for place in [1, 2, 4, *places]] + ([] if int4 else [[slices, 0, 0]])
    return gl.DistributedLinearLayout(
        registers + shared[bits:],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], *lanes],
        warps,
        [],
        [pieces * slices, rows, 64],
    )


@gluon.jit
def prepare_x(
    x_steps, norm_steps, slot,
    SLICES: gl.constexpr, PIECES: gl.constexpr, ROWS: gl.constexpr, INT4: gl.constexpr, NORMED: gl.constexpr,
):  # fmt: skip
    """Puts a step's x in the order of the weight's registers, where it lies.

    With a norm it multiplies x by the norm's weight, and returns sums of squares of x, eight for a
    row's piece, which add up to the row's.

    The step's bytes have come, and no product reads its slot before the next fence and barrier.
    """
    HELD: gl.constexpr = _x_held(PIECES, SLICES, ROWS, INT4, gl.num_warps())
    x = x_steps.index(slot).load(HELD)
    if NORMED:
        wide = x.to(gl.float32)
        # Over what a thread holds in a row.
        found = gl.sum((wide * wide).reshape((PIECES * SLICES, ROWS, 8, 8)), 3)
        g = gl.expand_dims(norm_steps.index(slot).load(gl.SliceLayout(1, HELD)), 1)
        if g.dtype == gl.bfloat16:
            PRODUCT: gl.constexpr = bf16_product_assembly()
            x = gl.inline_asm_elementwise(PRODUCT, "=r,r,r", [x, g], dtype=gl.bfloat16, is_pure=True, pack=2)
        else:
            x = (wide * g).to(gl.bfloat16)
    else:
        found = 0
    # An instruction's 16 inputs are two pairs of each thread. Of 8 bits, the thread is a piece of a
    # part and the half of a piece, of INT4 the quarter of a piece.
    if INT4:
        x = x.reshape((PIECES * SLICES * ROWS, 4, 8, 2)).permute((0, 2, 1, 3))
    else:
        x = x.reshape((PIECES // 2, 2, SLICES * ROWS, 2, 2, 8, 2)).permute((0, 4, 2, 5, 1, 3, 6))
    x_steps.index(slot).store(x.reshape((PIECES * SLICES, ROWS, 64)))
    return found


@gluon.jit
def numbers(words, KIND: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """The left operands of both pieces of 128 inputs of 8 bits: no number changes its thread."""
    OUTPUTS: gl.constexpr = 16 * gl.num_warps()
    BYTES: gl.constexpr = byte_assembly(KIND, DTYPE == gl.bfloat16)
    held = words.load(words_held(False, gl.num_warps()))
    w = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [held], dtype=DTYPE.value, is_pure=True, pack=4)
    # From (thread, piece, instruction, which eight of its inputs, which of a pair) to (instruction,
    # which eight, thread, which of a pair, piece).
    w = w.reshape((OUTPUTS, 4, 2, 4, 2, 2)).permute((0, 3, 4, 1, 5, 2)).reshape((OUTPUTS, 64, 2))
    first, second = gl.split(w)
    return gl.convert_layout(first, LEFT), gl.convert_layout(second, LEFT)


@gluon.jit
def _nibbles(held, scales, zeros, PLANE: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """The left operand of a plane's 64 inputs, as `dequantize` rounds them."""
    OUTPUTS: gl.constexpr = 16 * gl.num_warps()
    BF16: gl.constexpr = DTYPE == gl.bfloat16
    OF_OUTPUTS: gl.constexpr = gl.SliceLayout(1, words_held(True, gl.num_warps()))
    # 128 + zero in bf16, 1024 + zero in fp16: a mantissa that ends where the zero point does.
    shifts = (zeros.load(OF_OUTPUTS).to(gl.int16) | (0x4300 if BF16 else 0x6400)).to(DTYPE, bitcast=True)
    operands = [held, gl.expand_dims(shifts, 1), gl.expand_dims(scales.load(OF_OUTPUTS), 1)]
    NIBBLES: gl.constexpr = dequantizing_assembly(PLANE, BF16)
    w = gl.inline_asm_elementwise(NIBBLES, "=r,r,r,r", operands, dtype=DTYPE.value, is_pure=True, pack=2)
    # From (thread, instruction and which eight of its inputs, which of a pair).
    w = w.reshape((OUTPUTS, 4, 8, 2)).permute((0, 2, 1, 3)).reshape((OUTPUTS, 64))
    return gl.convert_layout(w, LEFT)


@gluon.jit
def _begin_byte_products(
    words, rights, slot, y, up,
    PARTS: gl.constexpr, SIDES: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Begins a step's products of 8 bits.

    Of both sides, some are over before others begin, so that threads need fewer registers.
    """
    for place in gl.static_range(PARTS):
        part = slot * PARTS + place
        x = rights.index(part * 2).permute((1, 0))
        other_x = rights.index(part * 2 + 1).permute((1, 0))
        w, other_w = numbers(words.index(part * SIDES), KIND, DTYPE, LEFT)
        y = warpgroup_mma(w, x, y, is_async=True)
        y = warpgroup_mma(other_w, other_x, y, is_async=True)
        if SIDES == 2:
            w, other_w = numbers(words.index(part * SIDES + 1), KIND, DTYPE, LEFT)
            up = warpgroup_mma(w, x, up, is_async=True)
            up = warpgroup_mma(other_w, other_x, up, is_async=True)
            if place < PARTS - 1:
                y, up = warpgroup_mma_wait(2, deps=[y, up])
    return y, up


@gluon.jit
def _begin_nibble_products(
    words, rights, scales, zeros, slot, y, up,
    PARTS: gl.constexpr, SIDES: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Begins a step's products of INT4: two parts have the words of four groups.

    Some are over before others begin: a thread has no registers for numbers of a whole step.
    """
    for place in gl.static_range(PARTS):
        part = (slot * PARTS + place) * SIDES
        held = words.index(part).load(words_held(True, gl.num_warps()))
        if SIDES == 2:
            up_held = words.index(part + 1).load(words_held(True, gl.num_warps()))
        for plane in gl.static_range(4):
            group = slot * (2 * PARTS) + place // 2 * 4 + plane
            x = rights.index(group * 2 + place % 2).permute((1, 0))
            of_side = group * SIDES
            w = _nibbles(held, scales.index(of_side), zeros.index(of_side), plane, DTYPE, LEFT)
            y = warpgroup_mma(w, x, y, is_async=True)
            if SIDES == 2:
                w = _nibbles(up_held, scales.index(of_side + 1), zeros.index(of_side + 1), plane, DTYPE, LEFT)
                up = warpgroup_mma(w, x, up, is_async=True)
                y, up = warpgroup_mma_wait(2, deps=[y, up])
            else:
                y = warpgroup_mma_wait(2, deps=[y])
    return y, up


@gluon.jit
def begin_products(
    words, rights, scales, zeros, slot, y, up,
    PARTS: gl.constexpr, SIDES: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Begins a step's products, which are added to y and, of two sides, to up."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if KIND == "int4":
        y, up = _begin_nibble_products(words, rights, scales, zeros, slot, y, up, PARTS, SIDES, DTYPE, LEFT)
    else:
        y, up = _begin_byte_products(words, rights, slot, y, up, PARTS, SIDES, KIND, DTYPE, LEFT)
    return y, up
