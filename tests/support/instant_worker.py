"""A worker that answers plans at once, with the same token for every draw, and keeps no cache."""

from __future__ import annotations

import numpy as np
from tests.engine.fake_worker import FakeWorker

from headrace_backend.step.plan import StepPlan, StepResult


class InstantWorker(FakeWorker):
    """Stands in for `FakeWorker` where blocks are counted and contents do not matter."""

    def __init__(self) -> None:
        super().__init__(0, 16, 0, 0)

    def push(self, plan: StepPlan) -> None:
        self.plans.append(plan.encode())

    def run(self) -> StepResult:
        plan = StepPlan.decode(self.plans.popleft())
        num_samples = plan.sample.rows.size
        result = StepResult(plan.step_id, 0, 1000, np.full(num_samples, 1, np.int32), np.ones(num_samples, np.uint8))
        result.checked_ok = np.ones(plan.forward.checked_indices.size, np.uint8)
        return result
