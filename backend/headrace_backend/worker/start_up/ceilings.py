"""Measures the device's highest rates before anything lies on it: bytes and products per second.

Owns the two measurements and their bounds in time and memory: a GPU takes below 0.3 s, a CPU below
0.2 s and 70 MiB. Steps are shown as shares of these. They are a start-up's quick look:
`benchmarks.measure_ceilings` takes its time, and where others use the device at this moment they
come out low. What can't be measured (no memory left) is 0, and nothing else depends on it.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_GPU_COPY_BYTES = 512 << 20
_CPU_COPY_BYTES = 32 << 20
# Rows, columns and depth of the product. Rows are many, so that it is bound by arithmetic.
_GPU_PRODUCT = (4096, 8192, 4096)
_CPU_PRODUCT = (256, 1024, 1024)
_GPU_REPEATS = 8
# A CPU's share of time, per measurement.
_CPU_LIMIT_S = 0.02
_CPU_MIN_REPEATS, _CPU_MAX_REPEATS = 2, 10


class Rates(NamedTuple):
    """Highest rates of one device; 0: not measured."""

    # Read and written.
    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures, and gives all memory back.

    Args:
        device: Device with nothing of ours on it yet.
        dtype: Type of the products.
    """
    seconds = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    try:
        return Rates(_copy_bytes_per_s(device, seconds), _matmul_flops_per_s(device, dtype, seconds))
    except RuntimeError:
        # Other processes have the memory; the plan says so in its own words.
        return Rates(0.0, 0.0)
    finally:
        if device.type == "cuda":
            # Or the product's workspace would count as weights.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _copy_bytes_per_s(device: torch.device, seconds: Callable[[Callable[[], object]], float]) -> float:
    num_bytes = _GPU_COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    source, target = _room(num_bytes, device).fill_(0.5), _room(num_bytes, device)
    return 2 * num_bytes / seconds(lambda: target.copy_(source))


def _room(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory, as float32, that nobody keeps once the tensor is gone.

    A CPU's allocator would (`device.prepare_torch`).
    """
    if device.type == "cpu":
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.float32)
    return torch.empty(num_bytes // 4, device=device)


def _matmul_flops_per_s(
    device: torch.device, dtype: torch.dtype, seconds: Callable[[Callable[[], object]], float]
) -> float:
    rows, columns, depth = _GPU_PRODUCT if device.type == "cuda" else _CPU_PRODUCT
    # Gaussian: a product of zeros takes less power, and runs faster.
    random = torch.Generator(device).manual_seed(0)
    entry = torch.randn(rows, depth, device=device, generator=random).mul_(0.02).to(dtype)
    weight = torch.randn(columns, depth, device=device, generator=random).mul_(0.02).to(dtype)
    product = torch.empty(rows, columns, device=device, dtype=dtype)
    return 2 * rows * columns * depth / seconds(lambda: torch.mm(entry, weight.t(), out=product))


def _cpu_seconds(run: Callable[[], object]) -> float:
    """The fastest of a few, after one that touches everything for the first time."""
    run()
    times_s: list[float] = []
    while len(times_s) < _CPU_MIN_REPEATS or (sum(times_s) < _CPU_LIMIT_S and len(times_s) < _CPU_MAX_REPEATS):
        began_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)


def _gpu_seconds(run: Callable[[], object]) -> float:
    """The fastest of a few, after two; by the device's own clock."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_GPU_REPEATS + 1)]  # type: ignore[no-untyped-call]
    run()
    run()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    events[-1].synchronize()
    return min(float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(events)) / 1e3
