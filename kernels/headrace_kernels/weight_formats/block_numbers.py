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
def exact_numbers(q, table_ptr, DTYPE: tl.constexpr, SIGNED: tl.constexpr, PLAIN: tl.constexpr):
    """The q as numbers of DTYPE, or fp32 if PLAIN; 128 more in bf16 unless signed or from a table.

    Each is exact, but for a table's.
    """
    if table_ptr is not None:
        numbers = tl.load(table_ptr + q)
        if PLAIN:
            numbers = numbers.to(tl.float32)
    elif PLAIN:
        numbers = q.to(tl.float32)
        if DTYPE == tl.bfloat16 and not SIGNED:
            numbers += 128.0
    elif SIGNED:
        numbers = q.to(tl.float32).to(DTYPE)
    elif DTYPE == tl.bfloat16:
        # The bits of 128, whose mantissa has room for 7 more.
        numbers = (q | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # The bits of 1024, which are taken off again: sums of such numbers would lose too much.
        numbers = (q | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    return numbers


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
