"""Cases of mixtures of experts: Qwen3-30B-A3B and a rank's quarter of Mixtral 8x7B, in bf16.

And gpt-oss-20b as published: MXFP4, biases, clamped gates.

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
from headrace_kernels.weight_formats.mxfp4 import allocate_mxfp4, quantize_mxfp4_rows

Case = tuple[Callable[[], object], int, int]


class Shape(NamedTuple):
    """Sizes of one layer's mixture."""

    num_experts: int
    per_token: int
    hidden: int
    inner: int


GPT_OSS = Shape(32, 4, 2880, 2880)
SHAPES = {"qwen3_30b_a3b": Shape(128, 8, 2048, 768), "mixtral_tp4": Shape(8, 2, 4096, 3584)}
_TOKENS = (1, 4, 8, 32, 128, 256, 1024, 8192)


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


def mxfp4_mixtures() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Mixtures of gpt-oss-20b in MXFP4, by the launch rules, routing apart."""
    for num_tokens in _TOKENS:
        yield f"gpt_oss_20b {num_tokens}", functools.partial(_mxfp4_case, num_tokens)


def routings() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The choice of experts, and the sort of pairs."""
    for name, shape in SHAPES.items():
        for num_tokens in _TOKENS:
            yield f"{name} {num_tokens}", functools.partial(_routing_case, shape, num_tokens)
