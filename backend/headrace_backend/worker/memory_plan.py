"""What the worker will allocate, worked out before it allocates anything.

Owns the arithmetic: weights, activations, cache. Pure functions on numbers; where free memory comes from is `free_memory_bytes`. The cache gets what is left or
what is configured, and a plan that does not fit is refused with its numbers.
"""

from __future__ import annotations

import dataclasses
import pathlib

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.penalty_slots import BYTES_PER_TOKEN
from headrace_backend.worker_messages import MemoryPlan
from headrace_model_folder import ModelConfig

_GIB = 1 << 30
# On a CPU other processes need memory too.
_CPU_CACHE_SHARE = 0.25
_CPU_CACHE_LIMIT = 4 * _GIB
# On a GPU kept for the allocator's fragments and libraries' workspaces.
_GPU_RESERVE_SHARE = 0.05
_CGROUP = pathlib.Path("/sys/fs/cgroup")
# The sampler holds about this many float32 copies of the logits at once: logits, log-softmax, scaled, noise, two int64 temporaries.
_LOGIT_COPIES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that the model and the configuration call for."""

    weights: int
    activations: int
    kv_block: int


def model_memory(model: ModelConfig, config: EngineConfig, parameter_count: int, dtype: torch.dtype) -> ModelMemory:
    """Bytes of weights, of a step's activations at the token budget, and of one block of the cache over all layers."""
    size = dtype.itemsize
    tokens = config.max_num_batched_tokens
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    # Residual and normed stream, queries, keys and values with their rotated copies, gate-up and its product.
    widths = 4 * model.hidden_size + 3 * heads + 3 * model.intermediate_size
    sampled = config.max_num_seqs * model.vocab_size * (4 * _LOGIT_COPIES + BYTES_PER_TOKEN)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    return ModelMemory(parameter_count * size, tokens * widths * size + sampled, config.block_size * per_token)


def plan_memory(
    config: EngineConfig, memory: ModelMemory, max_model_len: int, device: torch.device, free_bytes: int
) -> MemoryPlan:
    """Divides the free memory.

    Args:
        config: The engine's configuration.
        memory: What the model needs.
        max_model_len: Longest sequence, in tokens. The cache holds at least one of that length, unless its size is configured.
        device: Where the memory is.
        free_bytes: What is free there now.

    Raises:
        StartRefused: It does not fit. The message holds the arithmetic.
    """
    taken = memory.weights + memory.activations
    num_blocks = config.num_blocks or _cache_bytes(config, free_bytes, taken, device) // memory.kv_block
    needed_blocks = 1 if config.num_blocks or config.kv_cache_bytes else -(-max_model_len // config.block_size)
    cache_bytes = max(num_blocks, needed_blocks) * memory.kv_block
    if num_blocks < needed_blocks or taken + cache_bytes > free_bytes:
        raise StartRefused(
            f"weights {_mib(memory.weights)} + activations {_mib(memory.activations)} + KV cache {_mib(cache_bytes)}"
            f" ({max(num_blocks, needed_blocks)} blocks of {config.block_size} tokens, {memory.kv_block} bytes each) = {_mib(taken + cache_bytes)};"
            f" {_mib(free_bytes)} are free on {device}{_cache_rule(config, device)}"
        )
    return MemoryPlan(
        device=str(device),
        total_bytes=free_bytes,
        weight_bytes=memory.weights,
        activation_bytes=memory.activations,
        graph_bytes=0,
        kv_cache_bytes=cache_bytes,
        kv_block_bytes=memory.kv_block,
        num_blocks=num_blocks,
        block_size=config.block_size,
    )


def _cache_bytes(config: EngineConfig, free_bytes: int, taken: int, device: torch.device) -> int:
    if config.kv_cache_bytes:
        return config.kv_cache_bytes
    if device.type == "cpu":
        return min(int(free_bytes * _CPU_CACHE_SHARE), _CPU_CACHE_LIMIT)
    return max(0, int(free_bytes * (1 - _GPU_RESERVE_SHARE)) - taken)


def _cache_rule(config: EngineConfig, device: torch.device) -> str:
    """How the cache's size came about, for the message of a refusal."""
    if config.num_blocks:
        return f", num_blocks is {config.num_blocks}"
    if config.kv_cache_bytes:
        return f", kv_cache_bytes is {config.kv_cache_bytes}"
    if device.type == "cpu":
        return ", of which the cache gets a quarter, at most 4 GiB, and must hold one sequence of max_model_len"
    return f", of which {_GPU_RESERVE_SHARE:.0%} stay free, and the cache must hold one sequence of max_model_len"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can be allocated on the device now. On a CPU also bounded by what the control group allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_free_bytes(), _control_group_free_bytes())


def _machine_free_bytes() -> int:
    """What the kernel would give without swapping."""
    lines = (line.split() for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    kibibytes = {name: value for name, value, *_ in lines}
    return int(kibibytes["MemAvailable:"]) * 1024


def _control_group_free_bytes() -> int:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    if limit == "max":
        return 1 << 62
    # Page cache that nobody used lately is given back before anything is killed.
    return max(0, int(limit) - current + int(statistics.get("inactive_file", 0)))
