"""Products of FP8 weights and tokens rounded to e4m3 by our kernel.

It is emulated without a GPU, run on one, and asked which weights and rows it is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.linear.test_quantized_linear import Product, assert_close
from tests.support.gluon_emulation import emulating, launch_control
from tests.support.kernel_case import kernels_on, poisoned_memory
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear import gemm_fp8
from headrace_kernels.linear import gemm_fp8_sm90 as scaled
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.gemm_fp8_sm90 import Fp8GemmTile, gemm_fp8_variants, multiply_gemm_fp8, takes_gemm_fp8
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.rounded_tokens import RoundedTokens, round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate

# Rows, outputs, inputs, tile: rows and outputs that fill no tile, tokens in parts and in several
# tiles, few and many slots, whole tiles, splits that leave a last one shorter, and equal shares
# that begin and end within a tile (the card of a CPU has two multiprocessors).
CASES = (
    (40, 144, 640, Fp8GemmTile(64, 64, 64, 4, 3)),
    (7, 80, 1280, Fp8GemmTile(64, 64, 32, 4, 2, 4)),
    (70, 320, 384, Fp8GemmTile(64, 32, 16, 4, 4, 0)),
    (33, 192, 896, Fp8GemmTile(128, 32, 32, 4, 5, 3)),
    (64, 448, 256, Fp8GemmTile(64, 64, 16, 4, 3, 0)),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Computes with one thread.

    Emulation is many small operations, which threads on a busy machine make hundreds of times
    slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens_of(product: Product) -> RoundedTokens:
    return round_tokens_reference(product.x, torch.float8_e4m3fn)


def emulated(product: Product, tile: Fp8GemmTile, eager: bool = False, careless: str | None = None) -> Tensor:
    out = product.poison()

    with (
        kernels_on("cpu"),
        poisoned_memory("cpu"),
        emulating(scaled, "_gemm_fp8_kernel", launch_control, eager, careless),
    ):
        multiply_gemm_fp8(tokens_of(product), product.weight, product.bias, out, tile)
    return out


def check(product: Product, found: Tensor) -> None:
    """Both sides are given exactly, so that only fp32's sums are between the result and fp64."""
    tokens = tokens_of(product)
    x = tokens.numbers.double() * tokens.scales.double()
    assert_close(found, product.expected(x), product.spread(x) / 100)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: Fp8GemmTile, eager: bool
) -> None:
    product = Product(QuantKind.FP8, rows, outputs, inputs, inputs, torch.bfloat16, "cpu")
    check(product, emulated(product, tile, eager))


def test_a_product_without_a_bias_agrees_with_the_reference() -> None:
    for rows, outputs, inputs, tile in CASES[:2]:
        product = Product(QuantKind.FP8, rows, outputs, inputs, inputs, torch.bfloat16, "cpu")
        expected = gemm_fp8.scaled_linear_reference(tokens_of(product), product.weight, None)
        product.bias = None  # type: ignore[assignment]
        found = emulated(product, tile, eager=True)
        # Both round fp32 sums once, in another order.
        assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 1e-2


@pytest.mark.parametrize(("careless", "eager"), [("copies", False), ("products", True)])
def test_a_wait_that_is_missing_shows(careless: str, eager: bool) -> None:
    """The check of the checks: a missing wait gives wrong numbers.

    Copies are not there yet, or sums are read while they are made.
    """
    # Two products at a time, of which the first is waited for alone.
    tile = Fp8GemmTile(64, 64, 16, 4, 3)
    assert tile.overlaps
    product = Product(QuantKind.FP8, 60, 64, 640, 640, torch.bfloat16, "cpu")
    check(product, emulated(product, tile, eager))
    with pytest.raises(AssertionError, match="times what is allowed"):
        check(product, emulated(product, tile, eager, careless))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    product = Product(QuantKind.FP8, 40, 80, 640, 640, torch.bfloat16, "cpu")
    for tile in (Fp8GemmTile(64, 32, 16, 4, 3, 0), Fp8GemmTile(64, 64, 64, 4, 2, 2)):
        together = emulated(product, tile)
        before, product.x = product.x, product.x.clone()
        product.x[:3], product.x[6:] = float("nan"), 1e4
        apart = emulated(product, tile)
        product.x = before
        assert torch.equal(together[3:6], apart[3:6]) and bool(apart[:3].isnan().all())


def weight_of(
    outputs: int, inputs: int, kind: QuantKind = QuantKind.FP8, group: int = 0, keeps: bool = False
) -> QuantizedWeight:
    arrangement = Arrangement(keeps_activations=keeps)
    return allocate(kind, outputs, inputs, group or inputs, torch.bfloat16, torch.device("meta"), arrangement)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are asked as on an H200."""
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    for what in ("has_warpgroup_instructions", "has_warpgroup_products", "has_fp8_products"):
        monkeypatch.setattr(card, what, lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(card, "shared_bytes", lambda device: 232_448)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Fp8GemmTile, Fp8GemmTile | None]]:
    """A rule for some rows, whatever the measured one says."""
    tiles = {
        64: (Fp8GemmTile(128, 64, 64, 4, 4), Fp8GemmTile(256, 64, 64, 8, 5, 0)),
        256: (Fp8GemmTile(128, 128, 64, 8, 6), Fp8GemmTile(128, 128, 128, 8, 6, 0)),
    }
    monkeypatch.setattr(gemm_fp8, "_SCALED_TILES", tiles)
    monkeypatch.setattr(gemm_fp8, "_FEWEST_TILED_ROWS", 33)
    return tiles


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_scales_of_outputs_and_whole_steps() -> None:
    assert takes_gemm_fp8(weight_of(6144, 4096)) and takes_gemm_fp8(weight_of(80, 384))
    assert not takes_gemm_fp8(weight_of(128, 4000)) and not takes_gemm_fp8(weight_of(100, 4096))
    assert not takes_gemm_fp8(weight_of(128, 4096, QuantKind.INT8))
    blocks = allocate(
        QuantKind.FP8, 256, 4096, 128, torch.bfloat16, torch.device("meta"), Arrangement(scale_outputs=128)
    )
    assert not takes_gemm_fp8(blocks)


@pytest.mark.usefixtures("filled")
def test_other_cards_take_other_kernels() -> None:
    assert not takes_gemm_fp8(weight_of(6144, 4096)) and gemm_fp8.scaled_rule(64, weight_of(6144, 4096)) is None


@pytest.mark.usefixtures("hopper")
def test_a_rule_that_names_a_tile_has_tokens_rounded(filled: dict[int, tuple[Fp8GemmTile, Fp8GemmTile | None]]) -> None:
    weight, last = weight_of(28_672, 4096), max(filled)
    number = torch.float8_e4m3fn
    assert [quantized_linear.rounds_to(rows, weight) for rows in (32, 33, 64, 65, last + 1)] == [None, *[number] * 4]
    assert path_rule(32, weight) is not Path.SCALED and not quantized_linear.fuses(33, weight)
    rule = gemm_fp8.scaled_rule
    assert [rule(rows, weight) is None for rows in (32, 33, last, last + 1)] == [True, False, False, True]
    # Equal shares for many outputs, inputs split as often as a wave has room for where they are
    # few.
    assert rule(40, weight) == filled[64][1] and rule(40, weight_of(4096, 4096)) == filled[64][0]._replace(splits=8)
    # An output layer keeps its tokens.
    head = weight_of(128_256, 4096, keeps=True)
    assert rule(64, head) is None and quantized_linear.rounds_to(300, head) is None
    # What the kernel does not take is `_scaled_mm`'s from where it was.
    odd = weight_of(6144, 4000)
    assert rule(64, odd) is None and [quantized_linear.rounds_to(rows, odd) for rows in (64, 65)] == [None, number]


def launches(rows: int, weight: QuantizedWeight) -> tuple[object, ...] | None:
    """What of a product is compiled."""
    tile = gemm_fp8.scaled_rule(rows, weight)
    if tile is None:
        return None
    _, pieces = scaled.shared_out(tile, rows, weight.num_outputs, weight.num_inputs, 132)
    return *tile[:5], tile.overlaps, pieces


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("is_filled", [False, True])
def test_warm_rows_take_every_kernel_of_the_rule(is_filled: bool, request: pytest.FixtureRequest) -> None:
    if is_filled:
        request.getfixturevalue("filled")
    for outputs, inputs in ((6144, 4096), (4096, 14_336), (28_672, 8192), (2560, 8192), (2560, 9728)):
        weight = weight_of(outputs, inputs)
        warm = {launches(rows, weight) for rows in quantized_linear.WARM_ROWS}
        found = {launches(rows, weight) for rows in range(1, 600)}
        assert found <= warm and (len(found) > 1 or not is_filled)


@pytest.mark.usefixtures("hopper")
def test_every_variant_fits_a_card() -> None:
    for rows in (40, 64, 100, 256):
        for outputs, inputs in ((4096, 4096), (28_672, 4096), (2560, 9728), (64, 128)):
            tiles = gemm_fp8_variants(rows, weight_of(outputs, inputs))
            assert len(set(tiles)) == len(tiles) > 3
            for tile in tiles:
                assert tile.shared_bytes <= 232_448 and tile.block_n % (16 * tile.num_warps) == 0
                share, pieces = scaled.shared_out(tile, rows, outputs, inputs, 132)
                assert share >= 1 and 1 <= pieces <= inputs // 128


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (4096, 14_336), (28_672, 4096), (2560, 8192), (8192, 2048), (2560, 9728), (1040, 2560)],
)
def test_a_card_agrees_with_fp64(outputs: int, inputs: int) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (1, 33, 64, 100, 192, 250):
        product = Product(QuantKind.FP8, rows, outputs, inputs, inputs, torch.bfloat16, "cuda")
        tokens = tokens_of(product)
        for tile in gemm_fp8_variants(rows, product.weight):
            found, again = product.poison(), product.poison()
            with poisoned_memory("cuda"):
                multiply_gemm_fp8(tokens, product.weight, product.bias, found, tile)
                multiply_gemm_fp8(tokens, product.weight, product.bias, again, tile)
            check(product, found)
            assert torch.equal(found, again)


@pytest.mark.gpu
def test_a_card_keeps_more_than_14_bits_of_long_products() -> None:
    """Numbers have one sign, so that their sums grow.

    In the tensor cores' own sums what is added in the end would be cut off.
    """
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    product = Product(QuantKind.FP8, 64, 256, 14_336, 14_336, torch.bfloat16, "cuda")
    product.weight.packed.copy_(product.weight.packed.float().abs())
    product.x = product.x.abs()
    tokens = tokens_of(product)
    numbers = product.weight.packed.double() * product.weight.scales.double()[:, None]
    expected = (tokens.numbers.double() * tokens.scales.double()) @ numbers.t()
    for tile in gemm_fp8_variants(64, product.weight):
        found = product.poison()
        multiply_gemm_fp8(tokens, product.weight, None, found, tile)
        # Half a unit of bf16, and what four additions of 32 products each cut off at 14 bits. The
        # cores' own sums would lose a hundred times as much.
        assert float(((found.double() - expected).abs() / expected).max()) < 2**-8 + 2**-10
