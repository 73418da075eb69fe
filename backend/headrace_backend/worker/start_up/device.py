"""Chooses where and how the worker computes: device, data type, threads.

Owns the meaning of "auto" in the configuration, and one clear line where a GPU is not what was
asked for: refused if a GPU was asked for by name, reported and passed over for the CPU if not.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from typing import NamedTuple

import torch

from headrace_backend.cards import Card, unmeasured, why_too_old
from headrace_backend.config import EngineConfig
from headrace_backend.tp_rules import fewer_ranks
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

_DRIVER_VERSION = pathlib.Path("/sys/module/nvidia/version")
_CPU_PATH = "device cpu works"


class NoCuda(NamedTuple):
    """Why torch has no GPU at all."""

    # CUDA version that torch was built for; None: for CPUs only.
    built_for: str | None
    # Version of the kernel driver; empty: there is none.
    driver: str
    # What CUDA said when it was started.
    error: str


def choose_device(name: str) -> tuple[torch.device, str | None]:
    """The device that a configuration means: "auto", "cpu", "cuda" or "cuda:<index>".

    Returns:
        The device, and one line for the operator if it is not all that could be expected.

    Raises:
        StartRefused: There is no such device, or it is of no kind that we can use.
    """
    if name == "auto":
        return _best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise StartRefused(f"device is {name!r}; it must be auto, cpu, cuda or cuda:<index>")
    if device.type == "cpu":
        return device, None
    if (reason := why_no_cuda()) is not None:
        raise StartRefused(f"device is {name!r}: {reason}; {_CPU_PATH}")
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise StartRefused(
            f"device is {name!r}; torch sees cuda:0 to cuda:{last}"
            if last
            else f"device is {name!r}; torch sees only cuda:0"
        )
    card = _card(device)
    if (reason := why_too_old(card)) is not None:
        raise StartRefused(f"device is {name!r}: {reason}; {_CPU_PATH}")
    return device, unmeasured(card)


def choose_rank_device(config: EngineConfig, model: ModelConfig, rank: int) -> tuple[torch.device, str | None]:
    """Chooses a rank's device: its host's cards from the configured one on; a CPU is shared.

    Raises:
        StartRefused: As there; or there are fewer cards than ranks.
    """
    device, notice = choose_device(config.device)
    if config.num_ranks == 1 or device.type == "cpu":
        return device, notice if rank == 0 else None
    if (reason := too_few_cards(device.index, config, model, torch.cuda.device_count())) is not None:
        raise StartRefused(reason)
    return choose_device(f"cuda:{device.index + rank % config.ranks_per_host}")


def too_few_cards(first: int, config: EngineConfig, model: ModelConfig, count: int) -> str | None:
    """Says why the ranks of all stages can't run on cards from `first` on, and which numbers can.

    None if they can; there are `count` cards.
    """
    if first + config.ranks_per_host <= count:
        return None
    if config.hosts > 1:
        return (
            f"pp is {config.pp}, tp is {config.tp} and hosts is {config.hosts}, one GPU for each of "
            f"{config.ranks_per_host} ranks of this host from cuda:{first} on, and torch sees {count}"
        )
    if config.pp > 1:
        return (
            f"pp is {config.pp} and tp is {config.tp}, one GPU for each of {config.num_ranks} ranks from cuda:{first} "
            f"on, and torch sees {count}; pp times tp of at most {count - first} works"
        )
    fewer = fewer_ranks(config, model, count - first)
    return f"tp is {config.tp}, one GPU for each rank from cuda:{first} on, and torch sees {count}; {fewer}"


def _best_device() -> tuple[torch.device, str | None]:
    """The first GPU, if it can be used."""
    reason = why_no_cuda()
    if reason is None:
        device = torch.device("cuda", 0)
        card = _card(device)
        reason = why_too_old(card)
        if reason is None:
            return device, unmeasured(card)
    has_gpu = bool(_driver_version())
    return torch.device("cpu"), f"{reason}; the model runs on the CPU" if has_gpu else None


def why_no_cuda() -> str | None:
    """Why torch can use no GPU; None if it can."""
    if torch.cuda.is_available():
        return None
    error = ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as reason:
            error = str(reason)
    return explain(NoCuda(torch.version.cuda, _driver_version(), error))


def explain(facts: NoCuda) -> str:
    """One line that names what has to change."""
    if facts.built_for is None:
        return "the installed torch is built for CPUs only"
    if not facts.driver:
        return "this machine has no NVIDIA driver"
    if "too old" in facts.error:
        return (
            f"the NVIDIA driver {facts.driver} is too old for the installed torch, which is built for CUDA "
            f"{facts.built_for}"
        )
    first_line = facts.error.strip().partition("\n")[0].rstrip(".")
    return f"the NVIDIA driver {facts.driver} shows no GPU to torch" + (f" ({first_line})" if first_line else "")


def _card(device: torch.device) -> Card:
    return Card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def _driver_version() -> str:
    """Version of the NVIDIA kernel driver; empty if there is none."""
    try:
        return _DRIVER_VERSION.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Type of weights, activations and cache.

    "auto" is the model's own, but fp32 on a CPU, where it is the fastest and the most exact.
    """
    if name == "auto":
        name = "fp32" if device.type == "cpu" else model.torch_dtype
    return _DTYPES[name]


def prepare_torch(device: torch.device, num_threads: int, num_ranks: int) -> None:
    """Sets threads for good. To be called once, before anything is computed.

    Args:
        device: Device on which the worker computes.
        num_threads: CPU threads; 0: this rank's share of all cores but one.
        num_ranks: Ranks that share this machine.
    """
    cores = len(os.sched_getaffinity(0))
    # Ranks on a CPU share its cores; those on GPUs have little to do there.
    torch.set_num_threads(num_threads or max(1, (cores - 1) // num_ranks))
    torch.set_num_interop_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # cuDNN's attention builds a plan for each new context length: 40 ms for every token of a
        # growing row.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Has glibc's allocator keep what tensors free, for the next step's tensors.

    By default every tensor above 128 KiB to 32 MiB is mapped and unmapped, and touching its fresh
    pages costs more than computing it: penalties for 64 rows and 8,192 tokens took 10 to 14 ms
    instead of 6 to 7. Caches, larger than this, are still mapped by themselves. Other C libraries
    have no such knob.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
