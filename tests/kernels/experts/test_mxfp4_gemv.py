"""Few tokens' experts in MXFP4, by programs that stream gates and ups, against fp64."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.experts.test_mixture import EPS, Case, close
from tests.support.kernel_case import kernels_on, poisoned_memory

from headrace_kernels import card
from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import SILU, Gating
from headrace_kernels.experts.launch_rules import FEW_DOWN, FEW_GATE_UP, few_rule
from headrace_kernels.experts.mxfp4_gemv import FewTile, multiply_few
from headrace_kernels.experts.routing import Choice
from headrace_kernels.weight_formats.mxfp4 import allocate_mxfp4

CLAMPED = Gating(True, 1.702, 0.8)


def multiplied(
    case: Case, tiles: tuple[FewTile, FewTile], normed: bool = False, start: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full_like(case.x, float("nan")) if start is None else start.clone()
    norm = (case.norm, EPS) if normed else None
    with kernels_on("cpu"), poisoned_memory("cpu"):
        multiply_few(case.x, case.choice, case.gate_up, case.down, out, tiles, norm, start is not None, case.gating)
    return out


# Blocks of 8 inner elements: loops that divide their number, that do not, and of which one program
# has all. Of 416 inputs the last tile is half full and a warp has no last step; of 288, and of
# fewer than 128, the last step has one tile.
@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ((1, 3, 2, 416, 96), (FewTile(2, 1, 5, in_order=True), FewTile(1, 1))),
        ((1, 3, 2, 416, 64), (FewTile(1, 2, 8), FewTile(2, 1))),
        ((1, 4, 3, 96, 288), (FewTile(2, 1, 3), FewTile(1, 1, in_order=True))),
        ((2, 3, 2, 96, 288), (FewTile(1, 1, 3), FewTile(2, 1))),
        ((1, 3, 2, 32, 416), (FewTile(4, 3, 9), FewTile(1, 6))),
    ],
)
@pytest.mark.parametrize("has_biases", [False, True])
# Each of the sizes, with biases or without.
@pytest.mark.one_in(2)
def test_programs_of_several_blocks_agree_with_fp64(
    sizes: tuple[int, int, int, int, int], tiles: tuple[FewTile, FewTile], has_biases: bool
) -> None:
    gating = CLAMPED if has_biases else SILU
    case = Case(sizes, "mxfp4", torch.float32, "cpu", gating=gating, has_biases=has_biases)
    close(multiplied(case, tiles, normed=has_biases), case.expected(normed=has_biases), torch.float32)


def test_loops_change_no_bit() -> None:
    case = Case((1, 3, 2, 288, 96), "mxfp4", torch.float32, "cpu", gating=CLAMPED, has_biases=True)
    start = case.numbers.randn(*case.x.shape)
    found = [multiplied(case, (FewTile(2, 1, loops), FewTile(2, 1)), normed=True, start=start) for loops in (1, 2, 5)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    close(found[0], case.expected(normed=True) + start.double(), torch.float32)


# Inner elements of experts that are elsewhere are not written, and here are no numbers.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_what_ranks_with_whole_experts_compute_adds_up() -> None:
    case = Case((1, 5, 3, 96, 64), "mxfp4", torch.float32, "cpu", gating=CLAMPED, has_biases=True)
    total, whole, tiles = torch.zeros_like(case.x), (case.gate_up, case.down), (FewTile(1, 1, 3), FewTile(1, 1))
    expected = case.expected()
    for experts in (range(2), range(2, 5)):
        case.gate_up, case.down = whole
        case.keep(experts)
        total = multiplied(case, tiles, start=total)
    close(total, expected, torch.float32)


def test_few_tokens_stream_where_kernels_are_launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(num_tokens: int) -> tuple[FewTile, FewTile]:
        weights = [
            ExpertWeights(allocate_mxfp4(32 * rows, 2880, torch.bfloat16, torch.device("meta")), 32)
            for rows in (5760, 2880)
        ]
        choice = Choice(*(torch.empty(num_tokens, 4, device="meta") for _ in range(2)))
        return few_rule(choice, *weights)

    assert rule(1) == (FEW_GATE_UP, FEW_DOWN)
    monkeypatch.setattr(card, "launches_early", lambda device: True)
    monkeypatch.setattr(card, "multiprocessors", lambda device: 132)
    # As many blocks as leave one token three programs to a multiprocessor.
    for num_tokens in (1, 2, 4):
        assert rule(num_tokens) == (FEW_GATE_UP._replace(loops=4), FEW_DOWN)
