"""Gate and up products with the activation in them: who multiplies, with which tile; on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.linear.test_dense_gated_sm90 import Case, check
from tests.support.gluon_emulation import emulating

from headrace_kernels import card
from headrace_kernels.linear.gated import dense, dense_sm90
from headrace_kernels.linear.gated.dense import gated_linear, gated_linear_reference, gated_rule, gated_tile
from headrace_kernels.swiglu import Activation

_MULTIPROCESSORS = 132


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: True)


def rows_taken(size: int, inputs: int) -> list[int]:
    weight = torch.empty(2 * size, inputs, dtype=torch.bfloat16, device="meta")
    return [rows for rows in (1, 16, 17, 64, 65, 8192) if gated_rule(rows, weight)]


def test_some_tens_of_rows_are_multiplied_with_the_activation(sm90: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "multiprocessors", lambda device: _MULTIPROCESSORS)
    assert rows_taken(14_336, 4096) == [17, 64]
    # A rank's half of it leaves a sixth of the multiprocessors idle; too few inputs.
    assert rows_taken(7168, 4096) == rows_taken(14_336, 1024) == []
    monkeypatch.setattr(card, "has_warpgroup_instructions", lambda device: False)
    assert rows_taken(14_336, 4096) == []


@pytest.mark.parametrize("outputs", [8192, 9728, 12_288, 14_336, 28_672])
def test_tiles_fill_their_waves_and_fit_a_card(outputs: int) -> None:
    tile = gated_tile(outputs, _MULTIPROCESSORS)
    assert tile is not None
    programs = -(-outputs // tile.block_n)
    assert outputs >= 0.9 * tile.block_n * _MULTIPROCESSORS * -(-programs // _MULTIPROCESSORS)
    # Barriers take little besides.
    assert tile.slots >= 5 and tile.slots * tile.step_bytes <= 232_448 - 1024


def test_a_product_takes_the_kernel_where_the_rule_says_so(sm90: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    multiply = dense_sm90.multiply_gated

    def counted(x: torch.Tensor, *others: Any) -> None:
        launches.append(len(x))
        multiply(x, *others)

    monkeypatch.setattr(dense, "multiply_gated", counted)
    # Two programs, for the two multiprocessors that stand for a card.
    case = Case(20, 224, 2048, torch.float16, "cpu", True)
    with emulating(dense_sm90, "_gated_kernel", lambda *_: torch.zeros(1), False):
        check(case, gated_linear(case.x, case.weight, case.bias, "gelu_tanh"), True, "gelu_tanh")
        check(case, gated_linear(case.x, case.weight, None))
    assert launches == [20, 20]
    few = gated_linear(case.x[:9], case.weight, None)
    assert launches == [20, 20] and torch.equal(few, gated_linear_reference(case.x[:9], case.weight, None))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), [(14_336, 4096), (12_288, 4096), (9728, 2560)])
def test_a_card_agrees_with_fp64(outputs: int, inputs: int, activation: Activation) -> None:
    if not card.has_warpgroup_instructions(torch.device("cuda")):
        pytest.skip("needs a GPU of sm_90")
    for rows in (17, 40, 64):
        case = Case(rows, outputs, inputs, torch.bfloat16, "cuda", True)
        assert gated_rule(rows, case.weight) is not None
        found = gated_linear(case.x, case.weight, case.bias, activation)
        check(case, found, True, activation)
        check(case, gated_linear(case.x, case.weight, None, activation), False, activation)
        assert torch.equal(found, gated_linear(case.x, case.weight, case.bias, activation))


@pytest.mark.gpu
def test_products_behind_each_other_find_what_the_one_before_stored() -> None:
    """Each starts while the one before it runs, from a graph as in a step."""
    inner, hidden, rows = 14_336, 4096, 48
    numbers = torch.Generator("cuda").manual_seed(2)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=numbers, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5

    start, layers = (
        randn(rows, hidden) * hidden**0.5,
        [(randn(2 * inner, hidden), randn(hidden, inner)) for _ in range(4)],
    )

    def run(gate: bool) -> torch.Tensor:
        x = start
        for gate_up, down in layers:
            multiply = gated_linear if gate else gated_linear_reference
            # SwiGLU of numbers of order 1 makes smaller ones.
            x = 3 * torch.nn.functional.linear(multiply(x, gate_up, None), down)
        return x

    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(True)
    expected, first = run(False).double(), None
    for _ in range(5):
        graph.replay()
        first = found.clone() if first is None else first
        assert torch.equal(found, first)
    assert float((found.double() - expected).norm() / expected.norm()) < 0.02
