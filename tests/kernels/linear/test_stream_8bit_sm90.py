"""Products of 2 to 32 rows with weights of 8 bits, whose scales are outputs', in one launch.

The kernel is emulated without a GPU, run on one, and asked which weights and rows it is for.
"""

from __future__ import annotations

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
from headrace_kernels.linear import stream_8bit_sm90 as streams
from headrace_kernels.linear.stream_8bit_sm90 import (
    Stream8BitTile,
    multiply_8bit_streams,
    stream_8bit_variants,
    takes_8bit_streams,
)
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantizedWeight, QuantKind, allocate

KINDS = (QuantKind.FP8, QuantKind.INT8)
# Rows, outputs, inputs, tile: each class of rows, outputs that fill no tile, each number of slices,
# few and many slots, more slots than steps.
CASES = (
    (7, 80, 512, Stream8BitTile(1, 1, 3)),
    (16, 40, 1536, Stream8BitTile(2, 2, 2)),
    (3, 52, 1024, Stream8BitTile(4, 1, 3)),
    (11, 24, 512, Stream8BitTile(2, 2, 4)),
    (21, 70, 1024, Stream8BitTile(1, 4, 3)),
    (9, 80, 1024, Stream8BitTile(4, 1, 2, 8)),
    (30, 140, 1024, Stream8BitTile(1, 2, 2, 8)),
)


class Fused(Product):
    """A product, and what comes of it with all that is fused, in fp64."""

    def __init__(
        self, kind: QuantKind, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str, gated: bool
    ) -> None:
        super().__init__(kind, rows, outputs * (1 + gated), inputs, inputs, dtype, device)
        self.gated, self.residual = gated, self.residual[:, :outputs].contiguous()

    def run(self, tile: Stream8BitTile, bias: bool = True, add: bool = False, normed: bool = False) -> Tensor:
        """By the card, or as the kernel says."""
        out = self.residual.clone() if add else torch.full_like(self.residual, float("nan"))
        norm = (self.norm_weight, EPS) if normed else None
        given_bias = self.bias if bias else None
        multiply_8bit_streams(self.x, self.weight, given_bias, out, tile, norm, self.gated, add)
        return out

    def check(self, found: Tensor, bias: bool = True, add: bool = False, normed: bool = False) -> None:
        x = self.normed() if normed else self.x.double()
        sums = x @ self.numbers.t() + (self.bias.double() if bias else 0)
        # Products of x and a norm's weight are rounded once.
        spread = self.spread(x) if normed else torch.zeros_like(sums)
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


def emulated(
    product: Fused, tile: Stream8BitTile, eager: bool = False, careless: str | None = None, **what: bool
) -> Tensor:
    def numbers(source: tuple[object, ...] | str, operands: list[Tensor], kind: object) -> Tensor:
        if source == "product":
            return operands[0] * operands[1]
        return assembly(source, operands, kind)

    with (
        kernels_on("cpu"),
        mock.patch.object(streams, "byte_assembly", lambda kind, bf16: ("bytes", kind)),
        mock.patch.object(streams, "bf16_product_assembly", lambda: "product"),
        emulating(streams, "_stream_8bit_kernel", numbers, eager, careless),
    ):
        return product.run(tile, **what)


def fits(tile: Stream8BitTile, rows: int, gated: bool, norm_itemsize: int = 0) -> bool:
    """Whether a card has room for a program's steps, beside which barriers take little."""
    return tile.shared_bytes(rows, gated, norm_itemsize) <= MOST_SLOT_BYTES


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: Stream8BitTile, kind: QuantKind, eager: bool, gated: bool
) -> None:
    product = Fused(kind, rows, outputs, inputs, torch.float16 if eager else torch.bfloat16, "cpu", gated)
    product.check(emulated(product, tile, eager))
    product.check(emulated(product, tile, eager, bias=False, add=True), bias=False, add=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "tile"), CASES)
def test_what_the_kernel_says_of_a_norm_agrees_with_fp64(
    rows: int, outputs: int, inputs: int, tile: Stream8BitTile, eager: bool, gated: bool
) -> None:
    product = Fused(QuantKind.FP8, rows, outputs, inputs, torch.bfloat16, "cpu", gated)
    product.check(emulated(product, tile, eager, normed=True), normed=True)
    product.norm_weight = product.norm_weight.float()
    product.check(emulated(product, tile, eager, bias=False, normed=True), bias=False, normed=True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_product_agrees_with_fp64(data: st.DataObject) -> None:
    """Rows of every class, outputs that fill no tile, one step and many, all that is fused."""
    gated, normed, bias = (data.draw(st.booleans()) for _ in range(3))
    add = not gated and data.draw(st.booleans())
    slices, subs = data.draw(st.sampled_from(((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))))
    tile = Stream8BitTile(slices, subs, data.draw(st.sampled_from((2, 3, 5))), data.draw(st.sampled_from((4, 8))))
    inputs = slices * subs * 128 * data.draw(st.integers(1, 3))
    rows, outputs = data.draw(st.integers(1, 32)), data.draw(st.integers(1, 70))
    dtype = torch.bfloat16 if normed else torch.float16
    product = Fused(data.draw(st.sampled_from(KINDS)), rows, outputs, inputs, dtype, "cpu", gated)
    found = emulated(product, tile, data.draw(st.booleans()), bias=bias, add=add, normed=normed)
    product.check(found, bias, add, normed)


def test_a_wait_that_is_missing_shows() -> None:
    """The check of the checks."""
    product = Fused(QuantKind.INT8, 9, 40, 2048, torch.bfloat16, "cpu", False)
    with pytest.raises(AssertionError, match="times what is allowed"):
        product.check(emulated(product, Stream8BitTile(2, 1, 3), careless="copies"))


@pytest.mark.parametrize("normed", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(normed: bool) -> None:
    product = Fused(QuantKind.FP8, 12, 40, 512, torch.bfloat16, "cpu", False)
    tile = Stream8BitTile(2, 1, 3)
    together = emulated(product, tile, normed=normed)
    product.x[:3], product.x[6:] = float("nan"), float("inf")
    apart = emulated(product, tile, normed=normed)
    assert torch.equal(together[3:6], apart[3:6]) and not bool(apart[:3].isfinite().any())


def weight_of(outputs: int, inputs: int, kind: QuantKind = QuantKind.FP8, group: int = 0) -> QuantizedWeight:
    sizes = (outputs, inputs, group or inputs)
    return allocate(kind, *sizes, torch.bfloat16, torch.device("cpu"), Arrangement())


def test_the_kernel_takes_scales_of_outputs_and_whole_steps_on_its_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not takes_8bit_streams(weight_of(128, 4096))
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    assert takes_8bit_streams(weight_of(100, 4096)) and takes_8bit_streams(weight_of(128, 512, QuantKind.INT8))
    assert not takes_8bit_streams(weight_of(128, 4096 + 128))
    assert not takes_8bit_streams(weight_of(128, 4096, QuantKind.INT8, 128))
    assert not takes_8bit_streams(weight_of(128, 4096, QuantKind.INT4, 128))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [8, 16, 32])
def test_variants_differ_and_fit_a_card(num_rows: int, gated: bool) -> None:
    tiles = stream_8bit_variants(num_rows, gated)
    assert len(set(tiles)) == len(tiles) > 2
    assert all(fits(tile, num_rows, gated, norm_itemsize=4) for tile in tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "dtype", "tile"),
    [
        (6144, 4096, False, torch.bfloat16, Stream8BitTile(1, 2, 4)),
        (4096, 14_336, False, torch.bfloat16, Stream8BitTile(4, 1, 3)),
        (14_336, 4096, True, torch.bfloat16, Stream8BitTile(1, 1, 4)),
        (1010, 1536, False, torch.float16, Stream8BitTile(2, 2, 3)),
    ],
)
def test_a_card_agrees_with_fp64(
    kind: QuantKind, outputs: int, inputs: int, gated: bool, dtype: torch.dtype, tile: Stream8BitTile
) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (2, 8, 9, 16, 17, 32):
        product = Fused(kind, rows, outputs, inputs, dtype, "cuda", gated)
        found = product.run(tile)
        product.check(found)
        product.check(product.run(tile, bias=False, add=True), bias=False, add=True)
        assert torch.equal(found, product.run(tile))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "tile", "norm_dtype"),
    [
        (6144, 4096, False, Stream8BitTile(1, 1, 8), torch.bfloat16),
        (6144, 4096, False, Stream8BitTile(2, 2, 4), torch.float32),
        (1010, 1536, False, Stream8BitTile(4, 1, 6), torch.bfloat16),
        (14_336, 4096, True, Stream8BitTile(2, 1, 3), torch.bfloat16),
        (1000, 2560, True, Stream8BitTile(1, 2, 3), torch.float32),
    ],
)
def test_a_card_s_norm_agrees_with_fp64(
    outputs: int, inputs: int, gated: bool, tile: Stream8BitTile, norm_dtype: torch.dtype
) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (2, 8, 9, 16, 17, 32):
        product = Fused(QuantKind.FP8, rows, outputs, inputs, torch.bfloat16, "cuda", gated)
        product.norm_weight = product.norm_weight.to(norm_dtype)
        bias = rows % 2 == 0
        found = product.run(tile, bias=bias, normed=True)
        product.check(found, bias, normed=True)
        assert torch.equal(found, product.run(tile, bias=bias, normed=True))
