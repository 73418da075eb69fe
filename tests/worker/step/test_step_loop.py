"""The loop in this process: order of answers, running ahead, failing steps."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading

import numpy as np
import pytest
import torch
from tests.support.processes import wait_until
from tests.worker.driver import MAX_MODEL_LEN, NUM_BLOCKS, Entry, admission, execute, id_bytes, make_runner, step

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.step.messages import RecordKind, StepRaised, WorkerMessage, decode_message
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.step.rank_board import RankBoard, create_board
from headrace_backend.step.ring import RingReader, RingWriter, create_ring
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import StepFailed
from headrace_backend.worker.sampling.sampler import SampledTokens
from headrace_backend.worker.start_up.ranks import RankPlace
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.warm_up import probe_steps
from headrace_backend.worker.step import loop as step_loop
from headrace_backend.worker.step.host_copy import HostCopy
from headrace_backend.worker.step.loop import StepLoop
from headrace_backend.worker.step.recovery import Recovery
from headrace_backend.worker.step.runner import NOTHING_LAUNCHED, Launched, Runner


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

    def push(self, *plans: StepPlan) -> None:
        for plan in plans:
            self.plans.write(RecordKind.STEP_PLAN, plan.encode(), 0)

    def send(self, *plans: StepPlan) -> None:
        self.push(*plans)
        self.plans.write(RecordKind.SHUTDOWN, b"", 0)

    def records(self) -> list[StepResult | WorkerMessage]:
        records: list[StepResult | WorkerMessage] = []
        while (record := self.results.try_read()) is not None:
            kind, payload = record
            records.append(StepResult.decode(payload) if kind == RecordKind.STEP_RESULT else decode_message(payload))
        return records

    def answers(self) -> list[StepResult]:
        answers = self.records()
        assert all(isinstance(answer, StepResult) for answer in answers)
        return answers  # type: ignore[return-value]  # looked at above


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

    draws = True

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        return SampledTokens(torch.full((1,), plan.step_id), torch.ones(1, dtype=torch.bool), None)

    def reset(self) -> None:
        self.events.append(("reset", 0))


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


def recovery(runner: Runner) -> Recovery:
    config = EngineConfig(model=pathlib.Path("m"), device="cpu")
    return Recovery(runner, probe_steps(WorkerSizes.of(config, MAX_MODEL_LEN), NUM_BLOCKS))


def penalized_plans(count: int) -> list[StepPlan]:
    """Plans of one row (`plans_of_one_row`) whose tokens are counted."""
    option = admission(0, repetition_penalty=1.5, prompt_ids=id_bytes(3, 4, 5))
    first = step([Entry(0, 0, [3, 4, 5], (0,))], [option], {0: [1, 2]}, step_id=1)
    return [first, *(step([Entry(0, 2 + i, None, (0,), i)], step_id=1 + i) for i in range(1, count))]


def failing(step_id: int) -> StepPlan:
    """A token that does not exist, in another row that is counted too."""
    option = admission(1, repetition_penalty=1.5, prompt_ids=id_bytes(7))
    return step([Entry(1, 0, [10**6], (1,))], [option], {1: [3]}, step_id=step_id)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_after_a_step_that_raised_the_loop_begins_anew(llama: CausalLM, runs_ahead: bool) -> None:
    rings, plans = Rings(), penalized_plans(4)
    # Planned before the failure was known: passed over.
    rings.push(*plans[:2], failing(3), *plans[2:])
    rings.plans.write(RecordKind.RESET, b"", 0)
    rings.send(*plans)
    runner = make_runner(llama, 2, 2, 8)
    StepLoop(runner, rings.channel, runs_ahead, recovery=recovery(runner)).run()
    first, second, raised, *again = rings.records()
    assert isinstance(raised, StepRaised) and raised.step_id == 3 and "\n" not in raised.reason
    assert isinstance(first, StepResult) and isinstance(second, StepResult)
    assert [answer.step_id for answer in again if isinstance(answer, StepResult)] == [1, 2, 3, 4]
    expected = [execute(make_runner(llama, 2, 2, 8), plans[0]).tokens.tolist()]
    assert [answer.tokens.tolist() for answer in (first, again[0])] == 2 * expected  # type: ignore[union-attr]
    assert second.tokens.tolist() == again[1].tokens.tolist()  # type: ignore[union-attr]


def test_a_shutdown_after_a_step_that_raised_ends_the_loop(llama: CausalLM) -> None:
    rings, runner = Rings(), make_runner(llama, 2, 2, 8)
    rings.send(failing(1), failing(2))
    StepLoop(runner, rings.channel, runs_ahead=False, recovery=recovery(runner)).run()
    [raised] = rings.records()
    assert isinstance(raised, StepRaised) and raised.step_id == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_step_that_lacked_memory_ends_the_loop(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rings, runner = Rings(), make_runner(llama, 2, 2, 8)
    way_back = recovery(runner)

    def forward(plan: StepPlan) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(runner, "forward", forward)
        rings.send(*plans_of_one_row(1))
        with pytest.raises(StepFailed, match="step 1"):
            StepLoop(runner, rings.channel, runs_ahead=False, recovery=way_back).run()
    assert rings.records() == []


def test_a_worker_that_fails_its_own_small_step_too_ends(llama: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rings, runner = Rings(), make_runner(llama, 2, 2, 8)

    def forward(plan: StepPlan) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner, "forward", forward)
    rings.send(*plans_of_one_row(1))
    with pytest.raises(StepFailed, match="step 1"):
        StepLoop(runner, rings.channel, runs_ahead=False, recovery=recovery(runner)).run()
    assert rings.records() == []


def test_each_layer_of_a_step_is_marked_on_the_board(llama: CausalLM) -> None:
    descriptor = create_board(1)
    board = RankBoard(descriptor, 1)
    place = RankPlace(line=RankBoard(descriptor, 1).line(0))
    os.close(descriptor)
    runner = place.linked(make_runner(llama, 2, 2, 8), llama, torch.device("cpu"))
    seen: list[tuple[int, ...]] = []
    with contextlib.ExitStack() as hooks:
        for layer in llama.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                handle = part.register_forward_pre_hook(lambda *_: seen.append(board.progress()))
                hooks.callback(handle.remove)
        execute(runner, plans_of_one_row(1)[0])
    llama.model.on_progress = None
    seen.append(board.progress())
    # The step's number from the beginning on, and of two layers a mark each.
    assert {step_id for step_id, _, _ in seen} == {1}
    assert [parts for _, _, parts in seen][0] == 0 and seen[-1][2] >= 2
    assert len({parts for _, _, parts in seen}) >= 3


def masked_plans(count: int) -> list[StepPlan]:
    """Plans of one row whose every draw has a mask."""
    first = step([Entry(0, 0, [3, 4, 5], (0,))], [admission(0, is_masked=True)], {0: [1, 2]}, step_id=1, num_masked=1)
    later = [step([Entry(0, 2 + i, None, (0,), i)], step_id=1 + i, num_masked=1) for i in range(1, count)]
    return [first, *later]


def masks_of(step_id: int, token: int) -> bytes:
    """A mask that leaves one token."""
    words = np.zeros((1, mask_words(97)), np.int32)
    words.view(np.uint32)[0, token // 32] = 1 << token % 32
    return StepMasks(step_id, *np.zeros((2, 1), np.int32), words).encode()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_draw_waits_for_its_masks_and_answers_meanwhile(llama: CausalLM, runs_ahead: bool) -> None:
    """Plans run ahead of masks; each draw takes its own, whichever comes first."""
    rings, plans = Rings(), masked_plans(3)
    rings.push(*plans[:2])
    loop = StepLoop(make_runner(llama, 2, 2, 8), rings.channel, runs_ahead)
    thread = threading.Thread(target=loop.run)
    thread.start()
    rings.plans.write(RecordKind.MASKS, masks_of(1, 70), 0)
    first: list[StepResult] = []
    wait_until(lambda: first.extend(rings.answers()) or first, 60, "an answer while the second step waits")
    assert [answer.tokens.tolist() for answer in first] == [[70]]
    rings.push(plans[2])
    rings.plans.write(RecordKind.MASKS, masks_of(3, 31), 0)
    rings.plans.write(RecordKind.MASKS, masks_of(2, 96), 0)
    rings.plans.write(RecordKind.SHUTDOWN, b"", 0)
    thread.join(60)
    assert [answer.tokens.tolist() for answer in rings.answers()] == [[96], [31]]


def test_a_shutdown_ends_the_wait_for_masks(llama: CausalLM) -> None:
    rings = Rings()
    rings.send(*masked_plans(1))
    StepLoop(make_runner(llama, 2, 2, 8), rings.channel, runs_ahead=True).run()
    assert rings.answers() == []
