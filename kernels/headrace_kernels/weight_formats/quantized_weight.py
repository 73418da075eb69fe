"""Weights of 8 and 4 bits: their layout in memory, rounding to them, and back.

Owns what the bits mean. `dequantize` is the definition: every product of `linear.quantized`
multiplies by those numbers, in fp32 or rounded to the activations' type. Owns neither which layers
are quantized nor files of other tools.

Layouts, for N outputs and K inputs. Nothing outside this room looks at them.

INT8  packed [N, K] int8, scales [N] fp32: w = s q, q from -128 to 127.
      With groups or zero points (`is_grouped`): scales [K / group, N] in the activations' type,
      zeros none or [K / group, N] int8: w = s (q - z).
FP8   packed [N, K] e4m3fn, scales [N] fp32: w = s q. The layout that `torch._scaled_mm` takes.
      In blocks (`is_grouped`): scales [ceil(K / group), ceil(N / scale_outputs)] fp32, one for
      `group` inputs and `scale_outputs` outputs. Those of the same outputs are side by side, with
      room for a multiple of four, as cuBLAS takes them.
INT4  packed [N, words] int16, scales [K / group, N] in the activations' type, zeros [K / group, N]
uint8: w = s (q - z), q and z from 0 to 15. A tile of 4 P inputs is P words: bits 4 i to 4 i + 3 of
      word j hold input i P + j of the tile. So the four nibbles of a word feed four products of P
      inputs, each within one group, and nothing is interleaved. P (`plane_inputs`) is 128, or 64 or
      32 where the group or the number of inputs asks for it; inputs beyond the last are 0 and
      multiplied by nothing. A symmetric format stores z = 8.

Any of them may be `ordered`: what the layouts call input k is input order[k] of x, so that inputs
which share a group need not be neighbours. Products gather x first (`input_order`).
"""

from __future__ import annotations

import dataclasses
import enum
import math

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.weight_formats.dequantized_buffer import reserve

# Groups that are no whole row.
GROUP_SIZES = (32, 64, 128)
# Inputs and at most outputs of a block of FP8.
BLOCK_SIZE = 128
_NIBBLES = 4
# Blocks of FP8 along the inputs for which there is room, in multiples.
BLOCKS_ROOM = 4
# Numbers that one block of rows takes in fp32 while it is rounded or dequantized: 16 MB.
_BLOCK_NUMBERS = 1 << 22
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class QuantKind(enum.Enum):
    """How the numbers of a weight are written."""

    # 8-bit integers, one scale per output or group of inputs; symmetric, or with zero points like
    # the scales.
    INT8 = "int8"
    # 4-bit integers with scale and zero point per group of inputs.
    INT4 = "int4"
    # e4m3fn, one scale per output or block.
    FP8 = "fp8"


# Numbers that inputs of a product may be rounded to.
INPUT_NUMBERS = {
    QuantKind.INT8: torch.int8,
    QuantKind.FP8: torch.float8_e4m3fn,
    QuantKind.INT4: torch.float8_e4m3fn,
}


@dataclasses.dataclass(slots=True, frozen=True)
class Arrangement:
    """What a weight may have beyond its kind and groups. By default what `quantize_rows` needs."""

    # INT8: zero points. INT4 has them always.
    has_zeros: bool = False
    # FP8: outputs of a block, a power of two; 0: no blocks.
    scale_outputs: int = 0
    # Inputs in an order of the weight's own.
    is_ordered: bool = False
    # The scheme rounds inputs to numbers of 8 bits (`INPUT_NUMBERS`); None: it does not say so.
    inputs: InputRounding | None = None
    # FP8: products never round inputs, though the card could.
    keeps_activations: bool = False


PLAIN = Arrangement()


@dataclasses.dataclass(slots=True, frozen=True)
class QuantizedWeight:
    """A weight [num_outputs, num_inputs] in few bits. See the module for the layouts."""

    kind: QuantKind
    num_outputs: int
    num_inputs: int
    # num_inputs where a scale holds for a whole row.
    group_size: int
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    # Dtype of the activations that the weight is multiplied with.
    dtype: torch.dtype
    # Outputs that share a scale: more than 1 in blocks of FP8.
    scale_outputs: int = 1
    # [K] int32 or none: see the module.
    order: Tensor | None = None
    inputs: InputRounding | None = None
    keeps_activations: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether scales are those of groups or blocks, not of whole outputs."""
        return self.scales.dim() == 2

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, scales and all."""
        parts = (self.packed, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def device(self) -> torch.device:
        """Device that holds the weight."""
        return self.packed.device


def plane_inputs(num_inputs: int, group_size: int) -> int:
    """INT4: inputs that one nibble of a tile's words holds.

    The widest that divides, so that nothing is padded, or else the narrowest.
    """
    for size in (128, 64):
        if group_size % size == 0 and num_inputs % (_NIBBLES * size) == 0:
            return size
    return 32


def allocate(
    kind: QuantKind,
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    arrangement: Arrangement = PLAIN,
) -> QuantizedWeight:
    """An empty weight.

    `quantize_rows` fills it or, whatever its arrangement, `stored_rows.store_rows`.

    Args:
        kind: How numbers are written.
        num_outputs: N.
        num_inputs: K.
        group_size: 32, 64, 128 or num_inputs; FP8: num_inputs, or 128 in blocks.
        dtype: Dtype of the activations: bf16, fp16 or fp32.
        device: Device that holds the weight.
        arrangement: What it has beyond.

    Raises:
        ValueError: Sizes or types that there is no layout for; says which there are.
    """
    _check(kind, num_outputs, num_inputs, group_size, dtype, arrangement)
    weight = _empty(kind, num_outputs, num_inputs, group_size, dtype, device, arrangement)
    reserve(num_outputs, num_inputs, dtype, weight.device)
    return weight


def _empty(
    kind: QuantKind,
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    arrangement: Arrangement,
) -> QuantizedWeight:
    words, numbers = num_inputs, torch.int8 if kind is QuantKind.INT8 else torch.float8_e4m3fn
    if kind is QuantKind.INT4:
        tile = _NIBBLES * plane_inputs(num_inputs, group_size)
        words, numbers = math.ceil(num_inputs / tile) * tile // _NIBBLES, torch.int16
    shape: tuple[int, ...] = (math.ceil(num_inputs / group_size), num_outputs)
    scale_dtype, zeros, scales = dtype, None, None
    if kind is QuantKind.INT4 or arrangement.has_zeros:
        zeros = torch.empty(shape, dtype=torch.uint8 if kind is QuantKind.INT4 else torch.int8, device=device)
    elif arrangement.scale_outputs:
        room = math.ceil(shape[0] / BLOCKS_ROOM) * BLOCKS_ROOM
        rows = torch.empty(math.ceil(num_outputs / arrangement.scale_outputs), room, dtype=torch.float32, device=device)
        scales = rows.t()[: shape[0]]
    elif group_size == num_inputs:
        shape, scale_dtype = (num_outputs,), torch.float32
    return QuantizedWeight(
        kind,
        num_outputs,
        num_inputs,
        group_size,
        torch.empty(num_outputs, words, dtype=numbers, device=device),
        torch.empty(shape, dtype=scale_dtype, device=device) if scales is None else scales,
        zeros,
        dtype,
        scale_outputs=arrangement.scale_outputs or 1,
        order=torch.empty(num_inputs, dtype=torch.int32, device=device) if arrangement.is_ordered else None,
        inputs=arrangement.inputs,
        keeps_activations=arrangement.keeps_activations,
    )


def _check(
    kind: QuantKind, num_outputs: int, num_inputs: int, group_size: int, dtype: torch.dtype, arrangement: Arrangement
) -> None:
    if num_outputs < 1 or num_inputs < 1:
        raise ValueError(f"a weight of {num_outputs} outputs and {num_inputs} inputs: both must be at least 1")
    if dtype not in _FLOATS:
        raise ValueError(f"activations in {dtype}: a quantized weight takes bfloat16, float16 or float32")
    if arrangement.has_zeros and kind is QuantKind.FP8:
        raise ValueError("fp8 has no zero points")
    if arrangement.inputs is not None and arrangement.inputs.number is not INPUT_NUMBERS[kind]:
        raise ValueError(
            f"inputs in {arrangement.inputs.number}: {kind.value} has inputs in {INPUT_NUMBERS[kind]} or none"
        )
    if arrangement.inputs is not None and arrangement.keeps_activations:
        raise ValueError("activations are rounded or kept, not both")
    if arrangement.scale_outputs:
        _check_blocks(kind, group_size, arrangement.scale_outputs)
    elif group_size != num_inputs:
        _check_groups(kind, num_inputs, group_size)


def _check_blocks(kind: QuantKind, group_size: int, scale_outputs: int) -> None:
    is_power = scale_outputs & (scale_outputs - 1) == 0
    if kind is not QuantKind.FP8 or group_size != BLOCK_SIZE or scale_outputs > BLOCK_SIZE or not is_power:
        raise ValueError(
            f"{kind.value} in blocks of {scale_outputs} outputs and {group_size} inputs: "
            f"only fp8 has blocks, of a power of two up to {BLOCK_SIZE} outputs and {BLOCK_SIZE} inputs"
        )


def _check_groups(kind: QuantKind, num_inputs: int, group_size: int) -> None:
    if kind is QuantKind.FP8:
        raise ValueError(f"group size {group_size}: fp8 has one scale per output, group size {num_inputs}, or blocks")
    if group_size not in GROUP_SIZES or num_inputs % group_size:
        fitting = [size for size in GROUP_SIZES if num_inputs % size == 0 and size < num_inputs]
        raise ValueError(
            f"group size {group_size} for {num_inputs} inputs: {kind.value} takes "
            f"{', '.join(str(size) for size in [*fitting, num_inputs])} here ({num_inputs} is the whole row)"
        )


def quantize_rows(
    weight_rows: Tensor, target: QuantizedWeight, first_row: int, magnitudes: Tensor | None = None
) -> None:
    """Rounds rows to the nearest numbers of the target's kind and stores them.

    The largest number of an output (INT4: the range of a group, 0 included) sets the scale. A row
    with NaN or infinity gets a scale that is NaN or infinite, which `dequantize` shows as NaN.

    Args:
        weight_rows: [num_rows, K] bf16, fp16 or fp32, on the target's device.
        target: Changed in its rows `first_row` and on.
        first_row: Row of the target that the first one becomes.
        magnitudes: [num_rows] fp32, largest numbers to scale by, where rows are parts of longer
            ones; None: the rows' own. Not for INT4.
    """
    num_rows, num_inputs = weight_rows.shape
    assert num_inputs == target.num_inputs and 0 <= first_row <= target.num_outputs - num_rows
    assert target.order is None and (target.kind is QuantKind.INT4 or not target.is_grouped)
    assert magnitudes is None or (target.kind is not QuantKind.INT4 and magnitudes.shape == (num_rows,))
    step = _block_rows(num_inputs)
    for first in range(0, num_rows, step):
        wide = weight_rows[first : first + step].float()
        rows = slice(first_row + first, first_row + first + len(wide))
        if target.kind is QuantKind.INT4:
            _quantize_int4(wide, target, rows)
        else:
            most = wide.abs().amax(1) if magnitudes is None else magnitudes[first : first + step]
            _quantize_8_bits(wide, most, target, rows)


def _quantize_8_bits(wide: Tensor, most: Tensor, target: QuantizedWeight, rows: slice) -> None:
    """Quantizes rows [num_rows, K] fp32.

    Scales make a magnitude of `most` [num_rows] the greatest value.
    """
    is_int8 = target.kind is QuantKind.INT8
    largest = 127.0 if is_int8 else torch.finfo(torch.float8_e4m3fn).max
    scales = (most / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    numbers = (wide / scales[:, None]).clamp_(-largest, largest)
    target.packed[rows] = (numbers.round_().nan_to_num_(0) if is_int8 else numbers).to(target.packed.dtype)
    target.scales[rows] = scales


def _quantize_int4(wide: Tensor, target: QuantizedWeight, rows: slice) -> None:
    assert target.zeros is not None
    groups = wide.reshape(len(wide), -1, target.group_size)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    # Numbers are rounded by the scale that is stored, not by the one before its own rounding.
    least = 2.0**-24 if target.scales.dtype == torch.float16 else torch.finfo(target.scales.dtype).tiny
    scales = ((high - low) / 15).clamp_(min=least).to(target.scales.dtype)
    zeros = (-low / scales.float()).round_().clamp_(0, 15).nan_to_num_(0)
    numbers = (groups / scales.float()[:, :, None]).round_().add_(zeros[:, :, None])
    target.packed[rows] = pack_nibbles(numbers.clamp_(0, 15).nan_to_num_(0).flatten(1), target)
    target.scales[:, rows] = scales.t()
    target.zeros[:, rows] = zeros.t().to(torch.uint8)


def pack_nibbles(numbers: Tensor, target: QuantizedWeight) -> Tensor:
    """[num_rows, K] from 0 to 15 as words."""
    plane = plane_inputs(target.num_inputs, target.group_size)
    filled = target.packed.shape[1] * _NIBBLES
    padded = functional.pad(numbers, (0, filled - target.num_inputs)).to(torch.int32)
    tiles = padded.view(len(numbers), -1, _NIBBLES, plane)
    words = tiles[:, :, 0] | tiles[:, :, 1] << 4 | tiles[:, :, 2] << 8 | tiles[:, :, 3] << 12
    # The upper half of the unsigned range wraps around.
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).flatten(1)


def _unpack(words: Tensor, num_inputs: int, plane: int) -> Tensor:
    """Words [num_rows, words] -> [num_rows, K] int16 from 0 to 15."""
    tiles = words.view(len(words), -1, 1, plane)
    # Made on the device: a list would be copied there, which waits for the stream.
    shifts = torch.arange(0, 4 * _NIBBLES, 4, dtype=torch.int16, device=words.device).view(1, 1, _NIBBLES, 1)
    return ((tiles >> shifts) & 15).flatten(1)[:, :num_inputs]


def dequantize(weight: QuantizedWeight, out: Tensor | None = None) -> Tensor:
    """The numbers that the bits stand for.

    Args:
        weight: Filled.
        out: [N, K] in any floating type, which results are rounded to; None: the activations' type.

    Returns:
        [N, K], `out` if given.
    """
    if out is None:
        out = torch.empty(weight.num_outputs, weight.num_inputs, dtype=weight.dtype, device=weight.device)
    step = _block_rows(weight.num_inputs)
    for first in range(0, weight.num_outputs, step):
        dequantize_rows(weight, slice(first, min(first + step, weight.num_outputs)), out[first : first + step])
    return out


def dequantize_rows(weight: QuantizedWeight, rows: slice, out: Tensor) -> None:
    """`dequantize` for some rows: [num_rows, K] into `out`."""
    if weight.order is None:
        dequantize_ordered_rows(weight, rows, out)
    else:
        stored = torch.empty_like(out)
        dequantize_ordered_rows(weight, rows, stored)
        out.index_copy_(1, weight.order.long(), stored)


def dequantize_ordered_rows(weight: QuantizedWeight, rows: slice, out: Tensor) -> None:
    """`dequantize_rows` with inputs in the order of the weight's own."""
    if not weight.is_grouped:
        if out.dtype == torch.float32:
            out.copy_(weight.packed[rows]).mul_(weight.scales[rows, None])
        else:
            out.copy_(weight.packed[rows].float().mul_(weight.scales[rows, None]))
        return
    numbers = weight.packed[rows]
    if weight.kind is QuantKind.INT4:
        numbers = _unpack(numbers, weight.num_inputs, plane_inputs(weight.num_inputs, weight.group_size))
    out.copy_(_scaled(weight, rows, numbers.float()))


def _scaled(weight: QuantizedWeight, rows: slice, numbers: Tensor) -> Tensor:
    """Values [num_rows, K] fp32 less their zero points times their scales, in place if possible."""
    num_rows, whole = len(numbers), len(weight.scales) * weight.group_size
    # The last block of FP8 may be cut off.
    groups = functional.pad(numbers, (0, whole - weight.num_inputs)).view(num_rows, -1, weight.group_size)
    if weight.zeros is not None:
        groups = groups.sub_(weight.zeros[:, rows].t().float()[:, :, None])
    if weight.scale_outputs == 1:
        scales = weight.scales[:, rows]
    else:
        outputs = torch.arange(rows.start, rows.start + num_rows, device=numbers.device)
        scales = weight.scales[:, outputs // weight.scale_outputs]
    return groups.mul_(scales.t().float()[:, :, None]).flatten(1)[:, : weight.num_inputs]


def group_scales(weight: QuantizedWeight, rows: slice) -> Tensor:
    """[num_rows, num_groups] fp32: the scale of each group of some rows. Not of FP8 in blocks."""
    assert weight.scale_outputs == 1, "a block's scale is no row's"
    return weight.scales[:, rows].t().float() if weight.is_grouped else weight.scales[rows, None]


def _block_rows(num_inputs: int) -> int:
    return max(1, _BLOCK_NUMBERS // num_inputs)
