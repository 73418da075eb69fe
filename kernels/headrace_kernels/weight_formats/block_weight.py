"""Weights whose numbers come in small blocks with scales of their own.

These are the types of GGUF files and NF4: their layout in memory, and back.

Owns what the bits mean. `dequantize_rows` is the definition: every product of `block_linear`
multiplies by those numbers, in fp32 or rounded to the activations' type. What the bytes of a file
mean is `gguf_blocks`'s, how NF4 is rounded `nf4`'s; both end in `Pieces`, which `store_rows` puts
into place.

A number of input k is s (q - offset) - m, or s times what a table has at q (NF4, IQ4). q has 2 to 8
bits; s and m belong to groups of 16, 32 or 64 inputs, and are themselves products of a small
integer and a factor of 256 inputs in the K types.

Layout for N outputs and K inputs. Nothing outside this room looks at it. Inputs come in tiles of 4
P; P (`plane_inputs`) is at most a group, so that every product of P inputs has one scale.

nibbles  [N, tiles P] int16: bits 4 i to 4 i + 3 of word j of a tile are bits 0 to 3 of input i P +
j.
pairs    [N, tiles P] uint8: two bits of input i P + j at bit 2 i of byte j. Where there are nibbles
         they are bits 4 and 5.
singles  [N, tiles P / 2] uint8: one bit of input i P + j at bit 4 (j div (P / 2)) + i of byte j mod
(P / 2): the bit above the others.
octets   [N, tiles 4 P] int8: the number of each input, signed.
scales   [K / inputs of a factor, N] fp16, or fp32 for NF4_SINGLE; mins alike. group_scales,
         group_mins [K / group, N]: the small integers. Q2_K has both in one byte. NF4: group_scales
         [K / 64, N] uint8 are places in a table; scale of group g of row n is table scales[i] +
         mins[i], where i = (n K / 64 + g) div `nested`. scales, mins: fp32, flat.

The inputs of the last tile beyond K are 0 and multiplied by nothing. K is a multiple of a block;
where it is none of 4 P, up to 32 inputs of a row are filled.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch
from torch import Tensor

from headrace_kernels.weight_formats.dequantized_buffer import reserve

# Parts of a tile: nibbles of a word.
PARTS = 4
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# The 16 numbers of NF4 between -1 and 1: quantiles of a normal distribution. Source: QLoRA, arXiv
# 2305.14314, appendix E.
NF4_NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# The 16 numbers of IQ4, whose distances grow with their size. Source: ggml's public description of
# its types (`kvalues_iq4nl`).
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BlockKind(enum.Enum):
    """How the numbers of a weight are written; GGUF's names."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"
    # With scales in 8 bits, which a nested scale and an offset of many of them make numbers
    # ("double quantization").
    NF4 = "NF4"
    # With scales in fp32.
    NF4_SINGLE = "NF4_SINGLE"


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFormat:
    """What a kind's numbers are made of."""

    # Planes: `nibbles` alone is (4,), with `singles` (4, 1); (8,) is `octets`.
    bits: tuple[int, ...]
    # Inputs that share a scale, and those that share its factor; equal where scales are not
    # integers.
    group: int
    factor: int
    # Taken off q.
    offset: int = 0
    has_mins: bool = False
    # Scale and minimum of a group in one byte.
    is_joint: bool = False
    # What q are places in; empty: q are numbers themselves.
    table: tuple[float, ...] = ()


FORMATS = {
    BlockKind.Q4_0: BlockFormat((4,), 32, 32, offset=8),
    BlockKind.Q4_1: BlockFormat((4,), 32, 32, has_mins=True),
    BlockKind.Q5_0: BlockFormat((4, 1), 32, 32, offset=16),
    BlockKind.Q5_1: BlockFormat((4, 1), 32, 32, has_mins=True),
    BlockKind.Q8_0: BlockFormat((8,), 32, 32),
    BlockKind.Q2_K: BlockFormat((2,), 16, 256, has_mins=True, is_joint=True),
    BlockKind.Q3_K: BlockFormat((2, 1), 16, 256, offset=4),
    BlockKind.Q4_K: BlockFormat((4,), 32, 256, has_mins=True),
    BlockKind.Q5_K: BlockFormat((4, 1), 32, 256, has_mins=True),
    BlockKind.Q6_K: BlockFormat((4, 2), 16, 256, offset=32),
    BlockKind.IQ4_NL: BlockFormat((4,), 32, 32, table=IQ4_NUMBERS),
    BlockKind.IQ4_XS: BlockFormat((4,), 32, 256, table=IQ4_NUMBERS),
    BlockKind.NF4: BlockFormat((4,), 64, 64, table=NF4_NUMBERS),
    BlockKind.NF4_SINGLE: BlockFormat((4,), 64, 64, table=NF4_NUMBERS),
}


NF4_KINDS = (BlockKind.NF4, BlockKind.NF4_SINGLE)


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Some rows of a weight, not packed yet."""

    # [num_rows, K] uint8, or int8 for octets.
    numbers: Tensor
    # [num_rows, K / factor] and [num_rows, K / group], see the module.
    scales: Tensor
    mins: Tensor | None = None
    group_scales: Tensor | None = None
    group_mins: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [num_outputs, num_inputs] in blocks. See the module for the layout."""

    kind: BlockKind
    num_outputs: int
    num_inputs: int
    # Dtype of the activations that the weight is multiplied with.
    dtype: torch.dtype
    scales: Tensor
    nibbles: Tensor | None = None
    pairs: Tensor | None = None
    singles: Tensor | None = None
    octets: Tensor | None = None
    mins: Tensor | None = None
    group_scales: Tensor | None = None
    group_mins: Tensor | None = None
    # NF4: groups, counted along the rows, that share a nested scale.
    nested: int = 0

    @property
    def format(self) -> BlockFormat:
        """Planes, scales and minimums that a number of this kind is made of."""
        return FORMATS[self.kind]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tensors that the weight holds."""
        held = (self.scales, self.nibbles, self.pairs, self.singles, self.octets, self.mins)
        return tuple(part for part in (*held, self.group_scales, self.group_mins) if part is not None)

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, scales and all."""
        return sum(part.nbytes for part in self.parts)

    @property
    def device(self) -> torch.device:
        """Device that holds the weight."""
        return self.scales.device

    @property
    def num_tiles(self) -> int:
        """Tiles that a row of the weight has."""
        return -(-self.num_inputs // (PARTS * plane_inputs(self.kind, self.num_inputs)))


def nf4_numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """NF4's numbers on a device."""
    return table_numbers(NF4_NUMBERS, dtype, device)


@functools.cache
def table_numbers(table: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on a device; one tensor for all weights, as copying waits for the device."""
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=dtype, device=device)


@functools.cache
def scale_codes(device: torch.device) -> Tensor:
    """[256] fp32, ascending: the numbers between -1 and 1 that 8 bits of a scale stand for.

    Seven decades, the largest with 64 numbers of each sign, each smaller one with half as many: the
    middles of equal parts of 0.1 to 1; and 0 and 1. Source: 8-bit Approximations for Parallelism in
    Deep Learning, arXiv 1511.04561.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    with torch.inference_mode(False):
        return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def plane_inputs(kind: BlockKind, num_inputs: int) -> int:
    """P: inputs that one part of a tile holds.

    32 where a group is no smaller and no inputs are filled; or else 16, which is the least that
    tensor cores take.
    """
    return 32 if FORMATS[kind].group >= 32 and num_inputs % (PARTS * 32) == 0 else 16


def allocate(
    kind: BlockKind, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device, nested: int = 0
) -> BlockWeight:
    """An empty weight, to be filled by `store_rows`.

    Args:
        kind: How numbers are written.
        num_outputs: N.
        num_inputs: K, a multiple of the inputs that share a factor.
        dtype: Dtype of the activations: bf16, fp16 or fp32.
        device: Device that holds the weight.
        nested: NF4: groups that share a nested scale; 0: those of a row.

    Raises:
        ValueError: Sizes or types that there is no layout for.
    """
    made = FORMATS[kind]
    if num_outputs < 1 or num_inputs < 1 or num_inputs % made.factor:
        raise ValueError(
            f"a weight of {num_outputs} outputs and {num_inputs} inputs: "
            f"{kind.value} needs a multiple of {made.factor} inputs"
        )
    if dtype not in _FLOATS:
        raise ValueError(f"activations in {dtype}: a weight in blocks takes bfloat16, float16 or float32")
    plane = plane_inputs(kind, num_inputs)
    lanes = -(-num_inputs // (PARTS * plane)) * plane

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_outputs, size, dtype=dtype, device=device)

    def by_group(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_inputs // size, num_outputs, dtype=dtype, device=device)

    if kind is BlockKind.NF4:
        nested = nested or num_inputs // made.group
        num_nested = -(-num_outputs * (num_inputs // made.group) // nested)
    is_double = kind is BlockKind.NF4
    scale_type = torch.float32 if kind is BlockKind.NF4_SINGLE else torch.float16
    has_integers = made.group < made.factor
    # Q3_K's, Q6_K's and IQ4_XS's are signed.
    integers = torch.uint8 if made.has_mins else torch.int8
    reserve(num_outputs, num_inputs, dtype, torch.device(device))
    return BlockWeight(
        kind, num_outputs, num_inputs, dtype,
        scales=torch.empty(num_nested, dtype=torch.float32, device=device) if is_double else by_group(made.factor,
        scale_type),
        nibbles=empty(lanes, torch.int16) if 4 in made.bits else None,
        pairs=empty(lanes, torch.uint8) if 2 in made.bits else None,
        singles=empty(lanes // 2, torch.uint8) if 1 in made.bits else None,
        octets=empty(PARTS * lanes, torch.int8) if 8 in made.bits else None,
        mins=torch.empty(num_nested, dtype=torch.float32, device=device) if is_double else by_group(made.factor,
        scale_type) if made.has_mins else None,
        group_scales=by_group(made.group,
        torch.uint8 if is_double else integers) if has_integers or is_double else None,
        group_mins=by_group(made.group, torch.uint8) if has_integers and made.has_mins and not made.is_joint else None,
        nested=nested,
    )  # fmt: skip


def store_rows(pieces: Pieces, target: BlockWeight, first_row: int) -> None:
    """Packs rows and puts them into rows `first_row` and on of the target.

    Disjoint rows may be stored by several threads at a time; nothing waits for the device.
    """
    rows = slice(first_row, first_row + len(pieces.numbers))
    assert rows.stop <= target.num_outputs and pieces.numbers.shape[1] == target.num_inputs
    store_numbers(pieces.numbers, target, rows)
    for part, values in (
        (target.scales, pieces.scales),
        (target.mins, pieces.mins),
        (target.group_scales, pieces.group_scales),
        (target.group_mins, pieces.group_mins),
    ):
        assert (part is None) == (values is None)
        if part is not None and values is not None:
            # NF4's nested scales are one for a row here.
            part[(rows if part.dim() == 1 else (slice(None), rows))] = values.t()


def store_numbers(numbers: Tensor, target: BlockWeight, rows: slice) -> None:
    """Packs numbers, [num_rows, K] as in `Pieces`, into some rows; scales are left alone."""
    plane, bits = plane_inputs(target.kind, target.num_inputs), target.format.bits
    filled = target.num_tiles * PARTS * plane - target.num_inputs
    numbers = torch.nn.functional.pad(numbers, (0, filled))
    if target.octets is not None:
        target.octets[rows] = numbers
        return
    tiles = numbers.view(len(numbers), -1, PARTS, plane)
    if target.nibbles is not None:
        target.nibbles[rows] = _joined((tiles & 15).to(torch.int32), 4).to(torch.int16).flatten(1)
        tiles = tiles >> 4
    if target.pairs is not None:
        target.pairs[rows] = _joined(tiles & 3, 2).flatten(1)
        tiles = tiles >> 2
    if target.singles is not None:
        halves = _joined(tiles & 1, 1).view(len(numbers), -1, 2, plane // 2)
        target.singles[rows] = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    assert sum(bits) <= 6


def _joined(parts: Tensor, width: int) -> Tensor:
    """[num_rows, tiles, PARTS, P] numbers of `width` bits side by side: [num_rows, tiles, P]."""
    return parts[:, :, 0] | parts[:, :, 1] << width | parts[:, :, 2] << (2 * width) | parts[:, :, 3] << (3 * width)


def _apart(words: Tensor, plane: int, width: int) -> Tensor:
    """The way back: [num_rows, tiles P] -> [num_rows, tiles PARTS P], in the words' type."""
    shifts = torch.arange(0, PARTS * width, width, dtype=words.dtype, device=words.device).view(1, 1, PARTS, 1)
    return ((words.view(len(words), -1, 1, plane) >> shifts) & ((1 << width) - 1)).flatten(1)


def numbers_of_rows(weight: BlockWeight, rows: slice | Tensor) -> Tensor:
    """The q of some rows: [num_rows, K] int16, or int8 for octets."""
    plane = plane_inputs(weight.kind, weight.num_inputs)
    if weight.octets is not None:
        return weight.octets[rows][:, : weight.num_inputs]
    numbers, width = None, 0
    if weight.nibbles is not None:
        numbers, width = _apart(weight.nibbles[rows], plane, 4), 4
    if weight.pairs is not None:
        above = _apart(weight.pairs[rows], plane, 2).to(torch.int16)
        numbers, width = above if numbers is None else numbers | above << width, width + 2
    if weight.singles is not None:
        halves = weight.singles[rows].view(-1, weight.num_tiles, plane // 2)
        above = _apart(torch.cat((halves, halves >> 4), 2).flatten(1), plane, 1).to(torch.int16)
        assert numbers is not None
        numbers = numbers | above << width
    assert numbers is not None
    return numbers[:, : weight.num_inputs]


def dequantize_rows(weight: BlockWeight, rows: slice | Tensor, out: Tensor) -> None:
    """The numbers that the bits of some rows stand for.

    Args:
        weight: Filled.
        rows: Which: a slice, or int64 indices.
        out: [num_rows, K] in any floating type, which results are rounded to.
    """
    made = weight.format
    numbers = numbers_of_rows(weight, rows)
    if made.table:
        exact = table_numbers(made.table, torch.float32, weight.device)[numbers.to(torch.int32)]
    else:
        exact = numbers.float().sub_(made.offset)
    scales, mins = group_numbers(weight, rows)
    exact = exact.reshape(len(out), -1, made.group).mul_(scales[:, :, None])
    if mins is not None:
        exact.sub_(mins[:, :, None])
    out.copy_(exact.flatten(1))


def group_numbers(weight: BlockWeight, rows: slice | Tensor) -> tuple[Tensor, Tensor | None]:
    """The s and m of each group of some rows, fp32 [num_rows, K / group] each.

    m is None where the kind has none.
    """
    made = weight.format
    if weight.kind is BlockKind.NF4:
        return _nested_scales(weight, rows), None
    scales = weight.scales[:, rows].t().float()
    mins = None if weight.mins is None else weight.mins[:, rows].t().float()
    if weight.group_scales is None:
        return scales, mins
    times = made.factor // made.group
    integers = weight.group_scales[:, rows].t()
    scales = scales.repeat_interleave(times, 1, output_size=integers.shape[1])
    if mins is None:
        return scales * integers.float(), None
    lows = integers >> 4 if made.is_joint else weight.group_mins[:, rows].t()  # type: ignore[index]  # as allocated
    integers = integers & 15 if made.is_joint else integers
    mins = mins.repeat_interleave(times, 1, output_size=integers.shape[1])
    return scales * integers.float(), mins * lows.float()


def _nested_scales(weight: BlockWeight, rows: slice | Tensor) -> Tensor:
    """NF4's scales of some rows, [num_rows, K / 64]."""
    assert weight.group_scales is not None and weight.mins is not None
    codes = weight.group_scales[:, rows].t()
    if isinstance(rows, slice):
        rows = torch.arange(rows.start, rows.stop, device=weight.device)
    num_groups = codes.shape[1]
    places = rows[:, None] * num_groups + torch.arange(num_groups, device=weight.device)
    nested = places.div_(weight.nested, rounding_mode="floor")
    return scale_codes(weight.device)[codes.to(torch.int32)] * weight.scales[nested] + weight.mins[nested]


def is_finite(weight: BlockWeight, outputs: range) -> bool:
    """Whether every factor of some outputs is a number. Waits for the device."""
    factors = [weight.scales] if weight.mins is None else [weight.scales, weight.mins]
    if weight.kind is BlockKind.NF4:
        # Few, and shared among rows.
        return all(bool(factor.isfinite().all()) for factor in factors)
    return all(bool(factor[:, outputs.start : outputs.stop].isfinite().all()) for factor in factors)


def has_negative_scales(weight: BlockWeight) -> bool:
    """Whether a scale of NF4 is below 0, which the largest number of a group can't be.

    Scales of other kinds may be.

    Waits for the device.
    """
    if weight.kind not in NF4_KINDS:
        return False
    if weight.kind is BlockKind.NF4_SINGLE:
        return bool((weight.scales < 0).any())
    # A group of zeros ends near 0, on either side: scales are rounded to 256 numbers, at most 0.015
    # of the nested scale apart.
    scales, _ = group_numbers(weight, slice(0, weight.num_outputs))
    return bool((weight.scales < 0).any() | (scales < -0.01 * weight.scales.max()).any())
