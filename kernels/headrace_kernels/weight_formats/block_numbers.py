"""The numbers of weights in blocks, as Triton kernels of several rooms read them.

Owns how a kernel finds a number's bits and its scale (`block_weight` says what they mean), and what
it is given of a weight and compiled for. Products are the rooms' own.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.weight_formats.block_weight import BlockWeight, plane_inputs, scale_codes, table_numbers
from headrace_kernels.weight_formats.conversions import numbers_of


class BlockLayout(NamedTuple):
    """What a kernel is compiled for of a `BlockWeight`: one constexpr of every kernel."""

    num_inputs: int
    # Tiles of a row: 4 planes of inputs each.
    num_tiles: int
    # Inputs of a plane, which share a scale.
    plane: int
    # Inputs of a group, and inputs of a scale of groups' scales.
    group: int
    factor: int
    # Whether a byte holds the integers of a scale and of a min, 4 bits each.
    is_joint: bool
    # Groups that share a scale of scales (NF4's double quantization); 0: none.
    nested: int
    has_mins: bool
    # What is taken off every stored integer.
    offset: int


@triton.jit
def integers(
    nibble_ptr, pair_ptr, single_ptr, octet_ptr, row, tile, j, mask, PART: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """The q of inputs 4 PLANE tile + PLANE PART + j of some rows, int32.

    `row` and `tile` broadcast with j.
    """
    lane = row * (LAYOUT.num_tiles * LAYOUT.plane) + tile * LAYOUT.plane + j
    if octet_ptr is not None:
        places = octet_ptr + row * (LAYOUT.num_tiles * LAYOUT.plane * 4) + (tile * 4 + PART) * LAYOUT.plane + j
        q = tl.load(places, mask=mask, other=0).to(tl.int32)
    elif nibble_ptr is not None:
        q = (tl.load(nibble_ptr + lane, mask=mask, other=0).to(tl.int32) >> (4 * PART)) & 15
        if pair_ptr is not None:
            q |= ((tl.load(pair_ptr + lane, mask=mask, other=0).to(tl.int32) >> (2 * PART)) & 3) << 4
    else:
        q = (tl.load(pair_ptr + lane, mask=mask, other=0).to(tl.int32) >> (2 * PART)) & 3
    if single_ptr is not None:
        HALF: tl.constexpr = LAYOUT.plane // 2
        places = single_ptr + row * (LAYOUT.num_tiles * HALF) + tile * HALF + j % HALF
        above = tl.load(places, mask=mask, other=0).to(tl.int32) >> (j // HALF * 4 + PART)
        q |= (above & 1) << (4 if nibble_ptr is not None else 2)
    return q


@triton.jit
def scale_of(
    scale_ptr, min_ptr, group_scale_ptr, code_ptr, k, n, N,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """The s of input k and output n, fp32."""
    if LAYOUT.nested > 0:
        code = tl.load(group_scale_ptr + k // LAYOUT.group * N + n).to(tl.int32)
        nested = (n.to(tl.int64) * (LAYOUT.num_inputs // LAYOUT.group) + k // LAYOUT.group) // LAYOUT.nested
        return tl.load(code_ptr + code) * tl.load(scale_ptr + nested) + tl.load(min_ptr + nested)
    scale = tl.load(scale_ptr + k // LAYOUT.factor * N + n).to(tl.float32)
    if group_scale_ptr is not None:
        integer = tl.load(group_scale_ptr + k // LAYOUT.group * N + n).to(tl.int32)
        scale *= ((integer & 15) if LAYOUT.is_joint else integer).to(tl.float32)
    return scale


@triton.jit
def min_of(
    min_ptr, group_scale_ptr, group_min_ptr, k, n, N,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """The m of input k and output n, fp32."""
    low = tl.load(min_ptr + k // LAYOUT.factor * N + n).to(tl.float32)
    if LAYOUT.is_joint:
        low *= (tl.load(group_scale_ptr + k // LAYOUT.group * N + n).to(tl.int32) >> 4).to(tl.float32)
    elif group_min_ptr is not None:
        low *= tl.load(group_min_ptr + k // LAYOUT.group * N + n).to(tl.float32)
    return low


@triton.jit
def _exact_numbers(q, table_ptr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """The q as numbers of DTYPE, or fp32 if PLAIN; 128 more in bf16 unless from a table."""
    if table_ptr is not None:
        numbers = tl.load(table_ptr + q)
        if PLAIN:
            numbers = numbers.to(tl.float32)
    elif PLAIN:
        numbers = q.to(tl.float32)
        if DTYPE == tl.bfloat16:
            numbers += 128.0
    elif DTYPE == tl.bfloat16:
        # The bits of 128, whose mantissa has room for 7 more.
        numbers = (q | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # The bits of 1024, which are taken off again: sums of such numbers would lose too much.
        numbers = (q | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    return numbers


@triton.constexpr_function
def _six_bit_assembly(part, bf16):
    """Two words are in a register $1, the pairs above them in the halves of $2."""
    place = 4 - 2 * part
    above = f"shl.b32 u, $2, {place}; " if place >= 0 else f"shr.b32 u, $2, {-place}; "
    base = "0x43004300" if bf16 else "0x64006400"
    code = "{ .reg .b32 t, u; " + f"shr.b32 t, $1, {4 * part}; lop3.b32 t, t, 0x000F000F, {base}, 0xEA; " + above
    if bf16:
        return code + "lop3.b32 $0, u, 0x00300030, t, 0xEA; }"
    return code + "lop3.b32 t, u, 0x00300030, t, 0xEA; mov.b32 u, 0x64006400; sub.f16x2 $0, t, u; }"


@triton.jit
def _six_bit_numbers(words, pairs, PART: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of nibbles and pairs, those of `_exact_numbers`, two at a time."""
    assembly: tl.constexpr = _six_bit_assembly(PART, DTYPE == tl.bfloat16)
    return tl.inline_asm_elementwise(
        assembly, "=r,r,r", [words, pairs.to(tl.int16)], dtype=DTYPE.value, is_pure=True, pack=2
    )


@triton.jit
def part_numbers(
    nibble_ptr, pair_ptr, single_ptr, octet_ptr, table_ptr, row, tile, j, mask,
    PART: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The q of a tile's part as numbers of DTYPE, or fp32 if PLAIN; 128 more in bf16 from bits.

    Arguments are those of `integers`. Each is exact, but for a table's. 128 is not added to signed
    bytes and numbers of a table.
    """
    lane = row * (LAYOUT.num_tiles * LAYOUT.plane) + tile * LAYOUT.plane + j
    if octet_ptr is not None:
        places = octet_ptr + row * (LAYOUT.num_tiles * LAYOUT.plane * 4) + (tile * 4 + PART) * LAYOUT.plane + j
        return numbers_of(tl.load(places, mask=mask, other=0), 0, "int8", DTYPE, PLAIN)
    elif nibble_ptr is not None and pair_ptr is None and single_ptr is None and table_ptr is None:
        return numbers_of(tl.load(nibble_ptr + lane, mask=mask, other=0), PART, "int4", DTYPE, PLAIN)
    elif nibble_ptr is not None and pair_ptr is not None and not PLAIN:
        words, pairs = tl.load(nibble_ptr + lane, mask=mask, other=0), tl.load(pair_ptr + lane, mask=mask, other=0)
        return _six_bit_numbers(words, pairs, PART, DTYPE)
    else:
        q = integers(nibble_ptr, pair_ptr, single_ptr, octet_ptr, row, tile, j, mask, PART, LAYOUT)
        return _exact_numbers(q, table_ptr, DTYPE, PLAIN)


@triton.jit
def tile_scales(scale_ptr, min_ptr, group_scale_ptr, group_min_ptr, code_ptr, n, parts, N, LAYOUT: tl.constexpr):
    """The s and m of the parts of a row, or of its last one beyond it, and outputs n; fp32.

    `parts` broadcast with n. Without minimums the second is the first once more.
    """
    first = tl.minimum(parts * LAYOUT.plane, LAYOUT.num_inputs - 1)
    scales = scale_of(scale_ptr, min_ptr, group_scale_ptr, code_ptr, first, n, N, LAYOUT)
    mins = scales
    if LAYOUT.has_mins:
        mins = min_of(min_ptr, group_scale_ptr, group_min_ptr, first, n, N, LAYOUT)
    return scales, mins


def block_planes(weight: BlockWeight) -> tuple[Tensor | None, ...]:
    """Numbers and scales of a weight, as kernels are given them: None where it has none."""
    planes = (weight.nibbles, weight.pairs, weight.singles, weight.octets)
    return *planes, weight.scales, weight.mins, weight.group_scales, weight.group_mins


def block_layout(weight: BlockWeight) -> BlockLayout:
    """The constants that kernels are compiled for, of one weight."""
    made = weight.format
    return BlockLayout(
        num_inputs=weight.num_inputs,
        num_tiles=weight.num_tiles,
        plane=plane_inputs(weight.kind, weight.num_inputs),
        group=made.group,
        factor=made.factor,
        is_joint=made.is_joint,
        nested=weight.nested,
        has_mins=made.has_mins,
        offset=made.offset,
    )


def number_tables(weight: BlockWeight, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The tables of stored integers and of NF4's 8-bit scales.

    Each is None where numbers or scales are integers.
    """
    numbers = table_numbers(weight.format.table, dtype, weight.device) if weight.format.table else None
    return numbers, scale_codes(weight.device) if weight.nested else None
