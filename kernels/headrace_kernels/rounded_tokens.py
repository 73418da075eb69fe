"""Tokens rounded to 8 bits, each with a scale of its own, or one for each group of its inputs.

Products of 8-bit activations multiply them.

Owns the value (`RoundedTokens`), the rounding and its kernel. Kernels that make tokens round them
as they store them, by `store_rounded`; which products take rounded tokens is `linear.quantized`'s.

    scale = max|x| (1 / 448) (e4m3) or max|x| (1 / 127) (int8), number = x (1 / scale) to nearest,
    ties to even

With groups, max|x| is that of a group. Scales of one group lie side by side, token behind token,
with room for as many tokens as the numbers have, as cuBLAS takes them.

A scheme may give all tokens one scale, found before (`static`): number = x (1 / scale), cut off at
the type's range, -128 to 127 for int8. Only the kernel of its own rounds so.

x is what would have been stored in the model's type, rounded to it: so tokens are the same to the
bit whether the kernel that makes them rounds them or one behind it. bf16 before adds a thousandth
to e4m3's own error and a hundredth to int8's. A token with NaN or infinity has the scale NaN or
infinity, and its products are NaN, which ends its request.

Launch rule of the kernel of its own: as the norms', one token a program from 2,048 numbers on; 16
numbers a thread, at most 16 warps, launched early (`early_launch`). 8,192 tokens of 4,096 numbers
take 3.96 TB/s on an H200 (docs/experiments.md, "Launch rules of kernels").
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from headrace_kernels import card
from headrace_kernels.early_launch import grid_before_is_done, grid_behind_may_start
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.triton_runtime import uses_triton

# The types that there are, and the largest number of each.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# The smallest, which a scale of the token's own leaves alone in int8.
_SMALLEST = {torch.float8_e4m3fn: -448.0, torch.int8: -128.0}
# The smallest scale, for tokens that are all 0.
LEAST_SCALE = 1e-12
# Numbers of a token that one program holds.
_LONGEST_ROW = 65_536
# Numbers of a program that holds several tokens.
_SHARED_PROGRAM = 2048
# Tokens for which there is memory, in multiples: a product may take as many more as suit it. In
# groups the library takes all of them, since it knows no other room for scales.
_ROOM_TOKENS, _ROOM_TOKENS_IN_GROUPS = 128, 64
# Inputs up to which products of e4m3 are added up by sm_90's tensor cores alone, which keep 14 bits
# of a sum; of more, fp32 takes over every 128 products. See `linear.cublas.fp8`.
MOST_FAST_INPUTS = 4096

_STEP_E4M3, _STEP_INT8 = tl.constexpr(1 / LARGEST[torch.float8_e4m3fn]), tl.constexpr(1 / LARGEST[torch.int8])
_LEAST = tl.constexpr(LEAST_SCALE)
# 1.5 * 2^23: a sum with it has no fractions, and the low byte of its bits is the integer.
_INTEGERS = tl.constexpr(1.5 * 2**23)


@dataclasses.dataclass(slots=True, frozen=True)
class RoundedTokens:
    """Numbers times scales are what was rounded, nearly: see `values`."""

    # [num_tokens, size] e4m3fn or int8, the latter from -127 to 127, of a static scale from -128 to
    # 127.
    numbers: Tensor
    # [num_tokens, groups] fp32, those of a group side by side; one group: those of whole tokens.
    scales: Tensor
    # [num_tokens, size] what was rounded, in the model's type, where something reads that too.
    unrounded: Tensor | None = None
    # Inputs of a group, the last of a token maybe fewer; 0: all of a token's.
    group_size: int = 0

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        rounding: InputRounding,
        device: torch.device,
        unrounded: torch.dtype | None = None,
    ) -> RoundedTokens:
        """Room for [num_tokens, size] that are rounded so, and in the model's type if given."""
        (num_tokens, size), group_size = shape, rounding.group_size
        multiple = _ROOM_TOKENS_IN_GROUPS if group_size else _ROOM_TOKENS
        room = math.ceil(num_tokens / multiple) * multiple
        groups = math.ceil(size / group_size) if group_size else 1
        numbers = torch.empty(room, size, dtype=rounding.number, device=device)[:num_tokens]
        scales = torch.empty(groups, room, dtype=torch.float32, device=device).t()[:num_tokens]
        kept = None if unrounded is None else torch.empty(shape, dtype=unrounded, device=device)
        return cls(numbers, scales, kept, group_size)

    def __len__(self) -> int:
        """How many tokens there are, as of a tensor of them."""
        return len(self.numbers)

    def filled_up(self, multiple: int) -> RoundedTokens:
        """The tokens and whatever lies behind them, a multiple of so many in all.

        They are the tokens alone where too little memory of theirs lies behind them.
        """
        num_tokens = math.ceil(len(self) / multiple) * multiple
        parts = (self.numbers, self.scales)
        ends = (part.storage_offset() + num_tokens * part.stride(0) for part in parts)
        rooms = [part.untyped_storage().nbytes() // part.itemsize for part in parts]
        rooms[1] //= self.scales.shape[1]
        if any(end > room for end, room in zip(ends, rooms, strict=True)):
            return RoundedTokens(self.numbers, self.scales, group_size=self.group_size)
        numbers, scales = (part.as_strided((num_tokens, part.shape[1]), part.stride()) for part in parts)
        return RoundedTokens(numbers, scales, group_size=self.group_size)

    def is_rounded_by(self, rounding: InputRounding | None) -> bool:
        """Whether they are such numbers, with scales of such groups, as a product may ask for."""
        return rounding is not None and (self.numbers.dtype, self.group_size) == (rounding.number, rounding.group_size)

    def grouping(self, block: int) -> tuple[int | None, int, int]:
        """`room`, GROUP and GROUPS of `store_rounded`; programs hold `block` numbers of a token."""
        if not self.group_size:
            return None, 0, 1
        return self.scales.stride(1), min(self.group_size, block), self.scales.shape[1]

    def values(self) -> Tensor:
        """What the numbers stand for: [num_tokens, size] fp32."""
        wide = self.numbers.float()
        if not self.group_size:
            return wide * self.scales
        return wide * self.scales.repeat_interleave(self.group_size, 1)[:, : wide.shape[1]]


# What a product multiplies: [num_tokens, size] in the model's type, or rounded.
Activations: TypeAlias = Tensor | RoundedTokens


def unrounded(x: Activations) -> Tensor:
    """Tokens in the model's type, of rounded ones what was kept of them in it."""
    if isinstance(x, Tensor):
        return x
    assert x.unrounded is not None, "the model's type is read too, so it is kept"
    return x.unrounded


def as_taken(x: Activations, rounding: InputRounding | None) -> Activations:
    """Tokens for a product that takes them rounded so; None: it takes the model's type alone.

    Tokens that are rounded in another way are given in the model's type.
    """
    return x if isinstance(x, RoundedTokens) and x.is_rounded_by(rounding) else unrounded(x)


def round_tokens_reference(x: Tensor, rounding: InputRounding) -> RoundedTokens:
    """Specification of `round_tokens`, in plain PyTorch."""
    dtype, static, group_size = rounding.number, rounding.scale, rounding.group_size
    if group_size:
        tokens = RoundedTokens.empty(x.shape, rounding, x.device)
        padded = functional.pad(x, (0, -x.shape[1] % group_size))
        groups = round_tokens_reference(padded.reshape(-1, group_size), dataclasses.replace(rounding, group_size=0))
        tokens.numbers.copy_(groups.numbers.view(padded.shape)[:, : x.shape[1]])
        tokens.scales.copy_(groups.scales.view(tokens.scales.shape))
        return tokens
    wide, largest = x.float(), LARGEST[dtype]
    if static is not None:
        # NaN and infinity are the scale's business here, too.
        scales = (wide * 0).sum(1, keepdim=True) + static
        scaled = (wide * scales.reciprocal()).clamp_(_SMALLEST[dtype], largest)
        return RoundedTokens((scaled if dtype.is_floating_point else scaled.round_()).to(dtype), scales)
    # By the inverse: devices differ in how they divide by a constant.
    scales = (wide.abs().amax(1, keepdim=True) * (1 / largest)).clamp_(min=LEAST_SCALE)
    # A product with the inverse may exceed the largest number by its rounding, which is cut off.
    scaled = (wide * scales.reciprocal()).clamp_(-largest, largest)
    return RoundedTokens((scaled if dtype.is_floating_point else scaled.round_()).to(dtype), scales)


@triton.jit
def store_rounded(
    wide, out, scales, places, mask, rows, is_row, DTYPE: tl.constexpr, static=None,
    GROUP: tl.constexpr = 0, GROUPS: tl.constexpr = 1, room=None,
):  # fmt: skip
    """Stores whole rows, each a token, as numbers of 8 bits and scales.

    Args:
        wide: [rows, n] fp32, 0 outside the mask.
        out: Pointer to e4m3 or int8.
        scales: Pointer to fp32, one for each token or group of a token.
        places: [rows, n] where the numbers go, counted in `out`.
        mask: [rows, n] which do.
        rows: [rows] which tokens they are.
        is_row: [rows] whether there is such a token; None: all are.
        DTYPE: The model's type, to which `wide` is rounded first.
        static: The scale of all tokens; None: each has its own.
        GROUP: Numbers of a group, a power of two up to n; 0: all of a token's.
        GROUPS: Groups of a token, the last maybe shorter.
        room: Tokens for which a group has scales; None: there are no groups.
    """
    wide = wide.to(DTYPE).to(tl.float32)
    ROWS: tl.constexpr = wide.shape[0]
    BLOCK: tl.constexpr = wide.shape[1]
    # As one group, all of a row.
    SHARED: tl.constexpr = GROUP if GROUP > 0 else BLOCK
    IS_INT8: tl.constexpr = out.dtype.element_ty == tl.int8
    # Without their signs, numbers are ordered as their bits are, with infinity and then NaN above
    # all.
    magnitudes = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    grouped = tl.reshape(magnitudes, (ROWS, BLOCK // SHARED, SHARED)) if GROUP > 0 else magnitudes
    largest = tl.max(grouped, axis=2 if GROUP > 0 else 1).to(tl.float32, bitcast=True)
    if static is None:
        scale = tl.maximum(largest * (_STEP_INT8 if IS_INT8 else _STEP_E4M3), _LEAST, propagate_nan=tl.PropagateNan.ALL)
    else:
        # Infinity times 0 is NaN.
        scale = largest * 0.0 + static
    # A division as IEEE says, or the bits differ from the reference's.
    inverse = tl.math.div_rn(scale * 0.0 + 1.0, scale)
    if GROUP > 0:
        group = tl.arange(0, BLOCK // SHARED)[None, :]
        is_group = group < GROUPS
        if is_row is not None:
            is_group = is_group & is_row[:, None]
        tl.store(scales + group * room + rows[:, None], scale, mask=is_group)
        scaled = tl.reshape(tl.reshape(wide, (ROWS, BLOCK // SHARED, SHARED)) * inverse[:, :, None], (ROWS, BLOCK))
    else:
        tl.store(scales + rows, scale, mask=is_row)
        scaled = wide * inverse[:, None]
    if static is not None:
        # What a static scale does not reach is cut off.
        scaled = tl.minimum(tl.maximum(scaled, -128.0 if IS_INT8 else -448.0), 127.0 if IS_INT8 else 448.0)
    # Both conversions bring what exceeds the largest number, by less than its rounding, to the
    # largest.
    if IS_INT8:
        numbers = (scaled + _INTEGERS).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        numbers = scaled.to(tl.float8e4nv)
    # As many numbers a thread as a load of 16 bytes has: with the 16 of such a store rows would
    # change their layout on the way, and sums their order.
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    tl.store(tl.max_contiguous(out + places, [1, VECTOR]), numbers, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _round_kernel(
    x, out, scales, static, num_rows, room,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        grid_behind_may_start()
        grid_before_is_done()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (offs < SIZE)
    places = rows[:, None] * SIZE + offs
    wide = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    is_row = rows < num_rows
    store_rounded(wide, out, scales, places, mask, rows, is_row, x.dtype.element_ty, static, GROUP, GROUPS, room)


def launch_rule(size: int) -> tuple[int, int, int]:
    """Tokens of a program, numbers of a token rounded up to a power of two, and warps."""
    block = max(16, triton.next_power_of_2(size))
    rows = max(1, _SHARED_PROGRAM // block)
    return rows, block, min(16, max(1, rows * block // 512))


def takes_size(size: int) -> bool:
    """Whether kernels round tokens of `size` elements.

    More do not fit a program, and tokens of a single one came out wrong in int8 on an H200
    (Triton 3.6).
    """
    return 1 < size <= _LONGEST_ROW


def round_tokens(x: Tensor, rounding: InputRounding) -> RoundedTokens:
    """Rounds each token to the nearest numbers of its own scale or scales, or of one that is given.

    Args:
        x: [num_tokens, size] bf16, fp16 or fp32.
        rounding: A symmetric one, of groups of a power of two, of tokens, or of a static scale
            above 0. Kernels round to e4m3 on cards that multiply it (sm_89 and later).

    Returns:
        [num_tokens, size].
    """
    num_tokens, size = x.shape
    if not uses_triton(x) or not takes_size(size) or num_tokens == 0:
        return round_tokens_reference(x, rounding)
    tokens = RoundedTokens.empty(x.shape, rounding, x.device)
    (rows, block, num_warps), early = launch_rule(size), card.launches_early(x.device)
    _round_kernel[(triton.cdiv(num_tokens, rows),)](
        x.contiguous(), tokens.numbers, tokens.scales, rounding.scale, num_tokens, *tokens.grouping(block), size,
        rows, block, early, num_warps=num_warps, launch_pdl=early,
    )  # fmt: skip
    return tokens
