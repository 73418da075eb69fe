"""Weights that other tools made, stored as they are and multiplied against fp64.

They have 8 bits in groups, with zero points and in blocks, inputs in an order, and rounded
activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, Numbers, kernels_on

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import gemm_dequantized, gemm_fp8, gemm_int8, launch_rules
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.gemm_weight_only import GemmTile, dequantize_into, multiply_gemm
from headrace_kernels.linear.gemv_8bit import multiply_gemv, takes_gemv
from headrace_kernels.linear.input_order import take_inputs, take_inputs_reference
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.linear.small_batch import SmallBatchTile, multiply_small_batch
from headrace_kernels.rounded_tokens import round_tokens
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize,
)
from headrace_kernels.weight_formats.stored_rows import Rows, store_blocks, store_order, store_rows

EPS = 1e-5
# Kind, group (0: the whole row), arrangement.
Form = tuple[QuantKind, int, Arrangement]
ARRANGED: dict[str, Form] = {
    "int8 groups": (QuantKind.INT8, 32, Arrangement()),
    "int8 zeros": (QuantKind.INT8, 64, Arrangement(has_zeros=True)),
    "int8 rows with zeros": (QuantKind.INT8, 0, Arrangement(has_zeros=True)),
    "int8 ordered": (QuantKind.INT8, 128, Arrangement(is_ordered=True)),
    "int4 ordered": (QuantKind.INT4, 32, Arrangement(is_ordered=True)),
    "fp8 blocks": (QuantKind.FP8, 128, Arrangement(scale_outputs=128)),
    "fp8 narrow blocks": (QuantKind.FP8, 128, Arrangement(scale_outputs=8)),
}
arranged = pytest.mark.parametrize("name", ARRANGED)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on(str(request.param)):
        yield str(request.param)


class Stored:
    """Random numbers, scales and zero points, and the weight made of them.

    The matrix [N, K] fp64 that they are is by arithmetic of this test's own.
    """

    def __init__(self, name: str | Form, outputs: int, inputs: int, dtype: torch.dtype, device: str = "cpu") -> None:
        kind, group, arrangement = ARRANGED[name] if isinstance(name, str) else name
        group = group or inputs
        generator = torch.Generator().manual_seed(outputs * 31 + inputs)
        draw = torch.Generator(device).manual_seed(outputs)
        self.weight = allocate(kind, outputs, inputs, group, dtype, torch.device(device), arrangement)
        groups = -(-inputs // group)
        if kind is QuantKind.FP8:
            numbers = (torch.randn(outputs, inputs, generator=generator) * 40).to(torch.float8_e4m3fn)
        elif kind is QuantKind.INT8:
            numbers = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        else:
            numbers = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        zeros = None
        if self.weight.zeros is not None:
            low, high = (0, 16) if kind is QuantKind.INT4 else (-128, 128)
            zeros = torch.randint(low, high, (outputs, groups), generator=generator).to(self.weight.zeros.dtype)
        per = arrangement.scale_outputs or 1
        scales = torch.exp(torch.randn(-(-outputs // per), groups, generator=generator)).to(dtype).float() / 100
        scales = scales if kind is QuantKind.FP8 else scales.to(dtype).float()
        wide = scales.repeat_interleave(per, 0)[:outputs].repeat_interleave(group, 1)[:, :inputs].double()
        shifted = numbers.double()
        if zeros is not None:
            shifted = shifted - zeros.double().repeat_interleave(group, 1)[:, :inputs]
        self.numbers = shifted * wide
        blocks = bool(arrangement.scale_outputs)
        store_rows(
            Rows(
                numbers.to(device), None if blocks else scales.to(device), None if zeros is None else zeros.to(device)
            ),
            self.weight,
            0,
        )
        if blocks:
            store_blocks(scales.to(device), per, self.weight, range(outputs))
        if arrangement.is_ordered:
            order = torch.randperm(inputs, generator=generator)
            store_order(order.to(device), self.weight)
            self.numbers = torch.empty_like(self.numbers).index_copy_(1, order, self.numbers)
        self.numbers = self.numbers.to(device)
        self.dtype, self.device = dtype, device
        self.norm = (torch.rand(inputs, generator=draw, device=device) + 0.5).to(dtype)
        self.bias = torch.randn(outputs, generator=draw, device=device).to(dtype)
        self._draw = draw

    def x(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.weight.num_inputs, generator=self._draw, device=self.device).to(self.dtype)

    def stored_x(self, x: torch.Tensor) -> torch.Tensor:
        return take_inputs(x, self.weight.order)

    def check(self, found: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        expected = x.double() @ self.numbers.t() + (0 if bias is None else bias.double())
        unit = ROUNDING[self.dtype]
        # Each product off by two roundings of the type, 6 standard deviations of independent ones;
        # sums in fp32 of numbers up to 255 steps.
        spread = 9 * unit * (x.double().square() @ self.numbers.square().t()).sqrt()
        spread += 2.0**-14 * self.numbers.abs().amax(1) * x.double().square().sum(1, keepdim=True).sqrt()
        allowed = spread + 1.01 * unit * (expected.abs() + expected.square().mean(1, keepdim=True).sqrt())
        assert bool(((found.double() - expected).abs() <= allowed).all())


@arranged
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_what_the_numbers_say(name: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((40, 128), (24, 384), (136, 256)):
        stored = Stored(name, outputs, inputs, dtype)
        found = dequantize(stored.weight, torch.empty(outputs, inputs)).double()
        torch.testing.assert_close(found, stored.numbers, rtol=1e-6, atol=0)


def test_a_last_block_may_be_cut_off() -> None:
    stored = Stored("fp8 blocks", 200, 176, torch.bfloat16)
    assert stored.weight.scales.shape == (2, 2)
    found = dequantize(stored.weight, torch.empty(200, 176)).double()
    torch.testing.assert_close(found, stored.numbers, rtol=1e-6, atol=0)


@pytest.mark.one_in(2)
@arranged
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_kernels_agree_with_fp64(name: str, dtype: torch.dtype, device: str) -> None:
    sizes = ((24, 256), (40, 128)) if device == "cpu" else ((4096, 4096), (1000, 512))
    for outputs, inputs in sizes:
        stored = Stored(name, outputs, inputs, dtype, device)
        for rows, tile in ((1, SmallBatchTile(16, 32, 2, 2, 2)), (11, SmallBatchTile(32, 128, 4, 4, 3))):
            x, out = stored.x(rows), torch.full((rows, outputs), float("nan"), dtype=dtype, device=device)
            multiply_small_batch(stored.stored_x(x), stored.weight, stored.bias, out, tile)
            stored.check(out, x, stored.bias)
        assert takes_gemv(stored.weight)
        x, out = stored.x(1), torch.full((1, outputs), float("nan"), dtype=dtype, device=device)
        multiply_gemv(stored.stored_x(x), stored.weight, stored.bias, out, launch_rules.gemv_rule(stored.weight))
        stored.check(out, x, stored.bias)
        x, out = stored.x(19), torch.full((19, outputs), float("nan"), dtype=dtype, device=device)
        multiply_gemm(stored.stored_x(x), stored.weight, stored.bias, out, GemmTile(32, 16, 64, 4, 2, 2))
        stored.check(out, x, stored.bias)
        numbers = torch.full((outputs, inputs), float("nan"), dtype=dtype, device=device)
        dequantize_into(stored.weight, range(outputs), numbers)
        in_order = stored.numbers if stored.weight.order is None else stored.numbers[:, stored.weight.order.long()]
        off = (numbers.double() - in_order).abs()
        assert bool((off <= 1.01 * ROUNDING[dtype] * in_order.abs() + 2**-25).all())


def test_blocks_beyond_the_last_input_on_kernels(device: str) -> None:
    stored = Stored("fp8 blocks", 136, 176, torch.bfloat16, device)
    x, out = stored.x(3), torch.full((3, 136), float("nan"), dtype=torch.bfloat16, device=device)
    multiply_small_batch(x, stored.weight, None, out, SmallBatchTile(16, 128, 4, 4, 3))
    stored.check(out, x)
    multiply_gemm(x, stored.weight, None, out, GemmTile(32, 16, 64, 4, 2))
    stored.check(out, x)


@pytest.mark.one_in(2)
@arranged
@pytest.mark.parametrize("rows", [2, 20])
def test_operations_equal_their_references(name: str, rows: int, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    stored = Stored(name, 16, 128, dtype, device)
    x, weight, norm, bias = stored.x(rows), stored.weight, stored.norm, stored.bias
    found, expected = x[:, :16].contiguous(), x[:, :16].contiguous()
    quantized_linear.linear_add(x, weight, bias, found)
    quantized_linear.linear_add_reference(x, weight, bias, expected)
    pairs = [
        (found, expected),
        (quantized_linear.linear(x, weight, bias), quantized_linear.linear_reference(x, weight, bias)),
        (
            quantized_linear.norm_linear(x, norm, EPS, weight, None),
            quantized_linear.norm_linear_reference(x, norm, EPS, weight, None),
        ),
        (
            quantized_linear.norm_swiglu(x, norm, EPS, weight, bias),
            quantized_linear.norm_swiglu_reference(x, norm, EPS, weight, bias),
        ),
    ]
    # Tokens that are rounded to e4m3 are off by some 4%.
    is_rounded = quantized_linear.input_rounding(rows, weight) is not None
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2 if is_rounded else 3e-2
    for ours, reference in pairs:
        assert float((ours - reference).double().norm() / reference.double().norm()) < tolerance


@arranged
def test_a_processor_restores_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_dequantized, "_BLOCK_NUMBERS", 7 * 128)
    stored = Stored(name, 24, 128, torch.float32)
    x = stored.x(3)
    assert path_rule(3, stored.weight) is Path.BLOCKS
    stored.check(quantized_linear.linear(x, stored.weight, stored.bias), x, stored.bias)


def test_inputs_are_taken_in_order(device: str) -> None:
    for dtype in DTYPES:
        x = Numbers(device, dtype).randn(3, 1500)
        order = torch.randperm(1500, device=device).to(torch.int32)
        assert torch.equal(take_inputs(x, order), take_inputs_reference(x, order))
        assert take_inputs(x, None) is x


def rounding(
    outputs: int, inputs: int, dtype: torch.dtype, device: str, static: float | None = None
) -> QuantizedWeight:
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=device)
    arrangement = Arrangement(inputs=InputRounding(torch.int8, scale=static))
    weight = allocate(QuantKind.INT8, outputs, inputs, inputs, dtype, torch.device(device), arrangement)
    store_rows(Rows(numbers, torch.rand(outputs, 1, device=device) + 0.1, None), weight, 0)
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_rounded_activations_equal_their_reference(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(3)
    for rows, outputs, inputs in ((3, 40, 160), (70, 130, 272)):
        weight = rounding(outputs, inputs, dtype, device)
        x = torch.randn(rows, inputs, device=device).to(dtype)
        bias = torch.randn(outputs, device=device).to(dtype)
        tokens = round_tokens(x, InputRounding(torch.int8))
        found = gemm_int8.scaled_linear(tokens, weight, bias)
        expected = gemm_int8.scaled_linear_reference(tokens, weight, bias)
        # Sums are exact: what is left is the rounding of the result, and the order of two scales
        # and a bias.
        assert float((found - expected).double().norm() / expected.double().norm()) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_rows_round_by_the_schemes_own_scale(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(4)
    weight = rounding(40, 160, dtype, device, static=0.02)
    x = torch.randn(70, 160, device=device).to(dtype)
    assert path_rule(70, weight) is Path.SCALED
    # What makes tokens would give each a scale of its own.
    assert quantized_linear.rounds_to(70, weight) is None
    found = quantized_linear.linear(x, weight, None)
    numbers = (x.float() / 0.02).clamp(-128, 127).round()
    expected = (numbers.double() * 0.02) @ dequantize(weight, torch.empty(40, 160, device=device)).double().t()
    # Some numbers are half a step from two others, and the card multiplies by the inverse: 1 of
    # 10,000.
    assert float((found.double() - expected).norm() / expected.norm()) < 2 * ROUNDING[dtype] + 2e-4


def test_only_many_rows_of_a_scheme_that_says_so_round_activations(device: str) -> None:
    weight = rounding(32, 64, torch.bfloat16, device)
    assert [path_rule(rows, weight) for rows in (1, 16, 64, 65)] == [
        Path.SMALL_BATCH,
        Path.SMALL_BATCH,
        Path.GEMM,
        Path.SCALED,
    ]
    assert [quantized_linear.rounds_to(rows, weight) for rows in (64, 65)] == [None, InputRounding(torch.int8)]
    plain = allocate(QuantKind.INT8, 32, 64, 64, torch.bfloat16, torch.device(device))
    assert path_rule(65, plain) is Path.GEMM and quantized_linear.rounds_to(65, plain) is None


@pytest.mark.parametrize(
    ("kind", "group", "arrangement", "words"),
    [
        (QuantKind.FP8, 128, Arrangement(scale_outputs=48), "a power of two up to 128"),
        (QuantKind.INT8, 128, Arrangement(scale_outputs=128), "only fp8 has blocks"),
        (QuantKind.FP8, 64, Arrangement(scale_outputs=64), "128 inputs"),
        (QuantKind.FP8, 256, Arrangement(has_zeros=True), "no zero points"),
    ],
)
def test_what_has_no_layout_is_refused(kind: QuantKind, group: int, arrangement: Arrangement, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        allocate(kind, 16, 256, group, torch.bfloat16, torch.device("cpu"), arrangement)


def test_fp8_in_blocks_is_never_multiplied_by_rounded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of this kind know a scale for each output alone."""
    monkeypatch.setattr(card, "has_fp8_products", lambda device: True)
    sizes = (256, 256)
    whole = allocate(QuantKind.FP8, *sizes, 256, torch.bfloat16, torch.device("cpu"))
    blocks = allocate(QuantKind.FP8, *sizes, 128, torch.bfloat16, torch.device("cpu"), Arrangement(scale_outputs=128))
    assert gemm_fp8.can_scale(whole) and not gemm_fp8.can_scale(blocks)
