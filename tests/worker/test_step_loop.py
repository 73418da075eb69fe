"""The loop in this process: order of answers, running ahead, failing steps."""

from __future__ import annotations

import os

import pytest
import torch
from tests.worker.driver import Entry, admission, make_runner, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.ring import RingReader, RingWriter, create_ring
from headrace_backend.step_plan import StepPlan, StepResult
from headrace_backend.worker import step_loop
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import StepFailed
from headrace_backend.worker.host_copy import HostCopy
from headrace_backend.worker.runner import NOTHING_LAUNCHED, Launched
from headrace_backend.worker.sampler import SampledTokens
from headrace_backend.worker.step_loop import StepLoop
from headrace_backend.worker_messages import RecordKind


class Rings:
    """Both rings, all four ends."""

    def __init__(self) -> None:
        plans, results = create_ring(1 << 16, 1), create_ring(1 << 16, 1)
        self.plans = RingWriter(plans)
        self.results = RingReader(results.memory, results.data_events[0], results.space_event, 0)
        reader = RingReader(plans.memory, plans.data_events[0], plans.space_event, 0)
        self.channel = Channel(reader, RingWriter(results), os.getppid())
        plans.close()
        results.close()

    def send(self, *plans: StepPlan) -> None:
        for plan in plans:
            self.plans.write(RecordKind.STEP_PLAN, plan.encode(), 0)
        self.plans.write(RecordKind.SHUTDOWN, b"", 0)

    def answers(self) -> list[StepResult]:
        answers = []
        while (record := self.results.try_read()) is not None:
            assert record[0] == RecordKind.STEP_RESULT
            answers.append(StepResult.decode(record[1]))
        return answers


def plans_of_one_row(count: int) -> list[StepPlan]:
    first = step([Entry(0, 0, [3, 4, 5], (0,))], [admission(0)], {0: [1, 2]}, step_id=1)
    return [first, *(step([Entry(0, 2 + i, None, (0,), i)], step_id=1 + i) for i in range(1, count))]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_every_plan_before_shutdown_is_answered_in_order(llama: CausalLM, runs_ahead: bool) -> None:
    rings = Rings()
    rings.send(*plans_of_one_row(9))
    StepLoop(make_runner(llama, 2, 2, 8), rings.channel, runs_ahead).run()
    answers = rings.answers()
    assert [answer.step_id for answer in answers] == list(range(1, 10))
    assert all(answer.tokens.size == answer.ok.size == 1 for answer in answers)
    assert all(0 < a.started_at_ns <= a.launched_at_ns <= a.finished_at_ns for a in answers)


class SpyRunner:
    """Notes when a step is launched."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.launched = NOTHING_LAUNCHED

    def forward(self, plan: StepPlan) -> torch.Tensor:
        self.events.append(("launch", plan.step_id))
        self.launched = Launched(8 * plan.step_id, captured=plan.step_id == 2)
        return torch.empty(0)

    def sample(self, plan: StepPlan, hidden: torch.Tensor) -> SampledTokens | None:
        return SampledTokens(torch.full((1,), plan.step_id), torch.ones(1, dtype=torch.bool), None)


class SlowDevice(HostCopy):
    """A step that is done once the step after it was launched, or somebody waits for it."""

    spy: SpyRunner

    def __init__(self, sampled: SampledTokens | None, device: torch.device) -> None:
        super().__init__(sampled, device)
        assert sampled is not None
        self.step_id = int(sampled.tokens)

    def is_there(self) -> bool:
        return ("launch", self.step_id + 1) in self.spy.events

    def fill(self, result: StepResult) -> None:
        self.spy.events.append(("read", self.step_id))
        super().fill(result)


def test_running_ahead_launches_a_waiting_plan_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, spy = Rings(), SpyRunner()
    monkeypatch.setattr(SlowDevice, "spy", spy, raising=False)
    monkeypatch.setattr(step_loop, "HostCopy", SlowDevice)
    rings.send(*plans_of_one_row(3))
    StepLoop(spy, rings.channel, runs_ahead=True).run()
    order = [("launch", 1), ("launch", 2), ("read", 1), ("launch", 3), ("read", 2), ("read", 3)]
    assert spy.events == order
    answers = rings.answers()
    assert [answer.step_id for answer in answers] == [1, 2, 3]
    assert [(answer.padded_tokens, answer.captured) for answer in answers] == [(8, False), (16, True), (24, False)]


def test_work_that_came_too_late_is_counted_in_every_result() -> None:
    rings, late = Rings(), iter([5, 5, 7, 7])
    rings.send(*plans_of_one_row(3))
    StepLoop(SpyRunner(), rings.channel, runs_ahead=False, count_late_work=lambda: next(late)).run()
    assert [answer.late_work for answer in rings.answers()] == [0, 2, 2]


def test_a_failing_step_keeps_the_answers_before_it(llama: CausalLM) -> None:
    rings = Rings()
    plans = plans_of_one_row(3)
    plans[2] = step([Entry(0, 4, [10**6], (0,), 2)], step_id=3)
    rings.send(*plans)
    with pytest.raises(StepFailed, match="step 3"):
        StepLoop(make_runner(llama, 2, 2, 8), rings.channel, runs_ahead=False).run()
    assert [answer.step_id for answer in rings.answers()] == [1, 2]
