"""Where and how the worker computes: device, data type, threads.

Owns the meaning of "auto" in the configuration.
"""

from __future__ import annotations

import os

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.worker.errors import StartRefused
from headrace_model_folder import ModelConfig

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
