"""INT4 weights and tokens in FP8.

Sums of tokens, weights rounded to e4m3, and which rows take what.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.linear.test_quantized_linear import Product
from tests.support.kernel_case import DEVICES, kernels_on, poisoned_memory

from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding, rounded_inputs
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.linear.w4a8 import products as w4a8
from headrace_kernels.linear.w4a8.dequantized import round_to_e4m3, round_to_e4m3_reference
from headrace_kernels.linear.w4a8.token_sums import token_sums, token_sums_reference
from headrace_kernels.rounded_tokens import round_tokens
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate

E4M3 = torch.float8_e4m3fn
PER_TOKEN = InputRounding(E4M3)
ROUNDED = Arrangement(inputs=PER_TOKEN)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on(str(request.param)):
        yield str(request.param)


def weight_of(outputs: int, inputs: int, group: int = 128, arrangement: Arrangement = ROUNDED) -> QuantizedWeight:
    return allocate(QuantKind.INT4, outputs, inputs, group, torch.bfloat16, torch.device("meta"), arrangement)


@pytest.mark.parametrize(("rows", "inputs", "plane"), [(1, 512, 128), (5, 1536, 128), (3, 768, 64)])
def test_sums_of_tokens_are_exact(rows: int, inputs: int, plane: int, device: str) -> None:
    numbers = torch.randn(rows, inputs, device=device).to(E4M3)
    with poisoned_memory(device):
        found = token_sums(numbers, plane)
    expected = token_sums_reference(numbers, plane)
    # Numbers of e4m3 are multiples of 2^-9 up to 448: sums of 128 have few enough bits for fp32.
    assert torch.equal(found, expected) and bool((found.view(rows, -1, 8)[:, :, 4:] == 0).all())


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(17, 512, 128), (5, 256, 64), (18, 160, 32), (3, 96, 96), (20, 4096, 128)]
)
def test_weights_in_e4m3_are_the_references(outputs: int, inputs: int, group: int, device: str) -> None:
    weight = Product(QuantKind.INT4, 1, outputs, inputs, group, torch.bfloat16, device).weight
    for rows in (range(outputs), range(2, 3)):
        with poisoned_memory(device):
            found, steps = round_to_e4m3(weight, rows, torch.empty(len(rows), inputs, dtype=E4M3, device=device))
        expected, expected_steps = round_to_e4m3_reference(weight, rows)
        torch.testing.assert_close(steps, expected_steps, rtol=1e-6, atol=0)
        same = found.float() == expected.float()
        if device == "cpu":
            # The interpreter loses a carry into the exponent, just below a power of two.
            same |= 2 * found.float() == expected.float()
        # Numbers half-way between two go where fp32's last bit sends them.
        assert float((~same).float().mean()) < 3e-2


def test_weights_in_e4m3_are_a_sixteenth_off_at_most() -> None:
    product = Product(QuantKind.INT4, 1, 40, 1024, 128, torch.bfloat16, "cpu")
    numbers, steps = round_to_e4m3_reference(product.weight, range(40))
    found, step = numbers.double() * steps.double()[:, None], steps.double()[:, None]
    # Below 2^-6 steps numbers of e4m3 are 2^-9 apart.
    allowed = (product.numbers.abs() / 16).clamp(min=2.0**-10 * step) * 1.001
    assert bool(((found - product.numbers).abs() <= allowed).all())
    assert 0.01 < float((found - product.numbers).norm() / product.numbers.norm()) < 0.04


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are asked as on an H200."""
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    for what in ("has_warpgroup_instructions", "has_warpgroup_products", "has_fp8_products"):
        monkeypatch.setattr(card, what, lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(card, "shared_bytes", lambda device: 232_448)


@pytest.mark.usefixtures("hopper")
def test_only_a_scheme_that_says_so_rounds_tokens_from_65_rows_on() -> None:
    plain, rounding = weight_of(4096, 4096, arrangement=Arrangement()), weight_of(4096, 4096)
    assert [quantized_linear.rounds_to(rows, plain) for rows in (1, 65, 4096)] == [None] * 3
    found = [quantized_linear.rounds_to(rows, rounding) for rows in (1, 64, 65, 4096)]
    assert found == [None, None, PER_TOKEN, PER_TOKEN]
    # The kernel multiplies up to 256 rows, and groups of 64 and more.
    assert w4a8.w4a8_rule(256, rounding) is not None and w4a8.w4a8_rule(257, rounding) is None
    narrow = weight_of(4096, 4096, 32)
    assert w4a8.w4a8_rule(100, narrow) is None and path_rule(100, narrow) is Path.SCALED
    assert path_rule(100, weight_of(100, 4096)) is not Path.SCALED


def test_cards_without_fp8_products_keep_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    assert quantized_linear.rounds_to(256, weight_of(4096, 4096)) is None


def test_a_cpu_rounds_inputs_of_any_number_of_rows() -> None:
    product = Product(QuantKind.INT4, 3, 24, 256, 64, torch.float32, "cpu")
    weight = allocate(QuantKind.INT4, 24, 256, 64, torch.float32, torch.device("cpu"), ROUNDED)
    for part in ("packed", "scales", "zeros"):
        getattr(weight, part).copy_(getattr(product.weight, part))
    expected = rounded_inputs(product.x, PER_TOKEN).double() @ product.numbers.t()
    torch.testing.assert_close(quantized_linear.linear(product.x, weight).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(6144, 4096, 128), (4096, 14_336, 128), (2560, 9728, 64), (1040, 2560, 32)]
)
def test_a_card_multiplies_as_fp64_does(outputs: int, inputs: int, group: int) -> None:
    if not card.has_fp8_products(torch.device("cuda")):
        pytest.skip("needs a GPU with FP8 products")
    for rows in (65, 128, 200, 256, 300, 1000):
        product = Product(QuantKind.INT4, rows, outputs, inputs, group, torch.bfloat16, "cuda")
        tokens = round_tokens(product.x, PER_TOKEN)
        x = tokens.numbers.double() * tokens.scales.double()
        found, again = (w4a8.scaled_linear(tokens, product.weight, product.bias) for _ in range(2))
        expected = product.expected(x)
        error = float((found.double() - expected).norm() / expected.norm())
        # Whether the kernel multiplies or the weight was rounded to e4m3.
        exact = w4a8.w4a8_rule(rows, product.weight) is not None
        assert error < (5e-3 if exact else 0.04), (rows, error)
        assert torch.equal(found, again)
