"""Cases of mixtures of experts: Qwen3-30B-A3B and a rank's quarter of Mixtral 8x7B, in bf16.

Bytes are those of the experts that the tokens chose, routed by random logits; flops those of the
pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from headrace_kernels.experts.expert_weights import ExpertWeights
from headrace_kernels.experts.mixture import mixture
from headrace_kernels.experts.routing import choose_experts, sort_pairs

Case = tuple[Callable[[], object], int, int]


class Shape(NamedTuple):
    """Sizes of one layer's mixture."""

    num_experts: int
    per_token: int
    hidden: int
    inner: int


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


def routings() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The choice of experts, and the sort of pairs."""
    for name, shape in SHAPES.items():
        for num_tokens in _TOKENS:
            yield f"{name} {num_tokens}", functools.partial(_routing_case, shape, num_tokens)
