"""Experts chosen by sigmoid scores, in groups: against the definition, token by token."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, Numbers, kernels_on, poisoned_memory

from headrace_kernels.experts.scored_routing import Scoring, choose_scored_experts, choose_scored_experts_reference

# Tokens, experts, experts of a token, and how they are chosen: groups of sizes that are no power of
# two, one group, all groups, as many experts as the best groups have.
CASES = [
    (5, 12, 3, Scoring(4, 2, True, 2.5)),
    (3, 15, 6, Scoring(3, 2, False, 0.5)),
    (4, 7, 2, Scoring(1, 1, True, 1.0)),
    (2, 20, 8, Scoring(5, 2, True, 1.5)),
]


def defined(logits: torch.Tensor, correction: torch.Tensor, per_token: int, scoring: Scoring) -> dict[int, float]:
    """Expert -> weight of one token, in fp64."""
    scores = logits.double().sigmoid()
    choice = (scores + correction.double()).tolist()
    size = len(choice) // scoring.num_groups
    groups = [choice[first : first + size] for first in range(0, len(choice), size)]
    best = sorted(range(len(groups)), key=lambda group: -sum(sorted(groups[group])[-2:]))[: scoring.top_groups]
    experts = [group * size + place for group in best for place in range(size)]
    chosen = sorted(experts, key=lambda expert: -choice[expert])[:per_token]
    total = sum(float(scores[expert]) for expert in chosen) if scoring.renormalized else 1.0
    return {expert: float(scores[expert]) / total * scoring.scale for expert in chosen}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token", "scoring"), CASES)
def test_the_best_experts_of_the_best_groups_are_chosen(
    num_tokens: int, num_experts: int, per_token: int, scoring: Scoring, device: str
) -> None:
    for dtype in DTYPES:
        numbers = Numbers(device, dtype, num_experts)
        logits, correction = numbers.randn(num_tokens, num_experts), numbers.randn(num_experts).float()
        with kernels_on(device), poisoned_memory(device):
            found = choose_scored_experts(logits, correction, per_token, scoring)
        expected = choose_scored_experts_reference(logits, correction, per_token, scoring)
        assert torch.equal(found.experts, expected.experts) and found.experts.dtype == torch.int32
        torch.testing.assert_close(found.weights, expected.weights, rtol=2e-5, atol=1e-6)
        for row, experts, weights in zip(logits, *(part.tolist() for part in found), strict=True):
            wanted = defined(row, correction, per_token, scoring)
            assert dict(zip(experts, weights, strict=True)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 128, 8, 1, 1), (4097, 128, 8, 1, 1), (300, 256, 8, 8, 4)])
def test_experts_of_models_are_chosen(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_experts, per_token, *groups = sizes
    numbers, scoring = Numbers("cuda", dtype, num_experts), Scoring(groups[0], groups[1], True, 2.5)
    logits, correction = numbers.randn(num_tokens, num_experts), numbers.randn(num_experts).float()
    with kernels_on("cuda"), poisoned_memory("cuda"):
        found = choose_scored_experts(logits, correction, per_token, scoring)
    expected = choose_scored_experts_reference(logits, correction, per_token, scoring)
    torch.testing.assert_close(found.weights.sum(-1), expected.weights.sum(-1), rtol=1e-4, atol=0)
    # Sigmoids of two makers differ by a rounding, which may exchange two experts that are as good.
    assert float((found.experts == expected.experts).float().mean()) > 0.999


@pytest.mark.parametrize("device", DEVICES)
def test_the_correction_changes_who_is_chosen_and_no_weight(device: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    correction = torch.tensor([-1.0, 0.0, 0.0, 1.0], device=device)
    with kernels_on(device):
        found = choose_scored_experts(logits, correction, 2, Scoring(1, 1, False, 1.0))
    assert found.experts.tolist() == [[3, 1]]
    torch.testing.assert_close(found.weights[0], logits[0, [3, 1]].sigmoid())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_is_not_finite_gets_experts_that_exist_and_weights_that_show_it(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[0.5, nan, 1.0, 2.0], [-inf] * 4, [1.0, inf, 2.0, 0.0], [nan] * 4, [3.0, 1.0, 2.0, 0.0]]
    logits, correction = torch.tensor(rows, device=device), torch.zeros(4, device=device)
    scoring = Scoring(2, 1, True, 1.0)
    with kernels_on(device):
        found = choose_scored_experts(logits, correction, 2, scoring)
    for experts in found.experts.tolist():
        assert sorted(experts) in ([0, 1], [2, 3])
    assert found.weights[:4].isnan().all()
    alone = choose_scored_experts_reference(logits[4:], correction, 2, scoring)
    torch.testing.assert_close(found.weights[4], alone.weights[0])
