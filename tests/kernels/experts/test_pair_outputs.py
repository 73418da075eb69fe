"""Outputs of a token's experts that the norm behind them adds up, against the sum and the norm."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.kernels.experts.test_mixture import Case
from tests.support.kernel_case import DEVICES, Numbers, kernels_on, poisoned_memory
from tests.support.kernels_ahead import KernelsAhead

from headrace_kernels import card
from headrace_kernels.experts import pair_outputs
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.mixture import leaves_pairs, mixture, mixture_pairs
from headrace_kernels.experts.pair_outputs import PairOutputs, add_pairs_rms_norm, summed
from headrace_kernels.experts.routing import Choice
from headrace_kernels.rms_norm import add_rms_norm, rounded_add_rms_norm
from headrace_kernels.rounded_tokens import RoundedTokens, unrounded
from headrace_kernels.weight_formats.quantized_weight import QuantKind

EPS = 1e-5
# Tokens, experts of a token, hidden size: rows that share a program, and longer ones.
SIZES = [(1, 1, 8), (19, 3, 40), (5, 8, 2100)]


def pairs_of(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[PairOutputs, Numbers]:
    num_tokens, per_token, hidden = sizes
    numbers = Numbers(device, dtype, sum(sizes))
    experts = torch.zeros(num_tokens, per_token, dtype=torch.int32, device=device)
    choice = Choice(experts, torch.ones(num_tokens, per_token, device=device))
    down = ExpertWeights(torch.empty(hidden, 8, dtype=dtype, device=device), 1)
    return PairOutputs(numbers.randn(num_tokens * per_token, hidden), choice, down), numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_adds_up_a_token_s_outputs_to_the_same_bits(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    pairs, numbers = pairs_of(sizes, dtype, device)
    stream, weight = numbers.randn(sizes[0], sizes[2]), numbers.randn(sizes[2])
    streams = [stream.clone() for _ in range(4)]
    with kernels_on(device), poisoned_memory(device):
        total = summed(pairs)
        assert summed(total) is total
        found = add_pairs_rms_norm(pairs, streams[0], weight, EPS)
        both = add_pairs_rms_norm(pairs, streams[1], weight, EPS, torch.int8, keeps=True)
        expected = add_rms_norm(total, streams[2], weight, EPS)
        rounded = rounded_add_rms_norm(total, streams[3], weight, EPS, torch.int8)
    assert isinstance(both, RoundedTokens) and torch.equal(unrounded(found), expected)
    assert torch.equal(unrounded(both), expected)
    assert torch.equal(both.numbers, rounded.numbers) and torch.equal(both.scales, rounded.scales)
    assert all(torch.equal(each, streams[0]) for each in streams)
    exact = pairs.outputs.double().view(sizes[0], sizes[1], -1).sum(1)
    torch.testing.assert_close(total.double(), exact, rtol=2**-7, atol=1e-5)


def test_outputs_of_some_of_the_experts_are_added_up_before_the_norm() -> None:
    pairs, numbers = pairs_of((5, 2, 40), torch.float32, "cpu")
    down = dataclasses.replace(pairs.down, part=ExpertPart(1, 2))
    pairs = dataclasses.replace(pairs, down=down)
    pairs.choice.experts[:, 1] = 1
    stream, weight = numbers.randn(5, 40), numbers.randn(40)
    expected = add_rms_norm(pairs.outputs[1::2].clone(), stream.clone(), weight, EPS)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        found = add_pairs_rms_norm(pairs, stream, weight, EPS)
    torch.testing.assert_close(unrounded(found), expected, rtol=2e-5, atol=1e-6)


def test_a_mixture_of_many_tokens_may_leave_its_pairs() -> None:
    case = Case((5, 3, 2, 40, 32), None, torch.float32, "cpu")
    with kernels_on("cpu"), poisoned_memory("cpu"):
        assert [leaves_pairs(count, case.gate_up, case.down) for count in (4, 5)] == [False, True]
        pairs = mixture_pairs(case.x, case.choice, case.gate_up, case.down)
        assert len(pairs) == 5 and torch.equal(pairs.total(), mixture(case.x, case.choice, case.gate_up, case.down))
        few_bits = Case((5, 3, 2, 96, 32), "mxfp4", torch.float32, "cpu")
        assert not leaves_pairs(5, few_bits.gate_up, few_bits.down)
        part = dataclasses.replace(case.down, part=ExpertPart(0, 6))
        assert not leaves_pairs(5, case.gate_up, part)
    assert not leaves_pairs(5, case.gate_up, case.down)


def test_the_norm_of_pairs_reads_nothing_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, numbers = pairs_of((19, 3, 40), torch.float32, "cpu")
    stream, weight = numbers.randn(19, 40), numbers.randn(40)
    expected = add_rms_norm(pairs.outputs.view(19, 3, 40).sum(1), stream.clone(), weight, EPS)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        ahead = KernelsAhead(monkeypatch, pair_outputs, (pairs.outputs, stream))
        found = add_pairs_rms_norm(pairs, stream, weight, EPS)
    torch.testing.assert_close(unrounded(found), expected, rtol=2e-5, atol=1e-6)
    assert ahead.waits == ahead.released == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, QuantKind.FP8])
def test_norms_of_models_add_up_the_outputs_of_their_mixtures(kind: QuantKind | None) -> None:
    case = Case((256, 64, 8, 2048, 768), kind, torch.bfloat16, "cuda")
    weights, streams = (case.gate_up, case.down), [case.x.clone() for _ in range(2)]
    number = torch.float8_e4m3fn if card.has_fp8_products(case.x.device) else torch.int8
    pairs = mixture_pairs(case.x, case.choice, *weights)
    found = add_pairs_rms_norm(pairs, streams[0], case.norm, EPS, number, keeps=True)
    total = mixture(case.x, case.choice, *weights)
    expected = rounded_add_rms_norm(total, streams[1], case.norm, EPS, number, keeps=True)
    assert isinstance(found, RoundedTokens)
    assert torch.equal(unrounded(found), unrounded(expected)) and torch.equal(*streams)
    assert torch.equal(found.numbers.view(torch.uint8), expected.numbers.view(torch.uint8))
