"""Products of many pairs of token and expert by our kernel for sm_90.

It is emulated without a GPU, compared with the other kernel on one, and asked which weights it is
for.
"""

from __future__ import annotations

from typing import Any, Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.any_two import any_two_meet
from tests.support.examples import examples
from tests.support.gluon_emulation import emulating, launch_control
from tests.support.kernel_case import ROUNDING, Numbers
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.experts import grouped_gemm_sm90
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.gating import GELU, SILU, Gating
from headrace_kernels.experts.grouped_gemm_sm90 import GroupedTile, multiply_grouped_gemm, takes_grouped_gemm
from headrace_kernels.experts.mixture_kernels import PairTile, multiply_tiles
from headrace_kernels.experts.routing import Choice, sort_pairs_reference
from headrace_kernels.experts.tile_table import TileTable, tile_table, tile_table_reference
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import MOST_FAST_INPUTS, Activations, RoundedTokens, round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    quantize_rows,
)

E4M3 = torch.float8_e4m3fn
# Plain weights; FP8 with a scale for each output; FP8 in blocks of 128 inputs and as many outputs.
Form = Literal["plain", "outputs", "blocks"]
FORMS: tuple[Form, ...] = ("plain", "outputs", "blocks")
# Gates and ups on both sides of the limit.
CLAMPED = Gating(True, 1.702, 0.8)
# Tokens, experts, experts of a token. Of six experts the first has all tokens and so more than one
# tile of 64 pairs, and two have none; no expert's pairs fill their last tile.
ROUTING = (70, 6, 2)


class Case:
    """Fresh random operands of one product of all pairs, and what comes of them in fp64."""

    def __init__(
        self,
        form: Form,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        gating: Gating | None,
        device: str = "cpu",
        has_bias: bool = False,
        routing: tuple[int, int, int] = ROUTING,
        part: range | None = None,
    ) -> None:
        """Draws a product.

        Args:
            form: Form of the weights.
            dtype: The model's type.
            sizes: Outputs, of gate and up as many each, and inputs.
            gating: None: outputs are no gates and ups.
            device: The device.
            has_bias: Whether outputs have a bias.
            routing: Tokens, experts, experts of a token.
            part: Experts of the rank; None: it has all.
        """
        self.form, self.gating, (self.num_outputs, self.num_inputs) = form, gating, sizes
        num_tokens, num_experts, per_token = routing
        here, self.numbers = part or range(num_experts), Numbers(device, dtype, sum(sizes) + num_tokens)
        logits = self.numbers.randn(num_tokens, num_experts).float()
        logits[:, 0] += 100
        logits[:, 1::3] -= 100
        experts = logits.argsort(1, descending=True)[:, :per_token].to(torch.int32)
        self.choice = Choice(experts, self.numbers.randn(num_tokens, per_token).float().softmax(1))
        rows = len(here) * self.num_outputs * (1 if gating is None else 2)
        bias = self.numbers.randn(rows) if has_bias else None
        expert_part = None if part is None else ExpertPart(part.start, num_experts)
        self.weights = ExpertWeights(self._weight(rows), len(here), bias, expert_part)
        self.pairs = sort_pairs_reference(experts, len(here), self.weights.first_expert)
        # Rows of very different sizes: one that is taken for another would show.
        num_rows = experts.numel() if gating is None else num_tokens
        row_sizes = torch.logspace(-1, 1, num_rows, device=device)[:, None].to(dtype)
        self.x = self.numbers.randn(num_rows, self.num_inputs) * row_sizes

    def _weight(self, rows: int) -> Tensor | QuantizedWeight:
        plain: Tensor = self.numbers.randn(rows, self.num_inputs) * self.num_inputs**-0.5
        if self.form == "plain":
            return plain
        blocks = Arrangement(scale_outputs=128) if self.form == "blocks" else Arrangement()
        sizes = (rows, self.num_inputs, 128 if self.form == "blocks" else self.num_inputs)
        weight = allocate(QuantKind.FP8, *sizes, plain.dtype, plain.device, blocks)
        if self.form == "outputs":
            quantize_rows(plain, weight, 0)
        else:
            weight.packed.copy_(plain.float() * self.num_inputs**0.5 * 40)
            # Scales that differ widely.
            scales = torch.exp(2 * self.numbers.randn(*weight.scales.shape).float())
            weight.scales.copy_(scales * self.num_inputs**-0.5 / 100)
        return weight

    def activations(self) -> Activations:
        """Rows as the weights multiply them."""
        if self.form == "plain":
            return self.x
        return round_tokens_reference(self.x, InputRounding(E4M3, 128 if self.form == "blocks" else 0))

    def empty(self) -> Tensor:
        """Results that nobody has written."""
        return self.x.new_full((self.choice.experts.numel(), self.num_outputs), float("nan"))

    def multiplied(self, tile: GroupedTile, table: TileTable) -> Tensor:
        out = self.empty()
        given = (self.choice, self.pairs, table, self.weights, out, tile, self.gating)
        multiply_grouped_gemm(self.activations(), *given)
        return out

    def expected(self) -> Tensor:
        """The results in fp64, NaN where nobody writes."""
        x, numbers = self.activations(), self.weight_numbers()
        if isinstance(x, RoundedTokens):
            x = x.numbers.double() * self._scales_of_inputs(x.scales)
        starts, out = self.pairs.starts.tolist(), self.empty().double()
        for expert, own in enumerate(numbers.view(self.weights.num_experts, -1, self.num_inputs)):
            places = range(starts[expert], starts[expert + 1])
            pairs = self.pairs.order[list(places)].long()
            is_gated, bias = self.gating is not None, self.weights.expert_bias(expert)
            rows = pairs // self.choice.experts.shape[1] if is_gated else list(places)
            sums = x[rows].double() @ own.t() + (0 if bias is None else bias.double())
            if is_gated:
                out[list(places)] = self._gated(*sums.chunk(2, 1))
            else:
                out[pairs] = sums * self.choice.weights.flatten().double()[pairs, None]
        return out

    def weight_numbers(self) -> Tensor:
        """The weight in fp64, [outputs of all experts, inputs]."""
        weight = self.weights.weight
        if isinstance(weight, QuantizedWeight):
            # Scales of each output, [outputs, groups].
            scales = weight.scales.repeat_interleave(128, 1).t() if weight.is_grouped else weight.scales[:, None]
            return weight.packed.double() * self._scales_of_inputs(scales)
        assert isinstance(weight, Tensor)
        return weight.double()

    def _scales_of_inputs(self, scales: Tensor) -> Tensor:
        """Scales of groups of inputs, or of all inputs, as those of each."""
        return scales.double().repeat_interleave(self.num_inputs // scales.shape[1], 1)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        assert self.gating is not None
        if self.gating.is_gelu:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        if not self.gating.is_clamped:
            return gate / (1 + torch.exp(-gate)) * up
        gate, up = gate.clamp(max=self.gating.limit), up.clamp(-self.gating.limit, self.gating.limit)
        return (up + 1) * gate / (1 + torch.exp(-self.gating.alpha * gate))


def close(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """Sums of fp32 are rounded once, behind all that becomes of them."""
    is_written = ~expected.isnan().all(1)
    assert bool(found[~is_written].isnan().all()), "other rows are written"
    found, expected = found[is_written], expected[is_written].double()
    row_size = expected.square().mean(1, keepdim=True).sqrt()
    allowed = 1.01 * roundings * ROUNDING[found.dtype] * (expected.abs() + row_size)
    error = (found.double() - expected).abs()
    assert bool((error <= allowed).all()), f"{float((error / allowed).nan_to_num(torch.inf).max())} times"


def assembly(source: str, operands: list[Any], kind: object) -> Tensor:
    """What the kernel's pieces of assembly say."""
    if source.startswith("fma"):
        product, scales, total = operands
        return torch.as_tensor(total + product * scales)
    if "ex2" in source:
        return 1 / (1 + torch.exp2(torch.as_tensor(operands[0]).as_subclass(Tensor)))
    return launch_control(source, operands, kind)


def emulated(
    case: Case, tile: GroupedTile, programs: int = 3, eager: bool = False, careless: str | None = None
) -> Tensor:
    """Results of so many programs, of a table that behind its last tile names no expert."""
    table = tile_table_reference(case.pairs, tile.block_m)
    assert all(column.is_contiguous() for column in table)
    for column in table[1:]:
        column[int(table.num_tiles) :] = 1 << 20
    with (
        mock.patch.object(card, "launches_early", lambda device: True),
        mock.patch.object(card, "multiprocessors", lambda device: programs),
        mock.patch.object(grouped_gemm_sm90, "programs_at_a_time", lambda *sizes: 1),
        emulating(grouped_gemm_sm90, "_grouped_gemm_kernel", assembly, eager, careless),
    ):
        return case.multiplied(tile, table)


@pytest.mark.parametrize("gated", [True, False])
def test_what_the_kernel_before_writes_is_read_behind_the_wait(gated: bool) -> None:
    """Gates and ups wait for the sort and the table, outputs for inner elements alone."""
    case = Case("plain", torch.float16, (96, 256), SILU if gated else None)
    table, expected = tile_table_reference(case.pairs, 64), case.expected()
    awaited = (*table, *case.pairs) if gated else (case.x,)
    written = [tensor.clone() for tensor in awaited]
    for tensor in awaited:
        tensor.fill_(1 << 20 if gated else float("nan"))

    def on_card(source: str, operands: list[Any], kind: object) -> Tensor:
        if "griddepcontrol.wait" in source:
            for tensor, numbers in zip(awaited, written, strict=True):
                tensor.copy_(numbers)
        return assembly(source, operands, kind)

    with (
        mock.patch.object(card, "launches_early", lambda device: True),
        mock.patch.object(card, "multiprocessors", lambda device: 1),
        mock.patch.object(grouped_gemm_sm90, "programs_at_a_time", lambda *sizes: 1),
        emulating(grouped_gemm_sm90, "_grouped_gemm_kernel", on_card, True, None),
    ):
        close(case.multiplied(GroupedTile(64, 32, 4, 4), table), expected)


def of_one_side(tile: GroupedTile) -> GroupedTile:
    """A tile of as many outputs as `tile` has gates and ups."""
    return tile._replace(block_n=2 * tile.block_n)


# Form, type, outputs (of gate and up as many each), inputs, programs, tile: outputs that fill no
# tile, as few slots as there may be, as many as there are steps and one more, results that change
# threads in two parts and in four, blocks of outputs that several tiles share and that are a tile's
# parts; programs of all tiles, of some, of one or none; few pairs as columns of products.
CASES: tuple[tuple[Form, torch.dtype, int, int, int, GroupedTile], ...] = (
    ("plain", torch.float16, 48, 256, 3, GroupedTile(64, 32, 4, 3)),
    ("plain", torch.bfloat16, 80, 320, 1, GroupedTile(64, 16, 4, 5)),
    ("plain", torch.float16, 144, 128, 99, GroupedTile(128, 128, 8, 3)),
    ("outputs", torch.float16, 80, 640, 3, GroupedTile(64, 32, 4, 4)),
    ("outputs", torch.bfloat16, 48, 512, 1, GroupedTile(128, 16, 4, 4)),
    ("blocks", torch.float16, 128, 640, 3, GroupedTile(64, 32, 4, 4)),
    ("blocks", torch.bfloat16, 256, 384, 1, GroupedTile(64, 128, 4, 4)),
    ("plain", torch.float16, 48, 256, 3, GroupedTile(16, 64, 4, 3, is_swapped=True)),
    ("outputs", torch.bfloat16, 80, 640, 5, GroupedTile(32, 64, 4, 5, is_swapped=True)),
    ("blocks", torch.bfloat16, 128, 512, 3, GroupedTile(32, 64, 4, 4, is_swapped=True)),
)


@pytest.mark.parametrize(("sizes", "eager", "gated"), any_two_meet(CASES, (False, True), (True, False)))
def test_what_the_kernel_says_agrees_with_fp64(
    sizes: tuple[Form, torch.dtype, int, int, int, GroupedTile], eager: bool, gated: bool
) -> None:
    form, dtype, outputs, inputs, programs, tile = sizes
    case = Case(form, dtype, (outputs, inputs), SILU if gated else None)
    close(emulated(case, tile if gated else of_one_side(tile), programs, eager), case.expected())


@pytest.mark.parametrize("form", FORMS)
def test_biases_are_those_of_each_expert_s_outputs(form: Form) -> None:
    for gating in (SILU, None):
        case = Case(form, torch.float16, (128, 512), gating, has_bias=True)
        close(emulated(case, GroupedTile(64, 32, 4, 4)), case.expected())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gating", [GELU, CLAMPED], ids=["gelu", "clamped"])
def test_gates_of_every_kind_agree_with_fp64(gating: Gating, form: Form) -> None:
    case = Case(form, torch.float16, (128, 384), gating, has_bias=gating.is_clamped)
    close(emulated(case, GroupedTile(64, 64, 4, 3)), case.expected())


# The first experts of six, the last ones, one that nobody chose.
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", [range(2), range(3, 6), range(4, 5)], ids=["first", "last", "unused"])
def test_a_rank_computes_the_pairs_of_its_experts_alone(part: range, form: Form) -> None:
    for gating in (SILU, None):
        case = Case(form, torch.float16, (128, 384), gating, part=part)
        assert int(case.pairs.starts[-1]) < len(case.pairs.order)
        if gating is None:
            # There are no rows behind the last expert's pairs.
            case.x[int(case.pairs.starts[-1]) :] = float("nan")
        close(emulated(case, GroupedTile(64, 64, 4, 3)), case.expected())


@settings(max_examples=examples(40))
@given(st.data())
def test_any_product_agrees_with_fp64(data: st.DataObject) -> None:
    """Any routing and any number of programs; outputs that fill no tile, few steps and many."""
    num_experts, slots = data.draw(st.integers(1, 7)), data.draw(st.integers(3, 5))
    routing = (data.draw(st.integers(1, 100)), num_experts, data.draw(st.integers(1, num_experts)))
    form: Form = data.draw(st.sampled_from(["plain", "outputs"]))
    steps = data.draw(st.integers(slots - 1, slots + 2))
    sizes = (16 * data.draw(st.integers(1, 5)), steps * (64 if form == "plain" else 128))
    first = data.draw(st.integers(0, num_experts - 1))
    part = None if data.draw(st.booleans()) else range(first, data.draw(st.integers(first + 1, num_experts)))
    case = Case(form, torch.float16, sizes, SILU if data.draw(st.booleans()) else None, routing=routing, part=part)
    if data.draw(st.booleans()):
        tile = GroupedTile(data.draw(st.sampled_from([16, 32, 64])), 64, 4, slots, is_swapped=True)
    else:
        tile = GroupedTile(64, data.draw(st.sampled_from([16, 32, 64])), 4, slots)
    found = emulated(case, tile, data.draw(st.integers(1, 12)), data.draw(st.booleans()))
    close(found, case.expected())


@pytest.mark.parametrize(
    ("is_swapped", "careless", "form", "gated"),
    any_two_meet((False, True), ("copies", "copies of threads", "products"), FORMS, (True, False)),
)
def test_a_wait_that_is_missing_shows(is_swapped: bool, careless: str, form: Form, gated: bool) -> None:
    """The check of the checks. Where rows are in order, threads copy none."""
    case = Case(form, torch.float16, (128, 768), SILU if gated else None)
    tile = GroupedTile(64, 64, 4, 4, is_swapped)
    found = emulated(case, tile, eager=careless == "products", careless=careless)
    if careless == "copies of threads" and not gated:
        close(found, case.expected())
    else:
        with pytest.raises(AssertionError, match="times"):
            close(found, case.expected())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(is_swapped: bool, form: Form, gated: bool) -> None:
    case, tile = Case(form, torch.float16, (128, 384), SILU if gated else None), GroupedTile(64, 64, 4, 3, is_swapped)
    together = emulated(case, tile)
    case.x[:30], case.x[40:] = float("nan"), float("inf")
    apart = emulated(case, tile)
    # Rows of results, by the row that each is of: at a pair's place, or the pair's.
    order = case.pairs.order.long()
    rows = order // case.choice.experts.shape[1] if gated else order.argsort()
    kept = (rows >= 30) & (rows < 40)
    assert torch.equal(together[kept], apart[kept]) and bool(together.isfinite().all())
    assert not bool(apart[~kept].isfinite().any())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are asked as on an H200."""
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)


TILE, SMALL = GroupedTile(128, 128, 8, 4), GroupedTile(64, 64, 4, 4)


def plain(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    return ExpertWeights(torch.empty(4 * outputs, inputs, dtype=dtype), 4)


def quantized(
    kind: QuantKind,
    outputs: int,
    inputs: int,
    group: int = 0,
    scale_outputs: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> ExpertWeights:
    sizes, arrangement = (4 * outputs, inputs, group or inputs), Arrangement(scale_outputs=scale_outputs)
    return ExpertWeights(allocate(kind, *sizes, dtype, torch.device("cpu"), arrangement), 4)


def in_blocks(outputs: int, inputs: int, scale_outputs: int = 128) -> ExpertWeights:
    return quantized(QuantKind.FP8, outputs, inputs, 128, scale_outputs)


def test_other_cards_take_the_other_kernel() -> None:
    assert not takes_grouped_gemm(plain(256, 256), False, TILE, True)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_16_bits_and_whole_steps() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert takes_grouped_gemm(plain(256, 256, dtype), False, TILE, True)
    assert not takes_grouped_gemm(plain(256, 256, torch.float32), False, TILE, True)
    # No multiple of a step's 64 inputs, and less than the first ones that are copied.
    assert not takes_grouped_gemm(plain(256, 256 + 32), False, TILE, True)
    assert [takes_grouped_gemm(plain(256, inputs), False, TILE, True) for inputs in (128, 192)] == [False, True]
    # No multiple of 16 outputs: half of them are gates.
    assert [takes_grouped_gemm(plain(496, 256), False, TILE, gated) for gated in (True, False)] == [False, True]
    assert not takes_grouped_gemm(plain(248, 256), False, TILE, False)
    moved = torch.empty(4 * 256 * 256 + 1, dtype=torch.bfloat16)[1:].view(4 * 256, 256)
    assert not takes_grouped_gemm(ExpertWeights(moved, 4), False, TILE, True)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_outputs_that_nearly_fill_its_tiles() -> None:
    taken = {outputs: takes_grouped_gemm(plain(outputs, 256), False, TILE, False) for outputs in range(16, 1025, 16)}
    assert all(taken[128 * tiles - left] for tiles in range(1, 9) for left in (0, 16) if tiles > 1 or left == 0)
    assert not any(taken[128 * tiles + 16] for tiles in range(1, 7)) and not taken[64]


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_fp8_that_multiplies_rounded_rows() -> None:
    assert takes_grouped_gemm(quantized(QuantKind.FP8, 256, 512), True, TILE, True)
    assert not takes_grouped_gemm(quantized(QuantKind.FP8, 256, 512 + 64), True, TILE, True)
    assert not takes_grouped_gemm(quantized(QuantKind.FP8, 256, 512, dtype=torch.float32), True, TILE, True)
    longest = [quantized(QuantKind.FP8, 256, MOST_FAST_INPUTS + more) for more in (0, 128)]
    assert [takes_grouped_gemm(weights, True, TILE, True) for weights in longest] == [True, False]
    # Rows in 16 bits, whatever the kind.
    for weights in (
        quantized(QuantKind.FP8, 256, 512),
        quantized(QuantKind.INT8, 256, 512),
        quantized(QuantKind.INT4, 256, 512, 128),
        in_blocks(256, 512),
    ):
        assert not takes_grouped_gemm(weights, False, SMALL, True)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_blocks_whose_outputs_no_part_straddles() -> None:
    assert takes_grouped_gemm(in_blocks(256, 512), True, SMALL, True)
    assert takes_grouped_gemm(in_blocks(256, 2 * MOST_FAST_INPUTS), True, SMALL, True)
    # A part is a tile's gates, or its ups, or half of its outputs.
    for tile, is_taken in ((SMALL, True), (TILE, False)):
        weights = in_blocks(256, 512, scale_outputs=64)
        assert takes_grouped_gemm(weights, True, tile, True) is is_taken
        assert takes_grouped_gemm(weights, True, of_one_side(tile), False) is is_taken
    # The last gates share a block with the first ups.
    assert [takes_grouped_gemm(in_blocks(384, 512), True, SMALL, gated) for gated in (True, False)] == [False, True]


# Tiles of the rules, of gates and ups and of outputs alone.
GPU_TILES: tuple[tuple[Form, bool, GroupedTile], ...] = (
    ("plain", True, TILE),
    ("plain", False, of_one_side(TILE)),
    ("outputs", True, TILE),
    ("outputs", False, of_one_side(TILE)),
    ("outputs", False, GroupedTile(128, 128, 4, 3)),
    ("blocks", True, SMALL),
    ("blocks", False, of_one_side(SMALL)),
    *((form, False, GroupedTile(32, 128, 4, 5, is_swapped=True)) for form in FORMS),
    *((form, True, GroupedTile(32, 64, 4, 4, is_swapped=True)) for form in FORMS),
)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [None, range(3, 8)], ids=["all experts", "a rank's"])
@pytest.mark.parametrize(("form", "gated", "tile"), GPU_TILES)
def test_a_card_s_results_are_those_of_the_other_kernel(
    form: Form, gated: bool, tile: GroupedTile, part: range | None
) -> None:
    """Both round once what they add up in fp32; of plain weights an H200 gave the same bits."""
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    sizes = (384, 512) if gated else (512, 512 if tile.is_swapped else 384)
    case = Case(form, torch.bfloat16, sizes, SILU if gated else None, "cuda", routing=(300, 8, 2), part=part)
    assert takes_grouped_gemm(case.weights, form != "plain", tile, gated)
    found, again = (case.multiplied(tile, tile_table(case.pairs, tile.block_m)) for _ in range(2))
    other, any_tile = case.empty(), PairTile(64, 64, 64 if form == "plain" else 128, 4, 3)
    multiply_tiles(case.activations(), case.choice, case.pairs, case.weights, other, any_tile, case.gating)
    close(found, other, roundings=2)
    assert torch.equal(found.view(torch.int16), again.view(torch.int16))
