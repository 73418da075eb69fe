"""MXFP4's layout and numbers, against transformers and the format's own table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace_kernels.weight_formats.mxfp4 import (
    LARGEST_SCALE,
    Mxfp4Weight,
    allocate_mxfp4,
    dequantize_mxfp4_rows,
    has_large_scales,
    quantize_mxfp4_rows,
    store_blocks,
    store_scales,
)

CPU = torch.device("cpu")


def numbers(weight: Mxfp4Weight, rows: slice = slice(None)) -> torch.Tensor:
    found = torch.full((len(range(weight.num_outputs)[rows]), weight.num_inputs), float("nan"))
    dequantize_mxfp4_rows(weight, rows, found)
    return found


# Groups that fill tiles of four, and that do not.
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_a_folders_bytes_are_the_numbers_that_transformers_takes_them_for(groups: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, LARGEST_SCALE + 1, (rows, groups), dtype=torch.uint8, generator=generator)
    weight = allocate_mxfp4(rows, 32 * groups, torch.float32, CPU)
    # In pieces, as loaders hand them over.
    for first in range(rows):
        store_blocks(weight, first, blocks[first : first + 1].flatten(1))
        store_scales(weight, first, scales[first : first + 1])
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(numbers(weight), expected)
    assert torch.equal(numbers(weight, slice(rows - 1, rows)), expected[rows - 1 :])
    assert torch.equal(expected, expected.bfloat16().float())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(-30, 2), st.integers(0, 2**31))
def test_rounding_takes_the_nearest_number_of_its_scale(exponent: int, seed: int) -> None:
    rows = torch.randn(3, 96, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent / 4
    rows[1] = 0.0
    weight = allocate_mxfp4(3, 96, torch.float32, CPU)
    quantize_mxfp4_rows(rows, weight, 0)
    found, groups = numbers(weight).unflatten(1, (3, 32)), rows.unflatten(1, (3, 32))
    # The largest number of a group is 4 to 8 times its scale: numbers above 6 are cut, others are
    # a quarter of their size off at most, or half a step of the smallest.
    amax = groups.abs().amax(-1, keepdim=True)
    assert bool(((found - groups).abs() <= (groups.abs() / 4).maximum(amax / 16)).all())
    assert bool((found[1] == 0).all())


def test_numbers_of_a_weight_round_to_themselves() -> None:
    weight, other = (allocate_mxfp4(4, 160, torch.float32, CPU) for _ in range(2))
    quantize_mxfp4_rows(torch.randn(4, 160), weight, 0)
    quantize_mxfp4_rows(numbers(weight), other, 0)
    assert torch.equal(numbers(other), numbers(weight))


@pytest.mark.parametrize("code", [129, 255])
def test_scales_above_2_are_seen(code: int) -> None:
    weight = allocate_mxfp4(3, 64, torch.float32, CPU)
    store_scales(weight, 0, torch.full((3, 2), LARGEST_SCALE, dtype=torch.uint8))
    assert not has_large_scales(weight, slice(0, 3))
    store_scales(weight, 1, torch.tensor([[1, code]], dtype=torch.uint8))
    assert has_large_scales(weight, slice(0, 3)) and not has_large_scales(weight, slice(2, 3))
