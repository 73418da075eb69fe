"""Chosen experts and sorted pairs, against their references and their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, Numbers, kernels_on, poisoned_memory

from headrace_kernels.experts.routing import choose_experts, choose_experts_reference, sort_pairs, sort_pairs_reference

# Tokens, experts, experts of a token: one of each, numbers that are no power of two, all experts.
SIZES = [(1, 1, 1), (5, 7, 3), (3, 128, 8), (9, 6, 6)]
BIG_SIZES = [(1, 128, 8), (4097, 128, 8), (300, 60, 4), (8192, 8, 2)]


def check_choice(sizes: tuple[int, int, int], dtype: torch.dtype, renormalized: bool, device: str) -> None:
    num_tokens, num_experts, per_token = sizes
    logits = Numbers(device, dtype, num_tokens + num_experts).randn(num_tokens, num_experts)
    with kernels_on(device), poisoned_memory(device):
        found = choose_experts(logits, per_token, renormalized)
    expected = choose_experts_reference(logits, per_token, renormalized)
    assert torch.equal(found.experts, expected.experts) and found.experts.dtype == torch.int32
    # fp32 sums and exponentials in another order.
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-5, atol=1e-6)
    if renormalized:
        torch.testing.assert_close(found.weights.sum(-1), torch.ones(num_tokens, device=device), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("sizes", "renormalized"), [*zip(SIZES, (True, False) * 2, strict=True)])
def test_the_likeliest_experts_are_chosen(sizes: tuple[int, int, int], renormalized: bool) -> None:
    for dtype in DTYPES:
        check_choice(sizes, dtype, renormalized, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", BIG_SIZES)
def test_the_likeliest_experts_of_models_are_chosen(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for renormalized in (True, False):
        check_choice(sizes, dtype, renormalized, "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_lowest_experts_are_chosen(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5], device=device)
    with kernels_on(device):
        found = choose_experts(logits, 3, True)
    assert found.experts.tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_both_signs_are_equal_and_numbers_below_them_are_ordered(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[-2.0, -0.0, -1.0, 0.0], [-1.0, -3.0, -2.0, float("-inf")]], device=device, dtype=dtype)
    with kernels_on(device):
        found = choose_experts(logits, 3, True)
    assert found.experts.tolist() == [[1, 3, 2], [0, 2, 1]]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_is_not_finite_gets_experts_that_exist_and_weights_that_show_it(device: str) -> None:
    logits = torch.tensor([[0.5, float("nan"), 1.0], [float("-inf")] * 3, [1.0, float("inf"), 2.0], [3.0, 1.0, 2.0]])
    with kernels_on(device):
        found = choose_experts(logits.to(device), 2, True)
    for experts in found.experts.tolist():
        assert len(set(experts)) == 2 and set(experts) <= {0, 1, 2}
    assert found.weights[:3].isnan().any(1).all()
    # The one beside them is as it would be alone.
    torch.testing.assert_close(found.weights[3].cpu(), choose_experts_reference(logits[3:], 2, True).weights[0])


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_of_experts_that_are_elsewhere_are_left_out(device: str) -> None:
    # 2,400 pairs, more than a program reads at a time, and 8,400, which are sorted in chunks.
    for (first, num_experts), num_tokens in itertools.product(((0, 3), (3, 4), (6, 1), (2, 5)), (1200, 4200)):
        experts = Numbers("cpu", torch.float32, first).integers(0, 7, num_tokens, 2, dtype=torch.int32)
        with kernels_on(device), poisoned_memory(device):
            found = sort_pairs(experts.to(device), num_experts, first)
        expected = sort_pairs_reference(experts, num_experts, first)
        count = int(expected.starts[-1])
        own = (experts >= first) & (experts < first + num_experts)
        assert count == int(own.sum()) and torch.equal(found.starts.cpu(), expected.starts)
        order = found.order[:count].cpu()
        assert torch.equal(order, expected.order[:count])
        chosen = experts.flatten()[order.long()].tolist()
        assert chosen == sorted(experts[own].tolist())


def check_sorting(experts: torch.Tensor, num_experts: int, device: str) -> None:
    with kernels_on(device), poisoned_memory(device):
        found = sort_pairs(experts.to(device), num_experts)
    expected = sort_pairs_reference(experts, num_experts)
    assert torch.equal(found.order.cpu(), expected.order) and torch.equal(found.starts.cpu(), expected.starts)
    chosen = experts.flatten()[found.order.long().cpu()].tolist()
    assert chosen == sorted(chosen) and sorted(found.order.tolist()) == list(range(experts.numel()))


@pytest.mark.parametrize("num_experts", [1, 5])
def test_pairs_are_sorted_by_expert_and_keep_their_order(num_experts: int) -> None:
    # The last are sorted in chunks, of which there are several.
    for num_tokens, per_token in ((1, 1), (7, 1), (700, 3), (8500, 2)):
        experts = Numbers("cpu", torch.float32, num_tokens).integers(
            0, num_experts, num_tokens, per_token, dtype=torch.int32
        )
        check_sorting(experts, num_experts, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_all_pairs_may_fall_to_one_expert(device: str) -> None:
    for expert, num_tokens in itertools.product((0, 2, 3), (9, 9000)):
        check_sorting(torch.full((num_tokens, 1), expert, dtype=torch.int32), 4, device)


@pytest.mark.gpu
def test_pairs_of_models_are_sorted() -> None:
    for num_tokens, (num_experts, per_token) in itertools.product((5, 256, 8192), ((128, 8), (8, 2), (60, 4))):
        logits = Numbers("cuda", torch.bfloat16, num_tokens).randn(num_tokens, num_experts)
        check_sorting(choose_experts_reference(logits, per_token, True).experts.cpu(), num_experts, "cuda")
