"""The loop of the worker's life: plan in, step, result out.

Owns the order: plans are executed as they come, results are written in the same order, one per
plan. On a GPU a plan is launched as soon as it is there, whether or not the steps before it are
done, so that the device never waits for the host; a result is sent as soon as its step is done.
Where rows have grammars the draw waits for the step's masks, which need the result of the step
before: meanwhile results are sent, and plans that come are kept.

After a step that raised the loop goes on where it can (`recovery`): it says so, passes over what
was planned meanwhile, and begins anew at RESET.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from headrace_backend.step.masks import StepMasks
from headrace_backend.step.messages import Notice, RecordKind, StepRaised
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import StepFailed, one_line
from headrace_backend.worker.speculation.reported_drafts import ReportedDrafts
from headrace_backend.worker.step.host_copy import FinishTimes, HostCopy
from headrace_backend.worker.step.recovery import Recovery
from headrace_backend.worker.step.runner import Launched, StepRunner

# While the device works the loop looks this often for the next plan and the next result. Sleeping
# on the ring's event would be no better: poll() counts in milliseconds.
_LOOK_INTERVAL_S = 50e-6
_DRAFTS_LOST = "speculate: drafts were lost, because their drafter failed or proposed what is no token; steps go on"


@dataclasses.dataclass(slots=True)
class _LaunchedStep:
    """A step that the device computes, or has computed."""

    step_id: int
    started_at_ns: int
    launched_at_ns: int
    samples: HostCopy
    launched: Launched

    def is_done(self) -> bool:
        """Whether its result can be read without waiting."""
        return self.samples.is_there()

    def result(self) -> StepResult:
        """Waits for the device."""
        result = StepResult(self.step_id, self.started_at_ns, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
        result.padded_tokens, result.captured = self.launched
        result.launched_at_ns = self.launched_at_ns
        self.samples.fill(result)
        result.finished_at_ns = time.monotonic_ns()
        return result


class _ShutDown(Exception):  # what happened, not a mistake of ours
    """SHUTDOWN came while a step waited for masks, which will not come any more."""


class StepLoop:
    """Executes plans until SHUTDOWN."""

    def __init__(
        self,
        runner: StepRunner,
        channel: Channel,
        runs_ahead: bool,
        count_late_work: Callable[[], int] = lambda: 0,
        recovery: Recovery | None = None,
        reported_drafts: ReportedDrafts | None = None,
    ) -> None:
        """Joins its parts.

        Args:
            runner: Computes steps.
            channel: The worker's channel: plans come from it and results go to it.
            runs_ahead: Whether steps are computed elsewhere while this thread goes on (a GPU).
            count_late_work: Kernels compiled and graphs captured so far. What is added after this
                call should not have happened; every result tells.
            recovery: The way back after a step that raised; None: there is none.
            reported_drafts: Drafts that the engine must know before it can say which tokens may be
                drawn; None: there are none.
        """
        self._runner = runner
        self._channel = channel
        self._runs_ahead = runs_ahead
        self._count_late_work = count_late_work
        self._recovery = recovery
        self._reported_drafts = reported_drafts
        self._warm_count = count_late_work()
        self._finish_times = FinishTimes()
        self._launched: deque[_LaunchedStep] = deque()
        self._has_noticed_lost_drafts = False
        # Plans that came while a step before them waited for its masks.
        self._kept: deque[bytes] = deque()
        # Masks of later steps, whose rows are others, by step.
        self._early_masks: dict[int, StepMasks] = {}

    def run(self) -> None:
        """Returns after SHUTDOWN, when all that was planned before is answered.

        Raises:
            StepFailed: See there; the worker can't go on.
        """
        while True:
            try:
                self._run()
                return
            except _ShutDown:
                self._answer_done(wait=True)
                return
            except StepFailed as failed:
                if self._recovery is None or not self._recovery.succeeds_after(failed.__cause__):
                    raise
                self._report(failed)
            # Outside of the handler, so that nothing holds the tensors of the step that raised.
            if not self._await_reset():
                return

    def _report(self, failed: StepFailed) -> None:
        traceback.print_exception(failed)
        self._launched.clear()
        self._kept.clear()
        self._early_masks.clear()
        self._channel.send_message(StepRaised(one_line(failed.__cause__), failed.step_id))

    def _await_reset(self) -> bool:
        """Passes over plans that were made before the failure was known.

        False: SHUTDOWN came instead of RESET.
        """
        while True:
            kind, _ = self._channel.wait()
            if kind != RecordKind.STEP_PLAN:
                return kind == RecordKind.RESET

    def _run(self) -> None:
        """Returns after SHUTDOWN. Raises StepFailed."""
        while True:
            kind, payload = self._next_record()
            if kind == RecordKind.STEP_PLAN:
                self._launch(StepPlan.decode(payload))
            elif kind == RecordKind.MASKS and self._runner.draws:
                masks = StepMasks.decode(payload)
                self._early_masks[masks.step_id] = masks
            self._answer_done(wait=kind == RecordKind.SHUTDOWN or not self._runs_ahead)
            if kind == RecordKind.SHUTDOWN:
                return
            if kind is None:
                time.sleep(_LOOK_INTERVAL_S)

    def _next_record(self) -> tuple[int | None, bytes]:
        """The next plan or whatever else comes; without waiting where the device works."""
        if self._kept:
            return RecordKind.STEP_PLAN, self._kept.popleft()
        record = self._channel.poll() if self._launched else self._channel.wait()
        return record if record is not None else (None, b"")

    def _launch(self, plan: StepPlan) -> None:
        started_at_ns = time.monotonic_ns()
        with self._failing(plan.step_id):
            hidden = self._runner.forward(plan)
        launched_at_ns = time.monotonic_ns()
        masks = self._await_masks(plan.step_id) if plan.num_masked and self._runner.draws else None
        with self._failing(plan.step_id):
            samples = HostCopy(self._runner.sample(plan, hidden, masks), hidden.device)
        self._launched.append(
            _LaunchedStep(plan.step_id, started_at_ns, launched_at_ns, samples, self._runner.launched)
        )

    @contextlib.contextmanager
    def _failing(self, step_id: int) -> Iterator[None]:
        """Raises StepFailed for an exception inside, after the steps before it, which are whole."""
        try:
            yield
        except Exception as error:
            self._answer_done(wait=True)
            raise StepFailed(step_id) from error

    def _await_masks(self, step_id: int) -> StepMasks:
        """Waits for the masks of a step; raises _ShutDown if they will not come."""
        while step_id not in self._early_masks:
            kind, payload = (self._channel.poll() if self._is_busy else self._channel.wait()) or (None, b"")
            if kind == RecordKind.MASKS:
                masks = StepMasks.decode(payload)
                self._early_masks[masks.step_id] = masks
            elif kind == RecordKind.STEP_PLAN:
                self._kept.append(payload)
            elif kind == RecordKind.SHUTDOWN:
                raise _ShutDown
            self._answer_done(wait=False)
            if self._reported_drafts is not None:
                with self._failing(step_id):
                    self._reported_drafts.send_arrived()
            if kind is None:
                time.sleep(_LOOK_INTERVAL_S)
        return self._early_masks.pop(step_id)

    @property
    def _is_busy(self) -> bool:
        """Whether something of the device is to be sent, so that the loop must not sleep."""
        return bool(self._launched or (self._reported_drafts is not None and self._reported_drafts.is_unsent))

    def _answer_done(self, wait: bool) -> None:
        """Sends the results that are there, or all of them."""
        while self._launched:
            step = self._launched[0]
            try:
                if not wait and not step.is_done():
                    return
                result = step.result()
            except Exception as error:
                # A GPU reports what went wrong in a kernel only here.
                raise StepFailed(step.step_id) from error
            result.finished_at_ns = self._finish_times.of(step.samples, result.finished_at_ns)
            result.late_work = self._count_late_work() - self._warm_count
            self._launched.popleft()
            self._channel.send_result(result)
            if result.lost_drafts and not self._has_noticed_lost_drafts:
                self._has_noticed_lost_drafts = True
                self._channel.send_message(Notice(_DRAFTS_LOST))
