"""What Triton kernels do with the bits of a `QuantizedWeight`.

Words become bf16 or fp16, two or four numbers at a time.

Owns the conversions alone. Plain casts take several instructions a number, and a product of few
rows would wait for them instead of for memory; these build the numbers from their bits. Each is
exact. The interpreter, which knows no inline assembly, takes plain arithmetic to the same numbers
in fp32.

INT4 becomes 128 + q in bf16, whose 7 bits of mantissa hold q, and 1024 + q in fp16, which
`dequantized_nibbles` takes off with the zero point. Where `numbers_of` gives fp16 it has taken 1024
off, as sums of such numbers would lose too much.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What `numbers_of` adds to INT4's q, by type.
OFFSETS = {torch.bfloat16: 128, torch.float16: 0, torch.float32: 0}


@triton.constexpr_function
def _nibble_assembly(part, bf16):
    """Two words are in a register.

    (word & mask) | the bits of a 1 whose mantissa ends where q does; in fp16 less 1024.
    """
    shift = f"shr.b32 t, $1, {4 * part}; " if part else "mov.b32 t, $1; "
    if bf16:
        return "{ .reg .b32 t; " + shift + "lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }"
    less = "lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; mov.b32 c, 0x64006400; sub.f16x2 $0, t, c; }"
    return "{ .reg .b32 t, c; " + shift + less


@triton.constexpr_function
def dequantizing_assembly(part, bf16):
    """(number - $2) $3 in the type: the difference is exact, the product is rounded."""
    shift = f"shr.b32 t, $1, {4 * part}; " if part else "mov.b32 t, $1; "
    if bf16:
        # bf16 has differences and products of its own from sm_90 on: t - shift as -1 shift + t, and
        # the product plus -0.
        return (
            "{ .reg .b32 t, c, z; mov.b32 c, 0xBF80BF80; mov.b32 z, 0x80008000; "
            + shift
            + "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 t, $2, c, t; fma.rn.bf16x2 $0, t, $3, z; }"
        )
    less = "lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 t, t, $2; mul.f16x2 $0, t, $3; }"
    return "{ .reg .b32 t; " + shift + less


@triton.constexpr_function
def bf16_product_assembly():
    """Two products of bf16, each rounded once."""
    # Plus -0: before sm_90 there is no product alone.
    return "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"


@triton.constexpr_function
def byte_assembly(kind, bf16):
    """Four bytes are in a register, and become two of two numbers.

    Each pair is spread over the halves of t first.
    """
    if kind == "int8":
        pairs = (0, "0x4140"), (1, "0x4342")
        if bf16:
            # The lower 7 bits as 128 + v; the sign bit lands in the exponent's last and makes 128
            # or 256, which is taken off: v. c is -1.
            constants = "mov.b32 c, 0xBF80BF80; "
            dequantized = (
                "lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA; "
                "fma.rn.bf16x2 ${}, b, c, a; "
            )
        else:
            # (v + 128) + 1024, less 1152.
            constants = "mov.b32 c, 0x64806480; "
            dequantized = "lop3.b32 a, t, 0x00800080, 0x64006400, 0xBE; sub.f16x2 ${}, a, c; "
    else:
        # e4m3, spread with its sign in the upper byte: sign, exponent and mantissa move to their
        # places, and a factor makes up for the exponents' biases. It reaches numbers without a
        # leading 1 too.
        pairs = (0, "0x9180"), (1, "0xB3A2")
        places = "shl.b32 a, t, {}; and.b32 a, a, {}; "
        if bf16:
            # Times 2^120, plus -0.
            constants = "mov.b32 b, 0x80008000; mov.b32 c, 0x7B807B80; "
            dequantized = places.format(4, "0x87F087F0") + "fma.rn.bf16x2 ${}, a, c, b; "
        else:
            # Times 2^8.
            constants = "mov.b32 c, 0x5C005C00; "
            dequantized = places.format(7, "0xBF80BF80") + "mul.f16x2 ${}, a, c; "
    spread = "".join(f"prmt.b32 t, $2, 0, {selector}; " + dequantized.format(out) for out, selector in pairs)
    return "{ .reg .b32 t, a, b, c; " + constants + spread + "}"


@triton.jit
def numbers_of(words, PART: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Words of a weight whose `QuantKind.value` is KIND as numbers of DTYPE, or fp32 if PLAIN.

    INT4: bits 4 PART to 4 PART + 3, with the offset of DTYPE. FP8: given as int8; no NaN.
    """
    if PLAIN:
        if KIND == "int4":
            numbers = ((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32)
            if DTYPE == tl.bfloat16:
                numbers += 128.0
        elif KIND == "int8":
            numbers = words.to(tl.float32)
        else:
            numbers = words.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The assembly puts two numbers into a register. fp16 has all of 4 and of 8 bits: fp32 is
        # made from it.
        HALF: tl.constexpr = tl.float16 if DTYPE == tl.float32 else DTYPE
        if KIND == "int4":
            nibbles: tl.constexpr = _nibble_assembly(PART, HALF == tl.bfloat16)
            numbers = tl.inline_asm_elementwise(nibbles, "=r,r", [words], dtype=HALF.value, is_pure=True, pack=2)
        else:
            spread: tl.constexpr = byte_assembly(KIND, HALF == tl.bfloat16)
            numbers = tl.inline_asm_elementwise(spread, "=r,=r,r", [words], dtype=HALF.value, is_pure=True, pack=4)
        numbers = numbers.to(DTYPE)
    return numbers


# Four bytes are in a register: v + 128 as the lowest byte of 2^23 + v + 128, and that less 2^23 +
# 128.
_WIDE_BYTES = tl.constexpr(
    "{ .reg .b32 t; xor.b32 t, $4, 0x80808080; prmt.b32 $0, t, 0x4B000000, 0x7440; prmt.b32 $1, t, 0x4B000000, 0x7441; "
    "prmt.b32 $2, t, 0x4B000000, 0x7442; prmt.b32 $3, t, 0x4B000000, 0x7443; "
    "add.f32 $0, $0, 0fCB000080; add.f32 $1, $1, 0fCB000080; add.f32 $2, $2, 0fCB000080; add.f32 $3, $3, 0fCB000080; }"
)


@triton.constexpr_function
def tensor_product(number, found, left, right, sums):
    """Assembly of found = left right + sums for 16 outputs, 16 inputs and 8 columns.

    The threads of a warp compute it together.
    """
    operands = f"{{{found}}}, {{{left}}}, {{{right}}}, {{{sums}}}; "
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32 " + operands


@triton.constexpr_function
def _column_product_assembly(part, bf16):
    """Assembly of `column_products`: outputs $0 to $7, sums so far $20 to $27.

    Words of an output are in $8 to $11, of another in $12 to $15, x in $16 to $19.

    Sums of a part are (column, output); the instruction has them as (output, column). bf16: 128 +
    q, as `_nibble_assembly`. fp16: a number without a leading 1, q 2^-24 or in odd parts 16 q
    2^-24.
    """
    code = "{ .reg .b32 w<4>, a<4>; .reg .f32 c<4>; "
    for place, shown in enumerate((part, part + 1)):
        names = [4 * place + index for index in (0, 2, 1, 3)]
        sums = ", ".join(f"${20 + name}" for name in names)
        for half in (0, 1):
            # Registers of the instruction: inputs 2 t and on of both outputs, then inputs 2 t + 8
            # and on.
            for register, word in enumerate((8, 12, 9, 13)):
                shift = 4 * shown if bf16 else shown // 2 * 8
                source = f"${word + 2 * half}"
                if shift:
                    code += f"shr.b32 w{register}, {source}, {shift}; "
                    source = f"w{register}"
                if bf16:
                    code += f"lop3.b32 a{register}, {source}, 0x000F000F, 0x43004300, 0xEA; "
                else:
                    code += f"and.b32 a{register}, {source}, {'0x00F000F0' if shown % 2 else '0x000F000F'}; "
            found = ", ".join(f"${name}" for name in names) if half else "c0, c1, c2, c3"
            x = f"${16 + 2 * half}, ${17 + 2 * half}"
            so_far = "c0, c1, c2, c3" if half else sums
            code += tensor_product("bf16" if bf16 else "f16", found, "a0, a1, a2, a3", x, so_far)
    return code + "}"


@triton.constexpr_function
def _column_sum_assembly(squares, bf16):
    """Outputs $0 to $7, x in $8 to $11, normed x in $12 to $15, sums so far in $16 to $23."""
    kind, one = ("bf16", "0x3F803F80") if bf16 else ("f16", "0x3C003C00")
    code = "{ .reg .b32 o, z; .reg .f32 c<4>; mov.b32 o, " + one + "; mov.b32 z, 0; "
    ones = "o, o, o, o"
    code += tensor_product(kind, "c0, c1, c2, c3", ones, "$12, $13", "$20, $21, $22, $23")
    code += tensor_product(kind, "$4, $5, $6, $7", ones, "$14, $15", "c0, c1, c2, c3")
    if squares:
        code += tensor_product(kind, "c0, c1, c2, c3", "$8, z, $9, z", "$8, $9", "$16, $17, $18, $19")
        code += tensor_product(kind, "$0, $1, $2, $3", "$10, z, $11, z", "$10, $11", "c0, c1, c2, c3")
    else:
        code += "".join(f"mov.b32 ${place}, ${16 + place}; " for place in range(4))
    return code + "}"


# Eight sums; registers of words and x; the sums so far.
_PRODUCT_OPERANDS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 12 + ["f"] * 8))
_SUM_OPERANDS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 8 + ["f"] * 8))


@triton.jit
def _columns(products):
    """[8, 8 columns, warps] -> [4, 8, warps, 2]."""
    return tl.permute(tl.reshape(products, (8, 4, 2, products.shape[2])), (1, 0, 3, 2))


@triton.jit
def by_columns(left, right):
    """Sums over threads t and inputs, of outputs (or columns) g of the left: [4, 8, warps, 2].

    Each is a product with all columns of the right.
    """
    return _columns(tl.sum(tl.sum(left[:, :, None] * right[:, None], 4), 0))


@triton.jit
def _plain_products(words, x, PART: tl.constexpr, OFFSET: tl.constexpr):
    return by_columns(((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32) + OFFSET, x.to(tl.float32))


@triton.jit
def column_products(even, odd, x, sums, PART: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Adds the tensor cores' products of nibbles PART and PART + 1 with columns of x.

    All are [4, 8, warps, 8], of which thread 4 g + t of a warp must hold [t, g]: words `even` of
    output 2 g and `odd` of output 2 g + 1, x of column g, and sums (part, column 2 t or 2 t + 1,
    output 2 g or 2 g + 1). Numbers are 128 + q for inputs of bf16; for fp16 q 2^-24, in odd parts q
    2^-20, but q if PLAIN, where x may be wider than its DTYPE.
    """
    if PLAIN:
        OFFSET: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 0.0
        first = tl.join(_plain_products(even, x, PART, OFFSET), _plain_products(odd, x, PART, OFFSET))
        second = tl.join(_plain_products(even, x, PART + 1, OFFSET), _plain_products(odd, x, PART + 1, OFFSET))
        both = tl.permute(tl.join(first, second), (0, 1, 2, 5, 3, 4))
        return sums + tl.reshape(both, (4, 8, x.shape[2], 8))
    else:
        products: tl.constexpr = _column_product_assembly(PART, DTYPE == tl.bfloat16)
        return tl.inline_asm_elementwise(
            products, _PRODUCT_OPERANDS, [even, odd, x, sums], dtype=tl.float32, is_pure=True, pack=8
        )


@triton.jit
def column_sums(raw, x, sums, SQUARES: tl.constexpr, PLAIN: tl.constexpr):
    """Adds up columns of x on the tensor cores.

    If SQUARES, it adds the products of columns of raw x with each other too.

    All are [4, 8, warps, 8], held as `column_products` says. Sums: columns g times 2 t and 2 t + 1,
    and two of nothing; then columns 2 t and 2 t + 1, twice.
    """
    if PLAIN:
        own = by_columns(tl.full([4, 8, x.shape[2], 8], 1.0, tl.float32), x.to(tl.float32))
        products = tl.zeros_like(own)
        if SQUARES:
            products = by_columns(raw.to(tl.float32), raw.to(tl.float32))
        # Of both twice the two columns, squares before sums.
        both = tl.join(tl.join(products, own), tl.join(products, own))
        return sums + tl.reshape(tl.permute(both, (0, 1, 2, 4, 5, 3)), (4, 8, x.shape[2], 8))
    else:
        adding: tl.constexpr = _column_sum_assembly(SQUARES, x.dtype == tl.bfloat16)
        return tl.inline_asm_elementwise(adding, _SUM_OPERANDS, [raw, x, sums], dtype=tl.float32, is_pure=True, pack=8)


@triton.jit
def scaled_by_norm(x, norm, PLAIN: tl.constexpr):
    """Multiplies x by the weight of a norm: bf16, or fp32 if PLAIN."""
    if PLAIN:
        return x.to(tl.float32) * norm.to(tl.float32)
    else:
        product: tl.constexpr = bf16_product_assembly()
        return tl.inline_asm_elementwise(
            product,
            "=r,r,r",
            [x, norm],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def wide_bytes(words, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """INT8's or FP8's words, given as int8, in fp32. NATIVE_FP8: the card converts e4m3 itself."""
    if NATIVE_FP8:
        return words.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif KIND == "int8" and not PLAIN:
        return tl.inline_asm_elementwise(
            _WIDE_BYTES, "=&f,=&f,=&f,=&f,r", [words], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        # fp16 has all numbers of 8 bits, and takes fewer instructions than bf16.
        return numbers_of(words, 0, KIND, tl.float16, PLAIN).to(tl.float32)


@triton.jit
def dequantized_nibbles(words, zeros, scales, PART: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Scale times (q - zero) of bits 4 PART to 4 PART + 3 of INT4's words, rounded once to DTYPE.

    Zeros and scales broadcast to the words.
    """
    # The assembly rounds to 16 bits.
    if PLAIN or DTYPE == tl.float32:
        numbers = ((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32) - zeros.to(tl.float32)
        numbers = (numbers * scales.to(tl.float32)).to(DTYPE).to(tl.float32)
    else:
        # Exact in either type.
        shifts = (zeros.to(tl.float32) + (128.0 if DTYPE == tl.bfloat16 else 1024.0)).to(DTYPE)
        dequantizing: tl.constexpr = dequantizing_assembly(PART, DTYPE == tl.bfloat16)
        numbers = tl.inline_asm_elementwise(
            dequantizing, "=r,r,r,r", [words, shifts, scales], dtype=DTYPE.value, is_pure=True, pack=2
        )
    return numbers


@triton.jit
def dequantized_bytes(
    words, zeros, scales, KIND: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """Scale times (number - zero) of INT8's or FP8's words, rounded once to DTYPE.

    Zeros and scales broadcast to the words.
    """
    numbers = numbers_of(words, 0, KIND, DTYPE, PLAIN).to(tl.float32)
    if HAS_ZEROS:
        numbers -= zeros.to(tl.float32)
    numbers = (numbers * scales.to(tl.float32)).to(DTYPE)
    if PLAIN:
        numbers = numbers.to(tl.float32)
    return numbers
