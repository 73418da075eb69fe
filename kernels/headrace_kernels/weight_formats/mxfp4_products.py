"""Products of MXFP4's numbers with one token, on the tensor cores, from where the words lie.

An instruction multiplies 16 outputs x 16 inputs by 16 inputs x 8 columns. Of the 32 threads of a
warp, thread 4 g + t has outputs g of two sides a and b, and column g of the token, at the same
inputs of its t. So a thread loads 16 bytes of an output as they lie, four neighbours the 64 bytes
of a tile of 128 inputs: t has inputs 8 t to 8 t + 7 of each of the tile's four groups. The eight
columns are the four groups of two tiles in a row: every number of the token is one thread's. A
product of a group has its sums in that group's column, and in others what nobody reads. They end in
the thread that has loaded the group's scale, and are multiplied by it in fp32.

The sides are two outputs at one tile (`tile_pair_products`), or one output at two tiles
(`row_pair_products`). A word takes as many instructions either way. A step of one output has half
the words, which leaves registers for more steps under way or for more warps.

A byte with two nibbles becomes two bytes whose bits are the upper halves of fp16 numbers, 2^-14
times the nibbles: 1.4 instructions a number, with shifts and selections for eight and masks for two
at a time.
"""

# Triton's decorator has no types, and its tuples grow in loops that it unrolls.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.weight_formats.conversions import by_columns, tensor_product

# Exponents by which a scale's code and the numbers' 2^-14 become a factor in fp32.
_FACTOR_BIAS = tl.constexpr(14)


@triton.constexpr_function
def _halves_assembly(word, name):
    """Assembly that makes eight numbers of a register of two words.

    Registers `{name}0` to `{name}3` are those of parts 0 to 3, two in each. A selection takes the
    sign bits, s, of one word and all others of another, and the mask m keeps a number's bits in the
    upper byte of each half. Shifts to the left are instructions of the multipliers, that by 8 in
    place of a permutation of bytes too: 7 of 11 are left to the logical units, which have most to
    do.
    """
    return (
        f"shl.b32 t, {word}, 1; shl.b32 u, {word}, 4; lop3.b32 t, s, u, t, 0xCA; "
        f"and.b32 {name}2, t, m; shl.b32 t, t, 8; and.b32 {name}0, t, m; "
        f"shr.b32 t, {word}, 3; lop3.b32 t, s, {word}, t, 0xCA; "
        f"and.b32 {name}3, t, m; shl.b32 t, t, 8; and.b32 {name}1, t, m; "
    )


@triton.constexpr_function
def _tile_assembly():
    """Sums $0 to $7 of words in $8 to $11 (side a) and $12 to $15 (b), and x in $16 to $19; $20: 0.

    A sum's place is 4 times the pair of parts, 2 times the side, and the part in the pair.
    """
    names = [f"{side}{register}" for side in "ab" for register in range(4)]
    code = "{ .reg .b32 t, u, m, s; .reg .f32 z, c<4>, d<4>; mov.f32 z, 0f00000000; "
    code += "or.b32 m, $20, 0x8E008E00; or.b32 s, $20, 0x80808080; "
    code += "".join(f".reg .b32 {name}<4>; " for name in (f"{each}_" for each in names))
    for place, name in enumerate(names):
        code += _halves_assembly(f"${8 + place}", f"{name}_")
    for part in range(4):
        first = ", ".join(f"{name}_{part}" for name in ("a0", "b0", "a1", "b1"))
        second = ", ".join(f"{name}_{part}" for name in ("a2", "b2", "a3", "b3"))
        code += tensor_product("f16", "c0, c1, c2, c3", first, "$16, $17", "z, z, z, z")
        code += tensor_product("f16", "d0, d1, d2, d3", second, "$18, $19", "c0, c1, c2, c3")
        place = part // 2 * 4 + part % 2
        code += f"mov.f32 ${place}, d{part % 2}; mov.f32 ${place + 2}, d{2 + part % 2}; "
    return code + "}"


_TILE_OPERANDS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 16))


@triton.jit
def _plain_numbers(words, PART: tl.constexpr):
    """Nibbles PART of words times 2^-14 in fp32: two words in each of [4, 8, warps, 4]."""
    bits = tl.join((words >> (4 * PART)) & 15, (words >> (16 + 4 * PART)) & 15)
    bits = tl.reshape(bits, (4, 8, words.shape[2], 8))
    exponent, half = (bits >> 1) & 3, (bits & 1).to(tl.float32) * 0.5
    magnitude = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(bits < 8, magnitude, -magnitude) * 0.00006103515625


@triton.jit
def _plain_sums(words, x, PAIR: tl.constexpr):
    """Sums of parts 2 PAIR and 2 PAIR + 1 with a thread's even and odd column: [4, 8, warps, 2]."""
    even, _ = tl.split(by_columns(_plain_numbers(words, 2 * PAIR), x))
    _, odd = tl.split(by_columns(_plain_numbers(words, 2 * PAIR + 1), x))
    return tl.join(even, odd)


@triton.jit
def _chosen(is_second, first, second, PLAIN: tl.constexpr):
    """The second where is_second, [4, 1, 1, 1] int32 by thread, is not 0, otherwise the first.

    In assembly: of a selection that the compiler sees it may make two loops, one for each kind of
    thread, in which threads of a warp wait for each other's products forever.
    """
    if PLAIN:
        chosen = tl.where(is_second != 0, second, first)
    else:
        chosen = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.b32 $0, $3, $2, p; }",
            "=f,r,f,f", [is_second, first, second], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return chosen


@triton.jit
def _threads():
    """The t of each thread 4 g + t of a warp, [4, 1, 1, 1]."""
    return tl.arange(0, 4)[:, None, None, None]


@triton.jit
def _tile_products(a, b, x, zero, PLAIN: tl.constexpr):
    """Sums of a thread's columns 2 t and 2 t + 1, each with its own part: [4, 8, warps, 4].

    Words a and b are [4, 8, warps, 4], and x as `columns_for_products` returns a step. A sum's
    place is 2 times the side and which of the two columns. Columns of the second tile have the same
    parts as those of the first.
    """
    if PLAIN:
        low = tl.join(_plain_sums(a, x, 0), _plain_sums(b, x, 0))
        high = tl.join(_plain_sums(a, x, 1), _plain_sums(b, x, 1))
        low, high = tl.permute(low, (0, 1, 2, 4, 3)), tl.permute(high, (0, 1, 2, 4, 3))
        low, high = tl.reshape(low, (4, 8, x.shape[2], 4)), tl.reshape(high, (4, 8, x.shape[2], 4))
    else:
        assembly: tl.constexpr = _tile_assembly()
        low, high = tl.inline_asm_elementwise(
            assembly, _TILE_OPERANDS, [a, b, x, zero], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    return _chosen(_threads() & 1, low, high, PLAIN)


@triton.jit
def _scale_factors(scales):
    """Factors [4, 8, warps, 2 SIDES] fp32 of two codes in each of [4, 8, warps, SIDES] int16."""
    codes = scales.to(tl.int32)
    shape: tl.constexpr = (4, 8, scales.shape[2], 2 * scales.shape[3])
    codes = tl.reshape(tl.join(codes & 255, (codes >> 8) & 255), shape)
    return ((codes + _FACTOR_BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tile_pair_products(first_a, first_b, second_a, second_b, scales, x, zero, PLAIN: tl.constexpr):
    """Products of two tiles of two outputs with a token: [4, 8, warps, 4], to be added up.

    Args:
        first_a: [4, 8, warps, 4] int32, words 8 t to 8 t + 7 of the first tile, two in each, of
            output g of side a; thread 4 g + t of a warp must hold [t, g].
        first_b: The first tile's words of side b.
        second_a: The next tile's words of side a.
        second_b: The next tile's words of side b.
        scales: [4, 8, warps, 2 sides] int16, two codes in each: of groups 2 t and 2 t + 1 of the
            two tiles' eight.
        x: Inputs 8 t to 8 t + 7 of group g of the eight, a step of `columns_for_products`:
            [4, 8, warps, 4] int32, of two fp16 numbers each, or [4, 8, warps, 8] fp32 if PLAIN.
        zero: The number 0; if only known at run time, then what is made of it stays behind it.
        PLAIN: Whether plain arithmetic stands for the tensor cores.

    Returns:
        Of thread t the products of groups 2 t and 2 t + 1; the place is 2 times the side and which
        of the two groups.
    """
    first, second = _tile_products(first_a, first_b, x, zero, PLAIN), _tile_products(second_a, second_b, x, zero, PLAIN)
    return _chosen(_threads() & 2, first, second, PLAIN) * _scale_factors(scales)


@triton.jit
def row_pair_products(first, second, scales, x, zero, PLAIN: tl.constexpr):
    """Products of two tiles of one output with a token: [4, 8, warps, 2], to be added up.

    Arguments and what is returned are those of `tile_pair_products`, but of one side: first and
    second are the two tiles' words of output g, and scales are [4, 8, warps, 1].
    """
    sums = tl.reshape(_tile_products(first, second, x, zero, PLAIN), (4, 8, x.shape[2], 2, 2))
    of_first, of_second = tl.split(tl.permute(sums, (0, 1, 2, 4, 3)))
    return _chosen(_threads() & 2, of_first, of_second, PLAIN) * _scale_factors(scales)


@triton.jit
def scaled_columns(xs):
    """A warp's numbers times one power of two, and what undoes that.

    The numbers are a tuple of [4, 8, warps, 8] fp32, one of each of the warp's steps. The power
    brings the largest of a warp's in all steps below 2^14, so that fp16 holds them to 11 bits;
    smaller ones than 2^-27 of that one lose some. The factor is [1, 1, warps, 1] fp32, for sums
    over all steps. What is not finite stays so.
    """
    largest = tl.abs(xs[0])
    for number in tl.static_range(1, len(xs)):
        largest = tl.maximum(largest, tl.abs(xs[number]))
    largest = tl.max(tl.max(tl.max(largest, 3, keep_dims=True), 0, keep_dims=True), 1, keep_dims=True)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    # 2^(13 - e) of the largest's exponent e, in the range that has an inverse.
    power = tl.minimum(267 - exponent, 253)
    factor, scaled = (power << 23).to(tl.float32, bitcast=True), ()
    for number in tl.static_range(len(xs)):
        scaled = scaled + (xs[number] * factor,)
    return scaled, ((254 - power) << 23).to(tl.float32, bitcast=True)


@triton.jit
def columns_for_products(xs, PLAIN: tl.constexpr):
    """`scaled_columns` as products take a step of them: rounded to fp16, unless PLAIN."""
    scaled, undone = scaled_columns(xs)
    columns = ()
    for number in tl.static_range(len(scaled)):
        x = scaled[number]
        if not PLAIN:
            even, odd = tl.split(tl.reshape(x, (4, 8, x.shape[2], 4, 2)))
            x = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
            )
        columns = columns + (x,)
    return columns, undone
