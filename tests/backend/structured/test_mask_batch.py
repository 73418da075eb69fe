"""Masks computed side by side: they are those that each place computes by itself."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from benchmarks.made_schemas import make_schema
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLExecutor
from tests.support.processes import wait_until
from tests.support.running_server import DEMO

from headrace_backend.engine.output_grammar import Grammar, MaskOutcome, MaskState
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.structured_output import output_place
from headrace_backend.structured_output.compiler import GrammarCompiler, grammar_compiler
from headrace_backend.structured_output.mask_batch import BatchRow, batch_row, fill_batch, follow_batch
from headrace_backend.structured_output.mask_pool import MaskPool, fill_alone
from headrace_backend.structured_output.reasoning_place import behind_reasoning
from headrace_backend.structured_output.stacks import STACK_BYTES, library_threads
from headrace_model_folder import ModelFolder
from headrace_request.limits import MAX_DRAFTS
from headrace_request.reasoning import Reasoning
from headrace_request.structured_output import StructuredOutput, choice

FOLDER = ModelFolder.open(DEMO)
VOCAB = FOLDER.config.vocab_size
END = frozenset(FOLDER.generation_defaults.eos_token_ids)
OTHER_STOP = frozenset({FOLDER.token_table.token_bytes.index(b"}")}) if FOLDER.token_table else frozenset()
FORMS = [
    *(StructuredOutput("json_schema", json.dumps(make_schema(seed))) for seed in range(5)),
    StructuredOutput("regex", "[0-9]{2,30}"),
    choice(["a long way to go", "a long way to come", "b"]),
    choice(["there is no choice here at all"]),
]


@pytest.fixture(scope="module")
def grammars() -> Iterator[list[Grammar]]:
    compiler = grammar_compiler(FOLDER)
    assert isinstance(compiler, GrammarCompiler)
    compiled = [compiler.compile(form).result() for form in FORMS]
    thinking = Reasoning(start_ids=(7,), end_ids=(9,), begins_inside=True, max_tokens=3)
    yield [*compiled, *(made for each in compiled[:3] if (made := behind_reasoning(thinking, each)))]
    compiler.close()


@pytest.fixture(scope="module")
def library() -> LLExecutor:
    return library_threads(2)


def allowed(words: np.ndarray) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]).tolist()
    return tokens


def end_of(outcome: MaskOutcome) -> tuple[int, MaskState] | None:
    return None if outcome.end is None else (outcome.end.num_drafts, outcome.end.outcome.state)


class Walk:
    """One output, followed twice: by itself and beside others."""

    def __init__(self, grammar: Grammar, looks_ahead: bool, stops: frozenset[int], min_tokens: int) -> None:
        self.alone, self.beside = grammar.new_output(), grammar.new_output()
        self.asked = (stops, min_tokens, looks_ahead)
        self.tokens = array("i")
        self.num_given = 0
        self.ended = False

    def job(self, sample: int, place: Any, drafts: tuple[int, ...] = ()) -> MaskJob:
        first = min(self.num_given, len(self.tokens))
        return MaskJob(sample, place, first, self.tokens[first:], *self.asked, drafts)

    def drafts(self, draw: random.Random) -> tuple[int, ...]:
        """Tokens that may follow, for the most part."""
        place, first, drafts = self.alone.copy(), min(self.num_given, len(self.tokens)), array("i")
        for _ in range(draw.choice([0, 0, 1, 3, 8])):
            words = np.zeros(mask_words(VOCAB), np.int32)
            place.fill_mask(words, first, self.tokens[first:] + drafts, *self.asked[:2])
            drafts.append(draw.choice(allowed(words) or [7]) if draw.random() < 0.9 else draw.randrange(VOCAB))
        return tuple(drafts)

    def go_on(self, job: MaskJob, lines: np.ndarray, outcome: MaskOutcome, draw: random.Random, garbage: bool) -> None:
        """Draws tokens that the masks allow as far as drafts are right, or one that may not fit."""
        self.ended = outcome.state in (MaskState.COMPLETE, MaskState.FAILED)
        if self.ended:
            return
        self.num_given = len(self.tokens) + len(outcome.forced or ())
        if outcome.forced and draw.random() < 0.5:
            # The engine has computed them without drawing; of others each is drawn.
            self.tokens += outcome.forced
            return
        for place, line in enumerate(lines):
            self.ended = outcome.end is not None and outcome.end.num_drafts == place
            if self.ended:
                return
            masked = allowed(line) if place in outcome.masked_places else list(range(VOCAB))
            draft = job.drafts[place] if place < len(job.drafts) else -1
            token = draft if draft in masked and draw.random() < 0.9 else draw.choice(masked)
            token = draw.randrange(VOCAB) if garbage else token
            stops, min_tokens, _ = self.asked
            self.ended = token in stops and len(self.tokens) >= min_tokens
            if self.ended:
                return
            self.tokens.append(token)
            if token != draft:
                return


def side_by_side(library: LLExecutor, rows: list[BatchRow], words: np.ndarray) -> list[MaskOutcome | None]:
    """Masks, then what must come, of the rows for which that is done."""
    found = fill_batch(library, rows, words) if rows else []
    whole = [(row, outcome) for row, outcome in zip(rows, found, strict=True) if outcome is not None]
    written = words.copy()
    ahead_ns = output_place.AHEAD_NS
    followed = iter(follow_batch(library, *map(list, zip(*whole, strict=True)), words, ahead_ns) if whole else [])
    np.testing.assert_array_equal(words, written)
    return [None if outcome is None else next(followed) for outcome in found]


def unheard(call: MaskCall, masks: StepMasks, outcomes: list[MaskOutcome]) -> None:
    """Takes masks that a test does not look at."""


@given(data=st.data())
def test_masks_side_by_side_are_those_of_each_place_alone(
    grammars: list[Grammar], library: LLExecutor, data: st.DataObject
) -> None:
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    walks = [
        Walk(draw.choice(grammars), draw.random() < 0.7, draw.choice([END, END | OTHER_STOP]), draw.choice([0, 0, 12]))
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    has_garbage = data.draw(st.booleans())
    for _ in range(40):
        walks = [walk for walk in walks if not walk.ended]
        if not walks:
            return
        jobs = [walk.job(index, walk.beside, walk.drafts(draw)) for index, walk in enumerate(walks)]
        firsts = list(itertools.accumulate([1 + len(job.drafts) for job in jobs], initial=0))
        together = np.empty((firsts[-1], mask_words(VOCAB)), np.int32)
        rows = [batch_row(index, job, firsts[index]) for index, job in enumerate(jobs)]
        beside_others = [row for row in rows if row is not None]
        outcomes = iter(side_by_side(library, beside_others, together))
        for index, (walk, row) in enumerate(zip(walks, rows, strict=True)):
            lines = together[firsts[index] : firsts[index + 1]]
            beside = (next(outcomes) if row is not None else None) or fill_alone(jobs[index], lines)
            own = np.empty_like(lines)
            alone = fill_alone(walk.job(index, walk.alone, jobs[index].drafts), own)
            assert (beside.state, beside.next_masked) == (alone.state, alone.next_masked), (beside.error, alone.error)
            assert (beside.masked_places, end_of(beside)) == (alone.masked_places, end_of(alone))
            masked = list(alone.masked_places)
            np.testing.assert_array_equal(lines[masked], own[masked])
            # Both go on as far as their time allows.
            shorter = min(len(beside.forced or ()), len(alone.forced or ()))
            assert (beside.forced or array("i"))[:shorter] == (alone.forced or array("i"))[:shorter]
            agreed = alone if len(alone.forced or ()) <= len(beside.forced or ()) else beside
            walk.go_on(jobs[index], own, agreed, draw, has_garbage and draw.random() < 0.05)


def test_most_masks_of_a_form_are_computed_side_by_side(grammars: list[Grammar]) -> None:
    place = grammars[5].new_output()
    words = np.empty((1, mask_words(VOCAB)), np.int32)
    seven = FOLDER.token_table.token_bytes.index(b"7") if FOLDER.token_table is not None else 0
    job = MaskJob(0, place, 0, array("i"), END, 0, False)
    assert batch_row(0, job) is not None
    fill_alone(job, words)
    assert batch_row(0, job._replace(tokens=array("i", [seven]))) is not None
    # A step settles so many; a lost worker's output is read again, and more are given.
    assert batch_row(0, job._replace(tokens=array("i", [seven] * (1 + MAX_DRAFTS)))) is not None
    assert batch_row(0, job._replace(tokens=array("i", [seven] * (2 + MAX_DRAFTS)))) is None


def test_a_slow_place_is_found_among_others_and_ends_by_itself(
    grammars: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be slow is computed by itself for a while, where its time counts."""
    monkeypatch.setattr("headrace_backend.structured_output.mask_batch.FREE_NS", -(10**12))
    monkeypatch.setattr(output_place, "FREE_NS", -(10**9))
    place, pool = grammars[5].new_output(), MaskPool(VOCAB)
    seven = FOLDER.token_table.token_bytes.index(b"7") if FOLDER.token_table is not None else 0
    states, tokens = [], array("i")
    for step in range(2):
        done: list[list[MaskOutcome]] = []
        job = MaskJob(0, place, max(step - 1, 0), tokens[max(step - 1, 0) :], END, 0, False)
        pool.start(MaskCall(step, 0, [job], [], False), unheard, lambda call, found: done.append(found))  # noqa: B023
        wait_until(lambda: bool(done), 60, "the mask")  # noqa: B023
        states.append(done[0][0].state)
        tokens.append(seven)
    pool.close()
    assert states == [MaskState.MASKED, MaskState.FAILED]


def test_the_library_s_threads_have_the_stack_of_ours(library: LLExecutor) -> None:
    """A grammar that the trial's smaller stack holds can't end the process here."""
    sizes = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = line.split(maxsplit=1)[0].split("-")
            sizes.append(int(end, 16) - int(begin, 16))
    assert sizes.count(STACK_BYTES) >= 2, library


def test_a_mistake_of_ours_ends_the_rows_of_a_step_and_no_step_waits(grammars: list[Grammar]) -> None:
    pool, records, done = MaskPool(VOCAB), [], []
    place = grammars[5].new_output()
    broken = MaskJob(0, object(), 0, array("i"), END, 0, False)  # type: ignore[arg-type]
    for jobs in ([broken, broken._replace(grammar=place)], [], [broken._replace(grammar=place)]):
        call = MaskCall(1, 0, jobs, [], False)
        pool.start(call, lambda _, masks, __: records.append(masks.encode()), lambda _, found: done.append(found))
    wait_until(lambda: len(done) == 3, 60, "all calls")
    pool.close()
    assert [[outcome.state for outcome in found] for found in done] == [
        [MaskState.FAILED] * 2, [], [MaskState.MASKED],
    ]  # fmt: skip
    assert [StepMasks.decode(record).samples.size for record in records] == [0, 0, 1]


@pytest.mark.parametrize("is_awaited", [False, True])
def test_what_must_come_is_looked_for_at_length_only_if_the_next_plan_waits(
    grammars: list[Grammar], is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_backend.structured_output.mask_pool._BRIEF_AHEAD_NS", 0)
    monkeypatch.setattr("headrace_backend.structured_output.mask_pool.AHEAD_NS", 10**12)
    pool, done = MaskPool(VOCAB), []
    job = MaskJob(0, grammars[7].new_output(), 0, array("i"), END, 0, True)
    pool.start(MaskCall(1, 0, [job], [], is_awaited), unheard, lambda call, found: done.extend(found))
    wait_until(lambda: bool(done), 60, "the mask")
    pool.close()
    assert done[0].state is MaskState.MASKED
    assert len(done[0].forced or ()) > 2 if is_awaited else not done[0].forced
