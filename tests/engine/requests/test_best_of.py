"""The best n of several outputs: chosen at the end, whatever happened on the way."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.request import AbortCause, EngineRequest


def best(spec: EngineRequest) -> list[list[int]]:
    """The outputs with the largest mean log probability; the worker's is the token with a minus."""
    outputs = [expected_tokens(spec, index) for index in range(spec.asked.best_of)]
    return sorted(outputs, key=lambda tokens: sum(tokens) / len(tokens))[: spec.asked.n]


def check(spec: EngineRequest, reader: Reader) -> None:
    expected = best(spec)
    assert [reader.tokens[index] for index in range(spec.asked.n)] == expected
    scores = [reader.ends[index].score for index in range(spec.asked.n)]
    assert scores == pytest.approx([-sum(tokens) / len(tokens) for tokens in expected])
    assert reader.done is not None
    assert reader.done.output_tokens == spec.asked.best_of * spec.asked.stop.max_tokens


def test_the_best_are_sent_at_the_end_and_with_log_probabilities_only_if_asked() -> None:
    harness = Harness()
    silent, reporting = request(5, 6, n=2, best_of=4, seed=1), request(9, 6, n=1, best_of=3, seed=2, num_logprobs=2)
    readers = [harness.add(silent), harness.add(reporting)]
    while harness.engine.has_work:
        harness.checked_step()
        assert all(not reader.tokens or reader.done for reader in readers)
    check(silent, readers[0])
    check(reporting, readers[1])
    assert readers[0].logprobs == []
    assert [-sampled for sampled, _, _ in readers[1].logprobs] == best(reporting)[0]


_REQUESTS = st.builds(
    request,
    st.lists(st.integers(1, 3), min_size=1, max_size=40),
    st.integers(1, 20),
    n=st.integers(1, 2),
    best_of=st.integers(3, 4),
    seed=st.integers(0, 5),
)


@hypothesis.given(
    arrivals=st.lists(st.tuples(_REQUESTS, st.integers(0, 12)), min_size=1, max_size=4),
    num_blocks=st.integers(6, 14),
    deaths=st.sets(st.integers(1, 40), max_size=2),
)
@hypothesis.settings(max_examples=examples(60), deadline=None, report_multiple_bugs=False)
def test_whatever_happens_the_best_are_the_best(
    arrivals: list[tuple[EngineRequest, int]], num_blocks: int, deaths: set[int]
) -> None:
    harness = Harness(num_blocks, model_len=96, max_num_seqs=5)
    for spec, reader in harness.serve(arrivals, deaths):
        check(spec, reader)


def test_whole_outputs_come_before_those_that_were_ended() -> None:
    """The first output ends at its stop token; the others are cancelled with what they have."""
    harness = Harness()
    plain = request(5, 40, n=3, seed=1)
    stop = expected_tokens(plain, 0)[3]
    at = [
        expected_tokens(plain, index).index(stop) if stop in expected_tokens(plain, index) else 40 for index in (1, 2)
    ]
    assert min(at) > 5, "only the first output has ended by then"
    spec = request(5, 40, n=2, best_of=3, seed=1, token_ids=frozenset({stop}))
    reader = harness.add(spec)
    for _ in range(5):
        harness.step()
    harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED)
    harness.read()
    assert reader.tokens[0] == expected_tokens(plain, 0)[:4]
    assert [reader.ends[index].reason for index in range(2)] == [EndReason.STOP, EndReason.CANCELLED]
    harness.run()


@pytest.mark.parametrize("differs", [False, True])
def test_an_engine_that_goes_on_sends_only_what_is_missing(differs: bool) -> None:
    """The engine before was lost while it sent; the first output had come as a whole."""
    expected = best(request(5, 6, n=2, best_of=4, seed=1))
    second = [expected[1][0], (expected[1][1] + differs) % 24]
    emitted = tuple(np.array(tokens, np.int32) for tokens in (expected[0], second))
    spec = request(
        5, 6, n=2, best_of=4, seed=1, emitted=emitted, ends=(OutputEnd(0, EndReason.LENGTH),), request_id="again"
    )
    harness = Harness()
    reader = harness.add(spec)
    harness.run()
    assert 0 not in reader.tokens and 0 not in reader.ends
    if differs:
        assert reader.ends[1].reason is EndReason.ERROR and "another output" in reader.ends[1].error
    else:
        assert reader.tokens[1] == expected[1][2:] and reader.ends[1].reason is EndReason.LENGTH


def test_a_log_that_a_lost_engine_had_ended_is_kept_as_it_is() -> None:
    tokens = tuple(np.array(row, np.int32) for row in ([1, 2], [3]))
    ends = (OutputEnd(0, EndReason.LENGTH, score=-1.5), OutputEnd(1, EndReason.STOP, stop_token_id=3, score=-2.0))
    spec = request(5, 2, n=2, best_of=4, emitted=tokens, ends=ends, detached=True)
    harness = Harness()
    harness.engine.add(spec, None)
    snapshot = harness.engine.attach(harness.subscriber(), spec.request_id, "", None, 0)
    assert [list(output.token_ids) for output in snapshot.outputs] == [[1, 2], [3]]
    assert [output.end for output in snapshot.outputs] == list(ends)
    assert not harness.engine.has_work
