"""Experts chosen by a router's product in slices, against the operations one by one."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, Numbers, kernels_on, poisoned_memory
from tests.support.kernels_ahead import KernelsAhead

from headrace_kernels.experts import sliced_router
from headrace_kernels.experts.routing import Choice
from headrace_kernels.experts.sliced_router import (
    SliceTile,
    choose_in_slices,
    choose_in_slices_reference,
    slice_rule,
)

# Tokens, experts, experts of a token, hidden size: what no tile divides, with one slice and more.
SIZES = [(1, 1, 1, 8), (19, 7, 3, 40), (33, 20, 4, 200)]
BIG_SIZES = [(16, 128, 8, 2048), (256, 128, 8, 2048), (65, 32, 4, 2880), (200, 64, 6, 4096), (100, 256, 8, 2048)]
TILE = SliceTile(block_m=16, block_k=32, num_warps=4)


class Case:
    """Fresh random operands, and both ways to choose by them."""

    def __init__(self, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str, bias: bool = False) -> None:
        num_tokens, num_experts, self.per_token, hidden = sizes
        numbers = Numbers(device, dtype, sum(sizes))
        self.x = numbers.randn(num_tokens, hidden)
        self.router = numbers.randn(num_experts, hidden) * hidden**-0.5
        self.bias = numbers.randn(num_experts) if bias else None

    def found(self, tile: SliceTile = TILE, renormalized: bool = True) -> Choice:
        return choose_in_slices(self.x, self.router, self.bias, self.per_token, renormalized, tile)

    def expected(self, renormalized: bool = True) -> Choice:
        return choose_in_slices_reference(self.x, self.router, self.bias, self.per_token, renormalized)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_likeliest_experts_are_chosen(sizes: tuple[int, int, int, int]) -> None:
    case = Case(sizes, torch.float32, "cpu", bias=sizes[1] == 7)
    for renormalized in (True, False):
        with kernels_on("cpu"), poisoned_memory("cpu"):
            found = case.found(renormalized=renormalized)
        expected = case.expected(renormalized)
        assert found.experts.dtype is torch.int32 and torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, rtol=2e-5, atol=1e-6)


def test_logits_are_rounded_to_the_model_s_type_before_the_choice() -> None:
    # Two experts whose logits differ by less than bf16 tells apart: the lower one is chosen.
    case = Case((16, 4, 1, 64), torch.bfloat16, "cpu")
    case.x[:], case.router[:] = 1, 0
    case.router[2, :2], case.router[3, :3] = 1, torch.tensor([1, 1, 2**-9])
    with kernels_on("cpu"), poisoned_memory("cpu"):
        assert case.found().experts.flatten().tolist() == [2] * 16


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", BIG_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_models_are_chosen_by_logits_that_are_close(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    case = Case(sizes, dtype, "cuda", bias=sizes[1] == 32)
    tile = slice_rule(sizes[0], case.router)
    assert tile is not None
    with poisoned_memory("cuda"):
        found, again = case.found(tile), case.found(tile)
    assert torch.equal(found.experts, again.experts) and torch.equal(found.weights, again.weights)
    logits = case.x.double() @ case.router.double().t() + (0 if case.bias is None else case.bias.double())
    chosen, best = logits.gather(1, found.experts.long()), logits.topk(case.per_token).values
    # Logits that are one rounding apart may change places.
    torch.testing.assert_close(chosen, best, rtol=2**-7, atol=2**-7)
    weights = chosen.softmax(1)
    torch.testing.assert_close(found.weights.double(), weights, rtol=2**-5, atol=1e-3)
    assert all(len(set(row)) == case.per_token for row in found.experts.tolist())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_that_is_not_finite_gets_experts_that_exist_and_weights_that_show_it(device: str) -> None:
    case = Case((3, 5, 2, 64), torch.float32 if device == "cpu" else torch.bfloat16, device)
    alone = case.expected()
    case.x[0, 3], case.x[2, 40] = float("nan"), float("inf")
    with kernels_on(device):
        found = case.found()
    for experts in found.experts.tolist():
        assert len(set(experts)) == 2 and set(experts) <= set(range(5))
    assert found.weights[0].isnan().all() and found.weights[2].isnan().all()
    torch.testing.assert_close(found.weights[1], alone.weights[1], rtol=2e-5 if device == "cpu" else 0.06, atol=1e-6)


def test_a_slice_reads_only_its_weights_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((19, 7, 3, 40), torch.float32, "cpu")
    expected = case.expected()
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, sliced_router, (case.x,))
        found = case.found()
    assert torch.equal(found.experts, expected.experts)
    # Two tiles of two slices each, and a choice for each token.
    assert ahead.waits == ahead.released == 2 * 2 + 19


def test_tens_and_hundreds_of_tokens_are_multiplied_in_slices() -> None:
    def tile(num_tokens: int, num_experts: int = 128, dtype: torch.dtype = torch.bfloat16) -> SliceTile | None:
        return slice_rule(num_tokens, torch.empty(num_experts, 2048, dtype=dtype))

    assert tile(256) is None
    with kernels_on("cpu"):
        assert [tile(count) is not None for count in (15, 16, 256, 257)] == [False, True, True, False]
        # As many weights for any number of experts, and the same slices for any number of tokens.
        assert tile(16) == tile(256) == SliceTile(16, 256, 8)
        assert [each and each.block_k for each in (tile(64, 256), tile(64, 64), tile(64, 8))] == [128, 512, 512]
        assert tile(64, 257) is None
        assert slice_rule(64, torch.empty(2048, 128, dtype=torch.bfloat16).t()) is None
