"""Values in the block types of GGUF, with numpy alone: quantizers, and decoders.

Decoders walk a block value by value.

Written from the public description of each type and independently of the product's readers, which
work on whole tensors at once: here a decoder says for input i of a block where its bits are.
Quantizers are the plainest that give valid blocks, not the best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Kind(NamedTuple):
    """A type: its number in files, inputs and bytes of a block."""

    number: int
    inputs: int
    num_bytes: int


KINDS = {
    "F32": Kind(0, 1, 4), "F16": Kind(1, 1, 2), "BF16": Kind(30, 1, 2),
    "Q4_0": Kind(2, 32, 18), "Q4_1": Kind(3, 32, 20), "Q5_0": Kind(6, 32, 22), "Q5_1": Kind(7, 32, 24),
    "Q8_0": Kind(8, 32, 34), "Q2_K": Kind(10, 256, 84), "Q3_K": Kind(11, 256, 110), "Q4_K": Kind(12, 256, 144),
    "Q5_K": Kind(13, 256, 176), "Q6_K": Kind(14, 256, 210),
    "IQ4_NL": Kind(20, 32, 18), "IQ4_XS": Kind(23, 256, 136), "MXFP4": Kind(39, 32, 17),
}  # fmt: skip
# Those that any projection may have; MXFP4 is for experts alone.
BLOCK_KINDS = [name for name, kind in KINDS.items() if kind.inputs > 1 and name != "MXFP4"]


# ---- decoders ----


def decode(name: str, rows: Bytes) -> Floats:
    """[num_rows, bytes of a row] -> [num_rows, inputs] fp32."""
    if name == "F32":
        return np.ascontiguousarray(rows).view(np.float32)
    if name == "F16":
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    if name == "BF16":
        return (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    kind = KINDS[name]
    blocks = rows.reshape(-1, kind.num_bytes)
    out = np.empty((len(blocks), kind.inputs), np.float32)
    with np.errstate(all="ignore"):
        for i in range(kind.inputs):
            out[:, i] = _DECODERS[name](blocks, i)
    return out.reshape(len(rows), -1)


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)


def _bits(blocks: Bytes, byte: int, shift: int, width: int) -> npt.NDArray[np.int32]:
    return (blocks[:, byte].astype(np.int32) >> shift) & ((1 << width) - 1)


def _nibble(blocks: Bytes, at: int, i: int) -> npt.NDArray[np.int32]:
    return _bits(blocks, at + i % 16, 4 * (i // 16), 4)


def _fifth(blocks: Bytes, at: int, i: int) -> npt.NDArray[np.int32]:
    return _bits(blocks, at + i // 8, i % 8, 1) << 4


def _signed(blocks: Bytes, byte: int) -> Floats:
    return blocks[:, byte].astype(np.int8).astype(np.float32)


def _float(numbers: npt.NDArray[np.int32]) -> Floats:
    return numbers.astype(np.float32)


def _q2_k(blocks: Bytes, i: int) -> Floats:
    q = _bits(blocks, 16 + i // 128 * 32 + i % 32, 2 * (i % 128 // 32), 2)
    scale = _half(blocks, 80) * _float(_bits(blocks, i // 16, 0, 4))
    return scale * _float(q) - _half(blocks, 82) * _float(_bits(blocks, i // 16, 4, 4))


def _q3_k(blocks: Bytes, i: int) -> Floats:
    q = _bits(blocks, 32 + i // 128 * 32 + i % 32, 2 * (i % 128 // 32), 2)
    q = q - 4 * (1 - _bits(blocks, i % 32, i // 32, 1))
    group = i // 16
    six = _bits(blocks, 96 + group % 8, 4 * (group // 8), 4) | _bits(blocks, 104 + group % 4, 2 * (group // 4), 2) << 4
    return _half(blocks, 108) * _float(six - 32) * _float(q)


def _scale_min(blocks: Bytes, group: int) -> tuple[Floats, Floats]:
    if group < 4:
        return _float(_bits(blocks, 4 + group, 0, 6)), _float(_bits(blocks, 8 + group, 0, 6))
    low = _bits(blocks, 8 + group, 0, 4) | _bits(blocks, group, 6, 2) << 4
    high = _bits(blocks, 8 + group, 4, 4) | _bits(blocks, 4 + group, 6, 2) << 4
    return _float(low), _float(high)


def _q45_k(blocks: Bytes, i: int, at: int, fifth_at: int | None) -> Floats:
    q = _bits(blocks, at + i // 64 * 32 + i % 32, 4 * (i % 64 // 32), 4)
    if fifth_at is not None:
        q |= _bits(blocks, fifth_at + i % 32, i // 32, 1) << 4
    scale, low = _scale_min(blocks, i // 32)
    return _half(blocks, 0) * scale * _float(q) - _half(blocks, 2) * low


def _q6_k(blocks: Bytes, i: int) -> Floats:
    half, place = divmod(i, 128)
    q = _bits(blocks, half * 64 + place % 64, 4 * (place // 64), 4)
    q |= _bits(blocks, 128 + half * 32 + place % 32, 2 * (place // 32), 2) << 4
    return _half(blocks, 208) * _signed(blocks, 192 + i // 16) * _float(q - 32)


# IQ4's codebook.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _iq4_xs(blocks: Bytes, i: int) -> Floats:
    group, place = divmod(i, 32)
    six = _bits(blocks, 4 + group // 2, 4 * (group % 2), 4) | _bits(blocks, 2 + group // 4, 2 * (group % 4), 2) << 4
    number = IQ4[_bits(blocks, 8 + 16 * group + place % 16, 4 * (place // 16), 4)]
    return _half(blocks, 0) * _float(six - 32) * number


# MXFP4's numbers, and what they are multiplied with.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _power_of_two(blocks: Bytes) -> Floats:
    return np.ldexp(np.ones(len(blocks), np.float32), blocks[:, 0].astype(np.int32) - 127)


_DECODERS: dict[str, Callable[[Bytes, int], Floats]] = {
    "Q4_0": lambda b, i: _half(b, 0) * _float(_nibble(b, 2, i) - 8),
    "Q4_1": lambda b, i: _half(b, 0) * _float(_nibble(b, 4, i)) + _half(b, 2),
    "Q5_0": lambda b, i: _half(b, 0) * _float((_nibble(b, 6, i) | _fifth(b, 2, i)) - 16),
    "Q5_1": lambda b, i: _half(b, 0) * _float(_nibble(b, 8, i) | _fifth(b, 4, i)) + _half(b, 2),
    "Q8_0": lambda b, i: _half(b, 0) * _signed(b, 2 + i),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda b, i: _q45_k(b, i, 16, None),
    "Q5_K": lambda b, i: _q45_k(b, i, 48, 16),
    "Q6_K": _q6_k,
    "IQ4_NL": lambda b, i: _half(b, 0) * IQ4[_nibble(b, 2, i)],
    "IQ4_XS": _iq4_xs,
    "MXFP4": lambda b, i: _power_of_two(b) * E2M1[_nibble(b, 1, i)],
}


# ---- quantizers ----


def quantize(name: str, values: Floats) -> Bytes:
    """[num_rows, inputs] fp32 -> [num_rows, bytes of a row]."""
    values = np.ascontiguousarray(values, np.float32)
    if name == "F32":
        return values.view(np.uint8)
    if name == "F16":
        return values.astype(np.float16).view(np.uint8)
    if name == "BF16":
        words = values.view(np.uint32).astype(np.uint64)
        return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    kind = KINDS[name]
    blocks = values.reshape(-1, kind.inputs)
    out = np.zeros((len(blocks), kind.num_bytes), np.uint8)
    _QUANTIZERS[name](blocks, out)
    return out.reshape(len(values), -1)


def _put_half(out: Bytes, at: int, values: Floats) -> Floats:
    """Stores fp16, and returns what was stored, with zeros replaced by something to divide by."""
    stored = values.astype(np.float16)
    out[:, at : at + 2] = stored[:, None].view(np.uint8)
    wide = stored.astype(np.float32)
    return np.where(wide == 0, 1, wide)


def _rounded(values: Floats, low: int, high: int) -> npt.NDArray[np.int32]:
    return np.clip(np.rint(values), low, high).astype(np.int32)


def _put(out: Bytes, byte: int, shift: int, bits: npt.NDArray[np.int32]) -> None:
    out[:, byte] |= (bits << shift).astype(np.uint8)


def _legacy(blocks: Floats, out: Bytes, bits: int, has_min: bool) -> None:
    most = (1 << bits) - 1
    if has_min:
        low = blocks.min(1)
        scale = _put_half(out, 0, (blocks.max(1) - low) / most)
        q = _rounded((blocks - _put_half(out, 2, low)[:, None]) / scale[:, None], 0, most)
    else:
        scale = _put_half(out, 0, np.abs(blocks).max(1) / (1 << (bits - 1)))
        q = _rounded(blocks / scale[:, None] + (1 << (bits - 1)), 0, most)
    at = (4 if has_min else 2) + (4 if bits == 5 else 0)
    for i in range(32):
        _put(out, at + i % 16, 4 * (i // 16), q[:, i] & 15)
        if bits == 5:
            _put(out, at - 4 + i // 8, i % 8, q[:, i] >> 4)


def _q8_0_blocks(blocks: Floats, out: Bytes) -> None:
    scale = _put_half(out, 0, np.abs(blocks).max(1) / 127)
    out[:, 2:] = _rounded(blocks / scale[:, None], -127, 127).astype(np.int8).view(np.uint8)


def _affine_groups(
    blocks: Floats, out: Bytes, size: int, bits: int, scale_bits: int, at: tuple[int, int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Numbers, integer scales and integer minimums of groups; their factors are stored."""
    groups, most, top = blocks.reshape(len(blocks), -1, size), (1 << bits) - 1, (1 << scale_bits) - 1
    lows = -np.minimum(groups.min(2), 0)
    scales = (groups.max(2) + lows) / most
    factor = _put_half(out, at[0], scales.max(1) / top)
    low_factor = _put_half(out, at[1], lows.max(1) / top)
    sc, mn = _rounded(scales / factor[:, None], 0, top), _rounded(lows / low_factor[:, None], 0, top)
    step = np.maximum(factor[:, None] * sc, 1e-30)[:, :, None]
    q = _rounded((groups + (low_factor[:, None] * mn)[:, :, None]) / step, 0, most)
    return q.reshape(blocks.shape), sc, mn


def _q2_k_blocks(blocks: Floats, out: Bytes) -> None:
    q, sc, mn = _affine_groups(blocks, out, 16, 2, 4, (80, 82))
    out[:, :16] = sc | mn << 4
    for i in range(256):
        _put(out, 16 + i // 128 * 32 + i % 32, 2 * (i % 128 // 32), q[:, i])


def _q45_k_blocks(blocks: Floats, out: Bytes, bits: int) -> None:
    q, sc, mn = _affine_groups(blocks, out, 32, bits, 6, (0, 2))
    for group in range(4):
        _put(out, 4 + group, 0, sc[:, group])
        _put(out, 8 + group, 0, mn[:, group])
        _put(out, 12 + group, 0, sc[:, group + 4] & 15)
        _put(out, 12 + group, 4, mn[:, group + 4] & 15)
        _put(out, 4 + group, 6, sc[:, group + 4] >> 4)
        _put(out, 8 + group, 6, mn[:, group + 4] >> 4)
    at = 48 if bits == 5 else 16
    for i in range(256):
        _put(out, at + i // 64 * 32 + i % 32, 4 * (i % 64 // 32), q[:, i] & 15)
        if bits == 5:
            _put(out, 16 + i % 32, i // 32, q[:, i] >> 4)


def _symmetric_groups(
    blocks: Floats, out: Bytes, half: int, scale_most: int, at: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Numbers from -half and integer scales of groups of 16; their factor is stored."""
    groups = blocks.reshape(len(blocks), 16, 16)
    scales = np.abs(groups).max(2) / half
    factor = _put_half(out, at, scales.max(1) / scale_most)
    sc = _rounded(scales / factor[:, None], 0, scale_most)
    step = np.maximum(factor[:, None] * sc, 1e-30)[:, :, None]
    return _rounded(groups / step, -half, half - 1).reshape(blocks.shape), sc


def _q3_k_blocks(blocks: Floats, out: Bytes) -> None:
    q, sc = _symmetric_groups(blocks, out, 4, 31, 108)
    for group in range(16):
        six = sc[:, group] + 32
        _put(out, 96 + group % 8, 4 * (group // 8), six & 15)
        _put(out, 104 + group % 4, 2 * (group // 4), six >> 4)
    for i in range(256):
        _put(out, 32 + i // 128 * 32 + i % 32, 2 * (i % 128 // 32), (q[:, i] + 4) & 3)
        _put(out, i % 32, i // 32, (q[:, i] + 4) >> 2)


def _q6_k_blocks(blocks: Floats, out: Bytes) -> None:
    q, sc = _symmetric_groups(blocks, out, 32, 127, 208)
    out[:, 192:208] = sc.astype(np.int8).view(np.uint8)
    for i in range(256):
        half, place = divmod(i, 128)
        _put(out, half * 64 + place % 64, 4 * (place // 64), (q[:, i] + 32) & 15)
        _put(out, 128 + half * 32 + place % 32, 2 * (place // 32), (q[:, i] + 32) >> 4)


def _nearest_iq4(values: Floats) -> npt.NDArray[np.int32]:
    return np.searchsorted((IQ4[1:] + IQ4[:-1]) / 2, values).astype(np.int32)


def _iq4_nl_blocks(blocks: Floats, out: Bytes) -> None:
    scale = _put_half(out, 0, np.abs(blocks).max(1) / 120)
    q = _nearest_iq4(blocks / scale[:, None])
    for i in range(32):
        _put(out, 2 + i % 16, 4 * (i // 16), q[:, i])


def _iq4_xs_blocks(blocks: Floats, out: Bytes) -> None:
    groups = blocks.reshape(len(blocks), 8, 32)
    scales = np.abs(groups).max(2) / 120
    factor = _put_half(out, 0, scales.max(1) / 31)
    sc = _rounded(scales / factor[:, None], -32, 31)
    q = _nearest_iq4(groups / np.maximum(factor[:, None] * sc, 1e-30)[:, :, None])
    for group in range(8):
        six = sc[:, group] + 32
        _put(out, 4 + group // 2, 4 * (group % 2), six & 15)
        _put(out, 2 + group // 4, 2 * (group % 4), six >> 4)
        for i in range(32):
            _put(out, 8 + 16 * group + i % 16, 4 * (i // 16), q[:, group, i])


def _mxfp4_blocks(blocks: Floats, out: Bytes) -> None:
    # The largest number of a block becomes 4 to 8, of which 6 is the largest there is.
    out[:, 0] = np.clip(np.frexp(np.abs(blocks).max(1))[1] - 1 - 2 + 127, 0, 128)
    scaled = blocks / _power_of_two(out)[:, None]
    q = np.abs(scaled[:, :, None] - E2M1).argmin(2).astype(np.int32)
    for i in range(32):
        _put(out, 1 + i % 16, 4 * (i // 16), q[:, i])


_QUANTIZERS: dict[str, Callable[[Floats, Bytes], None]] = {
    "Q4_0": lambda b, o: _legacy(b, o, 4, False),
    "Q4_1": lambda b, o: _legacy(b, o, 4, True),
    "Q5_0": lambda b, o: _legacy(b, o, 5, False),
    "Q5_1": lambda b, o: _legacy(b, o, 5, True),
    "Q8_0": _q8_0_blocks,
    "Q2_K": _q2_k_blocks,
    "Q3_K": _q3_k_blocks,
    "Q4_K": lambda b, o: _q45_k_blocks(b, o, 4),
    "Q5_K": lambda b, o: _q45_k_blocks(b, o, 5),
    "Q6_K": _q6_k_blocks,
    "IQ4_NL": _iq4_nl_blocks,
    "IQ4_XS": _iq4_xs_blocks,
    "MXFP4": _mxfp4_blocks,
}
