"""Whether a worker can go on after a step that raised.

Another one would have to load the model again.

Owns the judgement, and nothing of what it means for requests. A worker goes on if it is the only
rank, memory was not what was short, and a small step of its own succeeds from an empty batch: so
process and device work, and what raised was that step. Of several ranks all end: the others may
wait in a collective for the one that raised. Too little memory ends the worker as well: the next
one measures what is free.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import torch

from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.step.runner import StepRunner, run_steps

# What torch says where the CPU's allocator gets nothing; it has no class of its own.
_NO_CPU_MEMORY = ("can't allocate memory", "not enough memory")


class Recovery:
    """The way back of one worker."""

    def __init__(self, runner: StepRunner, probe: Sequence[StepPlan]) -> None:
        """Joins its parts.

        Args:
            runner: Computes steps.
            probe: Steps that succeed on any worker that works, from an empty batch to an empty one.
        """
        self._runner = runner
        self._probe = probe

    def succeeds_after(self, error: BaseException | None) -> bool:
        """Whether the runner takes plans again, with an empty batch, after `error` ended a step."""
        if _lacked_memory(error):
            return False
        try:
            self._runner.reset()
            run_steps(self._runner, self._probe, lambda done: None)
            self._runner.reset()
        except Exception as further:
            traceback.print_exception(further)
            return False
        return True


def _lacked_memory(error: BaseException | None) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_CPU_MEMORY)
