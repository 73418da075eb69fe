"""Which devices and lengths can be: what of them can be refused before torch is loaded.

Owns the rules and their words; supervisor, backend and worker all ask here. What only torch or a
driver can say (that a card is too old, or that torch shows fewer of them) is the worker's.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable

from headrace_backend.config import EngineConfig
from headrace_model_folder import ModelConfig

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
# One of these exists wherever a GPU of NVIDIA can be used: a driver of Linux, one of Windows under
# WSL 2, or a board that has its GPU on the chip.
_DRIVERS = tuple(map(pathlib.Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")))
_CPU_WORKS = "device cpu works"


def unsuitable_device(device: str, exists: Callable[[pathlib.Path], bool] = pathlib.Path.exists) -> str | None:
    """Explains why there is no such device on this machine; returns None if there may be.

    Args:
        device: Device as it is configured, of an engine or of a host's ranks.
        exists: Whether there is a file.
    """
    asked = f"device is {device!r}"
    if not _DEVICE.fullmatch(device):
        return f"{asked}; it must be auto, cpu, cuda or cuda:<index>"
    if not device.startswith("cuda"):
        return None
    if not any(map(exists, _DRIVERS)):
        return f"{asked}: this machine has no NVIDIA driver; {_CPU_WORKS}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"{asked}: CUDA_VISIBLE_DEVICES hides every GPU; {_CPU_WORKS}"
    return None


def too_long(config: EngineConfig, model: ModelConfig) -> str | None:
    """Explains why sequences can't be as long as configured; returns None if they can."""
    context = model.max_position_embeddings
    if config.max_model_len <= context:
        return None
    return f"max_model_len is {config.max_model_len}; the model's context has {context} tokens"
