"""Products of many pairs of token and expert in MXFP4 by our kernel for sm_90.

It is emulated without a GPU, compared with the other kernel on one, and asked which weights it is
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.experts import test_grouped_gemm_sm90
from tests.kernels.experts.test_grouped_gemm_sm90 import CLAMPED, ROUTING, close
from tests.support.any_two import any_two_meet
from tests.support.examples import examples
from tests.support.gluon_emulation import Kind, emulating, launch_control
from torch import Tensor

from headrace_kernels import card
from headrace_kernels.experts import mxfp4_gemm_sm90, mxfp4_kernels
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating
from headrace_kernels.experts.launch_rules import many_rule
from headrace_kernels.experts.mxfp4_gemm_sm90 import Mxfp4Tile, multiply_mxfp4_gemm, takes_mxfp4_gemm
from headrace_kernels.experts.mxfp4_kernels import ManyTile
from headrace_kernels.experts.tile_table import TileTable, tile_table, tile_table_reference
from headrace_kernels.weight_formats import mxfp4_operands
from headrace_kernels.weight_formats.mxfp4 import (
    LARGEST_SCALE,
    Mxfp4Weight,
    allocate_mxfp4,
    dequantize_mxfp4_rows,
    quantize_mxfp4_rows,
)

DTYPES = (torch.bfloat16, torch.float16)


class Case(test_grouped_gemm_sm90.Case):
    """Fresh random operands of one product of all pairs, and what comes of them in fp64."""

    def __init__(
        self,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        gating: Gating | None,
        device: str = "cpu",
        has_bias: bool = False,
        routing: tuple[int, int, int] = ROUTING,
        part: range | None = None,
    ) -> None:
        """Draws a product, whose arguments are those of a plain one."""
        super().__init__("plain", dtype, sizes, gating, device, has_bias, routing, part)

    def _weight(self, rows: int) -> Any:
        plain = self.numbers.randn(rows, self.num_inputs).float() * self.num_inputs**-0.5
        # Groups of very different sizes: one whose scale is taken for another's would show.
        sizes = torch.exp(self.numbers.randn(rows, self.num_inputs // 32).float())
        weight = allocate_mxfp4(rows, self.num_inputs, self.x_dtype, plain.device)
        quantize_mxfp4_rows(plain * sizes.repeat_interleave(32, 1), weight, 0)
        return weight

    @property
    def x_dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def weight_numbers(self) -> Tensor:
        weight = self.weights.weight
        assert isinstance(weight, Mxfp4Weight)
        numbers = torch.empty(weight.num_outputs, weight.num_inputs, dtype=torch.float64, device=weight.device)
        dequantize_mxfp4_rows(weight, slice(weight.num_outputs), numbers)
        return numbers

    def multiplied(self, tile: Any, table: TileTable) -> Tensor:
        out = self.empty()
        multiply_mxfp4_gemm(self.x, self.choice, self.pairs, table, self.weights, out, tile, self.gating)
        return out


def _halves(registers: Tensor, dtype: torch.dtype) -> Tensor:
    """Two numbers of each register, [..., 2]."""
    return torch.stack((registers, registers >> 16), -1).to(torch.int16).view(dtype)


def _registers(halves: Tensor) -> Tensor:
    """Registers, in 64 bits, of two numbers of 16 bits each."""
    low, high = (halves.view(torch.int16).to(torch.int64) & 0xFFFF).unbind(-1)
    return low | high << 16


def _permuted(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both = (a | b << 32)[..., None]
    places = selector[..., None] >> torch.arange(0, 16, 4)
    assert not bool((places & 8).any()), "signs are not repeated"
    taken = both >> 8 * (places & 7) & 255
    return (taken << torch.arange(0, 32, 8)).sum(-1)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return _registers((_halves(a, dtype).double() * _halves(b, dtype).double()).to(dtype))


# What instructions of assembly make of registers.
_INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": torch.bitwise_and,
    "shl.b32": lambda a, bits: a << bits,
    "shr.b32": lambda a, bits: a >> bits,
    "mul.lo.u32": torch.mul,
    "prmt.b32": _permuted,
    "mul.rn.bf16x2": lambda a, b: _product(a, b, torch.bfloat16),
    "mul.rn.f16x2": lambda a, b: _product(a, b, torch.float16),
}


def run_assembly(source: str, registers: dict[str, Tensor]) -> Tensor:
    """What a piece of assembly writes to $0."""
    for line in source.strip("{} ").split(";"):
        name, *names = line.replace(",", " ").split() or [".reg"]
        if name == ".reg":
            continue
        target, *sources = names
        values = [registers[each] if each in registers else torch.tensor(int(each, 0)) for each in sources]
        if name == "lop3.b32":
            a, b, c, table = values
            assert int(table) == 0xEA, "(a & b) | c"
            registers[target] = a & b | c
        else:
            registers[target] = _INSTRUCTIONS[name](*values) & 0xFFFF_FFFF
    return registers["$0"]


def assembly(source: str, operands: list[Any], kind: Any) -> Tensor:
    """What the kernel's pieces of assembly make of operands, of which 32 bits are a register."""
    operands = [torch.as_tensor(each).as_subclass(Tensor) for each in operands]
    if len(operands) == 0:
        return launch_control(source, operands, kind)
    if "ex2" in source:
        return 1 / (1 + torch.exp2(operands[0]))
    if len(operands) == 1:
        return run_assembly(source, {"$1": operands[0].to(torch.int64) & 0xFFFF_FFFF}).to(torch.int32)
    words, factors = operands
    pairs = _registers(words.unflatten(1, (-1, 2)))
    factors = factors.to(torch.int64).expand(pairs.shape) & 0xFFFF_FFFF
    numbers = run_assembly(source, {"$1": pairs, "$2": factors, "$3": factors})
    return _halves(numbers, kind.dtype).flatten(1)


def emulated(
    case: Case, tile: Mxfp4Tile, programs: int = 3, eager: bool = False, careless: str | None = None
) -> Tensor:
    """Results of so many programs, of a table that behind its last tile names no expert."""
    table = tile_table_reference(case.pairs, tile.block_m)
    for column in table[1:]:
        column[int(table.num_tiles) :] = 1 << 20
    with (
        mock.patch.object(card, "launches_early", lambda device: True),
        mock.patch.object(card, "multiprocessors", lambda device: programs),
        mock.patch.object(mxfp4_gemm_sm90, "programs_at_a_time", lambda *sizes: 1),
        emulating(mxfp4_gemm_sm90, "_mxfp4_gemm_kernel", assembly, eager, careless),
    ):
        return case.multiplied(tile, table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(4))
def test_assembly_makes_every_number_with_every_scale_exactly(group: int, dtype: torch.dtype) -> None:
    codes = torch.arange(16)
    # Beside it there are other numbers, of which nothing may come over.
    others = torch.tensor([0x0000, 0xFFFF, 0x5A5A, 0xA5A5])[:, None] & ~(15 << 4 * group)
    words = (others | codes << 4 * group).to(torch.int16).flatten()
    words = torch.stack((words, words.flip(0)), 1).flatten()[None]
    for code in range(LARGEST_SCALE + 1):
        scales = torch.full((1,), code << 8 * group | 0x7F7F7F7F & ~(255 << 8 * group), dtype=torch.int64)
        number_source = str(mxfp4_operands.number_assembly(group, dtype == torch.bfloat16))
        if dtype == torch.bfloat16:
            exponents = (scales + 0x7E7E7E7E).to(torch.int32)
            factors = assembly(str(mxfp4_operands.factor_assembly(group)), [exponents], None)
        else:
            half = torch.exp2(torch.tensor([code - 113.0])).to(dtype).view(torch.int16).to(torch.int32)
            factors = half * 0x10001
        found = assembly(number_source, [words, factors[:, None]], Kind(dtype))
        values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
        numbers = torch.cat((values, -values))[words.to(torch.int64) >> 4 * group & 15]
        expected = torch.ldexp(numbers, torch.tensor(code - 127)).to(dtype)
        assert torch.equal(found.double(), expected.double())


# Type, outputs (of gate and up as many each), inputs, programs, tile: outputs that fill no tile;
# last steps of one group of 32 inputs, of two, three and four; as few slots as there may be, as
# many as there are steps and one more; programs of all tiles, of some, of one or none; results that
# change threads at once, in halves of pairs and in halves of outputs.
CASES: tuple[tuple[torch.dtype, int, int, int, Mxfp4Tile], ...] = (
    (torch.bfloat16, 48, 288, 3, Mxfp4Tile(32, 64, 4, 3)),
    (torch.float16, 80, 320, 1, Mxfp4Tile(64, 64, 4, 4)),
    (torch.bfloat16, 144, 352, 99, Mxfp4Tile(128, 128, 8, 3)),
    (torch.float16, 128, 512, 3, Mxfp4Tile(128, 64, 4, 5)),
    (torch.bfloat16, 80, 576, 2, Mxfp4Tile(16, 128, 8, 4)),
    (torch.float16, 272, 192, 3, Mxfp4Tile(64, 128, 4, 3)),
)


@pytest.mark.parametrize(("sizes", "eager", "gated"), any_two_meet(CASES, (False, True), (True, False)))
def test_what_the_kernel_says_agrees_with_fp64(
    sizes: tuple[torch.dtype, int, int, int, Mxfp4Tile], eager: bool, gated: bool
) -> None:
    dtype, outputs, inputs, programs, tile = sizes
    case = Case(dtype, (outputs, inputs), SILU if gated else None)
    close(emulated(case, tile, programs, eager), case.expected())


def test_biases_are_those_of_each_expert_s_outputs() -> None:
    for gating in (SILU, CLAMPED, None):
        case = Case(torch.float16, (144, 320), gating, has_bias=True)
        close(emulated(case, Mxfp4Tile(64, 64, 4, 3)), case.expected())


# The first experts of six, the last ones, one that nobody chose.
@pytest.mark.parametrize("part", [range(2), range(3, 6), range(4, 5)], ids=["first", "last", "unused"])
def test_a_rank_computes_the_pairs_of_its_experts_alone(part: range) -> None:
    for gating in (CLAMPED, None):
        case = Case(torch.bfloat16, (128, 352), gating, has_bias=True, part=part)
        assert int(case.pairs.starts[-1]) < len(case.pairs.order)
        if gating is None:
            # There are no rows behind the last expert's pairs.
            case.x[int(case.pairs.starts[-1]) :] = float("nan")
        close(emulated(case, Mxfp4Tile(64, 64, 4, 3)), case.expected())


@settings(max_examples=examples(40))
@given(st.data())
def test_any_product_agrees_with_fp64(data: st.DataObject) -> None:
    """Any routing and any number of programs; outputs that fill no tile, few steps and many."""
    num_experts, slots = data.draw(st.integers(1, 7)), data.draw(st.integers(3, 5))
    routing = (data.draw(st.integers(1, 100)), num_experts, data.draw(st.integers(1, num_experts)))
    groups = data.draw(st.integers(4 * (slots - 2) + 1, 4 * (slots + 1)))
    sizes = (16 * data.draw(st.integers(1, 9)), 32 * groups)
    first = data.draw(st.integers(0, num_experts - 1))
    part = None if data.draw(st.booleans()) else range(first, data.draw(st.integers(first + 1, num_experts)))
    gating, dtype = data.draw(st.sampled_from([CLAMPED, None])), data.draw(st.sampled_from(DTYPES))
    case = Case(dtype, sizes, gating, has_bias=data.draw(st.booleans()), routing=routing, part=part)
    num_warps = data.draw(st.sampled_from([4, 8]))
    parts = 1 if gating is not None else data.draw(st.sampled_from([1, 2]))
    tile = Mxfp4Tile(data.draw(st.sampled_from([16, 32, 64, 128])), 16 * num_warps * parts, num_warps, slots)
    found = emulated(case, tile, data.draw(st.integers(1, 12)), data.draw(st.booleans()))
    close(found, case.expected())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("careless", ["copies", "copies of threads", "products"])
def test_a_wait_that_is_missing_shows(careless: str, gated: bool) -> None:
    """The check of the checks. Where rows are in order, threads copy none."""
    case = Case(torch.float16, (128, 768), SILU if gated else None)
    found = emulated(case, Mxfp4Tile(64, 64, 4, 3), eager=careless == "products", careless=careless)
    if careless == "copies of threads" and not gated:
        close(found, case.expected())
    else:
        with pytest.raises(AssertionError, match="times"):
            close(found, case.expected())


@pytest.mark.parametrize("gated", [True, False])
def test_a_row_does_not_depend_on_its_neighbours(gated: bool) -> None:
    case, tile = Case(torch.bfloat16, (128, 352), SILU if gated else None), Mxfp4Tile(64, 64, 4, 3)
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


# Tiles of `launch_rules`: of most gates and ups, of few outputs and of many.
GATES, FEW, OUTPUTS = Mxfp4Tile(128, 128, 8, 4), Mxfp4Tile(64, 128, 4, 4), Mxfp4Tile(128, 128, 8, 4)


def in_mxfp4(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, num_experts: int = 4) -> ExpertWeights:
    device = torch.device("meta" if outputs > 1024 else "cpu")
    return ExpertWeights(allocate_mxfp4(num_experts * outputs, inputs, dtype, device), num_experts)


def test_other_cards_take_the_other_kernel() -> None:
    assert not takes_mxfp4_gemm(in_mxfp4(256, 512), GATES, True)
    assert isinstance(many_rule(4 * 1024, in_mxfp4(256, 512), True), ManyTile)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_mxfp4_with_activations_of_16_bits() -> None:
    for dtype, is_taken in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        assert takes_mxfp4_gemm(in_mxfp4(256, 512, dtype), GATES, True) is is_taken
    plain = ExpertWeights(torch.empty(4 * 256, 512, dtype=torch.bfloat16), 4)
    assert not takes_mxfp4_gemm(plain, GATES, True)


@pytest.mark.usefixtures("hopper")
def test_the_kernel_takes_any_groups_that_are_as_many_steps_as_are_copied_first() -> None:
    taken = [takes_mxfp4_gemm(in_mxfp4(256, 32 * groups), GATES, True) for groups in range(1, 46)]
    assert taken == [groups > 8 for groups in range(1, 46)]
    # No multiple of 16 outputs: half of them are gates. Few outputs leave most of a tile empty.
    assert not takes_mxfp4_gemm(in_mxfp4(496, 512), GATES, True)
    for outputs, is_taken in ((64, False), (112, False), (128, True)):
        assert takes_mxfp4_gemm(in_mxfp4(outputs, 512), OUTPUTS, False) is is_taken


@pytest.mark.usefixtures("hopper")
def test_many_pairs_of_an_expert_take_the_kernel_and_few_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are those of gpt-oss-20b and 120b, and of a rank of two."""
    monkeypatch.setattr(card, "has_warpgroup_products", lambda device: True)
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: 0)
    for num_experts, inner in ((32, 2880), (128, 2880), (32, 1440)):
        gate_up = in_mxfp4(2 * inner, 2880, num_experts=num_experts)
        down = in_mxfp4(2880, inner, num_experts=num_experts)
        gates = [many_rule(average * num_experts, gate_up, True) for average in (16, 63, 64, 512, 513)]
        assert [isinstance(tile, Mxfp4Tile) for tile in gates] == [False, False, True, True, True]
        assert gates[2:] == [GATES, GATES, GATES._replace(slots=3)]
        outputs = [many_rule(average * num_experts, down, False) for average in (16, 17, 128, 129)]
        assert isinstance(outputs[0], ManyTile) and outputs[1:] == [FEW, FEW, OUTPUTS]
    # Places in x are 32 bits.
    assert isinstance(many_rule((1 << 31) // 2880 + 1, gate_up, True), ManyTile)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("is_first", [True, False])
def test_products_may_each_have_their_own_kernel(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are written before the first product, behind which the next one starts early."""
    case = Case(torch.bfloat16, (288, 288), None)
    up = Case(torch.bfloat16, (288, 288), SILU)
    events: list[str] = []
    new, old = Mxfp4Tile(128, 128, 8, 3), ManyTile(64, 16, 4, 3)
    monkeypatch.setattr(mxfp4_kernels, "tile_table", lambda pairs, block_m: events.append(f"table of {block_m}"))
    monkeypatch.setattr(mxfp4_kernels, "multiply_mxfp4_gemm", lambda *given: events.append("new"))
    monkeypatch.setattr(mxfp4_kernels, "_launch_many", lambda *given: events.append("old"))
    tiles = (new, old) if is_first else (old, new)
    mxfp4_kernels.multiply_many(up.x, case.choice, case.pairs, up.weights, case.weights, tiles)
    assert events == ["table of 128", *(("new", "old") if is_first else ("old", "new"))]


@pytest.mark.gpu
@pytest.mark.parametrize("part", [None, range(3, 8)], ids=["all experts", "a rank's"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gated", "tile"), [(True, GATES), (True, GATES._replace(slots=3)), (False, FEW), (False, OUTPUTS)]
)
def test_a_card_s_results_are_those_of_the_other_kernel(
    gated: bool, tile: Mxfp4Tile, dtype: torch.dtype, part: range | None
) -> None:
    """Both round once what they add up in fp32."""
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    gating = CLAMPED if gated else None
    # Six steps, of which the last one has two groups, and five, of which it has one.
    for sizes in ((384, 704), (496, 544)):
        case = Case(dtype, sizes, gating, "cuda", has_bias=True, routing=(300, 8, 2), part=part)
        assert takes_mxfp4_gemm(case.weights, tile, gated)
        found, again = (case.multiplied(tile, tile_table(case.pairs, tile.block_m)) for _ in range(2))
        other = case.empty()
        mxfp4_kernels._launch_many(
            case.x, case.choice, case.pairs, case.weights, other, ManyTile(64, 64, 4, 3), case.gating
        )
        close(found, other, roundings=2)
        close(found, case.expected())
        assert torch.equal(found.view(torch.int16), again.view(torch.int16))
