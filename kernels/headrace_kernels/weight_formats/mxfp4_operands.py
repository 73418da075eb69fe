"""Numbers of MXFP4 as an operand in registers of sm_90's tensor cores, in Gluon.

Owns what threads compute of words and scales in the layout of `weight_formats.mxfp4`; its kernel is
`experts.mxfp4_step_sm90`. In bf16 two numbers take four or five instructions, and the factor of a
group's eight numbers in a thread takes two.
"""

# Gluon's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def number_assembly(group, is_bf16):
    """Two words are in a register $1, twice a register of their factor in $2 and $3.

    A number's lower three bits become exponent and mantissa of a number that is too small by a
    power of two, whether it has a leading 1 or not; the factor makes up for that. Exact. Where
    a product by two powers of two moves both these bits and the sign, it does.
    """
    if is_bf16 and group < 2:
        mask, factor = ("0x000F000F", "0x1040") if group == 0 else ("0x00F000F0", "0x0104")
        bits = f"and.b32 t, $1, {mask}; mul.lo.u32 t, t, {factor}; and.b32 t, t, 0x81C081C0; "
    else:
        shift = (6 if is_bf16 else 9) - 4 * group
        bits = f"shl.b32 t, $1, {shift}; " if shift >= 0 else f"shr.b32 t, $1, {-shift}; "
        bits += f"shl.b32 u, $1, {12 - 4 * group}; " if group < 3 else "mov.b32 u, $1; "
        bits += f"and.b32 t, t, {'0x01C001C0' if is_bf16 else '0x0E000E00'}; lop3.b32 t, u, 0x80008000, t, 0xEA; "
    product = "mul.rn.bf16x2" if is_bf16 else "mul.rn.f16x2"
    return "{ .reg .b32 t, u; " + bits + product + " $0, t, $2; }"


@gluon.constexpr_function
def factor_assembly(group):
    """Byte `group` of a word as exponents of two bf16 numbers."""
    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0, {0x404 + 0x1010 * group}; shr.b32 $0, t, 1; }}"


@gluon.jit
def _factors(scales, GROUP: gl.constexpr, DTYPE: gl.constexpr):
    """What the assembly's numbers of a group are multiplied by, twice in 32 bits."""
    if DTYPE == gl.bfloat16:
        # 2^126 times the scale, never without a leading 1: a code is at most 128.
        ASSEMBLY: gl.constexpr = factor_assembly(GROUP)
        exponents = scales + 0x7E7E7E7E
        factors = gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    else:
        code = (scales >> (8 * GROUP)) & 255
        # 2^14 times the scale.
        factors = gl.exp2((code - 113).to(gl.float32)).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32)
        factors = factors * 0x10001
    return factors


@gluon.jit
def group_numbers(words, scales, GROUP: gl.constexpr, DTYPE: gl.constexpr):
    """Numbers of a group, [outputs, 32], from a tile's words and its words of scales."""
    ASSEMBLY: gl.constexpr = number_assembly(GROUP, DTYPE == gl.bfloat16)
    factors = gl.expand_dims(_factors(scales, GROUP, DTYPE), 1)
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [words, factors], dtype=DTYPE.value, is_pure=True, pack=2)
