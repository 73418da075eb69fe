"""Mixtures of experts in every kernel and kind of weight, against fp64 and their references.

They run in the interpreter at awkward sizes, on a GPU at the sizes of models.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from tests.support.kernel_case import DEVICES, ROUNDING, Numbers, kernels_on, poisoned_memory

from headrace_kernels.experts import launch_rules
from headrace_kernels.experts.expert_weights import ExpertPart, ExpertWeights
from headrace_kernels.experts.gating import GELU, SILU, Gating
from headrace_kernels.experts.grouped_gemm_sm90 import GroupedTile
from headrace_kernels.experts.launch_rules import many_rule, pair_rule, rounded_tile_rule, tile_rule
from headrace_kernels.experts.mixture import (
    add_mixture,
    add_mixture_reference,
    fuses,
    mixture,
    mixture_in_parts,
    mixture_reference,
    rounds,
)
from headrace_kernels.experts.mixture_kernels import PairTile, combine_pairs, multiply_pairs
from headrace_kernels.experts.mxfp4_gemv import FewTile, multiply_few
from headrace_kernels.experts.mxfp4_kernels import ManyTile, multiply_many
from headrace_kernels.experts.routing import Choice, choose_experts_reference, sort_pairs_reference
from headrace_kernels.experts.vector_kernels import VectorTile, multiply_vectors
from headrace_kernels.rms_norm import rms_norm, summed
from headrace_kernels.weight_formats.mxfp4 import LARGEST_SCALE, Mxfp4Weight, allocate_mxfp4, quantize_mxfp4_rows
from headrace_kernels.weight_formats.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    QuantKind,
    allocate,
    quantize_rows,
)

EPS = 1e-5
Kind = QuantKind | Literal["mxfp4"] | None
KINDS: tuple[Kind, ...] = (None, QuantKind.INT8, QuantKind.FP8, QuantKind.INT4, "mxfp4")
Kernel = Literal["vector", "tile"]


class Case:
    """Fresh random operands, and what comes of them in fp64."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int, int],
        kind: Kind,
        dtype: torch.dtype,
        device: str,
        group: int = 32,
        gating: Gating = SILU,
        has_biases: bool = False,
    ) -> None:
        self.gating, self._has_biases = gating, has_biases
        num_tokens, self.num_experts, per_token, hidden, inner = sizes
        self.numbers = Numbers(device, dtype, sum(sizes))
        self.kind, self.group = kind, group
        # Tokens of very different sizes: one that is taken for another would show.
        scale = torch.logspace(-1, 1, num_tokens, device=device, dtype=torch.float32)[:, None].to(dtype)
        self.x = self.numbers.randn(num_tokens, hidden) * scale
        self.norm = (self.numbers.randn(hidden) * 0.3 + 1).contiguous()
        self.gate_up, self.down = self._weights(2 * inner, hidden), self._weights(hidden, inner)
        logits = self.numbers.randn(num_tokens, self.num_experts)
        self.choice = choose_experts_reference(logits, per_token, renormalized=True)

    def _weights(self, num_outputs: int, num_inputs: int) -> ExpertWeights:
        rows = self.num_experts * num_outputs
        plain = self.numbers.randn(rows, num_inputs) * num_inputs**-0.5
        bias = self.numbers.randn(rows) if self._has_biases else None
        return self._stored(plain, self.num_experts, bias)

    def _stored(self, plain: torch.Tensor, num_experts: int, bias: torch.Tensor | None) -> ExpertWeights:
        rows, num_inputs = plain.shape
        if self.kind is None:
            return ExpertWeights(plain, num_experts, bias)
        if self.kind == "mxfp4":
            mxfp4 = allocate_mxfp4(rows, num_inputs, plain.dtype, plain.device)
            quantize_mxfp4_rows(plain, mxfp4, 0)
            return ExpertWeights(mxfp4, num_experts, bias)
        group = self.group if self.kind is QuantKind.INT4 else num_inputs
        packed = allocate(self.kind, rows, num_inputs, group, plain.dtype, plain.device)
        quantize_rows(plain, packed, 0)
        return ExpertWeights(packed, num_experts, bias)

    def arrange(self, group: int, arrangement: Arrangement) -> None:
        """Puts other weights in place, of the case's kind with scales and zero points of groups."""
        for name in ("gate_up", "down"):
            whole: ExpertWeights = getattr(self, name)
            packed = whole.weight
            assert isinstance(packed, QuantizedWeight)
            sizes = (packed.num_outputs, packed.num_inputs, group or packed.num_inputs)
            made = allocate(packed.kind, *sizes, packed.dtype, packed.device, arrangement)
            made.packed.copy_(packed.packed)
            made.scales.copy_(self.numbers.randn(*made.scales.shape).abs() + 0.1)
            made.scales.mul_(packed.scales.mean())
            if made.zeros is not None:
                made.zeros.copy_(self.numbers.randn(*made.zeros.shape).mul(30))
            setattr(self, name, dataclasses.replace(whole, weight=made))

    def keep(self, experts: range) -> None:
        """Takes away all weights but those of some experts, as a rank has them."""
        part = ExpertPart(experts.start, self.num_experts)
        for name in ("gate_up", "down"):
            whole: ExpertWeights = getattr(self, name)
            kept = torch.cat([whole.expert(expert) for expert in experts])
            bias = None if whole.bias is None else whole.bias.view(self.num_experts, -1)[list(experts)].flatten()
            setattr(self, name, dataclasses.replace(self._stored(kept, len(experts), bias), part=part))

    def expected(self, normed: bool = False) -> torch.Tensor:
        x = self.x.double()
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm.double()
        total = torch.zeros_like(x)
        for token, (experts, weights) in enumerate(zip(*self.choice, strict=True)):
            for expert, weight in zip(experts.tolist(), weights.double(), strict=True):
                inner = self._inner(*self._product(self.gate_up, expert, x[token]).chunk(2))
                total[token] += weight * self._product(self.down, expert, inner)
        return total

    @staticmethod
    def _product(weights: ExpertWeights, expert: int, x: torch.Tensor) -> torch.Tensor:
        product, bias = weights.expert(expert).double() @ x, weights.expert_bias(expert)
        return product if bias is None else product + bias.double()

    def _inner(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not self.gating.is_clamped:
            if self.gating.is_gelu:
                return torch.nn.functional.gelu(gate, approximate="tanh") * up
            return gate / (1 + torch.exp(-gate)) * up
        gate, up = gate.clamp(max=self.gating.limit), up.clamp(-self.gating.limit, self.gating.limit)
        return (up + 1) * gate / (1 + torch.exp(-self.gating.alpha * gate))

    def multiplied(self, kernel: Kernel, vector: VectorTile, pair: PairTile) -> torch.Tensor:
        out = torch.full_like(self.x, float("nan"))
        pairs = sort_pairs_reference(self.choice.experts, self.gate_up.num_experts, self.gate_up.first_expert)
        weights = (self.gate_up, self.down)
        operands = (self.choice, *weights, out)
        if self.kind == "mxfp4" and kernel == "vector":
            # Programs of one block of gates and ups, and of three, of which the last one has fewer.
            loops = 1 if len(self.x) > 1 else 3
            few = FewTile(vector.num_warps, 1, loops), FewTile(vector.num_warps, 1)
            multiply_few(self.x, *operands, few, None, False, self.gating)
        elif self.kind == "mxfp4":
            many = ManyTile(pair.block_n, pair.block_m, pair.num_warps, pair.num_stages)
            outputs = multiply_many(self.x, self.choice, pairs, *weights, (many, many), self.gating)
            combine_pairs(outputs, self.choice, self.down, out)
        elif kernel == "vector":
            multiply_vectors(
                self.x, self.choice, self.gate_up, self.down, out, (vector, vector), None, False, self.gating
            )
        else:
            outputs = multiply_pairs(self.x, self.choice, pairs, *weights, (pair, pair), self.gating)
            combine_pairs(outputs, self.choice, self.down, out)
        return out


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, roundings: int = 6) -> None:
    """Whether results are within some roundings of the values and of their row's size.

    Inner elements are rounded, and of many tokens each expert's output; rows of K inner elements
    with independent roundings are off by about one of the row's size. Weights dequantized to the
    type differ from `expert`'s by none.
    """
    size = expected.square().mean(-1, keepdim=True).sqrt()
    error, allowed = (found.double() - expected).abs(), roundings * ROUNDING[dtype] * (expected.abs() + size)
    assert bool((error <= allowed).all()), f"off by up to {float((error / allowed).max()):.2f} times what is allowed"


def close_beside(found: torch.Tensor, expected: torch.Tensor, unrounded: torch.Tensor) -> None:
    """Whether results are those of rounded inputs, and not of others.

    An inner element between two numbers of 8 bits may become either, since it is rounded to 16 bits
    first: 3 in 100 do, by a sixteenth of themselves each, which makes 2% of a row and up to 3.3%.
    Inputs that are not rounded at all differ by 4.6%.
    """
    found, expected, unrounded = found.double(), expected.double(), unrounded.double()
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 0.06
    assert float((found - expected).norm()) < 0.7 * float((unrounded - expected).norm())


# Sizes that no tile divides: outputs, inputs and pairs.
VECTOR, PAIR = VectorTile(16, 64, 2), PairTile(16, 16, 32, 2, 2)
OUTPUTS_FIRST = PAIR._replace(outputs_first=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["vector", "tile"])
def test_kernels_agree_with_fp64(kernel: Kernel, kind: Kind) -> None:
    larger = (3, 5, 2, 96 if kind in (QuantKind.INT4, "mxfp4") else 72, 32)
    for sizes, pair in (((1, 3, 1, 32, 32), PAIR), (larger, OUTPUTS_FIRST)):
        case = Case(sizes, kind, torch.float32, "cpu")
        with kernels_on("cpu"), poisoned_memory("cpu"):
            close(case.multiplied(kernel, VECTOR, pair), case.expected(), torch.float32)


# Group (0: whole rows), and what else a folder that another tool quantized has.
ARRANGED = [
    (QuantKind.FP8, 128, Arrangement(scale_outputs=8)),
    (QuantKind.FP8, 128, Arrangement(scale_outputs=2)),
    (QuantKind.INT8, 32, Arrangement()),
    (QuantKind.INT8, 32, Arrangement(has_zeros=True)),
    (QuantKind.INT8, 0, Arrangement(has_zeros=True)),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "group", "arrangement"), ARRANGED)
@pytest.mark.parametrize("kernel", ["vector", "tile"])
def test_groups_and_blocks_of_8_bits_agree_with_fp64(
    kernel: Kernel, kind: QuantKind, group: int, arrangement: Arrangement
) -> None:
    # Of inputs in blocks of 128 the last is cut off.
    for sizes, pair in (((1, 3, 1, 160, 32), PAIR), ((3, 5, 2, 160, 32), OUTPUTS_FIRST)):
        case = Case(sizes, kind, torch.float32, "cpu")
        case.arrange(group, arrangement)
        with kernels_on("cpu"), poisoned_memory("cpu"):
            close(case.multiplied(kernel, VECTOR, pair), case.expected(), torch.float32)
            found = mixture(case.x, case.choice, case.gate_up, case.down)
        close(found, case.expected(), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "group", "arrangement"), [
    (QuantKind.FP8, 128, Arrangement(scale_outputs=128)),
    (QuantKind.FP8, 128, Arrangement(scale_outputs=64)),
    (QuantKind.INT8, 32, Arrangement()),
    (QuantKind.INT8, 128, Arrangement(has_zeros=True)),
])  # fmt: skip
@pytest.mark.parametrize("num_tokens", [1, 4, 33, 600, 3000])
def test_groups_and_blocks_of_models_agree_with_their_reference(
    num_tokens: int, kind: QuantKind, group: int, arrangement: Arrangement
) -> None:
    case = Case((num_tokens, 128, 8, 2048, 768), kind, torch.bfloat16, "cuda")
    case.arrange(group, arrangement)
    with kernels_on("cuda"), poisoned_memory("cuda"):
        found = mixture(case.x, case.choice, case.gate_up, case.down)
    operands = (case.x, case.choice, case.gate_up, case.down)
    plain, rounded = mixture_reference(*operands), rounds(num_tokens, case.gate_up, case.down)
    if any(rounded):
        close_beside(found, mixture_reference(*operands, rounded=rounded), plain)
    else:
        # Both sides are rounded, and the worst of millions of numbers counts.
        close(found, plain.double(), torch.bfloat16, roundings=12)


# Weights of INT8 and INT4 take the same kernels as plain ones.
EVERY_KERNEL = [
    None, "mxfp4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (QuantKind.INT8, QuantKind.INT4)),
]  # fmt: skip
# Gates and ups on both sides of the limit.
CLAMPED = Gating(True, 1.702, 0.8)


@pytest.mark.parametrize("kind", EVERY_KERNEL)
@pytest.mark.parametrize("kernel", ["vector", "tile"])
def test_biases_and_clamped_gates_agree_with_fp64(kernel: Kernel, kind: Kind) -> None:
    sizes = (3, 5, 2, 96 if kind in (QuantKind.INT4, "mxfp4") else 72, 32)
    case = Case(sizes, kind, torch.float32, "cpu", gating=CLAMPED, has_biases=True)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        close(case.multiplied(kernel, VECTOR, PAIR), case.expected(), torch.float32)


@pytest.mark.parametrize("kernel", ["vector", "tile"])
def test_gates_of_gelu_agree_with_fp64(kernel: Kernel) -> None:
    case = Case((3, 5, 2, 72, 32), None, torch.float32, "cpu", gating=GELU)
    with kernels_on("cpu"), poisoned_memory("cpu"):
        close(case.multiplied(kernel, VECTOR, PAIR), case.expected(), torch.float32)
    found = mixture_reference(case.x, case.choice, case.gate_up, case.down, GELU)
    close(found, case.expected(), torch.float32)


@pytest.mark.parametrize("end", [0, LARGEST_SCALE])
def test_powers_of_two_may_be_a_token_s_or_a_scale_s(end: int) -> None:
    """Scales of MXFP4 go down to 2^-127 and up to 2, and tokens as far as their type holds them."""
    case = Case((1, 2, 2, 96, 32), "mxfp4", torch.float32, "cpu")
    assert isinstance(case.gate_up.weight, Mxfp4Weight)
    # Of three groups; the tile's fourth has no inputs.
    codes = case.gate_up.weight.scales[:, :3]
    power = int(codes.max() if end else codes.min()) - end
    with kernels_on("cpu"), poisoned_memory("cpu"):
        expected = case.multiplied("vector", VECTOR, PAIR)
        case.x *= 2.0**power
        codes.copy_(codes.to(torch.int32) - power)
        assert torch.equal(case.multiplied("vector", VECTOR, PAIR), expected)


def test_the_reference_of_biases_and_clamped_gates_agrees_with_fp64() -> None:
    case = Case((6, 5, 3, 96, 32), None, torch.float32, "cpu", gating=CLAMPED, has_biases=True)
    found = mixture_reference(case.x, case.choice, case.gate_up, case.down, CLAMPED)
    close(found, case.expected(), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype"), [(None, torch.bfloat16), ("mxfp4", torch.bfloat16), ("mxfp4", torch.float16)]
)
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 200, 1000])
def test_biased_mixtures_of_models_agree_with_their_reference(num_tokens: int, kind: Kind, dtype: torch.dtype) -> None:
    """gpt-oss-20b's experts, as published and dequantized."""
    gating = Gating(True, 1.702, 7.0)
    case = Case((num_tokens, 32, 4, 2880, 2880), kind, dtype, "cuda", gating=gating, has_biases=True)
    with kernels_on("cuda"), poisoned_memory("cuda"):
        found = mixture(case.x, case.choice, case.gate_up, case.down, gating)
        residual = case.x.clone()
        add_mixture(residual, case.norm, EPS, case.choice, case.gate_up, case.down, gating)
    expected = mixture_reference(case.x, case.choice, case.gate_up, case.down, gating)
    close(found, expected.double(), dtype, roundings=9)
    added = case.x.clone()
    add_mixture_reference(added, case.norm, EPS, case.choice, case.gate_up, case.down, gating)
    close(residual, added.double(), dtype, roundings=9)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 33, 200, 600, 3000])
# Qwen3-30B-A3B, a rank's quarter of Mixtral 8x7B, and 60 experts of which 4 compute a token.
@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (8, 2, 4096, 3584), (60, 4, 2048, 1408)])
def test_mixtures_of_models_agree_with_their_reference(
    sizes: tuple[int, int, int, int], num_tokens: int, kind: Kind
) -> None:
    case = Case((num_tokens, *sizes), kind, torch.bfloat16, "cuda", group=128)
    with kernels_on("cuda"), poisoned_memory("cuda"):
        found = mixture(case.x, case.choice, case.gate_up, case.down)
        residual = case.x.clone()
        add_mixture(residual, case.norm, EPS, case.choice, case.gate_up, case.down)
        normed = mixture(rms_norm(case.x, case.norm, EPS), case.choice, case.gate_up, case.down)
    operands = (case.x, case.choice, case.gate_up, case.down)
    plain, rounded = mixture_reference(*operands), rounds(num_tokens, case.gate_up, case.down)
    if any(rounded):
        close_beside(found, mixture_reference(*operands, rounded=rounded), plain)
        assert torch.equal(residual, case.x + normed)
        return
    # Both sides are rounded, each by itself: of six million elements some differ by 7 roundings.
    close(found, plain.double(), torch.bfloat16, roundings=9)
    added = case.x.clone()
    add_mixture_reference(added, case.norm, EPS, case.choice, case.gate_up, case.down)
    close(residual, added.double(), torch.bfloat16, roundings=9)


@pytest.mark.gpu
def test_a_captured_mixture_follows_its_routing() -> None:
    case = Case((64, 16, 2, 256, 128), None, torch.bfloat16, "cuda")
    experts, weights = (column.clone() for column in case.choice)
    mixture(case.x, Choice(experts, weights), case.gate_up, case.down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mixture(case.x, Choice(experts, weights), case.gate_up, case.down)
    # As random weights route, all to two experts, and each to others than before.
    for routing in (case.choice.experts, torch.tensor([3, 7]).expand(64, 2), 15 - case.choice.experts):
        experts.copy_(routing)
        graph.replay()
        expected = mixture_reference(case.x, Choice(experts, weights), case.gate_up, case.down)
        close(found, expected.double(), torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operation_takes_the_kernels_and_equals_its_reference(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = Case((2, 4, 2, 40, 24), None, dtype, device)
    with kernels_on(device):
        assert fuses(1, 2, case.gate_up)
        found, residual = mixture(case.x, case.choice, case.gate_up, case.down), case.x.clone()
        add_mixture(residual, case.norm, EPS, case.choice, case.gate_up, case.down)
        assert mixture(case.x[:0], Choice(*(part[:0] for part in case.choice)), case.gate_up, case.down).shape == (
            0,
            40,
        )
    close(found, case.expected(), dtype)
    close(residual, case.x.double() + case.expected(normed=True), dtype)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        (None, "cpu"),
        (QuantKind.FP8, "cpu"),
        *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in (None, "mxfp4", QuantKind.FP8)),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 30])
def test_parts_of_a_mixture_add_up_to_its_bits(num_tokens: int, kind: Kind, device: str) -> None:
    sizes, dtype = (max(1, num_tokens), 5, 2, 128, 128), torch.bfloat16 if device == "cuda" else torch.float32
    case = Case(sizes, kind, dtype, device)
    given = (case.x[:num_tokens], Choice(*(part[:num_tokens] for part in case.choice)), case.gate_up, case.down)
    with kernels_on(device), poisoned_memory(device):
        parts, whole = mixture_in_parts(*given), mixture(*given)
    # One token's experts are added up as they are multiplied.
    assert parts.shape == ((num_tokens, 2, 128) if num_tokens > 4 else (num_tokens, 128))
    assert torch.equal(summed(parts), whole)


def test_the_reference_agrees_with_fp64() -> None:
    for kind in KINDS:
        case = Case((6, 5, 3, 96, 32), kind, torch.float32, "cpu")
        close(mixture_reference(case.x, case.choice, case.gate_up, case.down), case.expected(), torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("kernel", ["vector", "tile"])
def test_a_token_does_not_depend_on_its_neighbours(kernel: Kernel) -> None:
    case = Case((5, 3, 2, 40, 24), None, torch.float32, "cpu")
    with kernels_on("cpu"):
        together = case.multiplied(kernel, VECTOR, PAIR)
        case.x[:2], case.x[4] = float("nan"), float("inf")
        case.choice.weights[0] = float("nan")
        apart = case.multiplied(kernel, VECTOR, PAIR)
    assert torch.equal(together[2:4], apart[2:4])
    assert apart[0].isnan().all()


# Of two ranks one has three experts and the other two, and of all tokens some have none of them.
# A pair's biases are those of the rank that has its expert. Inner elements of experts that are
# elsewhere are not written, and here are no numbers.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("kind", EVERY_KERNEL)
@pytest.mark.parametrize("kernel", ["vector", "tile"])
def test_what_ranks_with_whole_experts_compute_adds_up(kernel: Kernel, kind: Kind) -> None:
    sizes = (5, 5, 2, 96 if kind in (QuantKind.INT4, "mxfp4") else 40, 32)
    total = torch.zeros(5, sizes[3])
    for experts in (range(3), range(3, 5)):
        case = Case(sizes, kind, torch.float32, "cpu", gating=CLAMPED, has_biases=True)
        expected = case.expected()
        case.choice.experts[0] = torch.tensor([4, 3])
        case.keep(experts)
        with kernels_on("cpu"), poisoned_memory("cpu"):
            part = case.multiplied(kernel, VECTOR, PAIR)
            assert torch.equal(part[0] == 0, torch.full_like(part[0], 3 not in experts, dtype=torch.bool))
        found = mixture_reference(case.x, case.choice, case.gate_up, case.down, CLAMPED)
        close(found, part.double(), torch.float32)
        total += part
    # Token 0 was sent elsewhere than the expectation's.
    close(total[1:], expected[1:], torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_operation_takes_the_kernels_with_a_rank_s_experts(num_tokens: int) -> None:
    case = Case((num_tokens, 5, 2, 40, 32), None, torch.float32, "cpu")
    case.keep(range(3, 5))
    expected = mixture_reference(case.x, case.choice, case.gate_up, case.down).double()
    with kernels_on("cpu"), poisoned_memory("cpu"):
        close(mixture(case.x, case.choice, case.gate_up, case.down), expected, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 33, 600])
def test_a_rank_s_experts_of_models_agree_with_their_reference(num_tokens: int) -> None:
    case = Case((num_tokens, 128, 8, 2048, 768), None, torch.bfloat16, "cuda")
    case.keep(range(64, 128))
    with kernels_on("cuda"), poisoned_memory("cuda"):
        found = mixture(case.x, case.choice, case.gate_up, case.down)
    expected = mixture_reference(case.x, case.choice, case.gate_up, case.down)
    # Both sides are rounded, and the worst of millions of numbers counts.
    close(found, expected.double(), torch.bfloat16, roundings=12)


@pytest.mark.parametrize(("num_experts", "per_token", "most"), [(32, 4, 6), (128, 4, 24), (128, 8, 12), (8, 8, 1)])
def test_tokens_in_mxfp4_are_by_themselves_until_they_meet_the_same_experts(
    num_experts: int, per_token: int, most: int
) -> None:
    weight = allocate_mxfp4(num_experts * 2, 32, torch.bfloat16, torch.device("cpu"))
    with kernels_on("cpu"):
        fused = [fuses(count, per_token, ExpertWeights(weight, num_experts)) for count in (most, most + 1)]
    assert fused == [True, False]


@pytest.mark.parametrize("kind", [None, QuantKind.INT4, QuantKind.FP8, QuantKind.INT8])
def test_two_tokens_share_tiles(kind: QuantKind | None) -> None:
    case = Case((1, 3, 1, 32, 32), kind, torch.bfloat16, "cpu")
    with kernels_on("cpu"):
        assert [fuses(count, 1, case.gate_up) for count in (0, 1, 2)] == [False, True, False]


def test_few_classes_of_tiles_serve_all_steps_and_sizes_that_warm_up_runs_meet_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warm-up computes every power of two and one more, so every class has one of them."""
    monkeypatch.setattr(launch_rules, "takes_grouped_gemm", lambda *about: True)
    monkeypatch.setattr(launch_rules, "takes_mxfp4_gemm", lambda *about: True)
    rules = (
        tile_rule,
        rounded_tile_rule,
        lambda pairs, weights, gated: pair_rule(pairs, weights, gated, False),
        lambda pairs, weights, gated: pair_rule(pairs, weights, gated, True),
    )
    for rule, num_experts, per_token in (
        *((rule, *sizes) for rule in rules for sizes in ((128, 8), (8, 2), (60, 4), (512, 10), (256, 8))),
        *((many_rule, *sizes) for sizes in ((32, 4), (128, 4))),
    ):
        weights = ExpertWeights(torch.empty(num_experts * 2, 16), num_experts)
        for gated in (True, False):
            classes = {count: rule(count * per_token, weights, gated) for count in range(1, 9000)}
            powers = [2**power for power in range(4, 13)]
            met = {classes[count] for count in (*range(1, 10), *powers, *(power + 1 for power in powers), 8192)}
            assert met == set(classes.values()) and len(met) <= 6


def test_rows_beyond_places_of_32_bits_are_left_to_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_rules, "takes_grouped_gemm", lambda *about: True)
    weights = ExpertWeights(torch.empty(2 * 2, 4096), 2)
    for gated in (True, False):
        tiles = [pair_rule(num_pairs, weights, gated, is_rounded=False) for num_pairs in ((1 << 19) - 1, 1 << 19)]
        assert [type(tile) for tile in tiles] == [GroupedTile, PairTile]
