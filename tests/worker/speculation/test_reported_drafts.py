"""Drafts of rows with grammars are reported, and draws behind them have masks of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.processes import wait_until
from tests.worker.driver import NUM_ROWS, Entry, admission, execute, step
from tests.worker.sampling.test_masked_rows import packed
from tests.worker.speculation.drafted_rows import GuessingDrafter
from tests.worker.speculation.test_cpu_verification import TOKENS_PER_ROW, runner
from tests.worker.step.test_step_loop import Rings

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.masks import StepMasks, max_masks_bytes
from headrace_backend.step.messages import RecordKind
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.worker.speculation import reported_drafts
from headrace_backend.worker.speculation.reported_drafts import ReportedDrafts
from headrace_backend.worker.step.cpu_runner import CpuRunner
from headrace_backend.worker.step.loop import StepLoop

PROMPT = [3, 4, 5]
NUM_DRAFTS = TOKENS_PER_ROW - 1


def plans(num_masked: int = 1) -> list[StepPlan]:
    """A row with a grammar and one without draw from a prompt, and then behind four drafts."""
    admissions = [admission(row, seed=7 + row, temperature=1.0, is_masked=row == 0) for row in range(2)]
    prompts = [Entry(row, 0, PROMPT, (row,)) for row in range(2)]
    drafted = [Entry(row, 3, None, (row,), 1, num_drafts=NUM_DRAFTS) for row in range(2)]
    first = step(prompts, admissions, {0: [1], 1: [2]}, num_masked=num_masked)
    return [first, step(drafted, step_id=2, num_masked=num_masked)]


def masks_of(step_id: int, allowed: list[set[int]]) -> StepMasks:
    """Masks of the first draws of the first sample."""
    places = np.arange(len(allowed), dtype=np.int32)
    masks = StepMasks(step_id, np.zeros_like(places), places, packed(allowed, 97))
    encoded = masks.encode()
    assert len(encoded) == max_masks_bytes(len(allowed), 97)
    return StepMasks.decode(encoded)


def drafting(llama: CausalLM, drafts: dict[int, list[int]]) -> tuple[CpuRunner, list[StepDrafts]]:
    """A runner whose drafts are these, place by place, and what it reports."""
    made, reported = runner(llama, GuessingDrafter(NUM_DRAFTS, drafts, 1.0)), []
    assert made.speculation is not None
    made.speculation.report_to(lambda drafts_of: reported.append(StepDrafts.decode(drafts_of.encode())))
    return made, reported


def alone(llama: CausalLM, allowed: list[set[int]]) -> list[int]:
    """What the row with a grammar draws one by one, as each of its masks allows."""
    made, tokens = runner(llama), []
    first, _ = plans()
    tokens.append(execute(made, first, masks_of(1, allowed[:1])).tokens[0])
    for place, mask in enumerate(allowed[1:], 1):
        plan = step([Entry(0, 2 + place, None, (0,), place)], step_id=1 + place, num_masked=1)
        tokens.append(execute(made, plan, masks_of(1 + place, [mask])).tokens[0])
    return [int(token) for token in tokens]


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 96), min_size=1, max_size=60), min_size=6, max_size=6),
    st.integers(0, NUM_DRAFTS),
)
def test_each_draw_has_its_own_mask(llama: CausalLM, allowed: list[set[int]], num_right: int) -> None:
    """The other row has none, and draws the same whatever stands beside it."""
    expected = alone(llama, allowed)
    drafts = [token if place <= num_right else (token + 1) % 97 for place, token in enumerate(expected)]
    made, reported = drafting(llama, {0: drafts})
    first, second = plans()
    assert execute(made, first, masks_of(1, allowed[:1])).tokens[0] == expected[0]
    result = execute(made, second, masks_of(2, allowed[1:]))
    num_settled = int(result.counts[0])
    assert result.tokens[:num_settled].tolist() == expected[1 : 1 + num_settled]
    assert num_settled == num_right + 1
    # Those of the row without a grammar stay where they are.
    assert [drafts_of.step_id for drafts_of in reported] == [2]
    assert reported[0].tokens.tolist() == drafts[1 : 1 + NUM_DRAFTS]


def test_a_step_that_waits_for_no_masks_reports_nothing(llama: CausalLM) -> None:
    made, reported = drafting(llama, {})
    for plan in plans(num_masked=0):
        execute(made, plan)
    assert reported == []


class LateCopy:
    """A copy that arrives when it is let."""

    def __init__(self, has_arrived: Callable[[], bool]) -> None:
        self.query = has_arrived


def test_drafts_are_sent_when_they_arrive_though_no_record_comes(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits for them, and the worker for masks that need them."""
    has_arrived = threading.Event()
    monkeypatch.setattr(reported_drafts, "_mark", lambda device: LateCopy(has_arrived.is_set))
    rings, made = Rings(), runner(llama, GuessingDrafter(NUM_DRAFTS, {}, 1.0))
    assert made.speculation is not None
    reported = made.speculation.report_to(rings.channel.send_drafts)
    loop = StepLoop(made, rings.channel, runs_ahead=True, reported_drafts=reported)
    rings.push(*plans())
    rings.plans.write(RecordKind.MASKS, masks_of(1, [{70}]).encode(), 0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    seen: list[tuple[int, bytes]] = []

    def kinds() -> list[int]:
        while (record := rings.results.try_read()) is not None:
            seen.append(record)
        return [kind for kind, _ in seen]

    wait_until(lambda: kinds() == [RecordKind.STEP_RESULT], 60, "the first result")
    has_arrived.set()
    wait_until(lambda: kinds()[1:] == [RecordKind.DRAFTS], 60, "the drafts")
    assert StepDrafts.decode(seen[1][1]).tokens.size == NUM_DRAFTS
    rings.plans.write(RecordKind.MASKS, masks_of(2, [{31}]).encode(), 0)
    rings.plans.write(RecordKind.SHUTDOWN, b"", 0)
    thread.join(60)
    assert kinds()[2:] == [RecordKind.STEP_RESULT]
    assert StepResult.decode(seen[2][1]).tokens[0] == 31


def test_what_was_not_sent_is_forgotten_with_the_rows() -> None:
    sent: list[StepDrafts] = []
    reported = ReportedDrafts(NUM_ROWS, sent.append)
    _, plan = plans()
    reported.admit([admission(0, is_masked=True)])
    reported.report(plan, torch.zeros(NUM_ROWS, NUM_DRAFTS, dtype=torch.int32))
    assert len(sent) == 1 and not reported.is_unsent
    # A row that another sequence takes has no grammar any more.
    reported.admit([admission(0)])
    reported.report(plan, torch.zeros(NUM_ROWS, NUM_DRAFTS, dtype=torch.int32))
    assert len(sent) == 1
