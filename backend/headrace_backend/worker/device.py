"""Where and how the worker computes: device, data type, threads.

Owns the meaning of "auto" in the configuration.
"""

from __future__ import annotations

import ctypes
import os

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.worker.errors import StartRefused
from headrace_model_folder import ModelConfig

# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 64 << 20
_MOST_KEPT_BYTES = 512 << 20

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def choose_device(name: str) -> torch.device:
    """The device that a configuration means: "auto", "cpu", "cuda" or "cuda:<index>".

    Raises:
        StartRefused: There is no such device, or it is of no kind that we can use.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartRefused(f"device is {name!r}; it must be auto, cpu, cuda or cuda:<index>") from None
    if device.type == "cuda":
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise StartRefused(f"device is {name!r}; torch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise StartRefused(f"device is {name!r}; it must be auto, cpu, cuda or cuda:<index>")
    return device


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Type of weights, activations and cache. "auto" is the model's own, but fp32 on a CPU, where it is the fastest and the most exact."""
    if name == "auto":
        name = "fp32" if device.type == "cpu" else model.torch_dtype
    return _DTYPES[name]


def prepare_torch(config: EngineConfig, device: torch.device) -> None:
    """Sets threads for good. To be called once, before anything is computed."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.worker_threads or max(1, cores - 1))
    torch.set_num_interop_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # cuDNN's attention builds a plan for each new context length: 40 ms for every token of a growing row.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Has glibc's allocator keep what tensors free, for the next step's tensors.

    By default every tensor above 128 KiB to 32 MiB is mapped and unmapped, and touching its fresh pages costs more than computing it: penalties for 64 rows
    and 8,192 tokens took 10 to 14 ms instead of 6 to 7. Caches, larger than this, are still mapped by themselves. Other C libraries have no such knob.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
