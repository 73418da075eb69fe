"""Draws behind drafts have masks of their own: answers are those of which each token was drawn."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.drafting_worker import DraftingWorker
from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker, expected_tokens
from tests.engine.harness import EOS, Harness, Reader, request
from tests.engine.masked_harness import TOKENS_PER_ROW, GuessingHarness, MaskedHarness, small_compiler
from tests.engine.test_forced_tokens import FORMS, answer, asked, ends_of, options_of_rows, tokens_of
from tests.engine.test_reasoning import allowed, reasonings
from tests.engine.test_reasoning import asked as asked_to_reason
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason
from headrace_backend.engine.output_grammar import MASKED, DraftedEnd, MaskOutcome, MaskState
from headrace_backend.engine.request import AbortCause
from headrace_backend.engine.scheduling.masks import MaskCall, num_certain
from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.masks import no_masks
from headrace_backend.step.plan import StepPlan
from headrace_backend.structured_output import output_place
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_request.reasoning import Reasoning
from headrace_request.structured_output import StructuredOutput


@pytest.fixture(scope="module")
def grammars() -> Iterator[list[CompiledGrammar]]:
    compiler = small_compiler()
    yield [compiler.compile(StructuredOutput("regex", form)).result() for form in FORMS]
    compiler.close()


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(options_of_rows, min_size=1, max_size=6),
    st.integers(9, 30),
    st.sets(st.integers(1, 40), max_size=2),
    st.sampled_from([0.0, 0.7, 0.95, 1.0]),
    st.sampled_from([-1, 1, 3]),
    st.sampled_from(["auto", "2", "4"]),
)
def test_answers_are_those_of_which_each_token_was_drawn(
    grammars: list[CompiledGrammar],
    rows: list[dict[str, Any]],
    num_blocks: int,
    deaths: set[int],
    share_right: float,
    max_drafts: int,
    num_drafts: str,
) -> None:
    """Whatever is preempted, lost, forked, penalized, stopped, forced or drafted besides."""
    options = {"max_num_seqs": 4, "model_len": 96}
    rows = [row | {"seed": 10 * index + row["seed"]} for index, row in enumerate(rows)]
    expected = {row["seed"]: answer(asked(grammars, row, max_drafts=0), **options) for row in rows}
    answers = {seed: tokens_of(reader) for seed, reader in expected.items()}
    drafting: dict[str, Any] = {"num_drafts": num_drafts, "num_blocks": num_blocks, "max_num_batched_tokens": 24}
    harness = GuessingHarness(answers, share_right, **drafting, **options)
    arrivals = [(asked(grammars, row, max_drafts=max_drafts), row["pause"]) for row in rows]
    for row, (_, reader) in zip(rows, harness.serve(arrivals, deaths), strict=True):
        assert tokens_of(reader) == answers[row["seed"]]
        assert ends_of(reader) == ends_of(expected[row["seed"]])
        if row["n"] == 1 and row["num_logprobs"] >= 0:
            # What nobody drew has all of the probability.
            pairs = zip(reader.logprobs, expected[row["seed"]].logprobs, strict=True)
            assert all(found in (drawn, (0.0, 1, drawn[2][:0] or found[2])) for found, drawn in pairs)


class LateHarness(GuessingHarness):
    """What must come is found out late: often the step's result was read before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.late: list[tuple[MaskCall, list[MaskOutcome]]] = []
        self.num_after_result = 0
        self.delays = random.Random(0)
        super().__init__(*arguments, **options)

    def plan(self) -> bool:
        if self.delays.random() < 0.3:
            self.find_out()
        if super().plan():
            return True
        if self.engine.num_in_flight or not self.late:
            return False
        self.find_out()
        return super().plan()

    def compute(self, call: MaskCall, worker: FakeWorker) -> None:
        # One thread computes one call after the other.
        self.find_out()
        super().compute(call, worker)

    def done(self, call: MaskCall, outcomes: list[MaskOutcome]) -> None:
        self.late.append((call, outcomes))

    def find_out(self) -> None:
        late, self.late = self.late, []
        in_flight = {step.step_id for step in self.engine._in_flight}
        for call, outcomes in late:
            self.num_after_result += call.step_id not in in_flight
            super().done(call, outcomes)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(options_of_rows, min_size=1, max_size=4),
    st.integers(12, 30),
    st.sets(st.integers(1, 40), max_size=1),
    st.sampled_from([0.7, 0.95, 1.0]),
)
def test_what_must_come_may_be_found_out_behind_the_result(
    grammars: list[CompiledGrammar], rows: list[dict[str, Any]], num_blocks: int, deaths: set[int], share_right: float
) -> None:
    options = {"max_num_seqs": 4, "model_len": 96}
    rows = [row | {"seed": 10 * index + row["seed"]} for index, row in enumerate(rows)]
    expected = {row["seed"]: answer(asked(grammars, row, max_drafts=0), **options) for row in rows}
    answers = {seed: tokens_of(reader) for seed, reader in expected.items()}
    harness = LateHarness(answers, share_right, num_blocks=num_blocks, max_num_batched_tokens=24, **options)
    arrivals = [(asked(grammars, row), row["pause"]) for row in rows]
    for row, (_, reader) in zip(rows, harness.serve(arrivals, deaths), strict=True):
        assert tokens_of(reader) == answers[row["seed"]]
        assert ends_of(reader) == ends_of(expected[row["seed"]])


def test_some_results_are_read_before_it_is_found_out_what_must_come(grammars: list[CompiledGrammar]) -> None:
    num_after_result = 0
    for grammar in grammars:
        drawn = run_alike(grammar, MaskedHarness(), 4, max_drafts=0)
        harness = LateHarness({4: tokens_of(drawn)}, 1.0)
        assert tokens_of(run_alike(grammar, harness, 4)) == tokens_of(drawn)
        num_after_result += harness.num_after_result
    assert num_after_result > 3


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(reasonings, st.integers(1, 40), st.integers(1, 3), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    ),
    st.integers(9, 30),
    st.sets(st.integers(1, 40), max_size=2),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_a_budget_of_reasoning_may_end_within_drafts(
    rows: list[tuple[Reasoning, int, int, int]], num_blocks: int, deaths: set[int], share_right: float
) -> None:
    """Draws before the end have no mask, and those behind it none either."""
    specs = [
        asked_to_reason(reasoning, max_tokens=max_tokens, n=n, seed=seed)
        for seed, (reasoning, max_tokens, n, _) in enumerate(rows)
    ]
    answers = {
        seed: {
            output: expected_tokens(spec, output, functools.partial(allowed, row[0])) for output in range(spec.asked.n)
        }
        for seed, (spec, row) in enumerate(zip(specs, rows, strict=True))
    }
    harness = GuessingHarness(answers, share_right, num_blocks=num_blocks, max_num_seqs=4, model_len=96)
    arrivals = [(spec, row[-1]) for spec, row in zip(specs, rows, strict=True)]
    for seed, (_, reader) in enumerate(harness.serve(arrivals, deaths)):
        assert tokens_of(reader) == answers[seed]


def run_alike(grammar: CompiledGrammar, harness: MaskedHarness, seed: int, **way: Any) -> Reader:
    reader = harness.add(request(9, 60, grammar=grammar, seed=seed, token_ids=[EOS], **way))
    harness.run()
    return reader


def test_right_drafts_save_steps_beside_what_must_come(
    grammars: list[CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine what must come would be followed less far at times.
    monkeypatch.setattr(output_place, "AHEAD_NS", 10**12)
    num_right = num_forced = num_fewer = 0
    for grammar in grammars:
        drawn = run_alike(grammar, MaskedHarness(), 4, max_drafts=0)
        right = GuessingHarness({4: tokens_of(drawn)}, 1.0)
        steps: dict[str, int] = {}
        for name, harness in {"forced": MaskedHarness(), "wrong": GuessingHarness({}, 0.0), "right": right}.items():
            reader = run_alike(grammar, harness, 4)
            assert tokens_of(reader) == tokens_of(drawn) and reader.done is not None
            steps[name] = reader.done.step_count
        assert drawn.done is not None
        # Wrong drafts keep nothing that must come from being computed at once.
        assert steps["right"] <= steps["forced"] == steps["wrong"] <= drawn.done.step_count
        num_right += right.num_right
        num_forced += right.worker.num_forced
        num_fewer += steps["forced"] - steps["right"]
    assert num_right > 5 and num_forced > 5 and num_fewer > 5


def test_rows_with_forms_that_settled_nothing_go_on_unless_the_next_step_was_planned_behind_it(
    grammars: list[CompiledGrammar],
) -> None:
    """What must come counts as settled before its result is there; the next step relies on it."""
    num_held_up = num_whole = num_ended = 0
    for grammar in grammars:
        for seed in range(6):
            expected = tokens_of(run_alike(grammar, MaskedHarness(), seed, max_drafts=0))
            harness = GuessingHarness({seed: expected}, 0.8)
            worker = harness.worker
            assert isinstance(worker, DraftingWorker)
            worker.holds_up = functools.partial(_is_one_in, random.Random(seed), 4)
            reader = run_alike(grammar, harness, seed)
            is_error = reader.ends[0].reason is EndReason.ERROR
            assert tokens_of(reader)[0] == expected[0][: len(tokens_of(reader)[0])]
            assert is_error or tokens_of(reader) == expected
            num_held_up += worker.num_empty
            num_whole += worker.num_empty > 0 and not is_error
            num_ended += is_error
    assert num_held_up > 20 and num_whole > 10 and num_ended > 0


def _is_one_in(draws: random.Random, count: int) -> bool:
    return draws.randrange(count) == 0


def test_a_form_that_ends_within_drafts_ends_the_output_there(grammars: list[CompiledGrammar]) -> None:
    """Nothing can be drawn behind its last token; what the worker draws there is dropped."""
    ended_within = 0
    for seed in range(8):
        spec = request(9, 60, grammar=grammars[1], seed=seed)
        alone = MaskedHarness()
        expected = alone.add(request(9, 60, grammar=grammars[1], seed=seed, max_drafts=0))
        alone.run()
        # It drafts beyond the end.
        tokens = tokens_of(expected)[0]
        harness = GuessingHarness({seed: {0: tokens + [1] * TOKENS_PER_ROW}}, 1.0)
        reader = harness.add(spec)
        while harness.engine.has_work:
            harness.plan()
            ended_within += any(step.ends for step in harness.engine._in_flight)
            harness.settle()
        assert tokens_of(reader)[0] == tokens and reader.ends[0].reason is EndReason.STOP
    assert ended_within > 3


def test_a_request_that_is_cancelled_within_drafts_leaves_nothing(grammars: list[CompiledGrammar]) -> None:
    drawn = run_alike(grammars[3], MaskedHarness(), 4, max_drafts=0)
    for num_steps in range(1, 7):
        harness = GuessingHarness({4: tokens_of(drawn)}, 1.0)
        spec = request(9, 60, grammar=grammars[3], seed=4, token_ids=[EOS])
        reader, beside = harness.add(spec), harness.add(request(9, 30, seed=5))
        for _ in range(num_steps):
            harness.checked_step()
        # Between a plan and its masks, too.
        Harness.plan(harness)
        harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED)
        harness.run()
        found = tokens_of(reader).get(0, [])
        assert found == tokens_of(drawn)[0][: len(found)]
        assert len(tokens_of(beside)[0]) == 30


class Free:
    """A grammar that allows everything."""

    first_masked, decides_ends = 0, True

    def new_output(self) -> object:
        return object()


class FailingHarness(GuessingHarness):
    """The grammars of its rows fail behind two drafts, and draws may be any token."""

    def compute(self, call: MaskCall, worker: FakeWorker) -> None:
        worker.masks[call.step_id] = no_masks(call.step_id, VOCAB_SIZE)
        failing = MaskOutcome(MaskState.MASKED, end=DraftedEnd(2, FAILED))
        outcomes = [failing if len(job.drafts) > 1 else MASKED for job in call.jobs]
        self.engine.masks_filled(call, outcomes)
        self.engine.masks_done(call, outcomes)


FAILED = MaskOutcome(MaskState.FAILED, "the structured output can't go on: a test")


@pytest.mark.parametrize(("num_wrong", "num_left"), [(0, 3), (2, 4), (12, 12)])
def test_a_grammar_that_fails_behind_drafts_ends_its_output_only_if_they_are_right(
    num_wrong: int, num_left: int
) -> None:
    """Drafts for the first so many places are wrong; the prompt's step drafts none."""
    tokens = expected_tokens(request(9, 12, seed=4), 0)
    guessed = [(token + 1) % VOCAB_SIZE if place < num_wrong else token for place, token in enumerate(tokens)]
    harness = FailingHarness({4: {0: guessed}}, 1.0)
    reader = harness.add(request(9, 12, seed=4, grammar=Free()))
    beside = harness.add(request(9, 12, seed=5))
    harness.run()
    assert tokens_of(reader)[0] == tokens[: len(tokens_of(reader)[0])]
    assert len(tokens_of(beside)[0]) == 12
    if num_left < 12:
        assert (reader.ends[0].reason, reader.ends[0].error) == (EndReason.ERROR, FAILED.error)
    assert len(tokens_of(reader)[0]) == num_left


@pytest.mark.parametrize(
    ("forced", "drafts", "certain"),
    [
        ([], [1, 2], None),
        ([7], [1, 2], 1),
        ([1], [1, 2], None),
        ([1, 7], [1, 2], 2),
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 2], 3),
        ([1, 2, 3, 4], [1, 2], 3),
        ([1], [], 1),
    ],
)
def test_what_must_come_says_how_many_drafts_are_right(
    forced: list[int], drafts: list[int], certain: int | None
) -> None:
    assert num_certain(forced, drafts) == certain


@pytest.mark.parametrize("tokens", [[], [1], [1] * 9, [1, 2, 3, VOCAB_SIZE], [1, 2, -1, 3]])
def test_drafts_that_a_step_can_not_have_are_a_broken_worker(
    grammars: list[CompiledGrammar], tokens: list[int]
) -> None:
    harness = GuessingHarness({}, 0.0)
    harness.add(request(9, 60, grammar=grammars[3], seed=4))
    harness.plan()
    harness.plan()
    step_id = StepPlan.decode(harness.worker.plans[1]).step_id
    with pytest.raises(ValueError, match=f"step {step_id}: "):
        harness.engine.take_drafts(StepDrafts(step_id, np.array(tokens, np.int32)))
    # Of a step that is gone they are of no use.
    harness.engine.take_drafts(StepDrafts(99, np.array(tokens, np.int32)))
