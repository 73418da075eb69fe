"""What a configuration leaves to the device, decided before any process has loaded torch.

Owns the defaults that differ between a CPU and a GPU, and the guess which of the two a
configuration means. `EngineConfig` asks here while it is made, so that the engine, which plans
steps before any worker is ready, and the workers, which allocate for them, read the same numbers in
the same object. Whether the GPU can really be used is seen by the worker; where it can't and the
device is "auto", the CPU gets the larger numbers, which costs memory and nothing else.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

# Exists wherever an NVIDIA driver runs, in containers too.
_DRIVER = pathlib.Path("/dev/nvidiactl")
_NO_GPU = ("", "-1")

_ON_CPU = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
_ON_GPU = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}
# Tokens of the steps with prompts that are captured: few longer ones are bound by the launches of
# their kernels.
_MIXED_GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768)
# Those that are captured where they are, up to what is nearly the whole default budget. A fifth of
# a step is padding at most. They are few because one that holds sums of NCCL takes up to a second
# to capture, by what starts of 80 layers took with and without (four H200s, 2026-11-22).
_LONG_GRAPH_TOKENS = (896, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 2560, 3072, 3840, 4608, 5632, 6656, 7936)


def expects_gpu(device: str) -> bool:
    """Whether a configured device means a GPU on this machine.

    The device is "auto", "cpu", "cuda" or "cuda:<index>".
    """
    if device != "auto":
        return device.startswith("cuda")
    return _DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in _NO_GPU


def step_sizes(device: str) -> Mapping[str, int]:
    """Rows of the batch and token budget of a step, by their names in the configuration."""
    return _ON_GPU if expects_gpu(device) else _ON_CPU


def default_graph_sizes(max_num_seqs: int, has_experts: bool = False) -> tuple[int, ...]:
    """Batch sizes that decode steps are captured for.

    Every capture costs start-up time and memory, so that they are few (28 for 512 rows). Up to 64
    rows a step's time is that of the weights, whatever is padded; above, at most a fifth of a batch
    is padding. Padding reads experts of its own, beside which those of few rows are few: a mixture
    has graphs of all of its first sizes.

    Args:
        max_num_seqs: The largest batch there is.
        has_experts: Whether the model is a mixture of experts.
    """
    few = (*range(1, 9), 10, 12, 14) if has_experts else (1, 2, 4, 8)
    sizes = [*few, *range(16, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    return tuple(size for size in sizes if size < max_num_seqs) + (max_num_seqs,)


def mixed_graph_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Tokens of the steps with prompts that are captured where graphs are on, smallest first.

    The worker keeps those that pay, and says which.
    """
    return tuple(size for size in _MIXED_GRAPH_TOKENS if size <= max_num_batched_tokens)


def long_graph_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Token counts of longer mixed steps that may be worth a graph, ascending.

    The whole token budget is among them if it is larger than the mixed steps that are always
    captured, and no larger than all of these. The worker finds out which sizes are worth a graph.
    """
    longest = min(max_num_batched_tokens, _LONG_GRAPH_TOKENS[-1])
    if longest <= _MIXED_GRAPH_TOKENS[-1]:
        return ()
    return (*(size for size in _LONG_GRAPH_TOKENS if size < longest), longest)


def checked_graph_sizes(sizes: str, max_num_seqs: int, has_experts: bool = False) -> tuple[int, ...]:
    """Reads the batch sizes that a setting means; "off" means none.

    Args:
        sizes: "auto", "off", or numbers with commas between.
        max_num_seqs: The largest batch there is.
        has_experts: Whether the model is a mixture of experts.

    Raises:
        ValueError: It is none of these, or a number is out of range or out of order. The message
            names the nearest value that works.
    """
    if sizes == "auto":
        return default_graph_sizes(max_num_seqs, has_experts)
    if sizes == "off":
        return ()
    try:
        wanted = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ValueError("graph_sizes should be auto, off, or batch sizes with commas between, as in 1,2,4,8") from None
    working = sorted({min(max(size, 1), max_num_seqs) for size in wanted})
    if wanted != working:
        nearest = ",".join(map(str, working))
        raise ValueError(
            f"graph_sizes should ascend from 1 or more to max_num_seqs ({max_num_seqs}) or less; the nearest that "
            f"works is {nearest}"
        )
    return tuple(wanted)
