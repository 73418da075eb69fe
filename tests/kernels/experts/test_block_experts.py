"""Mixtures of experts in a file's blocks, against fp64 of what the bits stand for.

They run in the interpreter at awkward sizes, on a GPU at those of a model.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.support.gguf_numbers import decode, quantize
from tests.support.kernel_case import DEVICES, ROUNDING, kernels_on, poisoned_memory

from headrace_kernels.experts import block_kernels
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.mixture import add_mixture, fuses, mixture, mixture_reference
from headrace_kernels.experts.routing import Choice, choose_experts_reference
from headrace_kernels.weight_formats import quantized_weight
from headrace_kernels.weight_formats.block_weight import BlockKind, allocate, dequantize_rows
from headrace_kernels.weight_formats.gguf_blocks import store_file_rows
from headrace_kernels.weight_formats.nf4 import quantize_rows


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        # The interpreter's time goes by programs, however many outputs they have.
        rule = block_kernels.block_rule
        monkeypatch.setattr(block_kernels, "block_rule", lambda *sizes: rule(*sizes)._replace(block_n=128))
    with kernels_on(str(request.param)), poisoned_memory(str(request.param)):
        yield str(request.param)


class Case:
    """Experts in blocks, tokens with their choice, and what comes of them in fp64."""

    def __init__(self, kinds: tuple[str, str], sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
        num_tokens, self.hidden, self.inner = sizes
        self.num_experts, self._dtype, self._device = 5, dtype, device
        self._generator = np.random.default_rng(num_tokens)
        self.x = self._random((num_tokens, self.hidden), 1.0)
        self.gate_up, self.exact_gate_up = self._weights(kinds[0], 2 * self.inner, self.hidden)
        self.down, self.exact_down = self._weights(kinds[1], self.hidden, self.inner)
        self.choice = choose_experts_reference(self._random((num_tokens, self.num_experts), 1.0), 2, renormalized=True)

    def _random(self, size: tuple[int, int], scale: float) -> torch.Tensor:
        return torch.from_numpy(self._generator.normal(0, scale, size)).to(self._device, self._dtype)

    def _weights(self, kind: str, num_outputs: int, num_inputs: int) -> tuple[ExpertWeights, torch.Tensor]:
        rows = self.num_experts * num_outputs
        numbers = self._generator.normal(0.002, num_inputs**-0.5, (rows, num_inputs)).astype(np.float32)
        if kind == "plain":
            plain = torch.from_numpy(numbers).to(self._device, self._dtype)
            return ExpertWeights(plain, self.num_experts), plain.double().view(self.num_experts, -1, num_inputs)
        if kind == "NF4":
            return self._rounded(torch.from_numpy(numbers))
        file_rows = quantize(kind, numbers)
        weight = allocate(BlockKind(kind), rows, num_inputs, self._dtype, torch.device(self._device))
        store_file_rows(torch.from_numpy(file_rows).to(self._device), weight, 0)
        exact = torch.from_numpy(decode(kind, file_rows).astype(np.float64)).to(self._device)
        return ExpertWeights(weight, self.num_experts), exact.view(self.num_experts, -1, num_inputs)

    def _rounded(self, numbers: torch.Tensor) -> tuple[ExpertWeights, torch.Tensor]:
        weight = allocate(BlockKind.NF4, *numbers.shape, self._dtype, torch.device(self._device))
        quantize_rows(numbers.to(self._device), weight, 0)
        found = torch.empty(numbers.shape, device=self._device)
        dequantize_rows(weight, slice(0, len(found)), found)
        exact = found.double()
        return ExpertWeights(weight, self.num_experts), exact.view(self.num_experts, -1, numbers.shape[1])

    def expected(self, experts: range) -> torch.Tensor:
        total = torch.zeros(len(self.x), self.hidden, dtype=torch.float64, device=self._device)
        for token, (chosen, weights) in enumerate(zip(*map(torch.Tensor.tolist, self.choice), strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                if expert in experts:
                    gate, up = (self.exact_gate_up[expert] @ self.x[token].double()).chunk(2)
                    inner = gate / (1 + torch.exp(-gate)) * up
                    total[token] += weight * (self.exact_down[expert] @ inner)
        return total

    def check(self, found: torch.Tensor, experts: range = range(5)) -> None:
        expected = self.expected(experts)
        # Inner elements and each expert's output are rounded, and the sum.
        error = float((found.double() - expected).norm() / expected.norm())
        assert error < 3 * ROUNDING[self._dtype] + 1e-5, error


# Q4_K_M files have Q4_K, some with Q6_K behind; of others a product of each sort.
OTHERS = (("Q5_K", "Q4_K"), ("Q4_1", "plain"), ("plain", "Q2_K"), ("Q3_K", "Q5_1"), ("IQ4_XS", "IQ4_NL"))
KINDS = [("Q4_K", "Q6_K"), ("NF4", "NF4"), *(pytest.param(pair, marks=pytest.mark.slow) for pair in OTHERS)]


@pytest.mark.parametrize("num_tokens", [1, 11])
@pytest.mark.parametrize("kinds", KINDS)
def test_mixtures_are_those_of_the_numbers(kinds: tuple[str, str], num_tokens: int, device: str) -> None:
    sizes = (num_tokens, 256, 256) if device == "cpu" else (num_tokens, 2048, 768)
    case = Case(kinds, sizes, torch.float32 if device == "cpu" else torch.bfloat16, device)
    case.check(mixture(case.x, case.choice, case.gate_up, case.down))
    case.check(mixture_reference(case.x, case.choice, case.gate_up, case.down))


def test_tokens_without_pairs_here_come_out_as_zeros(device: str) -> None:
    """A rank with two of five experts; blocks take no norm or addition inside."""
    case = Case(("Q4_K", "Q6_K"), (4, 256, 256), torch.float32, device)
    case.choice = Choice(
        torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2]], dtype=torch.int32).to(device), case.choice.weights
    )
    part = ExpertPart(2, 5)
    gate_up, down = (_experts(weights, 2, 4, part) for weights in (case.gate_up, case.down))
    found = mixture(case.x, case.choice, gate_up, down)
    case.check(found, range(2, 4))
    assert not found[0].any()
    assert not fuses(1, 2, gate_up)
    residual, norm = case.x.clone(), torch.ones(256, device=device)
    add_mixture(residual, norm, 1e-5, case.choice, case.gate_up, case.down)
    normed = case.x * (case.x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = case.x + mixture_reference(normed, case.choice, case.gate_up, case.down)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


def _experts(weights: ExpertWeights, first: int, end: int, part: ExpertPart) -> ExpertWeights:
    """The experts from `first` to before `end`, in memory of their own."""
    rows = slice(first * weights.num_outputs, end * weights.num_outputs)
    whole = weights.weight
    assert not isinstance(whole, (torch.Tensor, quantized_weight.QuantizedWeight))
    kept = allocate(whole.kind, rows.stop - rows.start, whole.num_inputs, whole.dtype, whole.device)  # type: ignore[union-attr]
    for name in ("nibbles", "pairs", "singles", "octets"):
        if getattr(kept, name) is not None:
            getattr(kept, name).copy_(getattr(whole, name)[rows])
    for name in ("scales", "mins", "group_scales", "group_mins"):
        if getattr(kept, name) is not None:
            getattr(kept, name).copy_(getattr(whole, name)[:, rows])
    return ExpertWeights(kept, end - first, part=part)
