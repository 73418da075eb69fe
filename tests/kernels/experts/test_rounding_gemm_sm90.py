"""Gates and ups in FP8 blocks by our kernel for sm_90, which rounds what it stores.

It is emulated without a GPU, and compared to the bit with what the kernel stores unrounded and
another rounds behind it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.experts.test_grouped_gemm_sm90 import CLAMPED, E4M3, Case, assembly, close
from tests.support.any_two import any_two_meet
from tests.support.examples import examples
from tests.support.gluon_emulation import emulating

from headrace_kernels import card
from headrace_kernels.experts import grouped_gemm_sm90, launch_rules, mixture_kernels
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import GELU, SILU, Gating
from headrace_kernels.experts.grouped_gemm_sm90 import GroupedTile, multiply_grouped_gemm, takes_grouped_gemm
from headrace_kernels.experts.launch_rules import pair_rule
from headrace_kernels.experts.mixture_kernels import PairTile, multiply_pairs, multiply_tiles
from headrace_kernels.experts.tile_table import TileTable, tile_table, tile_table_reference
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rounded_tokens import Activations, RoundedTokens, round_tokens, round_tokens_reference
from headrace_kernels.weight_formats.quantized_weight import Arrangement, QuantKind, allocate

IN_GROUPS = InputRounding(E4M3, 128)
# Two groups of warps side by side; and one behind the other, products in turn.
SIDE_BY_SIDE, IN_TURN = GroupedTile(64, 128, 8, 4, rounds=True), GroupedTile(128, 128, 8, 4, rounds=True)
EACH_TILE = (SIDE_BY_SIDE, IN_TURN)
TILES = pytest.mark.parametrize("tile", EACH_TILE, ids=["side by side", "in turn"])


def product(case: Case, tile: GroupedTile, table: TileTable) -> Activations:
    """Inner elements of all pairs, or NaN where nobody writes, rounded or not."""
    out: Activations = case.empty()
    if tile.rounds:
        out = RoundedTokens.empty((case.choice.experts.numel(), case.num_outputs), IN_GROUPS, case.x.device)
        out.numbers.view(torch.uint8).fill_(0x7F)
        out.scales.fill_(float("nan"))
    given = (case.choice, case.pairs, table, case.weights, out, tile, case.gating)
    multiply_grouped_gemm(case.activations(), *given)
    return out


def emulated(case: Case, tile: GroupedTile, programs: int = 3, **how: Any) -> Activations:
    """Results of so many programs."""
    table = tile_table_reference(case.pairs, tile.block_m)
    with (
        mock.patch.object(card, "launches_early", lambda device: True),
        mock.patch.object(card, "multiprocessors", lambda device: programs),
        mock.patch.object(grouped_gemm_sm90, "programs_at_a_time", lambda *sizes: 1),
        emulating(grouped_gemm_sm90, "_grouped_gemm_kernel", assembly, how.pop("eager", False), **how),
    ):
        return product(case, tile, table)


def rounded(case: Case, tile: GroupedTile, programs: int = 3, **how: Any) -> RoundedTokens:
    found = emulated(case, tile, programs, **how)
    assert isinstance(found, RoundedTokens)
    return found


def unrounded(case: Case, tile: GroupedTile) -> torch.Tensor:
    """What the kernel stores in the model's type."""
    found = emulated(case, tile._replace(rounds=False))
    assert isinstance(found, torch.Tensor)
    return found


def rounded_behind(plain: torch.Tensor) -> RoundedTokens:
    """What the kernel behind makes of inner elements.

    Of a group with infinity it makes NaN, since 1 / scale is NaN there; the reference leaves zeros.
    """
    tokens = round_tokens_reference(plain, IN_GROUPS)
    is_infinite = tokens.scales.isinf().repeat_interleave(128, 1)
    tokens.numbers.copy_(torch.where(is_infinite, float("nan"), tokens.numbers.float()))
    return tokens


def assert_same_bits(found: RoundedTokens, expected: RoundedTokens, num_pairs: int) -> None:
    """Pairs of experts that are here are equal, but for NaN's sign; what is behind is as it was."""
    for part, other in ((found.numbers, expected.numbers), (found.scales, expected.scales)):
        torch.testing.assert_close(part[:num_pairs].float(), other[:num_pairs].float(), rtol=0, atol=0, equal_nan=True)
        assert bool(part[num_pairs:].float().isnan().all()), "rows of nobody are written"
    # Zeros have signs.
    is_number = ~expected.numbers[:num_pairs].float().isnan()
    bits, others = (each.numbers[:num_pairs].view(torch.uint8)[is_number] for each in (found, expected))
    assert torch.equal(bits, others)


def check(case: Case, tile: GroupedTile, programs: int = 3, eager: bool = False) -> RoundedTokens:
    """What the kernel rounds is what is rounded behind it."""
    found, plain = rounded(case, tile, programs, eager=eager), unrounded(case, tile)
    assert_same_bits(found, rounded_behind(plain), int(case.pairs.starts[-1]))
    return found


# Type, inner elements, inputs, programs, slots: inner elements of one group, of three and of five,
# as few slots as there may be, as many as steps, programs of all tiles, of some, and of one or
# none.
CASES = (
    (torch.bfloat16, 128, 384, 1, 3),
    (torch.float16, 384, 640, 3, 4),
    (torch.bfloat16, 640, 512, 99, 5),
)


@pytest.mark.parametrize(("sizes", "eager", "tile"), any_two_meet(CASES, (False, True), EACH_TILE))
def test_inner_elements_are_rounded_as_a_launch_behind_would(
    sizes: tuple[torch.dtype, int, int, int, int], eager: bool, tile: GroupedTile
) -> None:
    dtype, inner, inputs, programs, slots = sizes
    case = Case("blocks", dtype, (inner, inputs), SILU)
    check(case, tile._replace(slots=slots), programs, eager)


@TILES
def test_what_is_rounded_agrees_with_fp64(tile: GroupedTile) -> None:
    case = Case("blocks", torch.float16, (256, 512), SILU)
    close(unrounded(case, tile), case.expected())


@TILES
@pytest.mark.parametrize("gating", [GELU, CLAMPED], ids=["gelu", "clamped"])
def test_gates_of_every_kind_are_rounded(gating: Gating, tile: GroupedTile) -> None:
    check(Case("blocks", torch.bfloat16, (256, 384), gating, has_bias=gating.is_clamped), tile)


@TILES
@pytest.mark.parametrize("part", [range(2), range(3, 6), range(4, 5)], ids=["first", "last", "unused"])
def test_a_rank_rounds_the_pairs_of_its_experts_alone(part: range, tile: GroupedTile) -> None:
    case = Case("blocks", torch.float16, (128, 384), SILU, part=part)
    assert int(case.pairs.starts[-1]) < len(case.pairs.order)
    check(case, tile)


@TILES
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 129])
def test_tiles_with_few_pairs_are_rounded(num_tokens: int, tile: GroupedTile) -> None:
    """The first expert has a pair of each token, its last tile maybe one; others few or none."""
    case = Case("blocks", torch.bfloat16, (128, 384), SILU, routing=(num_tokens, 6, 2))
    check(case, tile)


@TILES
def test_rows_of_zeros_have_the_least_scale(tile: GroupedTile) -> None:
    case = Case("blocks", torch.bfloat16, (256, 384), SILU)
    case.x[7] = 0
    found = check(case, tile)
    of_zeros = case.pairs.order.long() // case.choice.experts.shape[1] == 7
    assert bool((found.numbers[of_zeros].float() == 0).all())
    assert torch.equal(found.scales[of_zeros], torch.full_like(found.scales[of_zeros], 1e-12))


@TILES
def test_rows_that_are_not_finite_have_no_numbers_and_leave_others_alone(tile: GroupedTile) -> None:
    """Their scales are NaN or infinite, their numbers NaN, in groups that have such elements."""
    case = Case("blocks", torch.float16, (256, 384), SILU)
    assert isinstance(case.weights.weight.scales, torch.Tensor)
    together = rounded(case, tile)
    case.x[3], case.x[11] = float("nan"), 60_000
    found, plain = rounded(case, tile), unrounded(case, tile)
    groups = plain.view(len(plain), -1, 128)
    largest = groups.abs().amax(2)
    assert bool(largest.isinf().any()) and bool(largest.isnan().any())
    not_finite = ~largest.isfinite()
    assert bool(found.numbers.float().view(groups.shape)[not_finite].isnan().all())
    assert torch.equal(found.scales.isnan(), largest.isnan()) and torch.equal(found.scales.isinf(), largest.isinf())
    tokens = case.pairs.order.long() // case.choice.experts.shape[1]
    kept = (tokens != 3) & (tokens != 11)
    assert torch.equal(found.numbers[kept].view(torch.uint8), together.numbers[kept].view(torch.uint8))
    assert torch.equal(found.scales[kept], together.scales[kept])


@settings(max_examples=examples(20))
@given(st.data())
def test_any_product_is_rounded_as_a_launch_behind_would(data: st.DataObject) -> None:
    num_experts, slots = data.draw(st.integers(1, 7)), data.draw(st.integers(3, 5))
    routing = (data.draw(st.integers(1, 150)), num_experts, data.draw(st.integers(1, num_experts)))
    sizes = (128 * data.draw(st.integers(1, 3)), 128 * data.draw(st.integers(slots - 1, slots + 2)))
    first = data.draw(st.integers(0, num_experts - 1))
    part = None if data.draw(st.booleans()) else range(first, data.draw(st.integers(first + 1, num_experts)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    case = Case("blocks", dtype, sizes, SILU, routing=routing, part=part)
    tile = data.draw(st.sampled_from([SIDE_BY_SIDE, IN_TURN]))._replace(slots=slots)
    check(case, tile, data.draw(st.integers(1, 12)), data.draw(st.booleans()))


# In turn each product is waited for before the next one begins.
@pytest.mark.parametrize(
    ("careless", "tile"),
    [*((careless, tile) for careless in ("copies", "copies of threads") for tile in (SIDE_BY_SIDE, IN_TURN)),
     ("products", SIDE_BY_SIDE)],
)  # fmt: skip
def test_a_wait_that_is_missing_shows(careless: str, tile: GroupedTile) -> None:
    case = Case("blocks", torch.float16, (128, 768), SILU)
    found = rounded(case, tile, eager=careless == "products", careless=careless)
    expected = rounded_behind(unrounded(case, tile))
    with pytest.raises(AssertionError):
        assert_same_bits(found, expected, int(case.pairs.starts[-1]))


def in_blocks(outputs: int, inputs: int, group: int = 128, scale_outputs: int = 128) -> ExpertWeights:
    arrangement = Arrangement(scale_outputs=scale_outputs)
    weight = allocate(QuantKind.FP8, 4 * outputs, inputs, group, torch.bfloat16, torch.device("cpu"), arrangement)
    return ExpertWeights(weight, 4)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are asked as on an H200."""
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)
    monkeypatch.setattr(card, "has_warpgroup_products", lambda device: True)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_rounds_gates_and_ups_in_blocks_whose_inner_elements_are_groups() -> None:
    for tile in (SIDE_BY_SIDE, IN_TURN):
        assert takes_grouped_gemm(in_blocks(2 * 1408, 512), True, tile, True)
        # No multiple of 128 inner elements, and blocks of fewer.
        assert not takes_grouped_gemm(in_blocks(2 * 192, 512, scale_outputs=64), True, tile, True)
        assert not takes_grouped_gemm(in_blocks(512, 512, scale_outputs=64), True, tile, True)
        # Outputs that are no gates and ups; a tile of half a group.
        assert not takes_grouped_gemm(in_blocks(512, 512), True, tile, False)
        assert not takes_grouped_gemm(in_blocks(512, 512), True, tile._replace(block_n=64), True)
        # A scale for each output, and none.
        whole = allocate(QuantKind.FP8, 4 * 512, 512, 512, torch.bfloat16, torch.device("cpu"))
        assert not takes_grouped_gemm(ExpertWeights(whole, 4), True, tile, True)
        plain = ExpertWeights(torch.empty(4 * 512, 512, dtype=torch.bfloat16), 4)
        assert not takes_grouped_gemm(plain, False, tile, True)


@pytest.mark.usefixtures("hopper")
def test_many_pairs_in_blocks_take_a_tile_that_rounds_if_results_are_rounded_so() -> None:
    weights, straddling = in_blocks(512, 512), in_blocks(2 * 192, 512, scale_outputs=64)

    def rounds(num_pairs: int, weights: ExpertWeights, of_results: InputRounding | None, gated: bool = True) -> bool:
        tile = pair_rule(num_pairs, weights, gated, True, of_results)
        return isinstance(tile, GroupedTile) and tile.rounds

    # Of four experts, pairs of each.
    assert [rounds(4 * pairs, weights, IN_GROUPS) for pairs in (16, 17, 64, 256, 1024)] == [False, *4 * [True]]
    assert not rounds(4 * 1024, weights, None) and not rounds(4 * 1024, weights, IN_GROUPS, gated=False)
    assert not rounds(4 * 1024, weights, InputRounding(E4M3, 0))
    tile = pair_rule(4 * 1024, straddling, True, True, IN_GROUPS)
    assert isinstance(tile, GroupedTile) and not tile.rounds


def test_warm_up_s_powers_of_two_meet_each_class_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_rules, "takes_grouped_gemm", lambda *about: True)
    for num_experts, per_token in ((128, 8), (8, 2), (512, 10)):
        weights = allocate(
            QuantKind.FP8, num_experts * 256, 128, 128, torch.bfloat16, torch.device("cpu"),
            Arrangement(scale_outputs=128),
        )  # fmt: skip
        classes = {
            count: pair_rule(count * per_token, ExpertWeights(weights, num_experts), True, True, IN_GROUPS)
            for count in range(1, 9000)
        }
        met = {classes[count] for count in (*range(1, 10), *(2**power for power in range(4, 14)))}
        assert met == set(classes.values()) and len(met) <= 6


@pytest.mark.parametrize("by_itself", [True, False])
def test_inner_elements_that_the_product_rounds_are_rounded_by_no_launch(
    by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("blocks", torch.bfloat16, (128, 384), SILU)
    down = in_blocks(384, 128)
    launches: list[str] = []

    def multiply(x: Activations, *about: Any) -> None:
        launches.append("gate and up" if about[-1] is not None else "down")
        is_rounded = isinstance(about[-3] if about[-1] is not None else x, RoundedTokens)
        assert is_rounded is (by_itself or about[-1] is None)

    def round_rows(x: torch.Tensor, weights: ExpertWeights) -> RoundedTokens:
        launches.append("rounding")
        return round_tokens_reference(x, IN_GROUPS)

    monkeypatch.setattr(mixture_kernels, "multiply_grouped_gemm", multiply)
    monkeypatch.setattr(mixture_kernels, "round_rows", round_rows)
    monkeypatch.setattr(mixture_kernels, "tile_table", tile_table_reference)
    tiles = SIDE_BY_SIDE._replace(rounds=by_itself), GroupedTile(64, 128, 4, 4)
    given = (case.activations(), case.choice, case.pairs, case.weights, down, tiles)
    multiply_pairs(*given, rounds_inner=True)
    assert launches == ["gate and up", *([] if by_itself else ["rounding"]), "down"]


@pytest.mark.gpu
@TILES
@pytest.mark.parametrize("part", [None, range(3, 8)], ids=["all experts", "a rank's"])
@pytest.mark.parametrize("num_tokens", [1, 300, 2000])
def test_a_card_rounds_inner_elements_as_the_kernel_behind_does(
    num_tokens: int, part: range | None, tile: GroupedTile
) -> None:
    """Bits are those of the other kernel's results, rounded by a launch of its own."""
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    case = Case("blocks", torch.bfloat16, (384, 512), SILU, "cuda", routing=(num_tokens, 8, 2), part=part)
    case.x[::7] = 0
    case.x[5::11] = float("nan")
    num_pairs, plain = int(case.pairs.starts[-1]), case.empty()
    multiply_tiles(
        case.activations(), case.choice, case.pairs, case.weights, plain, PairTile(64, 64, 128, 4, 3), case.gating
    )
    expected = round_tokens(plain, IN_GROUPS)
    for _ in range(2):
        found = product(case, tile, tile_table(case.pairs, tile.block_m))
        assert isinstance(found, RoundedTokens)
        numbers, others = (each.numbers[:num_pairs].view(torch.uint8) for each in (found, expected))
        assert torch.equal(numbers, others)
        scales, other_scales = (each.scales[:num_pairs].contiguous().view(torch.int32) for each in (found, expected))
        assert torch.equal(scales, other_scales)
        assert bool(found.scales[num_pairs:].isnan().all()), "rows of nobody are written"
