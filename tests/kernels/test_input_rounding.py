"""Inputs rounded to 8 bits and back as schemes say: compared with one number at a time in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from headrace_kernels.input_rounding import InputRounding, rounded_inputs
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.quantized import Path
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize,
)
from headrace_kernels.weight_formats.stored_rows import Rows, store_rows

E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")
# Every e4m3 number from 0 on.
_E4M3 = sorted(
    {math.ldexp(m, e - 10) if e else math.ldexp(m, -9) for e in range(16) for m in (range(8, 16) if e else range(8))}
    - {480.0}
)


def nearest_e4m3(value: float) -> float:
    size = min(abs(value), 448.0)
    return math.copysign(min(_E4M3, key=lambda number: abs(number - size)), value)


def expected_row(row: list[float], rounding: InputRounding) -> list[float]:
    """One token, in fp64."""
    group, found = rounding.group_size or len(row), []
    for first in range(0, len(row), group):
        part = row[first : first + group]
        scale, zero = _scale_and_zero(part, rounding)
        for value in part:
            if rounding.number is E4M3:
                found.append(nearest_e4m3(value / scale) * scale)
            else:
                found.append((min(max(round(value / scale + zero), -128), 127) - zero) * scale)
    return found


def _scale_and_zero(part: list[float], rounding: InputRounding) -> tuple[float, int]:
    if rounding.scale is not None:
        return rounding.scale, rounding.zero_point
    if rounding.is_symmetric:
        return max(abs(value) for value in part) / (448 if rounding.number is E4M3 else 127.5), 0
    low, high = min(0.0, *part), max(0.0, *part)
    scale = (high - low) / 255
    return scale, round(-128 - low / scale)


SCHEMES = {
    "int8 token": InputRounding(torch.int8),
    "int8 token with zero points": InputRounding(torch.int8, is_symmetric=False),
    "int8 groups": InputRounding(torch.int8, 32),
    "int8 static": InputRounding(torch.int8, scale=0.03),
    "int8 static with a zero point": InputRounding(torch.int8, is_symmetric=False, scale=0.03, zero_point=-17),
    "fp8 token": InputRounding(E4M3),
    "fp8 groups": InputRounding(E4M3, 128),
    "fp8 static": InputRounding(E4M3, scale=0.004),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_are_rounded_as_the_scheme_says(name: str) -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(3)) * torch.logspace(-1, 1, 5)[:, None]
    x[:, :100] += 1
    found = rounded_inputs(x, SCHEMES[name])
    expected = torch.tensor([expected_row(row, SCHEMES[name]) for row in x.double().tolist()])
    # A number half way between two may go either way in fp32: none but the largest of a symmetric
    # group of int8, which is half a step above the last.
    ends = x.abs() == x.abs().amax(1, keepdim=True) if name == "int8 token" else torch.zeros_like(x, dtype=torch.bool)
    if SCHEMES[name].group_size == 32:
        groups = torch.nn.functional.pad(x, (0, 24)).view(5, -1, 32).abs()
        ends = (groups == groups.amax(-1, keepdim=True)).view(5, -1)[:, :200]
    torch.testing.assert_close(found[~ends], expected.float()[~ends], rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, x)
    torch.testing.assert_close(found[ends], x[ends], rtol=1 / 127, atol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_token_of_zeros_stays_one_and_one_that_is_not_finite_spoils_itself_alone(name: str) -> None:
    x = torch.ones(4, 64)
    x[1] = 0
    x[2, 5], x[3, 7] = float("inf"), float("nan")
    found = rounded_inputs(x, SCHEMES[name])
    assert not found[1].any() and bool(found[0].isfinite().all())
    assert bool(found[2:].isnan().any(1).all())


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    x = torch.randn(6, 160, generator=torch.Generator().manual_seed(5))
    together = rounded_inputs(x, SCHEMES[name])
    for index in range(6):
        assert torch.equal(rounded_inputs(x[index : index + 1], SCHEMES[name])[0], together[index])


def weight_of(scheme: InputRounding, ordered: bool = False) -> QuantizedWeight:
    kind = QuantKind.FP8 if scheme.number is E4M3 else QuantKind.INT8
    arrangement = Arrangement(inputs=scheme, is_ordered=ordered)
    weight = allocate(kind, 24, 160, 160, torch.float32, CPU, arrangement)
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randint(-100, 100, (24, 160), generator=generator).to(scheme.number)
    store_rows(Rows(numbers, torch.rand(24, 1, generator=generator) + 0.1, None), weight, 0)
    if weight.order is not None:
        weight.order.copy_(torch.randperm(160, generator=generator))
    return weight


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_processor_rounds_the_inputs_of_any_number_of_rows(name: str, ordered: bool) -> None:
    scheme = SCHEMES[name]
    weight = weight_of(scheme, ordered)
    x = torch.randn(70, 160, generator=torch.Generator().manual_seed(9))
    for rows in (1, 70):
        assert quantized_linear.path_rule(rows, weight) is Path.BLOCKS
        assert quantized_linear.input_rounding(rows, weight) == scheme
        # Groups are those of x as it came, whatever order the weight has.
        expected = rounded_inputs(x[:rows], scheme).double() @ dequantize(weight).double().t()
        found = quantized_linear.linear(x[:rows], weight, None)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        plain = x[:rows].double() @ dequantize(weight).double().t()
        assert float((expected - plain).norm()) > 10 * float((found - expected).norm())


def test_inputs_of_another_type_than_the_weights_are_refused() -> None:
    for kind, number in ((QuantKind.INT8, E4M3), (QuantKind.FP8, torch.int8), (QuantKind.INT4, torch.int8)):
        group = 32 if kind is QuantKind.INT4 else 64
        with pytest.raises(ValueError, match="has inputs in torch.* or none"):
            allocate(kind, 64, 64, group, torch.float32, CPU, Arrangement(inputs=InputRounding(number)))
