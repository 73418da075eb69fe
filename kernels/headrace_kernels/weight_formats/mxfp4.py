"""MXFP4: e2m1 numbers of 4 bits, of which 32 inputs in a row share a power of two as their scale.

    w = number 2^(code - 127), numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

Owns the layout in memory, the way from a folder's bytes to it, and back to numbers.
`dequantize_mxfp4_rows` is the definition: all that it gives are bf16 numbers, without rounding.

Layout, for N outputs and K inputs in T = ceil(K / 128) tiles of 128 inputs: packed [N, 32 T] int16,
where bits 4 i to 4 i + 3 of word j of a tile hold input 32 i + j of it; scales [N, 4 T] uint8,
codes of a tile's four groups side by side, so that a kernel loads them as one word. Inputs beyond
the last are 0. So the four nibbles of a word feed four products of 32 inputs, each of one group.

Scales are at most 2 (code 128): a kernel makes a number of its bits and one product.

Source: OCP Microscaling Formats (MX) v1.0.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Inputs that share a scale, and bytes of their numbers in a folder.
GROUP, GROUP_BYTES = 32, 16
_GROUPS_OF_TILE = 4
TILE_INPUTS = GROUP * _GROUPS_OF_TILE
# The largest code of a scale, 2.
LARGEST_SCALE = 128
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# The exponent of the largest number, 6.
_LARGEST_EXPONENT = 2


@dataclasses.dataclass(slots=True, frozen=True)
class Mxfp4Weight:
    """A weight [num_outputs, num_inputs] in MXFP4. See the module for the layout."""

    num_outputs: int
    num_inputs: int
    packed: Tensor
    scales: Tensor
    # Dtype of the activations that the weight is multiplied with.
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, scales and all."""
        return self.packed.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        """Device that holds the weight."""
        return self.packed.device


def allocate_mxfp4(num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Mxfp4Weight:
    """An empty weight, but for inputs beyond the last, which are 0.

    Args:
        num_outputs: N.
        num_inputs: K, a multiple of 32.
        dtype: Dtype of the activations: bf16, fp16 or fp32.
        device: Device that holds the weight.
    """
    assert num_inputs % GROUP == 0, "groups of 32 divide the inputs"
    tiles = math.ceil(num_inputs / TILE_INPUTS)
    # Zeros take no memory on `meta`; elsewhere writing them is the first touch of pages.
    packed = torch.zeros(num_outputs, tiles * GROUP, dtype=torch.int16, device=device)
    scales = torch.zeros(num_outputs, tiles * _GROUPS_OF_TILE, dtype=torch.uint8, device=device)
    return Mxfp4Weight(num_outputs, num_inputs, packed, scales, dtype)


def store_blocks(weight: Mxfp4Weight, first: int, blocks: Tensor) -> None:
    """Stores rows of numbers as a folder has them.

    Args:
        weight: Changed in its rows `first` and on.
        first: Row of the weight that the first one becomes.
        blocks: [num_rows, K / 2] uint8; the lower nibble of a byte is the earlier input.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    _store_codes(weight, first, codes)


def store_file_blocks(weight: Mxfp4Weight, first: int, blocks: Tensor) -> None:
    """Stores rows as a GGUF file has them, numbers and scales.

    Args:
        weight: Changed in its rows `first` and on.
        first: Row of the weight that the first one becomes.
        blocks: [num_rows, 17 K / 32] uint8; a block is a scale's code and 16 bytes, whose lower
            nibbles are the first half of its inputs.
    """
    parts = blocks.reshape(len(blocks), -1, 1 + GROUP_BYTES)
    numbers = parts[:, :, 1:]
    _store_codes(weight, first, torch.cat((numbers & 15, numbers >> 4), dim=-1).flatten(1))
    store_scales(weight, first, parts[:, :, 0])


def store_scales(weight: Mxfp4Weight, first: int, scales: Tensor) -> None:
    """Stores the codes of scales [num_rows, K / 32] uint8 in rows `first` and on."""
    weight.scales[first : first + len(scales), : scales.shape[1]] = scales


def has_large_scales(weight: Mxfp4Weight, rows: slice) -> bool:
    """Whether a scale of some rows is above 2, or no number. Waits for the device."""
    return bool((weight.scales[rows] > LARGEST_SCALE).any())


def quantize_mxfp4_rows(rows: Tensor, weight: Mxfp4Weight, first: int) -> None:
    """Rounds rows [num_rows, K] to the nearest numbers and stores them in rows `first` and on.

    The largest number of a group decides its scale, as the format's description proposes.
    """
    groups = rows.float().reshape(len(rows), -1, GROUP)
    exponents = torch.frexp(groups.abs().amax(-1)).exponent - 1 - _LARGEST_EXPONENT
    codes = (exponents + _BIAS).clamp(0, LARGEST_SCALE)
    scaled = torch.ldexp(groups, (_BIAS - codes)[..., None])
    middles = torch.tensor(_MIDDLES, device=rows.device)
    numbers = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    _store_codes(weight, first, numbers.flatten(1))
    store_scales(weight, first, codes.to(torch.uint8))


def dequantize_mxfp4_rows(weight: Mxfp4Weight, rows: slice, out: Tensor) -> None:
    """Writes the numbers of some rows to `out` [num_rows, K], in its type."""
    words = weight.packed[rows].to(torch.int32)
    words = words.view(len(words), -1, 1, GROUP)
    shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)[:, None]
    codes = (words >> shifts & 15).flatten(1, 2)
    values = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), device=words.device)
    exponents = weight.scales[rows].to(torch.int32) - _BIAS
    numbers = torch.ldexp(values[codes], exponents[..., None]).flatten(1)
    out.copy_(numbers[:, : weight.num_inputs])


def _store_codes(weight: Mxfp4Weight, first: int, codes: Tensor) -> None:
    """Codes of numbers [num_rows, K] uint8."""
    tiles = weight.packed.shape[1] // GROUP
    padded = torch.nn.functional.pad(codes, (0, tiles * TILE_INPUTS - codes.shape[1]))
    parts = padded.view(len(codes), tiles, _GROUPS_OF_TILE, GROUP).to(torch.int16).unbind(2)
    words = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    weight.packed[first : first + len(codes)] = words.flatten(1)


@triton.constexpr_function
def _number_assembly(part, bf16):
    """Two words are in a register $1, two factors in $2.

    A number's lower three bits become exponent and mantissa of a number that is too small by a
    power of two, whether it has a leading 1 or not; the factor makes up for that. Exact.
    """
    place = 6 if bf16 else 9
    shift = place - 4 * part
    shifted = f"shl.b32 t, $1, {shift}; " if shift >= 0 else f"shr.b32 t, $1, {-shift}; "
    sign = f"shl.b32 u, $1, {12 - 4 * part}; " if part < 3 else "mov.b32 u, $1; "
    mask = "0x01C001C0" if bf16 else "0x0E000E00"
    # bf16 has no product alone before sm_90: plus -0.
    product = "mov.b32 u, 0x80008000; fma.rn.bf16x2 $0, t, $2, u; }" if bf16 else "mul.f16x2 $0, t, $2; }"
    bits = f"and.b32 t, t, {mask}; lop3.b32 t, u, 0x80008000, t, 0xEA; "
    return "{ .reg .b32 t, u; " + shifted + sign + bits + product


@triton.jit
def mxfp4_numbers(words, scales, PART: tl.constexpr, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """Numbers of bits 4 PART to 4 PART + 3 of words, in DTYPE, or fp32 if PLAIN.

    `scales` are int32 words with the codes of a tile's four groups, and broadcast to the words.
    """
    code = (scales >> (8 * PART)) & 255
    if PLAIN:
        bits = (words.to(tl.int32) >> (4 * PART)) & 15
        exponent, half = (bits >> 1) & 3, (bits & 1).to(tl.float32) * 0.5
        magnitude = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
        numbers = tl.where(bits < 8, magnitude, -magnitude) * tl.exp2((code - 127).to(tl.float32))
    else:
        if DTYPE == tl.bfloat16:
            # 2^126 of the assembly's numbers times the scale: 2^(code - 1), never without a
            # leading 1.
            factors = ((code + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            factors = tl.exp2((code - 113).to(tl.float32)).to(tl.float16)
        assembly: tl.constexpr = _number_assembly(PART, DTYPE == tl.bfloat16)
        numbers = tl.inline_asm_elementwise(
            assembly, "=r,r,r", [words, factors], dtype=DTYPE.value, is_pure=True, pack=2
        )
    return numbers
