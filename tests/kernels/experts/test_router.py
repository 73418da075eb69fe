"""Experts chosen from the residual stream in one launch, against the operations one by one."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, Numbers, kernels_on, poisoned_memory

from headrace_kernels.experts.router import choose_after_norm, choose_after_norm_reference, chooses_at_once
from headrace_kernels.experts.routing import Choice

EPS = 1e-5
# Tokens, experts, experts of a token, hidden size.
SIZES = [(1, 1, 1, 8), (3, 7, 3, 40), (4, 32, 8, 72)]
BIG_SIZES = [(1, 32, 4, 2880), (4, 32, 4, 2880), (2, 8, 2, 4096), (3, 20, 4, 2048)]


class Case:
    """Fresh random operands, and both ways to choose by them."""

    def __init__(self, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str, bias: bool = False) -> None:
        num_tokens, num_experts, self.per_token, hidden = sizes
        numbers = Numbers(device, dtype, sum(sizes))
        self.x = numbers.randn(num_tokens, hidden)
        self.norm = (numbers.randn(hidden) * 0.3 + 1).contiguous()
        self.router = numbers.randn(num_experts, hidden) * hidden**-0.5
        self.bias = numbers.randn(num_experts) if bias else None
        self.done = torch.zeros(1, dtype=torch.int32, device=device)

    def found(self, renormalized: bool = True) -> Choice:
        return choose_after_norm(
            self.x, (self.norm, EPS), self.router, self.bias, self.per_token, renormalized, self.done
        )

    def expected(self, renormalized: bool = True) -> Choice:
        return choose_after_norm_reference(self.x, self.norm, EPS, self.router, self.bias, self.per_token, renormalized)


def check(case: Case, device: str, tolerance: float) -> None:
    for renormalized in (True, False):
        with kernels_on(device), poisoned_memory(device):
            found = case.found(renormalized)
        expected = case.expected(renormalized)
        assert case.done.item() == 0
        torch.testing.assert_close(found.weights, expected.weights, rtol=tolerance, atol=1e-6)
        assert found.experts.dtype == torch.int32
        for experts, likeliest in zip(found.experts.tolist(), expected.experts.tolist(), strict=True):
            assert len(set(experts)) == len(experts)
            # Logits that are one rounding apart may change places.
            assert experts == likeliest or tolerance > 1e-3


@pytest.mark.parametrize("sizes", SIZES)
def test_the_likeliest_experts_are_chosen(sizes: tuple[int, int, int, int]) -> None:
    check(Case(sizes, torch.float32, "cpu", bias=sizes[0] > 1), "cpu", 2e-5)


def test_one_launch_is_for_few_tokens_and_experts() -> None:
    assert chooses_at_once(4, torch.empty(32, 8))
    assert not chooses_at_once(5, torch.empty(32, 8)) and not chooses_at_once(4, torch.empty(33, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", BIG_SIZES)
def test_the_likeliest_experts_of_models_are_chosen_time_after_time(sizes: tuple[int, int, int, int]) -> None:
    case = Case(sizes, torch.bfloat16, "cuda", bias=sizes[1] == 8)
    # A logit of either way is rounded by itself: 2^-8 of it, and so the weights of two.
    check(case, "cuda", 0.06)
    first = case.found()
    for _ in range(50):
        again = case.found()
        assert torch.equal(again.experts, first.experts) and torch.equal(again.weights, first.weights)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_lowest_experts_are_chosen(device: str) -> None:
    case = Case((2, 5, 3, 16), torch.float32, device)
    case.router[:] = case.router[0]
    with kernels_on(device):
        assert case.found().experts.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_is_not_finite_gets_experts_that_exist_and_weights_that_show_it(device: str) -> None:
    case = Case((3, 5, 2, 16), torch.float32, device)
    expected = case.expected()
    case.x[0, 3], case.x[2, 1] = float("nan"), float("inf")
    with kernels_on(device):
        found = case.found()
    for experts in found.experts.tolist():
        assert len(set(experts)) == 2 and set(experts) <= set(range(5))
    assert found.weights[0].isnan().all() and found.weights[2].isnan().all()
    torch.testing.assert_close(found.weights[1], expected.weights[1], rtol=2e-5, atol=1e-6)
