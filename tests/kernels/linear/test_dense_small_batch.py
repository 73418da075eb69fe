"""Small-batch products with norm, bias, SwiGLU and residual in one kernel, against fp64.

They run in the interpreter at awkward sizes, on a GPU at the sizes of an 8B model.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from headrace_kernels.linear.dense import linear
from headrace_kernels.linear.dense_small_batch import (
    fuses,
    launch_rule,
    linear_add,
    linear_add_reference,
    norm_linear,
    norm_linear_reference,
    norm_swiglu,
    norm_swiglu_reference,
)
from headrace_kernels.linear.dense_small_batch_kernels import MAX_ROWS, Tile, multiply, variants
from headrace_kernels.rms_norm import rms_norm
from headrace_kernels.triton_runtime import INTERPRETED, forced

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A result is rounded once (the interpreter cuts bf16 off instead); the inputs' own values are exact
# in fp64. fp32: sums in another order.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}
VECTOR = Tile("vector", 1, 2048, 4)
# Odd tiles: outputs and inputs that they do not divide, several tiles of inputs.
ODD_TILES = (VECTOR, Tile("vector", 4, 32, 2), Tile("tile", 16, 64, 4, 2, 4), Tile("tile", 32, 32, 2, 2, 1))


class Product:
    """Fresh random operands, and what comes of them in fp64."""

    def __init__(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str, gated: bool = False
    ) -> None:
        generator = torch.Generator(device).manual_seed(rows * 1_000_003 + outputs * 1009 + inputs)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        weight_rows = outputs * (2 if gated else 1)
        self.gated = gated
        # Rows of very different sizes: a norm taken of another row would show.
        self.x = (randn(rows, inputs) * torch.logspace(-1, 1, rows, device=device)[:, None]).to(dtype)
        self.norm_weight = (randn(inputs) * 0.3 + 1).to(dtype)
        self.weight = (randn(weight_rows, inputs) * inputs**-0.5).to(dtype)
        self.bias = randn(weight_rows).to(dtype)
        self.residual = randn(rows, outputs).to(dtype)

    def _normed(self) -> torch.Tensor:
        x = self.x.double()
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm_weight.double()

    def _products(self, normed: bool, bias: bool) -> torch.Tensor:
        x = self._normed() if normed else self.x.double()
        return x @ self.weight.double().t() + (self.bias.double() if bias else 0)

    def expected(self, normed: bool, bias: bool, add: bool) -> torch.Tensor:
        y = self._products(normed, bias)
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = gate / (1 + torch.exp(-gate)) * up
        return y + self.residual.double() if add else y

    def spread(self, bias: bool) -> torch.Tensor:
        """How far results may be off where the normed x is rounded to its dtype twice.

        It depends on neither the result nor its row, so no relative bound holds.

        A rounding is off by at most the unit u relative to the number, evenly spread: a standard
        deviation of at most u / sqrt(3). A product sums up K independent ones, twice over, weighted
        by w x. Of 2 million results one in 500 million is further off than 6 deviations. SwiGLU, g
        sigmoid(g) v, passes the errors of gate g and value v on with its slopes, and their
        products: its second derivative in g is at most v / 2, the mixed one at most 1.1. Where g is
        large and v near 0 the result is small and the error is not.
        """
        unit = TOLERANCES[self.x.dtype]
        off = 6 * unit * (2 / 3) ** 0.5 * (self._normed().square() @ self.weight.double().square().t()).sqrt()
        if not self.gated:
            return off
        gate, value = self._products(True, bias).chunk(2, dim=-1)
        off_gate, off_value = off.chunk(2, dim=-1)
        passed = torch.sigmoid(gate)
        slope = passed * (1 + gate * (1 - passed))
        first = (slope * value).abs() * off_gate + (gate * passed).abs() * off_value
        return first + 1.1 * off_gate * off_value + 0.25 * value.abs() * off_gate.square()

    def multiplied(self, tile: Tile, normed: bool, bias: bool, add: bool) -> torch.Tensor:
        out = self.residual.clone() if add else torch.full_like(self.residual, float("nan"))
        norm = (self.norm_weight, EPS) if normed else None
        multiply(self.x, self.weight, self.bias if bias else None, out, tile, norm, self.gated, add)
        return out


def close(found: torch.Tensor, expected: torch.Tensor, rounding: float, spread: torch.Tensor | float = 0.0) -> None:
    """Whether results are within a rounding of the values and of their row's size.

    The latter bounds what cancels. What `Product.spread` says is allowed besides.
    """
    size = expected.square().mean(-1, keepdim=True).sqrt()
    error = (found.double() - expected).abs()
    allowed = rounding * (expected.abs() + size) + spread
    assert bool((error <= allowed).all()), f"off by up to {float((error / allowed).max()):.2f} times what is allowed"


def run_tile(rows: int, outputs: int, inputs: int, dtype: torch.dtype, tile: Tile, device: str) -> None:
    for gated, bias, add in ((False, True, True), (False, False, False), (True, True, False)):
        product = Product(rows, outputs, inputs, dtype, device, gated)
        normed = not add
        found = product.multiplied(tile, normed, bias, add)
        # Rows for the tensor cores are rounded to their type on the way, twice within the norm.
        spread = product.spread(bias) if normed and tile.kernel == "tile" else 0.0
        close(found, product.expected(normed, bias, add), TOLERANCES[dtype], spread)


@pytest.mark.one_in(2)
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("tile", ODD_TILES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 8), (1, 9, 88), (2, 3, 64), (5, 18, 72), (16, 8, 40)])
def test_kernels_agree_with_fp64(rows: int, outputs: int, inputs: int, dtype: torch.dtype, tile: Tile) -> None:
    run_tile(rows, outputs, inputs, dtype, tile, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (14336, 4096), (256, 704), (1000, 18944), (17, 2560)]
)
def test_kernels_agree_with_fp64_at_the_sizes_of_models(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 4, 8, 13, 16):
        tiles = (
            [VECTOR, launch_rule(1, outputs, inputs)]
            if rows == 1
            else variants(rows, outputs, gated=True)[:: 3 if dtype == torch.bfloat16 else 5]
        )
        for tile in tiles:
            run_tile(rows, outputs, inputs, dtype, tile, "cuda")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    return str(request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_operations_take_the_kernels_and_equal_their_references(rows: int, bias: bool, device: str) -> None:
    one, two = Product(rows, 40, 48, torch.float32, device), Product(rows, 24, 48, torch.float32, device, gated=True)
    if device == "cuda" and rows > 1:
        pytest.skip("fp32 does not go to the tensor cores, where it would be cut to tf32")
    with forced() if device == "cpu" else contextlib.nullcontext():
        found = run_operations(one, two, bias)
    residual = one.residual.clone()
    linear_add_reference(one.x, one.weight, one.bias if bias else None, residual)
    expected = [
        norm_linear_reference(one.x, one.norm_weight, EPS, one.weight, one.bias if bias else None),
        residual,
        norm_swiglu_reference(two.x, two.norm_weight, EPS, two.weight, two.bias if bias else None),
        one.x @ one.weight.t() + (one.bias if bias else 0),
    ]
    for ours, reference in zip(found, expected, strict=True):
        close(ours, reference.double(), TOLERANCES[torch.float32])


def run_operations(one: Product, two: Product, bias: bool) -> list[torch.Tensor]:
    residual = one.residual.clone()
    linear_add(one.x, one.weight, one.bias if bias else None, residual)
    return [
        norm_linear(one.x, one.norm_weight, EPS, one.weight, one.bias if bias else None),
        residual,
        norm_swiglu(two.x, two.norm_weight, EPS, two.weight, two.bias if bias else None),
        linear(one.x, one.weight, one.bias if bias else None),
    ]


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_one_row_of_logits_is_not_rounded_to_the_type_of_the_weights(dtype: torch.dtype, device: str) -> None:
    product = Product(1, 50, 64, dtype, device)
    with forced() if device == "cpu" else contextlib.nullcontext():
        logits = linear(product.x, product.weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    close(logits, product.expected(False, False, False), TOLERANCES[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 64])
def test_logits_of_a_gpu_are_fp32_sums(rows: int) -> None:
    product = Product(rows, 4096, 1024, torch.bfloat16, "cuda")
    close(
        linear(product.x, product.weight, out_dtype=torch.float32),
        product.expected(False, False, False),
        TOLERANCES[torch.float32],
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, device: str) -> None:
    tile = Tile("tile", 16, 64, 4, 2, 4)
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("fp32 does not go to the tensor cores")
    product = Product(7, 20, 96, dtype, device)
    together = product.multiplied(tile, False, True, False)
    product.x[:3] = float("nan")
    product.x[5:] = float("inf")
    apart = product.multiplied(tile, False, True, False)
    assert torch.equal(together[3:5], apart[3:5])


def test_what_the_kernels_can_not_read_is_not_fused() -> None:
    weight = torch.empty(16, 24)
    assert not fuses(1, weight)  # CPU
    if not INTERPRETED:
        return
    with forced():
        assert fuses(1, weight)
        assert not fuses(0, weight)
        assert not fuses(MAX_ROWS + 1, weight)
        assert not fuses(1, torch.empty(24, 16).t())  # the order in memory of CPU weights
        assert not fuses(1, torch.empty(16, 20))  # rows that do not begin at a multiple of 16 bytes
        assert not fuses(1, torch.empty(16, 24, dtype=torch.float64))


def test_every_variant_fits_its_kernel() -> None:
    for rows, outputs, gated in itertools.product((1, 2, 4, 8, 16), (256, 4096, 128_256), (False, True)):
        tiles = variants(rows, outputs, gated)
        assert len(set(tiles)) == len(tiles) > 0
        for tile in tiles:
            assert tile.block_k % (16 * tile.slices) == 0


def test_normed_rows_for_the_tensor_cores_are_rms_norm_s(device: str) -> None:
    """X goes to the tensor cores as it lies in memory after a norm of its own."""
    product = Product(3, 40, 64, torch.bfloat16, device)
    with forced() if device == "cpu" else contextlib.nullcontext():
        found = norm_linear(product.x, product.norm_weight, EPS, product.weight, None)
        normed = rms_norm(product.x, product.norm_weight, EPS)
    close(found, normed.double() @ product.weight.double().t(), TOLERANCES[torch.bfloat16])
