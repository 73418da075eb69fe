"""Searches among other requests, with too few blocks and rows, and workers that die.

What a search reads is that of the search alone, run without any engine.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import chain, expected_tokens, ranked_tokens
from tests.engine.harness import TOKEN_BYTES, Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup, SequenceBlocks
from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.request import AbortCause, EngineRequest, TenantLimits
from headrace_backend.engine.requests.beam_search import BeamSearch, Finish
from headrace_backend.engine.requests.selection import Chosen
from headrace_backend.engine.requests.stops import StopAutomaton, StopWatch
from headrace_backend.engine.requests.token_log import TokenLogprobs
from headrace_request.beam_search import BeamSearch as BeamOptions
from headrace_request.selection_rules import NO_SAMPLING


def search_request(prompt: list[int] | int, max_tokens: int = 8, width: int = 3, **changes: Any) -> EngineRequest:
    options = BeamOptions(width, changes.pop("length_penalty", 1.0), changes.pop("early_stopping", "heuristic"))
    return request(prompt, max_tokens, temperature=NO_SAMPLING.temperature, beam_search=options, **changes)


def expected_outputs(spec: EngineRequest) -> list[Chosen]:
    """The outputs of a request's search, run without any engine."""
    asked, strings = spec.asked, spec.asked.stop.strings
    assert asked.beam_search is not None
    finish = Finish(spec.stop_token_ids, asked.stop.min_tokens, asked.stop.max_tokens, TOKEN_BYTES)
    watch = StopWatch(StopAutomaton(strings), False) if strings else None
    search = BeamSearch(asked.beam_search, asked.n, finish, watch, asked.num_logprobs)
    while not search.is_over:
        reports = {}
        for running in search.running:
            slots: list[int] = []
            for token in [*spec.prompt_ids.tolist(), *running.tokens]:
                slots.append(chain(slots[-1] if slots else 0, token))
            top = ranked_tokens(slots)[: asked.num_row_logprobs]
            reports[running.slot] = TokenLogprobs(0.0, 1, [token for token, _ in top], [value for _, value in top])
        search.advance(reports)
    return search.choose(OutputEnd(0, EndReason.ERROR))


def check_outputs(spec: EngineRequest, reader: Reader) -> None:
    """Asserts that a search that ended by itself has the outputs that it must have."""
    expected = expected_outputs(spec)
    assert [reader.tokens.get(index, []) for index in range(len(expected))] == [list(one.tokens) for one in expected]
    for index, one in enumerate(expected):
        end = reader.ends[index]
        assert (end.reason, end.stop_token_id, end.stop_string_index, end.trim_bytes, end.score) == (
            one.end.reason, one.end.stop_token_id, one.end.stop_string_index, one.end.trim_bytes, one.end.score
        )  # fmt: skip
    for index in range(len(expected), spec.asked.n):
        end = reader.ends[index]
        assert end.reason is EndReason.ERROR and end.broken is not None and end.broken.field == "spec.n"


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40])
def test_a_search_reads_what_it_wrote(prompt: int) -> None:
    """Prompts that end before, at and behind the end of a block."""
    harness = Harness()
    spec = search_request(prompt, 40, width=4, n=3, token_ids=frozenset({0}))
    reader = harness.add(spec)
    while harness.engine.has_work:
        harness.checked_step()
        assert not reader.tokens or reader.done, "nothing is sent before the end"
    check_outputs(spec, reader)
    assert harness.engine.load().used_blocks == 0
    assert 0 < harness.worker.num_copies


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    harness = Harness(num_blocks=64)
    harness.add(search_request(100 * [2], 20, width=8))
    for _ in range(8):
        harness.checked_step()
        assert harness.engine.load().used_blocks <= 6 + 8
    harness.plan()
    # Six full blocks of the prompt, and of each beam the one that the prompt ends in.
    assert harness.engine.load().used_blocks == 6 + 8


def test_a_search_does_not_hold_up_others() -> None:
    """Nothing is planned ahead of a search, but whoever decodes is, in the same steps."""
    harness = Harness()
    plain = request(5, 30)
    reader = harness.add(plain)
    spec = search_request(6, 10)
    found = harness.add(spec)
    steps = 0
    while found.done is None:
        harness.plan()
        assert harness.engine.num_in_flight == 2 or reader.done, "the other request is planned ahead"
        harness.settle()
        steps += 1
    assert steps <= 2 * 11
    harness.run()
    check_outputs(spec, found)
    assert reader.tokens[0] == expected_tokens(plain, 0)


def test_a_search_waits_until_all_of_its_rows_are_free() -> None:
    harness = Harness(max_num_seqs=4)
    readers = [harness.add(request(5 + index, 6)) for index in range(2)]
    spec = search_request(9, 6, width=3)
    found = harness.add(spec)
    late = harness.add(request(20, 4))
    harness.plan()
    assert harness.engine.load().running_sequences == 2
    harness.run()
    assert [len(reader.tokens[0]) for reader in [*readers, late]] == [6, 6, 4]
    check_outputs(spec, found)


def test_a_search_that_fits_no_cache_is_refused() -> None:
    """Three beams need the prompt's full block once, and three blocks each."""
    harness = Harness(num_blocks=9)
    with pytest.raises(RequestRefused, match=r"beams need 10 blocks of KV cache; there are 9"):
        harness.add(search_request(20, 40, width=3))
    harness = Harness(num_blocks=10)
    spec = search_request(20, 40, width=3, n=3)
    reader = harness.add(spec)
    harness.run()
    check_outputs(spec, reader)
    limits = TenantLimits(kv_cache_share=0.9)
    with pytest.raises(RequestRefused, match=r"kv_cache_share: .* 10 blocks"):
        harness.add(search_request(20, 40, width=3, tenant="a", limits=limits))


def test_tokens_are_charged_for_every_beam_and_what_was_not_computed_is_given_back() -> None:
    harness = Harness()
    limits = TenantLimits(tokens_per_minute=100)
    with pytest.raises(RequestRefused, match="105 tokens; the limit of this key is 100"):
        harness.add(search_request(5, 25, width=4, tenant="a", limits=limits))
    reader = harness.add(search_request(5, 20, width=4, tenant="a", limits=limits))
    harness.run()
    assert reader.done is not None
    assert 20 < reader.done.output_tokens <= 80


@pytest.mark.parametrize("cause", AbortCause)
def test_a_search_that_is_ended_reports_what_it_has(cause: AbortCause) -> None:
    harness = Harness()
    spec = search_request(5, 60, width=3, n=2)
    reader = harness.add(spec)
    for _ in range(6):
        harness.step()
    harness.engine.abort(spec.request_id, "", cause)
    harness.read()
    reason = EndReason.DEADLINE if cause is AbortCause.DEADLINE else EndReason.CANCELLED
    assert [end.reason for end in reader.ends.values()] == [reason, reason]
    assert len(reader.tokens[0]) == len(reader.tokens[1]) > 2
    assert reader.ends[0].score is not None and reader.ends[1].score is not None
    assert reader.ends[0].score >= reader.ends[1].score
    assert reader.done is not None
    harness.run()


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("num_logprobs", [-1, 2])
def test_a_search_that_is_ended_before_its_first_choice_ends_all_outputs_by_that_reason(
    num_steps: int, num_logprobs: int
) -> None:
    """It waits, or computes its prompt, and has a single hypothesis for its outputs."""
    harness = Harness()
    spec = search_request(100, 20, width=4, n=3, num_logprobs=num_logprobs)
    reader = harness.add(spec)
    for _ in range(num_steps):
        harness.step()
    harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED)
    harness.read()
    assert [end.reason for end in reader.ends.values()] == 3 * [EndReason.CANCELLED]
    assert not reader.tokens and all(end.score is None and not end.error for end in reader.ends.values())
    harness.run()


def test_logits_that_are_no_numbers_end_the_search_alone() -> None:
    harness = Harness()
    spec, plain = search_request(5, 60, width=3, n=2), request(9, 20)
    reader, other = harness.add(spec), harness.add(plain)
    for _ in range(4):
        harness.step()
    beam = next(row for row, state in harness.worker.rows.items() if state.admission.sampling == NO_SAMPLING)
    harness.worker.non_finite_rows.add(beam)
    harness.run()
    assert {end.reason for end in reader.ends.values()} == {EndReason.ERROR}
    assert other.tokens[0] == expected_tokens(plain, 0)


def test_log_probabilities_of_a_search_are_those_that_it_chose_by() -> None:
    harness = Harness()
    spec = search_request(5, 12, width=3, num_logprobs=0)
    reader = harness.add(spec)
    harness.run()
    score = reader.ends[0].score
    assert score is not None
    assert sum(sampled for sampled, _, _ in reader.logprobs) / len(reader.tokens[0]) == pytest.approx(score)
    assert all(rank >= 1 for _, rank, _ in reader.logprobs)


def test_a_reader_that_comes_late_reads_the_whole_search() -> None:
    harness = Harness()
    spec = search_request(5, 12, width=3, n=2, detached=True)
    harness.engine.add(spec, None)
    harness.run()
    snapshot = harness.engine.attach(harness.subscriber(), spec.request_id, "", None, 0)
    assert [list(output.token_ids) for output in snapshot.outputs] == [list(o.tokens) for o in expected_outputs(spec)]
    assert [output.end.score for output in snapshot.outputs if output.end] == [
        one.end.score for one in expected_outputs(spec)
    ]


_SEARCHES = st.builds(
    search_request,
    st.lists(st.integers(1, 3), min_size=1, max_size=40),
    st.integers(1, 30),
    st.integers(1, 4),
    length_penalty=st.sampled_from([1.0, 0.0, -1.0, 3.0]),
    early_stopping=st.sampled_from(["heuristic", "full", "never"]),
    min_tokens=st.integers(0, 1),
    token_ids=st.frozensets(st.integers(0, 23), max_size=3),
    strings=st.lists(st.sampled_from([b"a", b"abab", b"bc", b"cab"]), max_size=2, unique=True).map(tuple),
    priority=st.integers(-2, 2),
)
_OTHERS = st.builds(request, st.lists(st.integers(1, 3), min_size=1, max_size=40), st.integers(1, 30),
                    n=st.integers(1, 2), priority=st.integers(-2, 2))  # fmt: skip


@hypothesis.given(
    arrivals=st.lists(st.tuples(_SEARCHES | _OTHERS, st.integers(0, 12)), min_size=1, max_size=6),
    num_blocks=st.integers(8, 24),
    budget=st.sampled_from([16, 17, 40]),
    prefix_cache=st.booleans(),
    deaths=st.sets(st.integers(1, 40), max_size=2),
    window=st.sampled_from([None, None, 5, 20]),
)
@hypothesis.settings(max_examples=examples(150), deadline=None, report_multiple_bugs=False)
def test_whatever_happens_a_search_ends_as_alone(
    arrivals: list[tuple[EngineRequest, int]],
    num_blocks: int,
    budget: int,
    prefix_cache: bool,
    deaths: set[int],
    window: int | None,
) -> None:
    groups = ONE_GROUP if window is None else (CacheGroup(), CacheGroup(window))
    num_blocks *= len(groups)
    harness = Harness(
        num_blocks, model_len=96, max_num_seqs=5, max_num_batched_tokens=budget,
        enable_prefix_cache=prefix_cache, ageing_s=1e-5, groups=groups,
    )  # fmt: skip
    blocks = SequenceBlocks(16, groups, budget)
    fitting = [(spec, pause) for spec, pause in arrivals if spec.most_blocks(blocks) <= num_blocks]
    for spec, reader in harness.serve(fitting, deaths):
        if spec.asked.beam_search is not None:
            check_outputs(spec, reader)
        else:
            assert [reader.tokens[index] for index in range(spec.asked.n)] == [
                expected_tokens(spec, index) for index in range(spec.asked.n)
            ]
    load = harness.engine.load()
    assert load.used_blocks == load.running_sequences == load.waiting_requests == 0
