"""What the bytes of a GGUF tensor's blocks mean: from a file's rows to `Pieces`.

Owns the formats' layouts in files. Within a block of 32 the low nibbles are its first half and the
high ones its second; a K block of 256 takes its inputs 32 at a time from the same bytes, bits
ascending. Each function is a reading of one format of the public descriptions (ggml's
`ggml-common.h` and `quants.py`), in as many operations as it has fields. The numbers stay what they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight, Pieces, store_rows

# Numbers that are unpacked at a time: 4 MB a byte each.
_BLOCK_NUMBERS = 1 << 22


class FileBlock(NamedTuple):
    """Inputs and bytes of one block."""

    inputs: int
    num_bytes: int


FILE_BLOCKS = {
    BlockKind.Q4_0: FileBlock(32, 18),
    BlockKind.Q4_1: FileBlock(32, 20),
    BlockKind.Q5_0: FileBlock(32, 22),
    BlockKind.Q5_1: FileBlock(32, 24),
    BlockKind.Q8_0: FileBlock(32, 34),
    BlockKind.Q2_K: FileBlock(256, 84),
    BlockKind.Q3_K: FileBlock(256, 110),
    BlockKind.Q4_K: FileBlock(256, 144),
    BlockKind.Q5_K: FileBlock(256, 176),
    BlockKind.Q6_K: FileBlock(256, 210),
    BlockKind.IQ4_NL: FileBlock(32, 18),
    BlockKind.IQ4_XS: FileBlock(256, 136),
}


def store_file_rows(file_rows: Tensor, target: BlockWeight, first_row: int) -> None:
    """Puts rows as a file has them into a weight.

    Args:
        file_rows: [num_rows, bytes of a row] uint8, on the target's device.
        target: Changed in its rows `first_row` and on.
        first_row: Row of the target that the first one becomes.
    """
    step = max(_BLOCK_NUMBERS // target.num_inputs, 1)
    for first in range(0, len(file_rows), step):
        rows = file_rows[first : first + step]
        store_rows(pieces_of(target.kind, rows), target, first_row + first)


def pieces_of(kind: BlockKind, file_rows: Tensor) -> Pieces:
    """Rows of a file, [num_rows, bytes of a row] uint8, taken apart."""
    blocks = file_rows.reshape(len(file_rows), -1, FILE_BLOCKS[kind].num_bytes)
    return _READERS[kind](blocks)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block: [num_rows, num_blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).flatten(1)


def _shifted(data: Tensor, width: int, count: int) -> Tensor:
    """[..., n] bytes -> [..., count, n] fields of `width` bits, lowest first."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-2) >> shifts[:, None]) & ((1 << width) - 1)


def _cut(data: Tensor, size: int) -> Tensor:
    """[num_rows, num_blocks, n] bytes -> [num_rows, num_blocks, n / size, size]."""
    return data.reshape(*data.shape[:2], -1, size)


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """16 bytes -> 32 numbers: [num_rows, num_blocks, 32]."""
    return _shifted(blocks[:, :, at : at + 16], 4, 2).flatten(2)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """4 bytes, one bit an input, moved to bit 4."""
    return _shifted(blocks[:, :, at : at + 4], 1, 8).transpose(2, 3).flatten(2) << 4


def _q4_0(blocks: Tensor) -> Pieces:
    return Pieces(_nibbles(blocks, 2).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Pieces:
    return Pieces(_nibbles(blocks, 4).flatten(1), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Pieces:
    return Pieces((_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).flatten(1), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Pieces:
    numbers = (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)).flatten(1)
    return Pieces(numbers, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Pieces:
    return Pieces(blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0))


def _two_bits(blocks: Tensor, at: int) -> Tensor:
    """64 bytes -> 256 numbers of 2 bits: [num_rows, num_blocks, 256].

    Each 32 bytes hold 128 inputs.
    """
    return _shifted(_cut(blocks[:, :, at : at + 64], 32), 2, 4).flatten(2)


def _q2_k(blocks: Tensor) -> Pieces:
    numbers = _two_bits(blocks, 16).flatten(1)
    return Pieces(numbers, _half(blocks, 80), _half(blocks, 82), blocks[:, :, :16].flatten(1))


def _q3_k(blocks: Tensor) -> Pieces:
    numbers = _two_bits(blocks, 32) | _shifted(blocks[:, :, :32], 1, 8).flatten(2) << 2
    low = _shifted(blocks[:, :, 96:104], 4, 2).flatten(2)
    high = _shifted(blocks[:, :, 104:108], 2, 4).flatten(2)
    scales = (low | high << 4).to(torch.int8) - 32
    return Pieces(numbers.flatten(1), _half(blocks, 108), group_scales=scales.flatten(1))


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minimums of 6 bits.

    The first four are whole, the others' upper bits lie in the first's top.
    """
    first, second, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), 2)
    mins = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 2)
    return scales.flatten(1), mins.flatten(1)


def _nibbles_by_64(data: Tensor) -> Tensor:
    """128 bytes -> 256 numbers.

    Each 32 bytes hold 32 inputs in their low and the next 32 in their high nibbles.
    """
    return _shifted(_cut(data, 32), 4, 2).flatten(2)


def _q4_k(blocks: Tensor) -> Pieces:
    numbers = _nibbles_by_64(blocks[:, :, 16:144]).flatten(1)
    return Pieces(numbers, _half(blocks, 0), _half(blocks, 2), *_six_bit_pairs(blocks[:, :, 4:16]))


def _q5_k(blocks: Tensor) -> Pieces:
    numbers = _nibbles_by_64(blocks[:, :, 48:176]) | _shifted(blocks[:, :, 16:48], 1, 8).flatten(2) << 4
    return Pieces(numbers.flatten(1), _half(blocks, 0), _half(blocks, 2), *_six_bit_pairs(blocks[:, :, 4:16]))


def _q6_k(blocks: Tensor) -> Pieces:
    # Each 64 bytes hold 128 inputs, and so do each 32 of the upper bits.
    low = _shifted(_cut(blocks[:, :, :128], 64), 4, 2).flatten(2)
    high = _shifted(_cut(blocks[:, :, 128:192], 32), 2, 4).flatten(2)
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    return Pieces((low | high << 4).flatten(1), _half(blocks, 208), group_scales=scales)


def _iq4_nl(blocks: Tensor) -> Pieces:
    return Pieces(_nibbles(blocks, 2).flatten(1), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Pieces:
    # Each 16 bytes hold 32 inputs, as in Q4_0. Of a scale's 6 bits the upper two lie side by side
    # in two bytes, the lower four in four.
    numbers = _shifted(_cut(blocks[:, :, 8:136], 16), 4, 2).flatten(1)
    high = _shifted(blocks[:, :, 2:4], 2, 4).transpose(2, 3).flatten(2)
    low = _shifted(blocks[:, :, 4:8], 4, 2).transpose(2, 3).flatten(2)
    scales = (low | high << 4).to(torch.int8) - 32
    return Pieces(numbers, _half(blocks, 0), group_scales=scales.flatten(1))


_READERS: dict[BlockKind, Callable[[Tensor], Pieces]] = {
    BlockKind.Q4_0: _q4_0,
    BlockKind.Q4_1: _q4_1,
    BlockKind.Q5_0: _q5_0,
    BlockKind.Q5_1: _q5_1,
    BlockKind.Q8_0: _q8_0,
    BlockKind.Q2_K: _q2_k,
    BlockKind.Q3_K: _q3_k,
    BlockKind.Q4_K: _q4_k,
    BlockKind.Q5_K: _q5_k,
    BlockKind.Q6_K: _q6_k,
    BlockKind.IQ4_NL: _iq4_nl,
    BlockKind.IQ4_XS: _iq4_xs,
}
