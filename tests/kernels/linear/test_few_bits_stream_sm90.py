"""Products of 2 to 16 rows with weights of 8 and 4 bits that stream by, with all that is fused.

The kernel is emulated without a GPU, run on one, and asked which weights and rows it is for.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.linear.test_gemm_weight_only_sm90 import assembly
from tests.kernels.linear.test_quantized_linear import EPS, Product, assert_close
from tests.support.gluon_emulation import emulating
from tests.support.kernel_case import kernels_on
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.hopper.launch import MOST_SLOT_BYTES
from headrace_kernels.linear import launch_rules, quantized
from headrace_kernels.linear.few_bits import operands
from headrace_kernels.linear.few_bits import stream_sm90 as streams
from headrace_kernels.linear.few_bits.stream_sm90 import (
    BitStreamTile,
    multiply_bit_streams,
    stream_bits_variants,
    takes_bit_streams,
)
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate
from headrace_kernels.weight_formats.stored_rows import store_blocks

BLOCKS = Arrangement(scale_outputs=128)
# What the kernel takes: a kind by outputs or groups, or FP8 in blocks.
Form = QuantKind | Arrangement
FORMS: tuple[Form, ...] = (*QuantKind, BLOCKS)
KINDS = (QuantKind.FP8, QuantKind.INT8)
# Rows, outputs, inputs, tile: each class of rows, outputs that fill no tile, each number of slices,
# few and many slots, more slots than steps.
CASES = (
    (7, 80, 512, BitStreamTile(1, 1, 3)),
    (16, 40, 1536, BitStreamTile(2, 2, 2)),
    (3, 52, 1024, BitStreamTile(4, 1, 3)),
    (11, 24, 512, BitStreamTile(2, 2, 4)),
    (13, 70, 1024, BitStreamTile(1, 4, 3)),
    (9, 80, 1024, BitStreamTile(4, 1, 2, 8)),
    (15, 140, 1024, BitStreamTile(1, 2, 2, 8)),
)
# The same of INT4, whose steps are 512 inputs and whose outputs are multiples of 16.
INT4_CASES = (
    (7, 80, 1024, BitStreamTile(1, 1, 3)),
    (16, 48, 3072, BitStreamTile(2, 1, 2)),
    (3, 64, 2048, BitStreamTile(4, 1, 3)),
    (13, 32, 3072, BitStreamTile(1, 2, 2)),
    (9, 80, 2048, BitStreamTile(2, 1, 2, 8)),
)
# The same in blocks of 128 outputs: slices that begin within 512 inputs, several blocks of outputs.
BLOCK_CASES = (
    (2, 128, 512, BitStreamTile(1, 1, 3)),
    (16, 256, 1536, BitStreamTile(2, 2, 2)),
    (3, 128, 1024, BitStreamTile(4, 1, 3)),
    (8, 384, 512, BitStreamTile(2, 2, 4)),
    (13, 128, 1024, BitStreamTile(1, 4, 3)),
    (9, 128, 1024, BitStreamTile(4, 1, 2, 8)),
    (16, 256, 4096, BitStreamTile(1, 2, 2, 8)),
)


class Fused(Product):
    """A product, and what comes of it with all that is fused, in fp64."""

    def __init__(
        self, kind: QuantKind, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str, gated: bool
    ) -> None:
        super().__init__(kind, rows, outputs * (1 + gated), inputs, 128, dtype, device)
        self.gated, self.residual = gated, self.residual[:, :outputs].contiguous()

    def run(self, tile: BitStreamTile, bias: bool = True, add: bool = False, normed: bool = False) -> Tensor:
        """By the card, or as the kernel says."""
        out = self.residual.clone() if add else torch.full_like(self.residual, float("nan"))
        norm = (self.norm_weight, EPS) if normed else None
        given_bias = self.bias if bias else None
        multiply_bit_streams(self.x, self.weight, given_bias, out, tile, norm, self.gated, add)
        return out

    def check(self, found: Tensor, bias: bool = True, add: bool = False, normed: bool = False) -> None:
        x = self.normed() if normed else self.x.double()
        sums = x @ self.numbers.t() + (self.bias.double() if bias else 0)
        # Products of x and a norm's weight are rounded once, INT4's numbers as well.
        is_rounded = normed or self.weight.kind is QuantKind.INT4
        spread = self.spread(x) if is_rounded else torch.zeros_like(sums)
        spread = spread + 2.0**-20 * (x.abs() @ self.numbers.abs().t())
        if self.gated:
            gate, up = sums.chunk(2, 1)
            of_gate, of_up = spread.chunk(2, 1)
            # The slope of SiLU is at most 1.1.
            sums = torch.nn.functional.silu(gate) * up
            spread = 1.1 * of_gate * (up.abs() + of_up) + (gate.abs() + of_gate) * of_up
        if add:
            sums = sums + self.residual.double()
        assert_close(found, sums, spread)


class InBlocks(Fused):
    """A product with a weight of FP8 in blocks, whose scales differ widely."""

    def __init__(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str, gated: bool) -> None:
        super().__init__(QuantKind.FP8, rows, outputs, inputs, dtype, device, gated)
        rows_of_weight = outputs * (1 + gated)
        self.weight = allocate(QuantKind.FP8, rows_of_weight, inputs, 128, dtype, self.x.device, BLOCKS)
        draw = torch.Generator(device).manual_seed(outputs + inputs)
        self.weight.packed.copy_(torch.randn(rows_of_weight, inputs, generator=draw, device=device) * 40)
        scales = torch.randn(-(-rows_of_weight // 128), -(-inputs // 128), generator=draw, device=device)
        scales = torch.exp(2 * scales) * inputs**-0.5 / 100
        store_blocks(scales, 128, self.weight, range(rows_of_weight))
        wide = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.numbers = self.weight.packed.double() * wide[:rows_of_weight, :inputs]


def product_of(form: Form, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str, gated: bool) -> Fused:
    if isinstance(form, Arrangement):
        return InBlocks(rows, outputs, inputs, dtype, device, gated)
    return Fused(form, rows, outputs, inputs, dtype, device, gated)


def emulated(
    product: Fused, tile: BitStreamTile, eager: bool = False, careless: str | None = None, **what: bool
) -> Tensor:
    def numbers(source: tuple[object, ...] | str, operands: list[Tensor], kind: object) -> Tensor:
        if source == "product":
            return operands[0] * operands[1]
        return assembly(source, operands, kind)

    with (
        kernels_on("cpu"),
        mock.patch.object(operands, "byte_assembly", lambda kind, bf16: ("bytes", kind)),
        mock.patch.object(operands, "dequantizing_assembly", lambda plane, bf16: ("nibbles", plane)),
        mock.patch.object(operands, "bf16_product_assembly", lambda: "product"),
        emulating(streams, "_bit_stream_kernel", numbers, eager, careless),
    ):
        return product.run(tile, **what)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: BitStreamTile, kind: QuantKind, eager: bool, gated: bool
) -> None:
    product = Fused(kind, rows, outputs, inputs, torch.float16 if eager else torch.bfloat16, "cpu", gated)
    product.check(emulated(product, tile, eager))
    product.check(emulated(product, tile, eager, bias=False, add=True), bias=False, add=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), INT4_CASES)
def test_what_the_kernel_says_of_groups_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: BitStreamTile, eager: bool, gated: bool
) -> None:
    product = Fused(QuantKind.INT4, rows, outputs, inputs, torch.bfloat16, "cpu", gated)
    product.check(emulated(product, tile, eager))
    product.check(emulated(product, tile, eager, bias=False, normed=True), bias=False, normed=True)
    product = Fused(QuantKind.INT4, rows, outputs, inputs, torch.float16, "cpu", gated)
    product.check(emulated(product, tile, eager, add=True), add=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_of_a_norm_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: BitStreamTile, eager: bool, gated: bool
) -> None:
    product = Fused(QuantKind.FP8, rows, outputs, inputs, torch.bfloat16, "cpu", gated)
    product.check(emulated(product, tile, eager, normed=True), normed=True)
    product.norm_weight = product.norm_weight.float()
    product.check(emulated(product, tile, eager, bias=False, normed=True), bias=False, normed=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), BLOCK_CASES)
def test_what_the_kernel_says_of_blocks_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: BitStreamTile, eager: bool, gated: bool
) -> None:
    product = InBlocks(rows, outputs, inputs, torch.bfloat16, "cpu", gated)
    product.check(emulated(product, tile, eager))
    product.check(emulated(product, tile, eager, bias=False, normed=True), bias=False, normed=True)
    product = InBlocks(rows, outputs, inputs, torch.float16, "cpu", gated)
    product.check(emulated(product, tile, eager, add=True), add=True)


@pytest.mark.parametrize("kind", QuantKind)
def test_an_output_layer_has_results_in_fp32(kind: QuantKind) -> None:
    product = Fused(kind, 9, 80, 2048, torch.bfloat16, "cpu", False)
    product.residual = product.residual.float()
    found = emulated(product, BitStreamTile(1, 1, 3))
    assert found.dtype == torch.float32
    product.check(found)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_product_agrees_with_fp64(data: st.DataObject) -> None:
    """Rows of every class, outputs that fill no tile, one step and many, all that is fused."""
    gated, normed, bias = (data.draw(st.booleans()) for _ in range(3))
    form = data.draw(st.sampled_from(FORMS))
    is_int4 = form is QuantKind.INT4
    add = not gated and data.draw(st.booleans())
    slices, subs = data.draw(st.sampled_from(((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))))
    tile = BitStreamTile(slices, subs, data.draw(st.sampled_from((2, 3, 5))), data.draw(st.sampled_from((4, 8))))
    inputs = slices * subs * (512 if is_int4 else 128) * data.draw(st.integers(1, 3))
    rows, outputs = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 70))
    outputs = 16 * (1 + outputs % 5) if is_int4 else outputs
    if form is BLOCKS:
        outputs, inputs = 128 * (1 + outputs % 3), 4 * inputs
    # Scales of blocks differ so widely that some gated results exceed fp16.
    dtype = torch.bfloat16 if normed or form is BLOCKS else torch.float16
    product = product_of(form, rows, outputs, inputs, dtype, "cpu", gated)
    found = emulated(product, tile, data.draw(st.booleans()), bias=bias, add=add, normed=normed)
    product.check(found, bias, add, normed)


def test_a_wait_that_is_missing_shows() -> None:
    """The check of the checks."""
    product = Fused(QuantKind.INT8, 9, 40, 2048, torch.bfloat16, "cpu", False)
    with pytest.raises(AssertionError, match="times what is allowed"):
        product.check(emulated(product, BitStreamTile(2, 1, 3), careless="copies"))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("form", [QuantKind.FP8, BLOCKS])
def test_a_row_does_not_depend_on_its_neighbours(form: Form, normed: bool) -> None:
    product = product_of(form, 12, 128, 512, torch.bfloat16, "cpu", False)
    tile = BitStreamTile(2, 1, 3)
    together = emulated(product, tile, normed=normed)
    product.x[:3], product.x[6:] = float("nan"), float("inf")
    apart = emulated(product, tile, normed=normed)
    assert torch.equal(together[3:6], apart[3:6]) and not bool(apart[:3].isfinite().any())


def weight_of(
    outputs: int, inputs: int, kind: QuantKind = QuantKind.FP8, group: int = 0, block: int = 0
) -> QuantizedWeight:
    sizes = (outputs, inputs, 128 if block else group or inputs)
    return allocate(kind, *sizes, torch.bfloat16, torch.device("meta"), Arrangement(scale_outputs=block))


def test_the_kernel_takes_scales_of_outputs_and_whole_steps_on_its_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not takes_bit_streams(weight_of(128, 4096))
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    assert takes_bit_streams(weight_of(100, 4096)) and takes_bit_streams(weight_of(128, 512, QuantKind.INT8))
    assert not takes_bit_streams(weight_of(128, 4096 + 128))
    assert not takes_bit_streams(weight_of(128, 4096, QuantKind.INT8, 128))
    assert takes_bit_streams(weight_of(128, 4096, QuantKind.INT4, 128))
    assert not takes_bit_streams(weight_of(128, 4096, QuantKind.INT4, 64))
    assert not takes_bit_streams(weight_of(144, 4096, QuantKind.INT4, 128))
    assert takes_bit_streams(weight_of(384, 4096, block=128))
    assert not takes_bit_streams(weight_of(384, 4096, block=64))
    assert not takes_bit_streams(weight_of(400, 4096, block=128))
    assert not takes_bit_streams(weight_of(384, 4096 + 128, block=128))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are asked as on an H200."""
    monkeypatch.setattr(quantized, "uses_triton", lambda tensor: True)
    for what in ("has_warpgroup_instructions", "has_warpgroup_products"):
        monkeypatch.setattr(card, what, lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", QuantKind)
def test_rules_that_name_a_tile_fuse_what_is_around(kind: QuantKind, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(6144, 4096, kind, 128 if kind is QuantKind.INT4 else 0)
    bits = 4 if kind is QuantKind.INT4 else 8
    gates, wide, narrow, long = (
        launch_rules._Fit(BitStreamTile(slices, 1, slots), programs)
        for slices, slots, programs in ((1, 2, 1), (1, 3, 1), (2, 2, 1), (2, 3, 2))
    )
    tiles = launch_rules._BitStreamTiles((gates,), (narrow, wide), (long,))
    monkeypatch.setattr(launch_rules, "_BIT_STREAM_TILES", {(bits, 16): tiles})
    assert launch_rules.bit_stream_rule(8, weight) is None and launch_rules.bit_stream_rule(17, weight) is None
    # 132 programs of 64 outputs, and of 32.
    assert launch_rules.bit_stream_rule(12, weight) == wide.tile
    assert launch_rules.bit_stream_rule(12, weight, gated=True) == gates.tile
    for outputs, inputs, tile in (
        (4096, 4096, narrow.tile), (8448, 4096, wide.tile), (8512, 4096, None), (4096, 14_336, long.tile)
    ):  # fmt: skip
        other = weight_of(outputs, inputs, kind, 128 if kind is QuantKind.INT4 else 0)
        assert launch_rules.bit_stream_rule(16, other) == tile
    assert quantized.path_rule(12, weight) is quantized.Path.SMALL_BATCH and quantized.fuses(12, weight)


@pytest.mark.usefixtures("hopper")
def test_blocks_have_a_tile_for_2_to_16_rows_where_halves_are_whole() -> None:
    shapes = ((6144, 4096, False), (4096, 4096, False), (24_576, 4096, True), (4096, 12_288, False))
    for (outputs, inputs, gated), rows in itertools.product(shapes, range(1, 18)):
        weight = weight_of(outputs, inputs, block=128)
        tile = launch_rules.bit_stream_rule(rows, weight, gated)
        assert (tile is None) == (rows in (1, 17))
        assert quantized.fuses(rows, weight) == (rows < 17)
        if tile is not None:
            num_bytes = tile.shared_bytes(QuantKind.FP8, rows, gated, 4) + tile.scale_bytes(inputs, gated)
            assert 128 % tile.block_n == 0 and num_bytes <= MOST_SLOT_BYTES
    # More programs than multiprocessors have room for, of which other kernels need fewer.
    assert launch_rules.bit_stream_rule(8, weight_of(10_240, 5120, block=128)) is None
    assert launch_rules.bit_stream_rule(8, weight_of(5120, 17_408, block=128)) is None
    assert launch_rules.bit_stream_rule(8, weight_of(5120, 5120, block=128)) == BitStreamTile(2, 2, 4)
    assert launch_rules.bit_stream_rule(8, weight_of(384, 4096, block=128)) is not None
    assert launch_rules.bit_stream_rule(8, weight_of(384, 4096, block=128), gated=True) is None
    assert launch_rules.bit_stream_rule(8, weight_of(512, 4096, block=64)) is None


@pytest.mark.usefixtures("hopper")
def test_a_second_wave_of_a_few_programs_is_left_to_other_kernels() -> None:
    tiles = {outputs: launch_rules.bit_stream_rule(8, weight_of(outputs, 5120)) for outputs in (5120, 10_240, 151_936)}
    assert tiles == {5120: BitStreamTile(2, 2, 4), 10_240: None, 151_936: BitStreamTile(2, 2, 4)}
    assert launch_rules.bit_stream_rule(8, weight_of(5120, 17_408)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("outputs", "inputs", "tiles"),
    [
        (9728, 2560, (BitStreamTile(2, 1, 3), BitStreamTile(2, 1, 3))),
        (12_288, 4096, (BitStreamTile(2, 1, 3), BitStreamTile(2, 1, 3))),
        (14_336, 4096, (BitStreamTile(1, 2, 3), BitStreamTile(1, 1, 5))),
        (17_408, 5120, (BitStreamTile(1, 1, 3), BitStreamTile(1, 1, 3))),
        (25_600, 5120, (BitStreamTile(1, 2, 3), BitStreamTile(1, 1, 5))),
    ],
)
@pytest.mark.parametrize("block", [0, 128])
def test_programs_of_gates_are_all_there_at_once_where_a_tile_allows(
    outputs: int, inputs: int, tiles: tuple[BitStreamTile, BitStreamTile], block: int
) -> None:
    """The tiles that took an H200 least for Qwen3 4B and 8B, an 8B Llama, Qwen3 14B and 32B."""
    weight = weight_of(2 * outputs, inputs, block=block)
    assert tuple(launch_rules.bit_stream_rule(rows, weight, gated=True) for rows in (8, 16)) == tiles


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("num_rows", "dtype", "is_inside"),
    [(8, torch.bfloat16, True), (9, torch.bfloat16, False), (8, torch.float16, False)],
)
def test_the_kernel_norms_bf16_where_the_rule_says_so(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, dtype: torch.dtype, is_inside: bool
) -> None:
    norms: list[object] = []

    def norm_before(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms.append("before")
        return x

    monkeypatch.setattr(quantized, "bit_stream_rule", lambda *product: BitStreamTile(2, 1, 3))
    monkeypatch.setattr(quantized, "rms_norm", norm_before)
    monkeypatch.setattr(quantized, "multiply_bit_streams", lambda *given: norms.append(given[5]))
    weight = allocate(QuantKind.FP8, 64, 512, 512, dtype, torch.device("cpu"))
    x, norm_weight = torch.zeros(num_rows, 512, dtype=dtype), torch.zeros(512, dtype=dtype)
    quantized.norm_linear(x, norm_weight, EPS, weight, None)
    quantized.norm_swiglu(x, norm_weight, EPS, weight, None)
    assert norms == ([(norm_weight, EPS)] if is_inside else ["before", None]) * 2


@pytest.mark.parametrize("kind", QuantKind)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [8, 16])
def test_variants_differ_and_fit_a_card(kind: QuantKind, num_rows: int, gated: bool) -> None:
    tiles = stream_bits_variants(kind, num_rows, gated)
    assert len(set(tiles)) == len(tiles) > 1
    assert all(tile.shared_bytes(kind, num_rows, gated, 4) <= MOST_SLOT_BYTES for tile in tiles)
    # Blocks' scales take some of the room.
    few = stream_bits_variants(kind, num_rows, gated, 1 << 21)
    assert len(few) < len(tiles) and set(stream_bits_variants(kind, num_rows, gated, 4096)) <= set(tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "dtype", "tile"),
    [
        (6144, 4096, False, torch.bfloat16, BitStreamTile(1, 1, 4)),
        (4096, 14_336, False, torch.bfloat16, BitStreamTile(2, 1, 3, 8)),
        (14_336, 4096, True, torch.bfloat16, BitStreamTile(1, 1, 2)),
        (1040, 2048, False, torch.float16, BitStreamTile(2, 2, 2)),
    ],
)
def test_a_card_agrees_with_fp64(
    form: Form, outputs: int, inputs: int, gated: bool, dtype: torch.dtype, tile: BitStreamTile
) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    outputs = outputs // 128 * 128 if form is BLOCKS else outputs
    for rows in (2, 3, 8, 9, 16):
        product = product_of(form, rows, outputs, inputs, dtype, "cuda", gated)
        found = product.run(tile)
        product.check(found)
        product.check(product.run(tile, bias=False, add=True), bias=False, add=True)
        assert torch.equal(found, product.run(tile))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "outputs", "inputs", "gated", "tile", "norm_dtype"),
    [
        (QuantKind.FP8, 6144, 4096, False, BitStreamTile(1, 1, 8), torch.bfloat16),
        (QuantKind.INT8, 6144, 4096, False, BitStreamTile(2, 2, 4), torch.float32),
        (QuantKind.INT4, 6144, 4096, False, BitStreamTile(2, 1, 3), torch.bfloat16),
        (QuantKind.FP8, 1010, 1536, False, BitStreamTile(4, 1, 6, 8), torch.bfloat16),
        (QuantKind.INT8, 14_336, 4096, True, BitStreamTile(2, 1, 3), torch.bfloat16),
        (QuantKind.FP8, 1000, 2560, True, BitStreamTile(1, 2, 3), torch.float32),
        (QuantKind.INT4, 14_336, 4096, True, BitStreamTile(1, 1, 2, 8), torch.bfloat16),
        (BLOCKS, 6144, 4096, False, BitStreamTile(2, 2, 4), torch.bfloat16),
        (BLOCKS, 12_288, 4096, True, BitStreamTile(1, 2, 3), torch.bfloat16),
        (BLOCKS, 640, 1536, True, BitStreamTile(4, 1, 2, 8), torch.float32),
    ],
)
def test_a_card_s_norm_agrees_with_fp64(
    form: Form, outputs: int, inputs: int, gated: bool, tile: BitStreamTile, norm_dtype: torch.dtype
) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (2, 8, 9, 16):
        product = product_of(form, rows, outputs, inputs, torch.bfloat16, "cuda", gated)
        product.norm_weight = product.norm_weight.to(norm_dtype)
        bias = rows % 2 == 0
        found = product.run(tile, bias=bias, normed=True)
        product.check(found, bias, normed=True)
        assert torch.equal(found, product.run(tile, bias=bias, normed=True))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [8, 9])
def test_a_chain_of_early_launches_gives_the_bits_of_single_ones(form: Form, rows: int) -> None:
    """The residual stream is read by a norm in each other product, and written by those between."""
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    ups = [product_of(form, rows, 4096, 2048, torch.bfloat16, "cuda", False) for _ in range(10)]
    downs = [product_of(form, rows, 2048, 4096, torch.bfloat16, "cuda", False) for _ in range(10)]
    start, norm = ups[0].x.clone(), (ups[0].norm_weight, EPS)
    residual = torch.empty_like(start)

    def launches(alone: bool) -> None:
        residual.copy_(start)
        for up, down in zip(ups, downs, strict=True):
            wide = start.new_empty(rows, 4096)
            for x, weight, out, given_norm in ((residual, up.weight, wide, norm), (wide, down.weight, residual, None)):
                multiply_bit_streams(x, weight, None, out, BitStreamTile(2, 1, 3), given_norm, add=out is residual)
                if alone:
                    torch.cuda.synchronize()

    launches(True)
    expected = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches(False)
    for _ in range(5):
        graph.replay()
        assert torch.equal(residual, expected)
    assert expected.isfinite().all()
