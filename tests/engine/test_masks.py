"""Rows with grammars: which masks a step waits for, when they are asked for, and from what."""

from __future__ import annotations

from array import array
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.engine.masked_harness import report_drafts
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason
from headrace_backend.engine.output_grammar import COMPLETE, MASKED, MaskOutcome, MaskState
from headrace_backend.engine.request import EngineRequest
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.plan import StepPlan


class Place:
    """An output's place in a grammar that allows everything, up to a length."""

    def __init__(self, length: int) -> None:
        self.tokens = array("i")
        self.length = length

    def take(self, job: MaskJob) -> MaskOutcome:
        assert job.first <= len(self.tokens), "the grammar is given every token"
        self.tokens = self.tokens[: job.first] + job.tokens
        return COMPLETE if len(self.tokens) == self.length else MASKED


class Grammar:
    first_masked = 0
    decides_ends = True

    def __init__(self, length: int = 1 << 20) -> None:
        self.places: list[Place] = []
        self.length = length

    def new_output(self) -> Place:
        self.places.append(Place(self.length))
        return self.places[-1]


class MaskingHarness(Harness):
    """Computes masks when they are asked for, and settles no step before its own."""

    def plan(self) -> bool:
        planned = super().plan()
        report_drafts(self)
        self.take_masks()
        return planned

    def settle(self) -> None:
        step = StepPlan.decode(self.worker.plans[0])
        assert not step.num_masked or step.step_id in self.masks, "a step waits for masks that nobody asks for"
        super().settle()
        report_drafts(self)
        self.take_masks()

    def replace_worker(self, pause_ns: int = 1_000) -> None:
        self.masks: dict[int, MaskCall] = {}
        super().replace_worker(pause_ns)

    def new_worker(self) -> Any:
        self.masks = {}
        return super().new_worker()

    def take_masks(self) -> None:
        for call in self.engine.take_mask_calls():
            assert call.step_id not in self.masks and self.engine.is_current(call)
            self.masks[call.step_id] = call
            outcomes = [self.outcome(job) for job in call.jobs]
            self.engine.masks_filled(call, outcomes)
            self.engine.masks_done(call, outcomes)
            self.read()

    def outcome(self, job: MaskJob) -> MaskOutcome:
        assert isinstance(job.grammar, Place)
        return job.grammar.take(job)


def tokens_of(reader: Reader, output: int = 0) -> list[int]:
    return reader.tokens.get(output, [])


asked = st.builds(
    lambda length, max_tokens, n, masked: request(
        [5] * 8 + [length], max_tokens, n=n, grammar=Grammar() if masked else None
    ),
    length=st.integers(1, 20),
    max_tokens=st.integers(1, 30),
    n=st.integers(1, 3),
    masked=st.booleans(),
)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(st.tuples(asked, st.integers(0, 6)), min_size=1, max_size=8),
    st.integers(7, 30),
    st.sets(st.integers(1, 40), max_size=2),
    st.sampled_from([None, 4]),
)
def test_masks_know_the_tokens_before_their_draw_and_tokens_stay(
    arrivals: list[tuple[EngineRequest, int]], num_blocks: int, deaths: set[int], drafts: int | None
) -> None:
    """Whatever is preempted, lost, forked or drafted beside them."""
    harness = MaskingHarness(num_blocks, tokens_per_row=drafts, max_num_seqs=4, model_len=96)
    for spec, reader in harness.serve(arrivals, deaths):
        for output in range(spec.asked.n):
            expected = expected_tokens(spec, output)
            assert tokens_of(reader, output) == expected
            if isinstance(spec.grammar, Grammar):
                # The mask of the last draw knows all before it, and a step settles so many at most.
                given_tokens = spec.grammar.places[output].tokens.tolist()
                assert given_tokens == expected[: len(given_tokens)]
                assert len(given_tokens) >= len(expected) - (drafts or 1)


def test_a_step_without_grammars_asks_for_nothing() -> None:
    harness = MaskingHarness()
    harness.add(request(4, 5))
    harness.plan()
    assert StepPlan.decode(harness.worker.plans[0]).num_masked == 0
    assert harness.engine.take_mask_calls() == []


def test_the_next_steps_masks_are_asked_for_when_the_step_before_has_settled() -> None:
    harness = MaskingHarness()
    harness.add(request(4, 5, grammar=Grammar()))
    harness.plan()
    # Two steps are in flight; the first draw needs no token.
    assert [StepPlan.decode(plan).num_masked for plan in harness.worker.plans] == [1, 1]
    assert list(harness.masks) == [1]
    harness.settle()
    assert list(harness.masks) == [1, 2]
    [job] = harness.masks[2].jobs
    assert (job.first, len(job.tokens)) == (0, 1)


def test_a_whole_output_ends_with_stop_and_a_failed_grammar_ends_its_own_alone() -> None:
    harness = MaskingHarness()
    whole = harness.add(request(4, 9, grammar=Grammar(length=3)))
    beside = harness.add(request(5, 9, grammar=Grammar()))
    failing_grammar = Grammar()
    failing = harness.add(request(6, 9, n=2, grammar=failing_grammar))
    error = "the structured output can't go on: a test"
    fail_after = 2

    def outcome(job: MaskJob) -> MaskOutcome:
        place = job.grammar
        assert isinstance(place, Place)
        taken = place.take(job)
        is_victim = place is failing_grammar.places[1]
        return MaskOutcome(MaskState.FAILED, error) if is_victim and len(place.tokens) == fail_after else taken

    harness.outcome = outcome  # type: ignore[method-assign]
    harness.run()
    assert (len(tokens_of(whole)), whole.ends[0].reason) == (3, EndReason.STOP)
    assert (len(tokens_of(beside)), beside.ends[0].reason) == (9, EndReason.LENGTH)
    assert (len(tokens_of(failing, 0)), failing.ends[0].reason) == (9, EndReason.LENGTH)
    assert (failing.ends[1].reason, failing.ends[1].error) == (EndReason.ERROR, error)
    assert len(tokens_of(failing, 1)) == fail_after


def test_a_resumed_output_gives_its_grammar_what_was_emitted() -> None:
    harness, grammar = MaskingHarness(), Grammar()
    emitted = (np.array([3, 4, 5], np.int32),)
    spec = request(4, 6, grammar=grammar, emitted=emitted, admitted=True)
    reader = harness.add(spec)
    harness.plan()
    [job] = harness.masks[1].jobs
    assert (job.first, job.tokens.tolist()) == (0, [3, 4, 5])
    harness.run()
    assert len(tokens_of(reader)) == 3


def test_masks_of_workers_that_were_lost_are_of_no_use() -> None:
    harness = MaskingHarness()
    harness.add(request(4, 5, grammar=Grammar()))
    Harness.plan(harness)
    [call] = harness.engine.take_mask_calls()
    harness.engine.worker_lost()
    assert not harness.engine.is_current(call)
    # What its grammar was given stays given, and an end that it found is found again.
    harness.engine.masks_filled(call, [COMPLETE])
    harness.engine.masks_done(call, [COMPLETE])
    assert harness.engine.has_work


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_stop_tokens_may_be_drawn_once_the_output_is_long_enough(min_tokens: int) -> None:
    harness = MaskingHarness()
    harness.add(request(4, 6, grammar=Grammar(), min_tokens=min_tokens, token_ids=[7]))
    harness.plan()
    assert StepPlan.decode(harness.worker.plans[0]).admissions[0].min_tokens == 0
    harness.run()
    jobs = [call.jobs[0] for call in harness.masks.values() if call.jobs]
    assert jobs and all((job.stop_token_ids, job.min_tokens) == ({7}, min_tokens) for job in jobs)


@pytest.mark.parametrize("max_drafts", [0, -1])
def test_a_plan_waits_for_masks_only_if_they_may_say_what_must_come(max_drafts: int) -> None:
    harness = MaskingHarness()
    harness.add(request([5] * 8, 6, grammar=Grammar(), max_drafts=max_drafts))
    harness.plan()
    harness.plan()
    # Of the first step, so that the masks of the second can be computed.
    Harness.settle(harness)
    (call,) = harness.engine.take_mask_calls()
    planned = harness.engine.plan()
    assert (planned is not None) == (max_drafts == 0)
    harness.engine.masks_done(call, [harness.outcome(job) for job in call.jobs])
    assert (harness.engine.plan() is not None) == (max_drafts != 0)


def test_a_plan_waits_no_more_once_nothing_has_come_to_be_known_for_long() -> None:
    harness = MaskingHarness()
    harness.add(request([5] * 8, 60, grammar=Grammar()))
    harness.run()
    waited = [call.is_awaited for call in harness.masks.values()]
    assert waited[:5] == [True] * 5 and waited[-5:] == [False] * 5
