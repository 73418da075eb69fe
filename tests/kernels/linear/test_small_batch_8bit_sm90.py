"""Products of 2 to 64 rows with weights of 8 bits.

The kernel is emulated without a GPU, run on one, and asked which weights and rows it is for.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.kernels.linear.test_gemm_weight_only_sm90 import assembly
from tests.kernels.linear.test_quantized_linear import EPS, Product, assert_close
from tests.support.gluon_emulation import emulating
from tests.support.kernel_case import kernels_on
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.linear import launch_rules
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear import small_batch_8bit_sm90 as few
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.linear.small_batch_8bit_sm90 import (
    SmallBatch8BitTile,
    multiply_small_batch_8bit,
    small_batch_8bit_variants,
    takes_small_batch_8bit,
)
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate

KINDS = (QuantKind.FP8, QuantKind.INT8)
# Rows, outputs, inputs, type, tile: each class of rows, outputs that fill no tile, few and many
# slots, splits that leave a last one shorter, and one empty.
CASES = (
    (7, 130, 640, torch.bfloat16, SmallBatch8BitTile(64, 2, 4, 3)),
    (16, 64, 1280, torch.float16, SmallBatch8BitTile(32, 1, 2, 4, 3)),
    (20, 70, 768, torch.bfloat16, SmallBatch8BitTile(16, 2, 1, 2, 5)),
    (50, 128, 384, torch.bfloat16, SmallBatch8BitTile(32, 4, 2, 6)),
)


def run(
    product: Product, tile: SmallBatch8BitTile, gated: bool = False, add: bool = False, bias: bool = True
) -> Tensor:
    """By the card, or as the kernel says."""
    out = product.residual.clone() if add else product.poison(product.num_outputs // (1 + gated))
    norm = (product.norm_weight, EPS) if gated else None
    multiply_small_batch_8bit(product.x, product.weight, product.bias if bias else None, out, tile, norm, gated, add)
    return out


def emulated(
    product: Product, tile: SmallBatch8BitTile, eager: bool = False, careless: str | None = None, **what: bool
) -> Tensor:
    with (
        kernels_on("cpu"),
        mock.patch.object(few, "byte_assembly", lambda kind, bf16: ("bytes", kind)),
        emulating(few, "_small_batch_8bit_kernel", assembly, eager, careless),
    ):
        return run(product, tile, **what)


def check_product(product: Product, found: Tensor) -> None:
    x = product.x.double()
    assert_close(found, product.expected(x), product.spread(x))


def check_added(product: Product, found: Tensor) -> None:
    x = product.x.double()
    assert_close(found, x @ product.numbers.t() + product.residual.double(), product.spread(x))


def check_gated(product: Product, found: Tensor) -> None:
    gate, value = product.expected(product.normed()).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * value
    # Norms and results are rounded, and in the interpreter cut: far less than what any number in a
    # wrong place would do.
    assert float((found.double() - expected).norm() / expected.norm()) < 2.5e-2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "dtype", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, tile: SmallBatch8BitTile, kind: QuantKind, eager: bool
) -> None:
    product = Product(kind, rows, outputs, inputs, inputs, dtype, "cpu")
    check_product(product, emulated(product, tile, eager))
    if eager:
        check_added(product, emulated(product, tile, eager, add=True, bias=False))
        check_gated(product, emulated(product, tile, eager, gated=True))


@pytest.mark.parametrize("tile", [SmallBatch8BitTile(32, 1, 2, 3), SmallBatch8BitTile(16, 2, 1, 5)])
def test_a_wait_that_is_missing_shows(tile: SmallBatch8BitTile) -> None:
    """The check of the checks."""
    product = Product(QuantKind.INT8, 5, 32, 1280, 1280, torch.bfloat16, "cpu")
    with pytest.raises(AssertionError, match="times what is allowed"):
        check_product(product, emulated(product, tile, careless="copies"))


def weight_of(outputs: int, inputs: int, kind: QuantKind = QuantKind.FP8, group: int = 0) -> QuantizedWeight:
    sizes = (outputs, inputs, group or inputs)
    return allocate(kind, *sizes, torch.bfloat16, torch.device("meta"), Arrangement(keeps_activations=True))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are asked as on an H200."""
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    for what in ("has_warpgroup_instructions", "has_warpgroup_products"):
        monkeypatch.setattr(card, what, lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(card, "shared_bytes", lambda device: 232_448)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_scales_of_outputs_and_whole_steps() -> None:
    assert takes_small_batch_8bit(weight_of(100, 4096)) and takes_small_batch_8bit(weight_of(6144, 384, QuantKind.INT8))
    assert not takes_small_batch_8bit(weight_of(128, 4000))
    assert not takes_small_batch_8bit(weight_of(128, 4096, QuantKind.INT8, 128))
    assert not takes_small_batch_8bit(weight_of(128, 4096, QuantKind.INT4, 128))


def test_other_cards_take_the_other_kernels() -> None:
    assert not takes_small_batch_8bit(weight_of(6144, 4096))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_name_a_tile_fuse_what_is_around(kind: QuantKind, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, tile = weight_of(6144, 4096, kind), SmallBatch8BitTile(64, 2, 4, 4)
    assert (
        launch_rules.small_batch_8bit_rule(1, weight) is None and launch_rules.small_batch_8bit_rule(65, weight) is None
    )
    monkeypatch.setattr(launch_rules, "_SMALL_BATCH_8BIT_TILES", {(kind, 32): (tile, tile, tile)})
    assert (
        launch_rules.small_batch_8bit_rule(20, weight) == tile
        and launch_rules.small_batch_8bit_rule(40, weight) is None
    )
    assert path_rule(20, weight) is Path.SMALL_BATCH and quantized_linear.fuses(20, weight)
    # A head has programs enough.
    tile = tile._replace(splits=4)
    monkeypatch.setattr(launch_rules, "_SMALL_BATCH_8BIT_TILES", {(kind, 32): (tile, tile, tile)})
    splits = [launch_rules.small_batch_8bit_rule(20, weight_of(outputs, 4096, kind)) for outputs in (4096, 128_256)]
    assert splits == [tile, tile._replace(splits=1)]
    assert path_rule(40, weight) is Path.GEMM and quantized_linear.rounds_to(20, weight) is None


@pytest.mark.parametrize("gated", [False, True])
def test_every_variant_fits_a_card(gated: bool) -> None:
    for rows in (2, 16, 32, 64):
        tiles = small_batch_8bit_variants(rows, 4096, 14_336, gated)
        assert len(set(tiles)) == len(tiles) > 2 and small_batch_8bit_variants(rows, 100, 256, gated)
        assert all(tile.shared_bytes(rows) <= 232_448 and tile.side_n % (16 * tile.num_warps) == 0 for tile in tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [(6144, 4096, torch.bfloat16), (4096, 14_336, torch.bfloat16), (1010, 2560, torch.float16)],
)
def test_a_card_agrees_with_fp64(kind: QuantKind, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (2, 16, 24, 32, 64):
        product = Product(kind, rows, outputs, inputs, inputs, dtype, "cuda")
        for tile in small_batch_8bit_variants(rows, outputs, inputs, gated=False)[::4]:
            found = run(product, tile)
            check_product(product, found)
            check_added(product, run(product, tile, add=True, bias=False))
            assert torch.equal(found, run(product, tile))
        check_gated(
            product, run(product, small_batch_8bit_variants(rows, outputs // 2, inputs, gated=True)[0], gated=True)
        )
