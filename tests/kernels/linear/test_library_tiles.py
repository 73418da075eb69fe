"""Tiles that cuBLAS is given: which products have one, and that the library can be asked."""

from __future__ import annotations

import ctypes
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend.quantization import product_check
from headrace_kernels import card
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.linear import gemm_fp8
from headrace_kernels.linear import quantized as quantized_linear
from headrace_kernels.linear.cublas import bindings, fp8, plain, tiles
from headrace_kernels.linear.cublas.bindings import ProductShape, TileName
from headrace_kernels.linear.cublas.plain import tiled_linear
from headrace_kernels.linear.cublas.tiled import tiled_product
from headrace_kernels.linear.cublas.tiles import tile_rule
from headrace_kernels.linear.quantized import Path, path_rule
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
PER_TOKEN = InputRounding(E4M3)
H200 = 132
CPU = torch.device("cpu")


def named(rows: int, outputs: int, inputs: int, number: torch.dtype = E4M3) -> TileName | None:
    return tile_rule(ProductShape(rows, outputs, inputs, number, False), H200)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        # Down of an 8B Llama: 128 tiles, one wave, whatever the rows.
        (128, 4096, 14_336, (64, 64)),
        (192, 4096, 14_336, (64, 96)),
        (256, 4096, 14_336, (128, 64)),
        (384, 4096, 14_336, (128, 96)),
        # The library's own is that wave.
        (512, 4096, 14_336, None),
        # QKV, whose 96 tiles of 128 outputs and 128 rows leave a quarter of the card idle.
        (256, 6144, 4096, (192, 64)),
        (384, 6144, 4096, (128, 88)),
        (512, 6144, 4096, (128, 104)),
        # Gate and up fill the card; with 192 rows the library would multiply 256.
        (192, 28_672, 4096, (128, 96)),
        (256, 28_672, 4096, None),
        (448, 28_672, 4096, None),
        # 64 x 96 would not be whole.
        (256, 2560, 8192, (128, 64)),
    ],
)
def test_a_product_in_fp8_has_the_tile_that_was_measured_to_be_fast(
    rows: int, outputs: int, inputs: int, tile: tuple[int, int] | None
) -> None:
    found = named(rows, outputs, inputs)
    expected = next((each for each in tiles._FP8_TILES if (each.outputs, each.tokens) == tile), None)
    assert found == (None if expected is None else TileName(expected.tile, expected.option, tiles._ALONE))


@given(st.integers(1, 512), st.integers(1, 4000), st.integers(1, 2000), st.sampled_from([H200, 114, 78]))
def test_a_tile_of_fp8_is_named_only_where_there_is_less_to_do(
    rows: int, outputs: int, inputs: int, multiprocessors: int
) -> None:
    """Waves of tiles times their size, beside those of the library's own with filled rows."""
    shape = ProductShape(rows, 16 * outputs, 16 * inputs, E4M3, False)
    name = tile_rule(shape, multiprocessors)
    if name is None:
        return

    def work(outputs_of_tile: int, rows_of_tile: int, num_tokens: int) -> int:
        programs = -(-num_tokens // rows_of_tile) * -(-shape.num_outputs // outputs_of_tile)
        return -(-programs // multiprocessors) * outputs_of_tile * rows_of_tile

    (chosen,) = (tile for tile in tiles._FP8_TILES if tile.tile == name.tile)
    assert work(chosen.outputs, chosen.tokens, rows) < work(128, 128, -(-rows // 128) * 128)


def test_products_in_bf16_are_given_only_what_was_faster() -> None:
    def tiled(outputs: int, inputs: int) -> list[int]:
        return [rows for rows in range(1, 1025) if named(rows, outputs, inputs, BF16) is not None]

    # Attention's output and down: tiles are whole, and one wave holds them.
    assert tiled(4096, 4096) == tiled(4096, 14_336) == [64, 96, 128, 192, 256, 384]
    # Gate and up fill whole waves of the tile with some rows alone, QKV with none.
    assert tiled(28_672, 4096) == [128, 256] and tiled(6144, 4096) == []
    # A few outputs of a rank would leave most of the card idle.
    assert 64 not in tiled(1024, 4096) and 256 in tiled(1024, 4096)
    assert named(128, 28_672, 4096, BF16) == TileName(165, 4, tiles._ALONE)
    assert named(256, 28_672, 4096, BF16) == TileName(165, 4, tiles._PAIRS_OF_TOKENS)


def test_warm_rows_take_every_tile() -> None:
    """A kernel of the library is loaded when it is first launched, which takes milliseconds."""
    sizes = ((6144, 4096), (4096, 14_336), (28_672, 4096), (2560, 8192), (8192, 2048), (51_200, 5120), (2048, 4096))
    tiled = range(1, fp8._MOST_TILED_ROWS + 1)
    for outputs, inputs in sizes:
        of_rows = {rows: named(-(-rows // fp8._WHOLE_ROWS) * fp8._WHOLE_ROWS, outputs, inputs) for rows in tiled}
        warm = {of_rows[rows] for rows in quantized_linear.WARM_ROWS if rows in tiled}
        assert set(of_rows.values()) <= warm


def weight_of(outputs: int, inputs: int, keeps: bool = False) -> QuantizedWeight:
    arrangement = Arrangement(keeps_activations=keeps)
    return allocate(QuantKind.FP8, outputs, inputs, inputs, BF16, torch.device("meta"), arrangement)


@pytest.mark.parametrize(("is_sm_90", "fewest"), [(True, 33), (False, 65)])
def test_tokens_are_rounded_from_fewer_rows_where_tiles_are_given(
    is_sm_90: bool, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "uses_triton", lambda tensor: True)
    for what in ("has_warpgroup_instructions", "has_warpgroup_products"):
        monkeypatch.setattr(card, what, lambda device: is_sm_90)
    monkeypatch.setattr(card, "has_fp8_products", lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: H200)
    monkeypatch.setattr(card, "shared_bytes", lambda device: 232_448)
    weight = weight_of(28_672, 4096)
    found = [quantized_linear.rounds_to(rows, weight) for rows in (fewest - 1, fewest, 600)]
    assert found == [None, PER_TOKEN, PER_TOKEN]
    assert path_rule(fewest, weight) is Path.SCALED and not quantized_linear.fuses(fewest, weight)
    # An output layer keeps its tokens, and sizes that the tensor cores don't take are no products.
    head, odd = weight_of(128_256, 4096, keeps=True), weight_of(100, 4096)
    assert quantized_linear.rounds_to(300, head) is None and not gemm_fp8.takes_rows(300, odd)


def test_shapes_of_long_prompts_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(plain, "tiled_product", lambda device, shape: asked.append(shape.num_tokens))
    weight = mock.Mock(wraps=torch.ones(64, 4096, dtype=BF16), is_cuda=True, dtype=BF16, shape=(64, 4096), device=CPU)
    for rows in (0, 1, 384, 385, 8192):
        assert tiled_linear(torch.ones(rows, 4096, dtype=BF16), weight, None) is None
    assert asked == [1, 384]


def test_elsewhere_the_library_is_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ProductShape(128, 4096, 4096, E4M3, False)
    assert tiled_product(CPU, shape) is None
    assert tiled_linear(torch.ones(128, 4096, dtype=BF16), torch.ones(64, 4096, dtype=BF16), None) is None
    loaded = bindings.loaded_library.__wrapped__
    for cuda in (None, "99.0"):
        with monkeypatch.context() as other:
            other.setattr(torch.version, "cuda", cuda)
            assert loaded() is None
    monkeypatch.setattr(bindings, "_LEAST_VERSION", 990_000)
    assert loaded() is None


def test_the_library_has_all_that_it_is_asked_and_its_structures_have_their_sizes() -> None:
    assert ctypes.sizeof(bindings._Algorithm) == 64 and ctypes.sizeof(bindings._Candidate) == 96
    library = bindings.loaded_library()
    if library is None:
        pytest.skip("this PyTorch comes without CUDA")
    assert all(hasattr(library, name) for name in bindings._SIGNATURES)


@given(st.integers(1, 512), st.integers(1, 400), st.integers(1, 200), st.sampled_from([H200, 114, 78]))
def test_a_tile_in_blocks_is_one_wave_of_rows_that_start_up_compares(
    rows: int, outputs: int, inputs: int, multiprocessors: int
) -> None:
    """In a second wave the library's results are wrong, though it says that it can multiply so."""
    filled = -(-rows // fp8._WHOLE_ROWS) * fp8._WHOLE_ROWS
    shape = ProductShape(filled, 128 * outputs, 128 * inputs, E4M3, False, in_blocks=True)
    name = tile_rule(shape, multiprocessors)
    if name is None:
        return
    (chosen,) = (tile for tile in tiles._BLOCK_TILES if (tile.tile, tile.option) == (name.tile, name.option))
    assert name.cluster == tiles._ALONE and filled % chosen.tokens == 0
    assert filled // chosen.tokens * -(-shape.num_outputs // chosen.outputs) <= multiprocessors
    assert filled in {-(-count // 64) * 64 for count in product_check._CARD_ROW_COUNTS}


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        # QKV, output and down of Qwen3-8B.
        (64, 6144, 4096, (64, 64)),
        (128, 6144, 4096, (128, 64)),
        (256, 6144, 4096, None),
        (128, 4096, 4096, (64, 64)),
        (256, 4096, 12_288, (128, 64)),
        (320, 4096, 12_288, None),
        # Gate and up.
        (64, 24_576, 4096, None),
    ],
)
def test_a_product_in_blocks_has_the_tile_that_was_measured_to_be_fast(
    rows: int, outputs: int, inputs: int, tile: tuple[int, int] | None
) -> None:
    found = tile_rule(ProductShape(rows, outputs, inputs, E4M3, False, in_blocks=True), H200)
    expected = next((each for each in tiles._BLOCK_TILES if (each.outputs, each.tokens) == tile), None)
    assert found == (None if expected is None else TileName(expected.tile, expected.option, tiles._ALONE))
