"""Products by warp groups.

The kernel is emulated without a GPU, run on one, and asked which weights and rows it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from tests.kernels.linear.test_quantized_linear import Product, assert_close
from tests.support.gluon_emulation import emulating, launch_control
from tests.support.kernel_case import kernels_on

from headrace_kernels import card
from headrace_kernels.linear import gemm_weight_only_sm90 as warpgroup
from headrace_kernels.linear import launch_rules
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.gemm_weight_only import multiply_gemm
from headrace_kernels.linear.gemm_weight_only_sm90 import (
    WarpgroupTile,
    splittings,
    takes_warpgroups,
    warpgroup_variants,
)
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate

# Few and many slots; splits that leave a last one shorter, and one empty.
TILES = (
    WarpgroupTile(128, 32, 8, 4, 2),
    WarpgroupTile(64, 64, 4, 8, 3, 3),
    WarpgroupTile(128, 64, 8, 4, 3, 5),
    WarpgroupTile(64, 32, 4, 8, 2),
)
# Rows, outputs, inputs, group of INT4, type, tile: pieces of 128 and 64 inputs, rows that fill no
# tile, several tiles, all inputs in one group.
CASES = (
    (40, 128, 1536, 128, torch.bfloat16, TILES[0]),
    (9, 128, 1024, 64, torch.float16, TILES[1]),
    (70, 128, 2048, 128, torch.bfloat16, TILES[2]),
    (5, 128, 1536, 1536, torch.bfloat16, TILES[3]),
)


def assembly(source: tuple[object, ...] | str, operands: list[torch.Tensor], kind: object) -> torch.Tensor:
    """What the two pieces of assembly do, by the names that `check` gives them."""
    if isinstance(source, str):
        return launch_control(source, operands, kind)
    dtype = kind.dtype  # type: ignore[attr-defined]
    numbers = [operand.as_subclass(torch.Tensor) for operand in operands]
    if source[0] == "nibbles":
        words, shifts, scales = numbers
        offset = 128 if dtype == torch.bfloat16 else 1024
        return (((words.int() >> 4 * int(str(source[1])) & 15) + offset - shifts.float()) * scales.float()).to(dtype)
    return (numbers[0] if source[1] == "int8" else numbers[0].view(torch.float8_e4m3fn)).to(dtype)


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


def check(product: Product, tile: WarpgroupTile, eager: bool = False, careless: str | None = None) -> None:
    out = product.poison()
    with (
        kernels_on("cpu"),
        mock.patch.object(warpgroup, "dequantizing_assembly", lambda part, bf16: ("nibbles", part)),
        mock.patch.object(warpgroup, "byte_assembly", lambda kind, bf16: ("bytes", kind)),
        emulating(warpgroup, "_gemm_sm90_kernel", assembly, eager, careless),
    ):
        multiply_gemm(product.x, product.weight, product.bias, out, tile)
    x = product.x.double()
    assert_close(out, product.expected(x), product.spread(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", QuantKind)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group", "dtype", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
    dtype: torch.dtype,
    tile: WarpgroupTile,
    kind: QuantKind,
    eager: bool,
) -> None:
    check(Product(kind, rows, outputs, inputs, group, dtype, "cpu"), tile, eager)


@pytest.mark.parametrize(("careless", "eager"), [("copies", False), ("products", True)])
@pytest.mark.parametrize("tile", TILES)
def test_a_wait_that_is_missing_shows(tile: WarpgroupTile, careless: str, eager: bool) -> None:
    """The check of the checks: a missing wait gives wrong numbers.

    x is not there yet, or slots are filled while a product reads them.
    """
    product = Product(QuantKind.INT4, 5, 128, 2560, 128, torch.bfloat16, "cpu")
    with pytest.raises(AssertionError, match="times what is allowed"):
        check(product, tile, eager, careless)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are asked as on an H200."""
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    monkeypatch.setattr(card, "has_warpgroup_products", lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(card, "shared_bytes", lambda device: 232_448)


def weight_of(kind: QuantKind, outputs: int, inputs: int, group: int = 128) -> QuantizedWeight:
    group = group if kind is QuantKind.INT4 else inputs
    return allocate(kind, outputs, inputs, group, torch.bfloat16, torch.device("meta"))


@pytest.mark.usefixtures("hopper")
def test_weights_that_are_no_whole_tiles_take_the_other_kernel() -> None:
    assert all(takes_warpgroups(weight_of(kind, 6144, 4096)) for kind in QuantKind)
    assert not takes_warpgroups(weight_of(QuantKind.INT4, 6144, 4096, 32))
    assert not takes_warpgroups(weight_of(QuantKind.INT4, 100, 4096))
    assert not takes_warpgroups(weight_of(QuantKind.INT8, 256, 4000))
    grouped = allocate(QuantKind.INT8, 256, 4096, 128, torch.bfloat16, torch.device("meta"), Arrangement())
    wide = allocate(QuantKind.INT4, 256, 4096, 128, torch.float32, torch.device("meta"))
    assert not takes_warpgroups(grouped) and not takes_warpgroups(wide)


def test_other_cards_take_the_other_kernel() -> None:
    assert not takes_warpgroups(weight_of(QuantKind.INT4, 6144, 4096))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", QuantKind)
def test_a_rule_s_tile_takes_every_weight_that_the_kernel_takes(kind: QuantKind) -> None:
    for outputs, inputs in ((128, 512), (6144, 4096), (19_456, 2560), (28_672, 4096), (8192, 28_672), (1152, 3072)):
        weight = weight_of(kind, outputs, inputs)
        assert takes_warpgroups(weight)
        warm = {launch_rules.gemm_rule(rows, weight) for rows in quantized_linear.WARM_ROWS if rows > 16}
        for rows in range(17, 600):
            tile = launch_rules.gemm_rule(rows, weight)
            assert isinstance(tile, WarpgroupTile) and tile in warm
            assert outputs % tile.block_n == 0 and tile.shared_bytes(kind) <= 232_448


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", QuantKind)
def test_splits_share_all_inputs_and_every_variant_fits(kind: QuantKind) -> None:
    weight = weight_of(kind, 4096, 14_336)
    for rows in (32, 64, 128, 256, 512):
        variants = warpgroup_variants(rows, weight)
        assert len(set(variants)) == len(variants) > 4
        assert all(tile.shared_bytes(kind) <= 232_448 for tile in variants)
    shares = [-(-14_336 // (256 * tile.splits)) for tile in splittings(TILES[0], 64, weight)]
    assert len(set(shares)) == len(shares) and 56 in shares


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QuantKind)
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [(6144, 4096, torch.bfloat16), (4096, 14_336, torch.bfloat16), (19_456, 2560, torch.float16)],
)
def test_a_card_agrees_with_fp64(kind: QuantKind, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (17, 64, 100, 250, 512):
        product = Product(kind, rows, outputs, inputs, 128, dtype, "cuda")
        x = product.x.double()
        for tile in dict.fromkeys(
            each._replace(splits=splits) for each in warpgroup_variants(rows, product.weight) for splits in (1, 3)
        ):
            out, again = product.poison(), product.poison()
            multiply_gemm(product.x, product.weight, product.bias, out, tile)
            assert_close(out, product.expected(x), product.spread(x))
            multiply_gemm(product.x, product.weight, product.bias, again, tile)
            assert torch.equal(out, again)
