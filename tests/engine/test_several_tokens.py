"""Steps that settle several tokens of a row, or none, give what steps of one token each give."""

from __future__ import annotations

import functools
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from tests.engine.drafting_worker import DraftingWorker
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import TOKEN_BYTES, Harness, Reader, request
from tests.engine.test_engine_state_machine import EngineMachine, expected_end
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import EngineRequest, Recording
from headrace_backend.step.plan import StepResult
from headrace_facts import facts, step_records, token_steps

TOKENS_PER_ROW = 4


def drafting(tokens_per_row: int = TOKENS_PER_ROW, speculate_tokens: str = "8", **changes: int | bool) -> Harness:
    """An engine whose steps have as many drafts as its worker drafts, or as many as pay."""
    return Harness(tokens_per_row=tokens_per_row, speculate_tokens=speculate_tokens, **changes)


def worker_of(harness: Harness) -> DraftingWorker:
    assert isinstance(harness.worker, DraftingWorker)
    return harness.worker


class DraftingMachine(EngineMachine):
    """All that may happen to an engine, while rows settle up to four tokens a step at random."""

    tokens_per_row = TOKENS_PER_ROW

    @initialize(seed=st.integers(0, 1 << 16))
    def choose(self, seed: int) -> None:
        self.draws = random.Random(seed)

    def choose_count(self, most: int) -> int:
        return self.draws.randint(0, most)


class OneAtMostMachine(DraftingMachine):
    """Rows settle one token or none."""

    tokens_per_row = 1


SETTINGS = hypothesis.settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = SETTINGS
TestOneAtMostMachine = OneAtMostMachine.TestCase
TestOneAtMostMachine.settings = SETTINGS


def test_a_step_verifies_what_a_plan_that_was_sent_asked_for() -> None:
    """Now and then both rows wait for a result, and nothing is planned. The worker asserts it."""
    harness = drafting(num_blocks=5, model_len=96, max_num_seqs=2, max_num_batched_tokens=40, speculate_tokens="auto")
    harness.choose_count = functools.partial(random.Random(16).randint, 0)
    readers = [harness.add(request(length, max_tokens)) for length, max_tokens in ((27, 7), (23, 12))]
    harness.run()
    assert [len(reader.tokens[0]) for reader in readers] == [7, 12]


requests = st.builds(
    lambda shared, own, max_tokens, n, strings, stop_tokens, penalty, logprobs: request(
        [5] * shared + own,
        max_tokens,
        n=n,
        strings=tuple(strings),
        token_ids=stop_tokens,
        presence_penalty=0.5 if penalty else 0.0,
        num_logprobs=logprobs,
    ),
    shared=st.integers(0, 40),
    own=st.lists(st.integers(1, 3), min_size=1, max_size=20),
    max_tokens=st.integers(1, 36),
    n=st.integers(1, 3),
    strings=st.lists(st.sampled_from([b"a", b"abab", b"bcc", b"cab"]), max_size=2, unique=True),
    stop_tokens=st.frozensets(st.integers(0, 23), max_size=1),
    penalty=st.booleans(),
    logprobs=st.sampled_from([-1, 0, 2]),
)


def seen(reader: Reader) -> object:
    ends = {
        index: (end.reason, end.stop_token_id, end.stop_string_index, end.trim_bytes)
        for index, end in reader.ends.items()
    }
    assert reader.done is not None
    return reader.tokens, sorted(reader.logprobs), ends, reader.done.output_tokens


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    arrivals=st.lists(st.tuples(requests, st.integers(0, 4)), min_size=1, max_size=6),
    deaths=st.frozensets(st.integers(1, 12), max_size=1),
    num_blocks=st.integers(7, 14),
    tokens_per_row=st.integers(1, 5),
    budget=st.sampled_from([16, 17, 40, 200]),
    speculate_tokens=st.sampled_from(["auto", "2", "8"]),
    seed=st.integers(0, 1 << 16),
)
def test_outputs_are_those_of_one_token_a_step(
    arrivals: list[tuple[EngineRequest, int]],
    deaths: frozenset[int],
    num_blocks: int,
    tokens_per_row: int,
    budget: int,
    speculate_tokens: str,
    seed: int,
) -> None:
    sizes = {"model_len": 112, "max_num_seqs": 4, "max_num_batched_tokens": budget, "max_waiting_requests": 100}
    draws = random.Random(seed)
    harness = drafting(tokens_per_row, speculate_tokens, num_blocks=num_blocks, **sizes)
    harness.choose_count = lambda most: draws.randint(0, most)
    plain = Harness(num_blocks, **sizes)
    for (spec, reader), (_, other) in zip(harness.serve(arrivals, deaths), plain.serve(arrivals), strict=True):
        assert seen(reader) == seen(other)
        for output_index in range(spec.asked.n):
            assert (reader.tokens[output_index], reader.ends[output_index].reason) == expected_end(spec, output_index)
    assert harness.engine.load().used_blocks == 0


def test_a_step_settles_as_many_tokens_as_the_worker_drafts_and_the_output_needs_fewer_steps() -> None:
    harness = drafting()
    spec = request(10, max_tokens=41)
    reader = harness.add(spec)
    harness.run()
    assert reader.tokens[0] == expected_tokens(spec, 0)
    assert worker_of(harness).largest_count == TOKENS_PER_ROW
    assert reader.done is not None
    # The prompt's step settles one, ten more settle four each.
    assert reader.done.step_count == 11
    assert (reader.done.draft_tokens, reader.done.accepted_tokens) == (30, 30)


@pytest.mark.parametrize("speculate_tokens", ["auto", "8"])
def test_a_request_has_as_many_drafts_as_it_allows_beside_others_that_have_all(speculate_tokens: str) -> None:
    harness = drafting(speculate_tokens=speculate_tokens)
    specs = [request(10 + limit, max_tokens=24, max_drafts=limit) for limit in (0, 1, -1)]
    readers = [harness.add(spec) for spec in specs]
    harness.run()
    for spec, reader in zip(specs, readers, strict=True):
        assert reader.tokens[0] == expected_tokens(spec, 0)
    none, one, all_of_them = (reader.done for reader in readers)
    assert none is not None and one is not None and all_of_them is not None
    assert none.draft_tokens == 0 and none.step_count == 24
    assert 0 < one.draft_tokens <= one.step_count
    assert all_of_them.draft_tokens > one.draft_tokens and all_of_them.step_count < one.step_count < 24


@pytest.mark.parametrize("index", [4, 5, 6, 7])
def test_a_stop_token_within_a_rows_tokens_ends_the_output_there(index: int) -> None:
    spec = request(12, max_tokens=30)
    tokens = expected_tokens(spec, 0)
    stop = tokens[index]
    harness = drafting()
    reader = harness.add(request(12, max_tokens=30, token_ids=frozenset([stop])))
    harness.run()
    end = reader.ends[0]
    assert reader.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert (end.reason, end.stop_token_id) == (EndReason.STOP, stop)
    assert harness.engine.load().used_blocks == 0


@pytest.mark.parametrize("length", range(2, 9))
def test_max_tokens_within_a_rows_tokens_ends_the_output_there(length: int) -> None:
    harness = drafting()
    spec = request(15, max_tokens=length)
    reader = harness.add(spec)
    harness.run()
    assert reader.tokens[0] == expected_tokens(spec, 0)
    assert reader.ends[0].reason is EndReason.LENGTH
    # Never a slot behind the last token that is needed: 16 tokens have room in one block.
    assert harness.worker.num_tokens <= 15 + length - 1


def test_a_stop_string_across_a_rows_tokens_ends_the_output_there() -> None:
    spec = request(9, max_tokens=40)
    tokens = expected_tokens(spec, 0)
    text = b"".join(TOKEN_BYTES[token] for token in tokens[:8])
    harness = drafting()
    reader = harness.add(request(9, max_tokens=40, strings=(text[-5:],)))
    harness.run()
    assert reader.ends[0].stop_string_index == 0
    assert (reader.tokens[0], EndReason.STOP) == expected_end(request(9, max_tokens=40, strings=(text[-5:],)), 0)


def test_tokens_before_one_that_is_not_finite_reach_the_reader() -> None:
    harness = drafting()
    spec = request(10, max_tokens=20)
    reader, other = harness.add(spec), harness.add(request(11, max_tokens=20))
    for _ in range(3):
        harness.step()
    harness.plan()
    result = harness.worker.run()
    assert result.counts.tolist() == [4, 4]
    # A copy, because columns are views of the message.
    result.ok = result.ok.copy()
    result.ok[2] = 0
    num_before = len(reader.tokens[0])
    harness.engine.settle(result)
    harness.run()
    assert reader.ends[0].reason is EndReason.ERROR
    assert reader.tokens[0] == expected_tokens(spec, 0)[: num_before + 2]
    assert other.ends[0].reason is EndReason.LENGTH


def test_rows_that_settle_nothing_stay_as_they_were() -> None:
    harness = drafting()
    reader = harness.add(request(10, max_tokens=20))
    for _ in range(2):
        harness.step()
    num_before, steps_before = len(reader.tokens[0]), harness.engine.num_settled_steps
    harness.choose_count = lambda most: 0
    for _ in range(5):
        harness.checked_step()
    assert len(reader.tokens[0]) == num_before
    assert harness.engine.num_settled_steps == steps_before + 5
    harness.choose_count = lambda most: most
    harness.run()
    assert reader.tokens[0] == expected_tokens(request(10, max_tokens=20), 0)


@pytest.mark.parametrize("num_others", [0, 1])
def test_a_row_that_settled_nothing_has_no_drafts_in_the_next_step_to_be_planned(num_others: int) -> None:
    """Whatever was drafted holds up two steps at most: the one in flight by then has drafts too."""
    harness = drafting()
    readers = [harness.add(request(10 + index, max_tokens=40)) for index in range(1 + num_others)]
    for _ in range(2):
        harness.step()
    # The first row is held up once.
    counts = iter([0])
    harness.choose_count = lambda most: min(next(counts, most), most)

    def planned() -> list[int]:
        harness.plan()
        return harness.engine._in_flight[-1].draft_counts

    others = [3] * num_others
    assert planned() == planned() == [3, *others]
    harness.settle()
    assert planned() == ([0, *others] if others else [])
    harness.settle()
    assert planned() == [3, *others]
    harness.run()
    for index, reader in enumerate(readers):
        assert reader.tokens[0] == expected_tokens(request(10 + index, max_tokens=40), 0)


def test_drafts_stay_within_budget_and_free_blocks_and_preempt_nobody() -> None:
    # Four rows share a budget of 16 tokens, and the last one has it alone (the worker asserts that
    # no step passes it). Eight blocks hold what four sequences need.
    harness = drafting(8, num_blocks=8, max_num_seqs=7, max_num_batched_tokens=16)
    specs = [request(10 + index, max_tokens=18) for index in range(4)]
    readers = [harness.add(spec) for spec in specs]
    harness.run()
    assert worker_of(harness).largest_count == 8
    for spec, reader in zip(specs, readers, strict=True):
        assert reader.tokens[0] == expected_tokens(spec, 0)
        assert reader.done is not None and reader.done.preemptions == 0


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([5], r"sample 0 settled 5 tokens, not 0 to 4"),
        ([-1], r"sample 0 settled -1 tokens"),
        ([4, 4], r"counts 2 samples, the plan 1"),
        ([3], r"4 tokens, not 3"),
    ],
)
def test_counts_that_no_plan_allows_are_refused_and_change_nothing(counts: list[int], message: str) -> None:
    harness = drafting()
    spec = request(10, max_tokens=30)
    reader = harness.add(spec)
    harness.step()
    harness.plan()
    result = harness.worker.run()
    true_counts = result.counts
    result.counts = np.array(counts, np.int32)
    with pytest.raises(ValueError, match=message):
        harness.engine.settle(result)
    result.counts = true_counts
    harness.engine.settle(result)
    harness.run()
    assert reader.tokens[0] == expected_tokens(spec, 0)


def test_the_sample_behind_a_prompt_can_not_settle_nothing() -> None:
    harness = drafting()
    harness.add(request(10))
    harness.plan()
    result = harness.worker.run()
    empty = StepResult(result.step_id, 0, 1000, np.empty(0, np.int32), np.empty(0, np.uint8))
    empty.counts = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="sample 0 settled 0 tokens, not 1 to 1"):
        harness.engine.settle(empty)


def test_counts_cross_as_bytes_and_cost_nothing_where_each_sample_settles_one() -> None:
    one_each = StepResult(3, 1, 2, np.array([7, 8], np.int32), np.ones(2, np.uint8))
    several = StepResult(3, 1, 2, np.array([7, 8], np.int32), np.ones(2, np.uint8))
    several.counts = np.array([2, 0], np.int32)
    assert StepResult.decode(several.encode()).counts.tolist() == [2, 0]
    assert StepResult.decode(one_each.encode()).counts.size == 0
    assert len(several.encode()) == len(one_each.encode()) + several.counts.nbytes


def test_telemetry_counts_drafts_and_knows_each_tokens_step() -> None:
    harness = drafting()
    records = harness.engine.steps.reader()
    span = facts.SpanContext("ab" * 16, "cd" * 8)
    reader = harness.add(request(10, max_tokens=14, span=span, recording=Recording()))
    counts = iter([4, 2, 0, 1, 4, 4, 4])
    harness.choose_count = lambda most: min(next(counts), most)
    harness.run()
    steps = step_records.decode(records.take())
    assert steps["num_samples"].tolist()[:5] == [1, 4, 2, 0, 1]
    assert steps["accepted_tokens"].tolist()[:5] == [0, 3, 1, 0, 0]
    assert reader.done is not None
    assert reader.done.draft_tokens == steps["draft_tokens"].sum()
    assert reader.done.accepted_tokens == steps["accepted_tokens"].sum()
    [of_output] = facts.decode_trace(reader.done.engine_trace).token_steps
    ids = token_steps.step_ids(of_output).tolist()
    assert ids[:8] == [1, 2, 2, 2, 2, 3, 3, 5]
    assert len(ids) == 14
