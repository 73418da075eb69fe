"""Scales, zero points, rounding, and the layout in the file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_quantize.compressed_tensors import matrix_of, pack, tensors_of, unpack
from headrace_quantize.rounding.numbers import NumberFormat, round_to_nearest

FORMATS = {
    "int4": NumberFormat(4, True, False, torch.float32),
    "int4 with zeros": NumberFormat(4, False, False, torch.bfloat16),
    "int8": NumberFormat(8, True, False, torch.float16),
    "int8 with zeros": NumberFormat(8, False, False, torch.float32),
    "fp8": NumberFormat(8, True, True, torch.bfloat16),
}
SIZES = st.tuples(st.integers(1, 19), st.integers(1, 5), st.integers(1, 9))


def weights(outputs: int, inputs: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * size


@given(st.sampled_from([4, 8]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 1 << 30))
def test_packed_numbers_come_back(bits: int, rows: int, columns: int, seed: int) -> None:
    half = 1 << (bits - 1)
    numbers = torch.randint(-half, half, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    words = pack(numbers, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack(words, bits, columns), numbers)


def test_the_lowest_bits_come_first() -> None:
    # 7 + 8 = 15 in the highest nibble makes the word negative.
    numbers = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7, 1]])
    assert pack(numbers, 4).tolist() == [[0xF6543210 - (1 << 32), 9]]
    assert pack(torch.tensor([[-128, -127, 0, 127]]), 8).tolist() == [[0xFF800100 - (1 << 32)]]


@pytest.mark.parametrize("name", FORMATS)
@given(SIZES, st.integers(0, 1 << 30), st.sampled_from([1e-6, 1.0, 300.0]))
def test_rounding_is_to_the_nearest_within_the_range(
    name: str, sizes: tuple[int, int, int], seed: int, size: float
) -> None:
    outputs, groups, group = sizes
    form, weight = FORMATS[name], weights(outputs, groups * group, seed, size)
    matrix = round_to_nearest(weight, form, group)
    steps = matrix.scales.repeat_interleave(group, 1)
    # Half a step (of e4m3 the widest is 32), and what rounding the scale to its type takes off the
    # range's end.
    allowed = steps * (16 if form.is_float else 0.5) + weight.abs() * torch.finfo(form.scale_dtype).eps
    # The zero point is rounded too, which moves the range by half a step.
    assert ((matrix.dequantized() - weight).abs() <= allowed * (1 if form.symmetric else 2) + 1e-30).all()
    assert matrix.numbers.min() >= form.least and matrix.numbers.max() <= form.most
    assert torch.equal(matrix.scales, matrix.scales.to(form.scale_dtype).float())


@pytest.mark.parametrize("name", FORMATS)
@given(SIZES, st.integers(0, 1 << 30))
def test_what_is_written_is_what_was_rounded(name: str, sizes: tuple[int, int, int], seed: int) -> None:
    outputs, groups, group = sizes
    matrix = round_to_nearest(weights(outputs, groups * group, seed), FORMATS[name], group)
    tensors = tensors_of("layer", matrix)
    read = matrix_of("layer", tensors, FORMATS[name])
    assert torch.equal(read.dequantized(), matrix.dequantized())
    assert tensors["layer.weight_scale"].shape == (outputs, groups)
    assert ("layer.weight_zero_point" in tensors) is not FORMATS[name].symmetric


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_of_zeros_stays_zero(name: str) -> None:
    matrix = round_to_nearest(torch.zeros(3, 8), FORMATS[name], 4)
    assert torch.equal(matrix.dequantized(), torch.zeros(3, 8))
    assert (matrix.scales == 1).all()


def test_both_ends_of_a_symmetric_range_are_reached() -> None:
    matrix = round_to_nearest(torch.tensor([[-8.0, 3.0], [7.0, -3.0]]), FORMATS["int4"], None)
    assert matrix.scales.flatten().tolist() == [1.0, 1.0]
    assert matrix.numbers.tolist() == [[-8, 3], [7, -3]]
