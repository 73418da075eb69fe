"""Cases of mixtures of experts: Qwen3-30B-A3B and a rank's quarter of Mixtral 8x7B, in bf16.

And Qwen3-30B-A3B in few bits, of which any are a valid weight once its scales are, and gpt-oss-20b
as published: MXFP4, biases, clamped gates.

Bytes are those of the experts that the tokens chose, routed by random logits; flops those of the
pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.gating import Gating
from headrace_kernels.experts.mixture import mixture
from headrace_kernels.experts.routing import choose_experts, sort_pairs
from headrace_kernels.weight_formats import block_weight, quantized_weight
from headrace_kernels.weight_formats.block_weight import BlockKind, BlockWeight
from headrace_kernels.weight_formats.mxfp4 import allocate_mxfp4, quantize_mxfp4_rows
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight, QuantKind

Case = tuple[Callable[[], object], int, int]


class Shape(NamedTuple):
    """Sizes of one layer's mixture."""

    num_experts: int
    per_token: int
    hidden: int
    inner: int


GPT_OSS = Shape(32, 4, 2880, 2880)
SHAPES = {"qwen3_30b_a3b": Shape(128, 8, 2048, 768), "mixtral_tp4": Shape(8, 2, 4096, 3584)}
_TOKENS = (1, 2, 4, 8, 32, 128, 256, 1024, 8192)
# Inputs that share a scale in INT4, as most folders have it.
_GROUP = 128
# The largest byte of random FP8 that is a number.
_LARGEST_BYTE = 126
_KINDS = (QuantKind.FP8, QuantKind.INT8, QuantKind.INT4, BlockKind.Q4_K, BlockKind.Q6_K)


def _randn(*size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)


def _mixture_case(shape: Shape, num_tokens: int) -> Case:
    x = _randn(num_tokens, shape.hidden, seed=1)
    gate_up = _randn(shape.num_experts * 2 * shape.inner, shape.hidden, seed=2).mul_(0.02)
    down = _randn(shape.num_experts * shape.hidden, shape.inner, seed=3).mul_(0.02)
    choice = choose_experts(_randn(num_tokens, shape.num_experts, seed=4), shape.per_token, True)
    weights = ExpertWeights(gate_up, shape.num_experts), ExpertWeights(down, shape.num_experts)
    expert_bytes = (gate_up.nbytes + down.nbytes) // shape.num_experts
    moved = len(torch.unique(choice.experts)) * expert_bytes + 2 * x.nbytes
    flops = 2 * num_tokens * shape.per_token * 3 * shape.hidden * shape.inner
    return lambda: mixture(x, choice, *weights), moved, flops


def _random_bits(kind: QuantKind | BlockKind, num_experts: int, outputs: int, inputs: int) -> ExpertWeights:
    """Random numbers under scales of ordinary size."""
    where, rows = (torch.bfloat16, torch.device("cuda")), num_experts * outputs
    weight: BlockWeight | QuantizedWeight
    if isinstance(kind, BlockKind):
        weight = block_weight.allocate(kind, rows, inputs, *where)
        parts: list[torch.Tensor | None] = list(weight.parts)
    else:
        weight = quantized_weight.allocate(kind, rows, inputs, _GROUP if kind is QuantKind.INT4 else inputs, *where)
        parts = [weight.packed, weight.scales, weight.zeros]
    for part in parts:
        if part is not None and part.is_floating_point() and part.itemsize > 1:
            part.uniform_(0.001, 0.002)
        elif part is not None:
            part.view(torch.uint8).random_(0, _LARGEST_BYTE + 1)
    return ExpertWeights(weight, num_experts)


def _few_bits_case(kind: QuantKind | BlockKind, shape: Shape, num_tokens: int) -> Case:
    gate_up = _random_bits(kind, shape.num_experts, 2 * shape.inner, shape.hidden)
    down = _random_bits(kind, shape.num_experts, shape.hidden, shape.inner)
    x = _randn(num_tokens, shape.hidden, seed=1)
    choice = choose_experts(_randn(num_tokens, shape.num_experts, seed=4), shape.per_token, True)
    weights = gate_up.weight, down.weight
    num_bytes = sum(each.num_bytes for each in weights if isinstance(each, (BlockWeight, QuantizedWeight)))
    moved = len(torch.unique(choice.experts)) * num_bytes // shape.num_experts + 2 * x.nbytes
    flops = 2 * num_tokens * shape.per_token * 3 * shape.hidden * shape.inner
    return lambda: mixture(x, choice, gate_up, down), moved, flops


def _mxfp4(shape: Shape, outputs: int, inputs: int, seed: int) -> ExpertWeights:
    rows = shape.num_experts * outputs
    weight = allocate_mxfp4(rows, inputs, torch.bfloat16, torch.device("cuda"))
    step = rows // shape.num_experts
    for first in range(0, rows, step):
        quantize_mxfp4_rows(_randn(step, inputs, seed=seed + first).mul_(0.02), weight, first)
    return ExpertWeights(weight, shape.num_experts, _randn(rows, seed=seed).mul_(0.1))


def _mxfp4_case(num_tokens: int) -> Case:
    shape = GPT_OSS
    weights = _mxfp4(shape, 2 * shape.inner, shape.hidden, 2), _mxfp4(shape, shape.hidden, shape.inner, 3)
    x = _randn(num_tokens, shape.hidden, seed=1)
    choice = choose_experts(_randn(num_tokens, shape.num_experts, seed=4), shape.per_token, True)
    # Four bits and an eighth of a byte's scale, without what fills the last tile.
    expert_bytes = 3 * shape.hidden * shape.inner * 17 // 32
    moved = len(torch.unique(choice.experts)) * expert_bytes + 2 * x.nbytes
    flops = 2 * num_tokens * shape.per_token * 3 * shape.hidden * shape.inner
    return lambda: mixture(x, choice, *weights, Gating(True, 1.702, 7.0)), moved, flops


def _routing_case(shape: Shape, num_tokens: int) -> Case:
    logits = _randn(num_tokens, shape.num_experts, seed=4)

    def route() -> object:
        return sort_pairs(choose_experts(logits, shape.per_token, True).experts, shape.num_experts)

    return route, logits.nbytes + num_tokens * shape.per_token * 12, 0


def mixtures() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The experts' MLPs and their sum, by the launch rules, routing apart."""
    for name, shape in SHAPES.items():
        for num_tokens in _TOKENS:
            yield f"{name} {num_tokens}", functools.partial(_mixture_case, shape, num_tokens)


def few_bits_mixtures() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Mixtures of Qwen3-30B-A3B in few bits, by the launch rules, routing apart."""
    for kind in _KINDS:
        for num_tokens in _TOKENS:
            case = functools.partial(_few_bits_case, kind, SHAPES["qwen3_30b_a3b"], num_tokens)
            yield f"qwen3_30b_a3b {kind.value} {num_tokens}", case


def mxfp4_mixtures() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Mixtures of gpt-oss-20b in MXFP4, by the launch rules, routing apart."""
    for num_tokens in _TOKENS:
        yield f"gpt_oss_20b {num_tokens}", functools.partial(_mxfp4_case, num_tokens)


def routings() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The choice of experts, and the sort of pairs."""
    for name, shape in SHAPES.items():
        for num_tokens in _TOKENS:
            yield f"{name} {num_tokens}", functools.partial(_routing_case, shape, num_tokens)
