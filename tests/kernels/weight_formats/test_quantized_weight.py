"""Weights of 8 and 4 bits: what rounding costs at most, what the bits are, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_kernels.weight_formats.quantized_weight import (
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize,
    dequantize_rows,
    plane_inputs,
    quantize_rows,
)

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Outputs, inputs, group of INT4: whole tiles, tiles of 64 and 32 inputs a nibble, tiles that are
# not full, whole rows of odd length.
SIZES = ((3, 512, 128), (37, 1024, 1024), (5, 640, 128), (4, 256, 64), (7, 96, 32), (1, 101, 101), (2, 8, 8))


def quantized(
    rows: torch.Tensor, kind: QuantKind, group: int | None = None, dtype: torch.dtype | None = None
) -> QuantizedWeight:
    num_outputs, num_inputs = rows.shape
    group = group if group and kind is QuantKind.INT4 else num_inputs
    weight = allocate(kind, num_outputs, num_inputs, group, dtype or rows.dtype, rows.device)
    for part in (weight.packed, weight.scales, weight.zeros):
        if part is not None:
            part.view(torch.uint8).fill_(0xFF)  # NaN, and bits that stand for something else
    quantize_rows(rows, weight, 0)
    return weight


def restored(weight: QuantizedWeight) -> torch.Tensor:
    out = torch.full((weight.num_outputs, weight.num_inputs), float("nan"), device=weight.device)
    return dequantize(weight, out).double()


def largest_errors(rows: torch.Tensor, kind: QuantKind, group: int, scale_rounding: float) -> torch.Tensor:
    """The largest error that rounding to nearest may make, for each number.

    INT8: half a step, of which the largest number of a row has 127. FP8: half a unit in the last of
    4 bits, or of the smallest numbers' fixed step. INT4: half a step, of which the range of a group
    has 15; the zero point's own rounding can push a range's end out by another half, where numbers
    are cut off and so are off by half a step too. A stored scale that is rounded down cuts the
    range's ends off by up to its rounding of the whole range.
    """
    wide = rows.double()
    if kind is QuantKind.INT8:
        return (wide.abs().amax(1, keepdim=True) / 127 / 2).expand_as(wide)
    if kind is QuantKind.FP8:
        step = wide.abs().amax(1, keepdim=True) / 448
        return torch.maximum(wide.abs() * 2**-4, step * 2**-10)
    groups = wide.unflatten(1, (-1, group))
    size = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
    return (size / 15 * (0.5 + 16 * scale_rounding)).repeat_interleave(group, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QuantKind)
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group"), SIZES)
def test_rounding_is_to_the_nearest(
    kind: QuantKind, num_outputs: int, num_inputs: int, group: int, dtype: torch.dtype
) -> None:
    rows = (torch.randn(num_outputs, num_inputs) * torch.logspace(-3, 1, num_outputs)[:, None]).to(dtype)
    weight = quantized(rows, kind, group)
    scale_rounding = torch.finfo(weight.scales.dtype).eps
    # fp32 arithmetic on the way, and fp16's scales near the end of its range.
    slack = 1e-5 * rows.double().abs().amax(1, keepdim=True) + 16 * 2**-25
    bound = largest_errors(rows, kind, weight.group_size, scale_rounding) * 1.0001 + slack
    error = (restored(weight) - rows.double()).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.3f} times the bound"


@given(st.data())
def test_numbers_that_have_bits_of_their_own_come_back(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([32, 64, 128]))
    num_inputs = group * data.draw(st.integers(1, 5))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (3, num_inputs // group, group), generator=generator)
    # Both ends are used, so that the scale is the one that numbers were made with.
    numbers[:, :, 0], numbers[:, :, 1] = 0, 15
    zeros = torch.randint(0, 16, (3, num_inputs // group, 1), generator=generator)
    rows = ((numbers - zeros) * 0.25).flatten(1).float()
    assert torch.equal(restored(quantized(rows, QuantKind.INT4, group)).float(), rows)
    integers = torch.randint(-127, 128, (3, num_inputs), generator=generator).float()
    integers[:, 0] = 127
    assert torch.equal(restored(quantized(integers, QuantKind.INT8)).float(), integers)
    floats = torch.randn(3, num_inputs, generator=generator).to(torch.float8_e4m3fn).float()
    floats[:, 0] = -448
    assert torch.equal(restored(quantized(floats, QuantKind.FP8)).float(), floats)


def test_the_nibbles_of_a_word_are_a_plane_apart() -> None:
    """The order that kernels rely on: input i P + j of a tile in bits 4 i of word j."""
    for num_inputs, group in ((1024, 128), (256, 64), (128, 32), (96, 32)):
        plane = plane_inputs(num_inputs, group)
        rows = torch.randint(0, 16, (2, num_inputs)).float()
        rows.view(2, -1, group)[:, :, 0], rows.view(2, -1, group)[:, :, 1] = 0, 15
        weight = quantized(rows, QuantKind.INT4, group)
        assert weight.zeros is not None and not weight.zeros.any() and bool((weight.scales == 1).all())
        for k in range(num_inputs):
            tile, place = divmod(k, 4 * plane)
            word = weight.packed[:, tile * plane + place % plane].int() & 0xFFFF
            assert torch.equal(word >> 4 * (place // plane) & 15, rows[:, k].int())


def test_rows_come_in_pieces() -> None:
    rows = torch.randn(11, 256)
    for kind in QuantKind:
        whole, pieces = quantized(rows, kind, 64), quantized(torch.zeros(11, 256), kind, 64)
        for piece in ((0, 4), (9, 11), (4, 9)):
            quantize_rows(rows[slice(*piece)], pieces, piece[0])
        assert torch.equal(restored(whole), restored(pieces))
        part = torch.empty(5, 256)
        dequantize_rows(whole, slice(3, 8), part)
        assert torch.equal(part.double(), restored(whole)[3:8])


@pytest.mark.parametrize("kind", [QuantKind.INT8, QuantKind.FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_rows_are_slices_of_the_whole_by_the_whole_rows_magnitudes(
    kind: QuantKind, dtype: torch.dtype
) -> None:
    rows = torch.randn(11, 192, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows[torch.arange(10), torch.arange(10) * 19] = 7
    rows[10] = 0
    whole, magnitudes = quantized(rows, kind), rows.abs().amax(1).float()
    for columns in (slice(0, 64), slice(64, 192)):
        kept = rows[:, columns]
        part = quantized(torch.zeros_like(kept), kind)
        for first, end in ((4, 11), (0, 4)):
            quantize_rows(kept[first:end], part, first, magnitudes[first:end])
        assert torch.equal(part.scales, whole.scales)
        assert torch.equal(part.packed.float(), whole.packed[:, columns].float())


@pytest.mark.parametrize("kind", QuantKind)
def test_rows_of_zeros_stay_zeros(kind: QuantKind) -> None:
    for dtype in DTYPES:
        assert not restored(quantized(torch.zeros(2, 64, dtype=dtype), kind)).any()


@pytest.mark.parametrize("kind", QuantKind)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_show(kind: QuantKind, bad: float) -> None:
    rows = torch.randn(3, 64)
    rows[1, 5] = bad
    found = restored(quantized(rows, kind, 32))
    assert not found[1, :32].isfinite().all() and found[0].isfinite().all() and found[2].isfinite().all()


def test_bytes_are_those_of_the_scheme() -> None:
    def bits(kind: QuantKind, group: int) -> float:
        return allocate(kind, 1024, 4096, group, torch.bfloat16, CPU).num_bytes * 8 / 1024 / 4096

    assert bits(QuantKind.INT8, 4096) == bits(QuantKind.FP8, 4096) == 8 + 32 / 4096
    assert [bits(QuantKind.INT4, group) for group in (32, 64, 128)] == [4 + 24 / group for group in (32, 64, 128)]
    # At most 0.28 of bf16's bytes.
    assert bits(QuantKind.INT4, 128) / 16 < 0.28


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "words"),
    [
        (QuantKind.INT4, (8, 96, 128), torch.bfloat16, "int4 takes 32, 96 here"),
        (QuantKind.INT4, (8, 512, 256), torch.bfloat16, "int4 takes 32, 64, 128, 512 here"),
        (QuantKind.INT4, (8, 101, 32), torch.bfloat16, "int4 takes 101 here"),
        (QuantKind.INT8, (8, 512, 256), torch.bfloat16, "int8 takes 32, 64, 128, 512 here"),
        (QuantKind.FP8, (8, 512, 0), torch.bfloat16, "one scale per output, group size 512"),
        (QuantKind.INT8, (0, 512, 512), torch.bfloat16, "at least 1"),
        (QuantKind.INT8, (8, 512, 512), torch.float64, "bfloat16, float16 or float32"),
    ],
)
def test_what_has_no_layout_is_refused_with_what_has(
    kind: QuantKind, sizes: tuple[int, int, int], dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        allocate(kind, *sizes, dtype, CPU)
