"""Products with weights of 8 and 4 bits against fp64 of what the bits stand for.

They run in the interpreter at awkward sizes, on a GPU at the sizes of models.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.any_two import any_two_meet
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, Numbers, kernels_on

from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import gemm_dequantized, launch_rules
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.gemm_fp8 import can_scale, scaled_linear
from headrace_kernels.linear.gemm_weight_only import GemmTile, dequantize_into, gemm_variants, multiply_gemm
from headrace_kernels.linear.gemv_8bit import GemvTile, gemv_variants, multiply_gemv, takes_gemv
from headrace_kernels.linear.gemv_int4 import Int4GemvTile
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.linear.small_batch import (
    MAX_SMALL_BATCH_ROWS,
    SmallBatchTile,
    multiply_small_batch,
    small_batch_variants,
)
from headrace_kernels.linear.small_batch_8bit_sm90 import rows_of
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS, round_tokens
from headrace_kernels.weight_formats import dequantized_buffer as dequantized_buffer
from headrace_kernels.weight_formats.quantized_weight import (
    QuantizedWeight,
    QuantKind,
    allocate,
    dequantize,
    quantize_rows,
)

EPS = 1e-5
# Outputs, inputs, group of INT4: pieces of 128, 64 and 32 inputs, tiles that are not full, odd
# numbers of outputs and inputs.
SIZES = ((17, 512, 128), (5, 256, 64), (18, 160, 32), (1, 101, 101))
# Outputs, inputs, type. Of layers of Llama 8B, Qwen3-4B and Llama 70B; an odd number of outputs;
# inputs that no tile divides.
MODEL_SIZES = (
    (4096, 14336, torch.bfloat16),
    (19456, 2560, torch.bfloat16),
    (8192, 28672, torch.bfloat16),
    (1001, 4096, torch.float16),
    (256, 4000, torch.bfloat16),
)
SMALL_TILES = (
    SmallBatchTile(16, 32, 2, 2, 2),
    SmallBatchTile(32, 64, 4, 4, 3, False),
    SmallBatchTile(16, 128, 4, 4, 2),
)
WIDE_TILES = (GemmTile(32, 16, 32, 4, 2, 3), GemmTile(64, 32, 64, 4, 3))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on(str(request.param)):
        yield str(request.param)


class Product:
    """Fresh random operands, and what comes of them in fp64."""

    def __init__(
        self, kind: QuantKind, rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, device: str
    ) -> None:
        numbers = Numbers(device, dtype, seed=rows * 1009 + outputs + inputs)
        self.dtype, self.num_rows, self.num_outputs = dtype, rows, outputs
        self.weight = allocate(
            kind, outputs, inputs, group if kind is QuantKind.INT4 else inputs, dtype, torch.device(device)
        )
        scattered = numbers.randn(outputs, inputs) * inputs**-0.5
        # Groups and outputs of very different sizes: scales of another one would show. All of one
        # sign in places, so that zero points go to both ends.
        sizes = torch.exp(numbers.randn(outputs, inputs // self.weight.group_size).float()).repeat_interleave(
            self.weight.group_size, 1
        )
        quantize_rows((scattered.float() + 0.5 * inputs**-0.5) * sizes, self.weight, 0)
        self.numbers = dequantize(self.weight, torch.empty(outputs, inputs, device=device)).double()
        self.x = numbers.randn(rows, inputs) * torch.logspace(-1, 1, rows, device=device, dtype=dtype)[:, None]
        self.norm_weight = numbers.randn(inputs) * 0.3 + 1
        self.bias, self.residual = numbers.randn(outputs), numbers.randn(rows, outputs)

    def poison(self, outputs: int | None = None) -> torch.Tensor:
        return torch.full(
            (self.num_rows, outputs or self.num_outputs), float("nan"), dtype=self.dtype, device=self.x.device
        )

    def normed(self) -> torch.Tensor:
        x = self.x.double()
        return x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm_weight.double()

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.numbers.t() + self.bias.double()

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """How far sums may be off: 6 standard deviations of independent errors.

        Each product may be off by two roundings of the dtype, and each sum by fp32's. The second
        part is what INT4's way through 128 + q costs: sums of numbers up to 151 steps, of which at
        most 15 are left.
        """
        unit = ROUNDING[self.dtype]
        size = (x.square() @ self.numbers.square().t()).sqrt()
        largest = self.numbers.abs().amax(1) * x.square().sum(1, keepdim=True).sqrt()
        return 6 * 2**0.5 * unit * size + 151 * 2.0**-22 * largest


def assert_close(found: torch.Tensor, expected: torch.Tensor, spread: torch.Tensor) -> None:
    """Within the spread and a rounding of the result itself, or the type's smallest number."""
    error, numbers = (found.double() - expected).abs(), torch.finfo(found.dtype)
    allowed = spread + 1.01 * ROUNDING[found.dtype] * (expected.abs() + expected.square().mean(1, keepdim=True).sqrt())
    allowed += numbers.smallest_normal * numbers.eps
    assert bool((error <= allowed).all()), (
        f"off by up to {float((error / allowed).nan_to_num(torch.inf).max()):.2f} times what is allowed"
    )


def check_small(product: Product, tile: SmallBatchTile) -> None:
    out = product.poison()
    multiply_small_batch(product.x, product.weight, product.bias, out, tile, norm=(product.norm_weight, EPS))
    assert_close(out, product.expected(product.normed()), product.spread(product.normed()))
    out = product.residual.clone()
    multiply_small_batch(product.x, product.weight, None, out, tile, add=True)
    x = product.x.double()
    assert_close(out, x @ product.numbers.t() + product.residual.double(), product.spread(x))


def check_row(product: Product, tile: GemvTile | Int4GemvTile) -> None:
    """One row, alone and normed, and added to the stream."""
    out = product.poison()
    multiply_gemv(product.x, product.weight, product.bias, out, tile, norm=(product.norm_weight, EPS))
    assert_close(out, product.expected(product.normed()), product.spread(product.normed()))
    out, x = product.residual.clone(), product.x.double()
    multiply_gemv(product.x, product.weight, None, out, tile, add=True)
    assert_close(out, x @ product.numbers.t() + product.residual.double(), product.spread(x))


def check_gated(product: Product, tile: SmallBatchTile | GemvTile | Int4GemvTile) -> None:
    out = product.poison(product.num_outputs // 2)
    norm = (product.norm_weight, EPS)
    if isinstance(tile, (GemvTile, Int4GemvTile)):
        multiply_gemv(product.x, product.weight, product.bias, out, tile, norm, gated=True)
    else:
        multiply_small_batch(product.x, product.weight, product.bias, out, tile, norm, gated=True)
    gate, value = product.expected(product.normed()).chunk(2, 1)
    off_gate, off_value = product.spread(product.normed()).chunk(2, 1)
    passed = torch.sigmoid(gate)
    # SwiGLU passes errors on with its slopes; its second derivatives are at most value / 2 and 1.1.
    spread = (passed * (1 + gate * (1 - passed)) * value).abs() * off_gate + (gate * passed).abs() * off_value
    spread += 1.1 * off_gate * off_value + 0.25 * value.abs() * off_gate.square()
    assert_close(out, gate * passed * value, spread)


def check_wide(product: Product, tile: GemmTile) -> None:
    out = product.poison()
    multiply_gemm(product.x, product.weight, product.bias, out, tile)
    assert_close(out, product.expected(product.x.double()), product.spread(product.x.double()))


def check_restored(product: Product) -> None:
    weight = product.weight
    rows = range(1, weight.num_outputs) if weight.num_outputs > 1 else range(1)
    out = torch.full((len(rows), weight.num_inputs), float("nan"), dtype=product.dtype, device=weight.device)
    dequantize_into(weight, rows, out)
    expected = product.numbers[rows.start :]
    assert bool(((out.double() - expected).abs() <= expected.abs() * ROUNDING[product.dtype] * 1.01 + 2**-25).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "size", "dtype"), any_two_meet(tuple(QuantKind), SIZES, DTYPES), ids=str)
def test_kernels_agree_with_fp64(kind: QuantKind, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    outputs, inputs, group = size
    with kernels_on("cpu"):
        for rows, small, wide in (
            (1, SMALL_TILES[0], WIDE_TILES[0]),
            (11, SMALL_TILES[1], WIDE_TILES[1]),
            (3, SMALL_TILES[2], WIDE_TILES[0]),
        ):
            product = Product(kind, rows, outputs, inputs, group, dtype, "cpu")
            check_small(product, small)
            check_wide(product, wide)
        check_restored(product)
        product = Product(kind, 1, 2 * outputs, inputs, group, dtype, "cpu")
        if takes_gemv(product.weight):
            is_int4 = kind is QuantKind.INT4
            check_row(product, Int4GemvTile(32, 2, 1) if is_int4 else GemvTile(4, 2, True))
            check_gated(product, Int4GemvTile(16, 1, 2) if is_int4 else GemvTile(2, 4, True))
        check_gated(Product(kind, 2, 2 * outputs, inputs, group, dtype, "cpu"), SMALL_TILES[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "size", "rows"), any_two_meet(tuple(QuantKind), MODEL_SIZES, (1, 13, 64, 250)))
def test_kernels_agree_with_fp64_at_the_sizes_of_models(
    kind: QuantKind, size: tuple[int, int, torch.dtype], rows: int
) -> None:
    outputs, inputs, dtype = size
    product = Product(kind, rows, outputs, inputs, 128 if inputs % 128 == 0 else 32, dtype, "cuda")
    if rows == 1:
        check_row(product, launch_rules.gemv_rule(product.weight))
        if outputs % 2 == 0:
            check_gated(product, launch_rules.gemv_rule(product.weight, gated=True))
    if rows <= MAX_SMALL_BATCH_ROWS:
        check_small(product, launch_rules.small_batch_rule(rows, product.weight))
        if outputs % 2 == 0:
            check_gated(product, launch_rules.small_batch_rule(rows, product.weight, gated=True))
    else:
        check_wide(product, launch_rules.gemm_rule(rows, product.weight))
    if rows == 250:
        check_restored(product)


GROUPS = (32, 64, 128, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_every_size_on_a_card(group: int) -> None:
    """A tile is tried with one of the groups, since each is a compilation of a second."""
    tiles = gemv_variants(QuantKind.INT4, gated=False)[GROUPS.index(group) :: len(GROUPS)]
    for dtype in DTYPES[:2]:
        for rows in (1, 16, 40):
            product = Product(QuantKind.INT4, rows, 512, 4096, group, dtype, "cuda")
            if rows == 1:
                for tile in tiles:
                    check_row(product, tile)
            if rows <= MAX_SMALL_BATCH_ROWS:
                check_small(product, SmallBatchTile(16, 64, 4, 4, 3, dtype == torch.bfloat16))
            else:
                check_wide(product, GemmTile(64, 64, 64, 4, 3, 2))


@pytest.mark.parametrize("kind", QuantKind)
def test_every_number_is_multiplied_as_it_is(kind: QuantKind, device: str) -> None:
    """All codes there are, times 1 or 0, so that nothing is rounded.

    A conversion that is off in the last bit shows.
    """
    for dtype in DTYPES[:2]:
        codes = all_codes(kind, dtype, device)
        expected = dequantize(codes, torch.empty(codes.num_outputs, codes.num_inputs, device=device))
        for first in range(0, codes.num_inputs, MAX_SMALL_BATCH_ROWS):
            x = torch.eye(codes.num_inputs, dtype=dtype, device=device)[first : first + MAX_SMALL_BATCH_ROWS]
            out = torch.full((MAX_SMALL_BATCH_ROWS, codes.num_outputs), float("nan"), device=device)
            multiply_small_batch(x, codes, None, out, SmallBatchTile(16, 32, 2, 2, 2))
            assert torch.equal(out, expected.t()[first : first + MAX_SMALL_BATCH_ROWS])
            multiply_gemm(x, codes, None, out, GemmTile(64, 16, 32, 4, 2))
            assert torch.equal(out, expected.t()[first : first + MAX_SMALL_BATCH_ROWS])


def all_codes(kind: QuantKind, dtype: torch.dtype, device: str) -> QuantizedWeight:
    """A weight of 16 outputs that holds every code in every place of a word.

    Scales are 1 and, for INT4, each output has a zero point of its own.
    """
    inputs = 128
    weight = allocate(kind, 16, inputs, inputs, dtype, torch.device(device))
    weight.scales.fill_(1)
    if kind is QuantKind.INT4:
        assert weight.zeros is not None
        weight.zeros.copy_(torch.arange(16)[None, :])
        words = torch.arange(16)[:, None] + torch.arange(weight.packed.shape[1])[None, :]
        nibbles = sum(((words + 5 * place) % 16) << 4 * place for place in range(4))
        weight.packed.copy_(torch.as_tensor(nibbles).to(torch.int32).to(torch.int16))
        return weight
    codes = (torch.arange(16)[:, None] * 16 + torch.arange(inputs)[None, :]) % 256
    if kind is QuantKind.FP8:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    else:
        codes[codes == 128] = 0  # -128 is not used, and would be right too
    weight.packed.view(torch.uint8).copy_(codes)
    return weight


@pytest.mark.parametrize("damage", ["order", "zero", "scale"])
def test_a_weight_that_is_packed_wrongly_shows(damage: str, device: str) -> None:
    """The check of the checks: wrong packing is far outside what the tests allow.

    Bits are in another order, zero points off by one, or scales a neighbour's.
    """
    product = Product(QuantKind.INT4, 4, 24, 256, 64, torch.bfloat16, device)
    assert product.weight.zeros is not None
    if damage == "order":
        packed = product.weight.packed
        packed.copy_((packed >> 4 & 0x0F0F) | (packed & 0x0F0F) << 4)
    elif damage == "zero":
        product.weight.zeros.add_(1)
    else:
        product.weight.scales.copy_(product.weight.scales.roll(1, 0))
    for check in (lambda: check_small(product, SMALL_TILES[0]), lambda: check_wide(product, WIDE_TILES[0])):
        with pytest.raises(AssertionError, match="times what is allowed"):
            check()


@pytest.mark.parametrize("kind", QuantKind)
@pytest.mark.parametrize("rows", [2, 20])
def test_operations_equal_their_references(kind: QuantKind, rows: int, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    product = Product(kind, rows, 24, 96, 32, dtype, device)
    x, weight, norm, bias = product.x, product.weight, product.norm_weight, product.bias
    found, expected = product.residual.clone(), product.residual.clone()
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
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, reference in pairs:
        assert ours.dtype == reference.dtype and ours.shape == reference.shape
        assert float((ours - reference).double().norm() / reference.double().norm()) < tolerance


@pytest.mark.parametrize("kind", QuantKind)
def test_a_processor_restores_in_blocks(kind: QuantKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_dequantized, "_BLOCK_NUMBERS", 7 * 96)
    for dtype in DTYPES:
        product = Product(kind, 3, 24, 96, 32, dtype, "cpu")
        assert path_rule(3, product.weight) is Path.BLOCKS and not quantized_linear.fuses(3, product.weight)
        assert_close(
            quantized_linear.linear(product.x, product.weight, product.bias),
            product.expected(product.x.double()),
            product.spread(product.x.double()),
        )
        wide = quantized_linear.linear(product.x, product.weight, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert quantized_linear.scratch_bytes(product.weight) == 0


@pytest.mark.parametrize("kind", QuantKind)
def test_long_weights_are_restored_in_parts(kind: QuantKind, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(kind, 5, 50, 256, 64, torch.float32, device)
    monkeypatch.setattr(dequantized_buffer, "_MOST_BYTES", 16 * 256 * 4)
    found = gemm_dequantized.dequantized_linear(product.x, product.weight, product.bias)
    assert_close(found, product.expected(product.x.double()), 20 * product.spread(product.x.double()))


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    product = Product(QuantKind.INT4, 12, 20, 256, 64, torch.bfloat16, device)
    for multiply, tile in ((multiply_small_batch, SMALL_TILES[0]), (multiply_gemm, WIDE_TILES[0])):
        together, apart = product.poison(), product.poison()
        multiply(product.x, product.weight, None, together, tile)
        x = product.x.clone()
        x[:3], x[6:] = 1e4, -1e4
        multiply(x, product.weight, None, apart, tile)
        assert torch.equal(together[3:6], apart[3:6])


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (19456, 2560)])
def test_products_of_8_bit_activations_agree_with_fp64(outputs: int, inputs: int) -> None:
    for rows in (17, 65, 300, 2048):
        product = Product(QuantKind.FP8, rows, outputs, inputs, inputs, torch.bfloat16, "cuda")
        if not can_scale(product.weight):
            pytest.skip("needs FP8 tensor cores")
        tokens = round_tokens(product.x, InputRounding(torch.float8_e4m3fn))
        x = tokens.numbers.double() * tokens.scales.double()
        found = scaled_linear(tokens, product.weight, product.bias)
        # Tensor cores that add up alone keep 14 bits of a sum.
        exactness = 1 if inputs <= MOST_FAST_INPUTS else 100
        assert_close(found, product.expected(x), product.spread(x) / exactness)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QuantKind)
def test_all_paths_of_a_card_give_the_product(kind: QuantKind) -> None:
    seen = set()
    for rows in (1, 16, 17, 64, 65, 256, 257, 512, 1000):
        product = Product(kind, rows, 4096, 4096, 128, torch.bfloat16, "cuda")
        path = path_rule(rows, product.weight)
        seen.add(path)
        found = quantized_linear.linear(product.x, product.weight, product.bias)
        expected = product.expected(product.x.double())
        # Activations of 4 bits of mantissa: 2.6% of each number, evenly spread.
        assert float((found - expected).norm() / expected.norm()) < (4e-2 if path is Path.SCALED else 5e-3)
    # Products of rounded tokens may follow those of few rows at once.
    assert seen >= (
        {Path.SMALL_BATCH, Path.SCALED}
        if can_scale(product.weight)
        else {Path.SMALL_BATCH, Path.GEMM, Path.DEQUANTIZED}
    )


def test_a_card_s_buffer_is_as_large_as_the_largest_weight_needs() -> None:
    assert dequantized_buffer.scratch_bytes(28_672, 4096, torch.bfloat16) == 28_672 * 4096 * 2
    # Those of a 70B are restored in parts.
    assert dequantized_buffer.scratch_bytes(57_344, 8192, torch.bfloat16) <= 1 << 28
    assert dequantized_buffer.rows_at_a_time(3, 1 << 30, torch.bfloat16) == 1


@pytest.mark.gpu
def test_a_card_without_a_number_is_the_current_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    named = torch.device("cuda", torch.cuda.current_device())
    dequantized_buffer.reserve(64, 64, torch.float16, torch.device("cuda"))
    assert dequantized_buffer.room(64, 64, torch.float16, named).shape == (64, 64)
    dequantized_buffer.release(torch.device("cuda"))
    with pytest.raises(KeyError):
        dequantized_buffer.room(64, 64, torch.float16, named)


def test_warm_rows_take_every_tile_of_the_rules(device: str) -> None:
    """Whatever number of rows comes, its path and tile are those of one of the warm ones."""

    def launches(rows: int, weight: QuantizedWeight) -> set[object]:
        path = path_rule(rows, weight)
        if path is Path.SMALL_BATCH and rows == 1 and takes_gemv(weight):
            return {launch_rules.gemv_rule(weight, gated) for gated in (False, True)}
        if launch_rules.small_batch_8bit_rule(rows, weight) is not None:
            return {(launch_rules.small_batch_8bit_rule(rows, weight, gated), rows_of(rows)) for gated in (False, True)}
        if path is Path.SMALL_BATCH:
            rules = {launch_rules.small_batch_rule(rows, weight, gated) for gated in (False, True)}
            return {(tile, rows <= 8) for tile in rules}
        return {launch_rules.gemm_rule(rows, weight)} if path is Path.GEMM else {path}

    for kind in QuantKind:
        for outputs in (1024, 2560, 4096, 6144, 19_456, 28_672):
            weight = allocate(kind, outputs, 64, 64, torch.bfloat16, torch.device(device))
            warm = set().union(*(launches(rows, weight) for rows in quantized_linear.WARM_ROWS))
            for rows in range(1, 600):
                assert launches(rows, weight) <= warm


@pytest.mark.parametrize("kind", QuantKind)
def test_one_row_is_the_same_product_by_every_tile(kind: QuantKind, device: str) -> None:
    for gated in (False, True):
        product = Product(kind, 1, 20, 512, 128, torch.bfloat16, device)
        tiles = gemv_variants(kind, gated)
        assert len(set(tiles)) == len(tiles) > 2
        # Some of them: the interpreter takes its time, and a card a second to compile each.
        for tile in tiles[:: 3 if device == "cuda" else 5]:
            if gated:
                check_gated(product, tile)
            else:
                check_row(product, tile)


def test_every_variant_fits_its_kernel() -> None:
    for kind in QuantKind:
        for gated in (False, True):
            tiles = small_batch_variants(kind, gated, normed=gated)
            assert len(set(tiles)) == len(tiles) > 2
        for rows, outputs in ((32, 4096), (64, 28_672), (256, 6144)):
            wide = gemm_variants(kind, rows, outputs)
            assert len(set(wide)) == len(wide) > 2
