"""Masks that take their time on a device that takes its own: answers stay, and it never waits."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.drafting_worker import DraftingWorker
from tests.engine.harness import EOS, Reader, request
from tests.engine.masked_harness import (
    TOKENS_PER_ROW,
    Answers,
    MaskedHarness,
    guessed,
    report_drafts,
    small_compiler,
)
from tests.engine.scheduling.test_held_plans import LEAD_NS, MS, STEP_NS, DeviceHarness
from tests.support.examples import examples

from headrace_backend.engine.request import EngineRequest
from headrace_backend.engine.scheduling.masks import MaskCall
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_request.structured_output import StructuredOutput

FORMS = ["((a|b)abababababab){1,9}c?", "(a|cc)(abcabcabcabcabcabc|bbabbabbabb|c)(a|b){1,30}", "[abc]{3,60}(cccc|aaaa)b"]
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def grammars() -> Iterator[list[CompiledGrammar]]:
    compiler = small_compiler()
    yield [compiler.compile(StructuredOutput("regex", form)).result() for form in FORMS]
    compiler.close()


class MaskedDevice(DeviceHarness):
    """A device whose draws wait for masks that are there some time after they were asked for."""

    def __init__(self, delays_ns: list[int], seed: int = 0, **changes: Any) -> None:
        self.delays_ns, self.draw = delays_ns, random.Random(seed)
        self.calls: deque[tuple[int, MaskCall]] = deque()
        self.num_masks = 0
        # Plans that were made although masks were still computed.
        self.num_before_masks = 0
        super().__init__(**changes)

    compute, done = MaskedHarness.compute, MaskedHarness.done

    def plan(self) -> bool:
        self.take_calls()
        planned = super().plan()
        self.num_before_masks += planned and bool(self.calls)
        self.take_calls()
        return planned

    def take_calls(self) -> None:
        for call in self.engine.take_mask_calls():
            ready_ns = self.now_ns + self.draw.choice(self.delays_ns)
            # One step's masks after the other's.
            self.calls.append((max([ready_ns, *(other for other, _ in self.calls)]), call))

    def event(self) -> None:
        self.plan()
        due_ns, done_ns = self.engine.plan_due_ns, self.times[0][1] if self.times else None
        ready_ns = self.calls[0][0] if self.calls else None
        if ready_ns is not None and all(ready_ns <= other for other in (due_ns, done_ns) if other is not None):
            self.take_masks(ready_ns)
        else:
            super().event()

    def take_masks(self, ready_ns: int) -> None:
        self.now_ns = max(self.now_ns, ready_ns)
        self.compute(self.calls.popleft()[1], self.worker)  # type: ignore[arg-type]
        self.read()
        self.plan()

    def settle(self) -> None:
        # The draw waits for the step's masks, and what was launched behind it with it.
        while self.calls and self.calls[0][1].step_id <= self.worker_step_id():
            self.take_masks(self.calls[0][0])
            late_ns = max(self.now_ns - self.times[0][1], 0)
            self.times = deque((launched, done + late_ns) for launched, done in self.times)
            self.free_ns += late_ns
        super().settle()
        self.plan()

    def worker_step_id(self) -> int:
        """The step that is computed."""
        return self.engine._in_flight[0].step_id


class DraftingDevice(MaskedDevice):
    """One that drafts, and of which the engine hears the drafts some time after the step before."""

    def __init__(self, answers: Answers, delays_ns: list[int], seed: int = 0, share_early: float = 0.5) -> None:
        self.answers, self.share_early = answers, share_early
        # Plans that were made although drafts of the step in flight were not known.
        self.num_before_drafts = 0
        super().__init__(delays_ns, seed, tokens_per_row=TOKENS_PER_ROW, speculate_tokens="4")

    def ready(self, on_gpu: bool) -> None:
        captured = self.config.captured_mixed_sizes() if on_gpu else ()
        self.engine.worker_ready(self.num_blocks, on_gpu, captured, tokens_per_row=TOKENS_PER_ROW)

    def new_worker(self) -> DraftingWorker:
        worker = super().new_worker()
        assert isinstance(worker, DraftingWorker)
        worker.guess = lambda admission, position: guessed(self.answers, admission, position, 0.8, self.draw)
        return worker

    def plan(self) -> bool:
        waits = any(step.num_reported_drafts for step in self.engine._masks._waiting)
        if waits and self.draw.random() < self.share_early:
            report_drafts(self)
            waits = False
        planned = super().plan()
        self.num_before_drafts += planned and waits
        return planned

    def settle(self) -> None:
        report_drafts(self)
        self.take_calls()
        super().settle()


def asked(grammar: CompiledGrammar | None, seed: int, **way: int) -> EngineRequest:
    return request(9 + seed % 5, MAX_TOKENS, grammar=grammar, seed=seed, token_ids=[EOS], **way)


def alone(grammar: CompiledGrammar | None, seed: int) -> dict[int, list[int]]:
    harness = MaskedHarness()
    reader = harness.add(asked(grammar, seed, max_drafts=0))
    harness.run()
    return reader.tokens


def served(harness: MaskedDevice, grammars: list[CompiledGrammar], rows: list[tuple[int, int]]) -> list[Reader]:
    readers = [harness.add(asked(grammars[form] if form >= 0 else None, seed)) for form, seed in rows]
    harness.finish()
    return readers


def have_short_steps(harness: MaskedDevice) -> None:
    """Launching takes so long that a third step is in flight, where no row has a grammar."""
    harness.step_ns, harness.lead_ns = 3 * MS // 2, MS


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(-1, len(FORMS) - 1), st.integers(0, 99)), min_size=1, max_size=5),
    st.lists(st.sampled_from([0, MS // 2, 2 * MS, 4 * MS, 5 * MS, 9 * MS]), min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_answers_do_not_depend_on_when_masks_come(
    grammars: list[CompiledGrammar], rows: list[tuple[int, int]], delays_ns: list[int], seed: int, is_short: bool
) -> None:
    harness = MaskedDevice(delays_ns, seed)
    if is_short:
        have_short_steps(harness)
    # Long enough that plans are held back for some of the others.
    harness.add(request(20, max_tokens=60))
    for (form, row_seed), reader in zip(rows, served(harness, grammars, rows), strict=True):
        assert reader.tokens == alone(grammars[form] if form >= 0 else None, row_seed)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(-1, len(FORMS) - 1), st.integers(0, 99)), min_size=1, max_size=5),
    st.lists(st.sampled_from([0, MS // 2, 2 * MS, 4 * MS, 5 * MS, 9 * MS]), min_size=1, max_size=4),
    st.integers(0, 2**16),
)
def test_answers_do_not_depend_on_when_drafts_are_reported(
    grammars: list[CompiledGrammar], rows: list[tuple[int, int]], delays_ns: list[int], seed: int
) -> None:
    """What must come may be known further than what is drafted, before the drafts are."""
    answers = {row_seed: alone(grammars[form] if form >= 0 else None, row_seed) for form, row_seed in rows}
    expected = [answers[row_seed] for _, row_seed in rows]
    hypothesis.assume(len(answers) == len(rows))
    harness = DraftingDevice(answers, delays_ns, seed)
    harness.add(request(20, max_tokens=60))
    assert [reader.tokens for reader in served(harness, grammars, rows)] == expected


def test_plans_do_not_wait_for_drafts_that_are_late(grammars: list[CompiledGrammar]) -> None:
    """Wrong ones keep nothing that must come for long from being computed at once."""
    rows = [(0, seed) for seed in range(4)]
    answers = {seed: alone(grammars[form], seed) for form, seed in rows}
    harness = DraftingDevice({}, [MS // 2], share_early=0.0)
    harness.add(request(20, max_tokens=400))
    harness.held()
    readers = served(harness, grammars, rows)
    assert [reader.tokens for reader in readers] == list(answers.values())
    assert harness.num_before_drafts > 3 and harness.worker.num_forced > 5


@pytest.mark.parametrize(("delay_ns", "comes_late"), [(MS, False), (STEP_NS - LEAD_NS // 2, True)])
def test_a_device_does_not_wait_for_a_plan_that_waits_for_masks(
    grammars: list[CompiledGrammar], delay_ns: int, comes_late: bool
) -> None:
    """Masks that come in time are waited for, others until the plan is due."""
    harness = MaskedDevice([delay_ns])
    # Until enough is known of the device.
    harness.add(request(20, max_tokens=400))
    harness.held()
    harness.num_before_masks = 0
    served(harness, grammars, [(0, seed) for seed in range(4)])
    assert (harness.num_before_masks > 10) == comes_late
    # What must come for longer is known in time all the same.
    assert harness.worker.num_forced > 10


def test_beside_rows_with_grammars_two_steps_are_in_flight_at_most(grammars: list[CompiledGrammar]) -> None:
    harness = MaskedDevice([0])
    have_short_steps(harness)
    harness.add(request(20, max_tokens=490))

    def num_in_flight(num_events: int) -> int:
        """The most that there ever are."""
        found = 0
        for _ in range(num_events):
            harness.event()
            found = max(found, harness.engine.num_in_flight)
        return found

    assert num_in_flight(100) == 3
    reader = harness.add(asked(grammars[2], 1))
    while not reader.tokens:
        harness.event()
    assert num_in_flight(20) == 2
    assert reader.done is None
    while reader.done is None:
        harness.event()
    assert num_in_flight(20) == 3
