"""The real worker, except that prompts that begin with POISON_PROMPT harm it.

Its command line is `poisoned_worker.py KIND WORKER_ARGUMENT...`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn

import torch
from tests.backend.fake_worker import POISON_PROMPT

from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.main import main
from headrace_backend.worker.step.cpu_runner import CpuRunner
from headrace_backend.worker.step.gpu_runner import GpuRunner


def is_poisoned(plan: StepPlan) -> bool:
    forward, first = plan.forward, 0
    for start, count in zip(forward.starts.tolist(), forward.known_counts.tolist(), strict=True):
        known = forward.token_ids[first : first + count].tolist()
        if start == 0 and known[: len(POISON_PROMPT)] == POISON_PROMPT:
            return True
        first += count
    return False


def suffer(kind: str, hidden: torch.Tensor) -> NoReturn:
    if kind == "raise":
        raise RuntimeError("planted")
    if kind == "memory":
        raise MemoryError("planted")
    if kind == "illegal":
        hidden.index_select(0, torch.full((1,), 1 << 40, device=hidden.device)).cpu()
    if kind == "exit":
        os._exit(7)
    while True:
        time.sleep(1.0)


def poison(kind: str) -> None:
    for runner in (CpuRunner, GpuRunner):
        poison_runner(runner, kind)


def poison_runner(runner: type[CpuRunner] | type[GpuRunner], kind: str) -> None:
    own_forward: Any = runner.forward

    def forward(self: Any, plan: StepPlan) -> torch.Tensor:
        hidden: torch.Tensor = own_forward(self, plan)
        if is_poisoned(plan):
            suffer(kind, hidden)
        return hidden

    runner.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    poison(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
