"""The loop of the worker's life: plan in, step, result out.

Owns the order: plans are executed as they come, results are written in the same order, one per plan. On a GPU a plan that is already there is launched before
the result of the plan before it is read, so that the device never waits for the host.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from headrace_backend.step_plan import StepPlan, StepResult
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import StepFailed
from headrace_backend.worker.model_runner import ModelRunner
from headrace_backend.worker.sampler import SampledTokens
from headrace_backend.worker_messages import RecordKind


@dataclasses.dataclass(slots=True)
class _LaunchedStep:
    """A step that the device computes, or has computed."""

    step_id: int
    started_at_ns: int
    sampled: SampledTokens | None

    def result(self) -> StepResult:
        """Waits for the device."""
        result = StepResult(self.step_id, self.started_at_ns, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
        if self.sampled is not None:
            self.sampled.fill(result)
        result.finished_at_ns = time.monotonic_ns()
        return result


class StepLoop:
    """Executes plans until SHUTDOWN."""

    def __init__(self, runner: ModelRunner, channel: Channel, runs_ahead: bool) -> None:
        """Joins its parts.

        Args:
            runner: Computes steps.
            channel: Where plans come from and results go.
            runs_ahead: Whether steps are computed elsewhere while this thread goes on (a GPU).
        """
        self._runner = runner
        self._channel = channel
        self._runs_ahead = runs_ahead

    def run(self) -> None:
        """Returns after SHUTDOWN, when all that was planned before is answered.

        Raises:
            StepFailed: See there.
        """
        unanswered: _LaunchedStep | None = None
        while True:
            record = self._channel.poll() if unanswered else self._channel.wait()
            kind, payload = record if record is not None else (None, b"")
            launched = self._launch(StepPlan.decode(payload)) if kind == RecordKind.STEP_PLAN else None
            if unanswered is not None:
                self._answer(unanswered)
            unanswered = launched
            if launched is not None and not self._runs_ahead:
                self._answer(launched)
                unanswered = None
            if kind == RecordKind.SHUTDOWN:
                return

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        started_at_ns = time.monotonic_ns()
        try:
            sampled = self._runner.sample(plan, self._runner.forward(plan))
        except Exception as error:
            raise StepFailed(plan.step_id) from error
        return _LaunchedStep(plan.step_id, started_at_ns, sampled)

    def _answer(self, step: _LaunchedStep) -> None:
        try:
            result = step.result()
        except Exception as error:
            # A GPU reports what went wrong in a kernel only here.
            raise StepFailed(step.step_id) from error
        self._channel.send_result(result)
