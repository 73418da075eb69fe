"""What Triton kernels do with the bits of a `QuantizedWeight`: words to bf16 or fp16, two or four numbers at a time.

Owns the conversions alone. Plain casts take several instructions a number, and a product of few rows would wait for them instead of for memory; these build the numbers from their bits. Each is exact.
The interpreter, which knows no inline assembly, takes plain arithmetic to the same numbers in fp32.

INT4 becomes 128 + q in bf16, whose 7 bits of mantissa hold q, and 1024 + q in fp16, which `restored_nibbles` takes off with the zero point. Where `numbers_of` gives fp16 it has taken 1024 off, as
sums of such numbers would lose too much.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What `numbers_of` adds to INT4's q, by type.
OFFSETS = {torch.bfloat16: 128, torch.float16: 0, torch.float32: 0}


@triton.constexpr_function
def _nibble_assembly(part, bf16):
    """Two words are in a register. (word & mask) | the bits of a 1 whose mantissa ends where q does; in fp16 less 1024."""
    shift = f"shr.b32 t, $1, {4 * part}; " if part else "mov.b32 t, $1; "
    if bf16:
        return "{ .reg .b32 t; " + shift + "lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }"
    less = "lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; mov.b32 c, 0x64006400; sub.f16x2 $0, t, c; }"
    return "{ .reg .b32 t, c; " + shift + less


@triton.constexpr_function
def restoring_assembly(part, bf16):
    """(number - $2) $3 in the type: the difference is exact, the product is rounded."""
    shift = f"shr.b32 t, $1, {4 * part}; " if part else "mov.b32 t, $1; "
    if bf16:
        # bf16 has differences and products of its own from sm_90 on: t - shift as -1 shift + t, and the product plus -0.
        return (
            "{ .reg .b32 t, c, z; mov.b32 c, 0xBF80BF80; mov.b32 z, 0x80008000; "
            + shift
            + "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 t, $2, c, t; fma.rn.bf16x2 $0, t, $3, z; }"
        )
    less = "lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 t, t, $2; mul.f16x2 $0, t, $3; }"
    return "{ .reg .b32 t; " + shift + less


@triton.constexpr_function
def byte_assembly(kind, bf16):
    """Four bytes are in a register, and become two of two numbers. Each pair is spread over the halves of t first."""
    if kind == "int8":
        pairs = (0, "0x4140"), (1, "0x4342")
        if bf16:
            # The lower 7 bits as 128 + v; the sign bit lands in the exponent's last and makes 128 or 256, which is taken off: v. c is -1.
            constants = "mov.b32 c, 0xBF80BF80; "
            restored = (
                "lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA; "
                "fma.rn.bf16x2 ${}, b, c, a; "
            )
        else:
            # (v + 128) + 1024, less 1152.
            constants = "mov.b32 c, 0x64806480; "
            restored = "lop3.b32 a, t, 0x00800080, 0x64006400, 0xBE; sub.f16x2 ${}, a, c; "
    else:
        # e4m3: sign, exponent and mantissa move to their places, and a factor makes up for the exponents' biases. It reaches numbers without a leading 1 too.
        pairs = (0, "0x1404"), (1, "0x3424")
        places = "shr.b32 a, t, {}; and.b32 a, a, {}; lop3.b32 a, t, 0x80008000, a, 0xEA; "
        if bf16:
            # Times 2^120, plus -0.
            constants = "mov.b32 b, 0x80008000; mov.b32 c, 0x7B807B80; "
            restored = places.format(4, "0x07F007F0") + "fma.rn.bf16x2 ${}, a, c, b; "
        else:
            # Times 2^8.
            constants = "mov.b32 c, 0x5C005C00; "
            restored = places.format(1, "0x3F803F80") + "mul.f16x2 ${}, a, c; "
    spread = "".join(f"prmt.b32 t, $2, 0, {selector}; " + restored.format(out) for out, selector in pairs)
    return "{ .reg .b32 t, a, b, c; " + constants + spread + "}"


@triton.jit
def numbers_of(words, PART: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Words of a weight whose `QuantKind.value` is KIND as numbers of DTYPE, or fp32 if PLAIN. INT4: bits 4 PART to 4 PART + 3, with the offset of DTYPE. FP8: given as int8; no NaN."""
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
        # The assembly puts two numbers into a register. fp16 has all of 4 and of 8 bits: fp32 is made from it.
        HALF: tl.constexpr = tl.float16 if DTYPE == tl.float32 else DTYPE
        if KIND == "int4":
            nibbles: tl.constexpr = _nibble_assembly(PART, HALF == tl.bfloat16)
            numbers = tl.inline_asm_elementwise(nibbles, "=r,r", [words], dtype=HALF.value, is_pure=True, pack=2)
        else:
            spread: tl.constexpr = byte_assembly(KIND, HALF == tl.bfloat16)
            numbers = tl.inline_asm_elementwise(spread, "=r,=r,r", [words], dtype=HALF.value, is_pure=True, pack=4)
        numbers = numbers.to(DTYPE)
    return numbers


# Four bytes are in a register: v + 128 as the lowest byte of 2^23 + v + 128, and that less 2^23 + 128.
_WIDE_BYTES = tl.constexpr(
    "{ .reg .b32 t; xor.b32 t, $4, 0x80808080; prmt.b32 $0, t, 0x4B000000, 0x7440; prmt.b32 $1, t, 0x4B000000, 0x7441; "
    "prmt.b32 $2, t, 0x4B000000, 0x7442; prmt.b32 $3, t, 0x4B000000, 0x7443; "
    "add.f32 $0, $0, 0fCB000080; add.f32 $1, $1, 0fCB000080; add.f32 $2, $2, 0fCB000080; add.f32 $3, $3, 0fCB000080; }"
)


@triton.constexpr_function
def _nibble_dot_assembly(part):
    """Eight nibbles in four registers, as they lie: an fp16 without a leading 1, q 2^-24 or 16 q 2^-24. Times eight numbers of fp16, added up in pairs, and the pair."""
    mask = "0x00F000F0" if part % 2 else "0x000F000F"
    products = "".join(
        f"and.b32 t, ${1 + word}, {mask}; "
        + ("mul.f16x2 a, t, $5; " if word == 0 else f"fma.rn.f16x2 a, t, ${5 + word}, a; ")
        for word in range(4)
    )
    ends = "mov.b32 {l, h}, a; cvt.f32.f16 p, l; cvt.f32.f16 q, h; add.f32 $0, p, q; }"
    return "{ .reg .b32 t, a; .reg .b16 l, h; .reg .f32 p, q; " + products + ends


@triton.jit
def nibble_dots(w0, w1, w2, w3, x0, x1, x2, x3, PART: tl.constexpr):
    """Sums of q x over nibbles PART of eight words, two in each of w0 to w3 (32 bits; parts 2 and 3: shifted right by 8), and eight numbers of fp16, two in each of x0 to x3; times 2^-24, of odd parts times 2^-20.

    Sums are fp16: each of the three additions of a pair of products rounds to 11 bits of the sum so far.
    """
    assembly: tl.constexpr = _nibble_dot_assembly(PART)
    return tl.inline_asm_elementwise(
        assembly, "=f,r,r,r,r,r,r,r,r", [w0, w1, w2, w3, x0, x1, x2, x3], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def halves(low, high):
    """Two numbers of fp32 as fp16 in 32 bits."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
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
def restored_nibbles(words, zeros, scales, PART: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Scale times (q - zero) of bits 4 PART to 4 PART + 3 of INT4's words, rounded once to DTYPE. Zeros and scales broadcast to the words."""
    # The assembly rounds to 16 bits.
    if PLAIN or DTYPE == tl.float32:
        numbers = ((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32) - zeros.to(tl.float32)
        numbers = (numbers * scales.to(tl.float32)).to(DTYPE).to(tl.float32)
    else:
        # Exact in either type.
        shifts = (zeros.to(tl.float32) + (128.0 if DTYPE == tl.bfloat16 else 1024.0)).to(DTYPE)
        restoring: tl.constexpr = restoring_assembly(PART, DTYPE == tl.bfloat16)
        numbers = tl.inline_asm_elementwise(
            restoring, "=r,r,r,r", [words, shifts, scales], dtype=DTYPE.value, is_pure=True, pack=2
        )
    return numbers


@triton.jit
def restored_bytes(words, zeros, scales, KIND: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr, HAS_ZEROS: tl.constexpr):  # fmt: skip
    """Scale times (number - zero) of INT8's or FP8's words, rounded once to DTYPE. Zeros and scales broadcast to the words."""
    numbers = numbers_of(words, 0, KIND, DTYPE, PLAIN).to(tl.float32)
    if HAS_ZEROS:
        numbers -= zeros.to(tl.float32)
    numbers = (numbers * scales.to(tl.float32)).to(DTYPE)
    if PLAIN:
        numbers = numbers.to(tl.float32)
    return numbers
