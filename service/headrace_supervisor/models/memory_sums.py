"""Whether one more model fits beside those that are loaded.

Owns the sum of the stated budgets against what the machine has: the GPU's memory as a backend on it
reported it, the machine's own on a CPU. Whether a model fits into its own budget is found out by
its worker, which measures.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from headrace_supervisor import refusals

_CGROUP_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
_CPU = "cpu"


class Claim(NamedTuple):
    """The memory that one model may take.

    Attributes:
        name: the model's.
        device: "cpu" or "cuda:<index>".
        budget_bytes: its memory budget; 0: none is stated.
        device_bytes: all of the device's memory, as its worker found it; 0: not known (yet).
        ranks: that share the model, each on a GPU of its own from `device` on, of which it takes as
            much; a CPU they share.
    """

    name: str
    device: str
    budget_bytes: int
    device_bytes: int = 0
    ranks: int = 1

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices that the model lies on."""
        kind, _, index = self.device.partition(":")
        # An index that is none is refused by the worker.
        if not index.isdecimal():
            return (self.device,)
        return tuple(f"{kind}:{int(index) + rank}" for rank in range(self.ranks))


def check(new: Claim, loaded: Sequence[Claim], cpu_bytes: int) -> None:
    """Refuses a model that would take memory which another was promised.

    Args:
        new: the model to be loaded.
        loaded: models that run or start, on any device.
        cpu_bytes: memory of the machine.

    Raises:
        Refused: FAILED_PRECONDITION where a GPU is to be shared and somebody states no budget;
            RESOURCE_EXHAUSTED with the arithmetic.
    """
    for device in new.devices:
        _check_device(device, new, [claim for claim in loaded if device in claim.devices], cpu_bytes)


def _check_device(device: str, new: Claim, sharing: Sequence[Claim], cpu_bytes: int) -> None:
    if device != _CPU and sharing:
        _check_stated(device, [new, *sharing])
    available = cpu_bytes if device == _CPU else max((claim.device_bytes for claim in sharing), default=0)
    total = sum(claim.budget_bytes for claim in (new, *sharing))
    if new.budget_bytes and available and total > available:
        raise refusals.exhausted(
            f"model {new.name} does not fit: {_arithmetic(device, new, sharing, total, available)}"
        )


def machine_bytes() -> int:
    """Memory of the machine, or what the control group allows of it."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def _check_stated(device: str, claims: Sequence[Claim]) -> None:
    silent = [claim.name for claim in claims if not claim.budget_bytes]
    if silent:
        raise refusals.failed_precondition(
            f"models that share {device} need a memory budget each, and {', '.join(silent)} has none: give "
            "memory_bytes,"
            " --memory-budget, or memory_budget in the model's headrace.toml"
        )


def _arithmetic(device: str, new: Claim, sharing: Sequence[Claim], total: int, available: int) -> str:
    summands = " + ".join(f"{claim.name} {_gib(claim.budget_bytes)}" for claim in (new, *sharing) if claim.budget_bytes)
    left = max(0, available - (total - new.budget_bytes))
    return f"{summands} = {_gib(total)}; {device} has {_gib(available)}; a budget of at most {left} bytes fits"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
