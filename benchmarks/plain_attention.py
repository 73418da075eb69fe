"""Attention that writes its scores to memory, beside our kernel that does not, on one card.

For `bench_ladder`: one layer of an 8B Llama's heads over fresh prompts, each way's time and the
memory it takes beyond queries, keys and values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, prefill_case

_LENGTHS = (2048, 8192)
_REPEATS = 5
_MIB = 1 << 20


def materialized_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in three operations, each of which reads and writes all scores.

    Args:
        query: [num_heads, tokens, head_dim].
        key: [num_kv_heads, tokens, head_dim].
        value: Like the keys.

    Returns:
        [num_heads, tokens, head_dim], of the queries' dtype; the softmax is in fp32.
    """
    heads, tokens, size = query.shape
    grouped = query.view(len(key), -1, tokens, size)
    scores = (grouped @ key[:, None].transpose(-1, -2)) * size**-0.5
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill_(later, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    attended: Tensor = weights @ value[:, None]
    return attended.view(heads, tokens, size)


def compared_attention() -> list[dict[str, Any]]:
    """Milliseconds and MiB of both ways for prompts of 2,048 and 8,192 tokens in bf16."""
    return [_compared(tokens) for tokens in _LENGTHS]


def _compared(tokens: int) -> dict[str, Any]:
    assert SCALE == HEAD_DIM**-0.5
    sizes = [(heads, tokens, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    query, key, value = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    plain_ms, plain_bytes = _taken(lambda: materialized_attention(query, key, value))
    fused, _, _ = prefill_case(1, tokens, gathers=False)
    fused_ms, fused_bytes = _taken(fused)
    return {
        "tokens": tokens,
        "materialized_ms": round(plain_ms, 4),
        "fused_ms": round(fused_ms, 4),
        "gain": round(plain_ms / fused_ms, 2),
        "materialized_mib": round(plain_bytes / _MIB, 1),
        "fused_mib": round(fused_bytes / _MIB, 1),
    }


def _taken(launch: Callable[[], object]) -> tuple[float, int]:
    """Median milliseconds of a launch, and the most bytes that it held beyond what was there."""
    launch()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch()
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() - before
    return statistics.median(_milliseconds(launch) for _ in range(_REPEATS)), held


def _milliseconds(launch: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
