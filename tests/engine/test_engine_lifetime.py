"""Workers that die, deadlines, admission, idempotency, retention, listings."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, request

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason
from headrace_backend.engine.request import AbortCause, RequestState
from headrace_backend.step.plan import StepResult


def refused(harness: Harness, code: RefusalCode, **changes: object) -> RequestRefused:
    with pytest.raises(RequestRefused) as refusal:
        harness.add(request(10, **changes))  # type: ignore[arg-type]
    assert refusal.value.code is code
    return refusal.value


def test_lost_worker_costs_no_token_and_streams_learn_of_it() -> None:
    harness = Harness()
    specs = [request(20, max_tokens=12), request(40, max_tokens=8, n=3)]
    readers = [harness.add(spec) for spec in specs]
    for _ in range(3):
        harness.step()
    assert harness.engine.num_in_flight == 1
    harness.replace_worker(pause_ns=500_000)
    queued = harness.add(request(6))
    harness.run()
    for spec, reader in zip(specs, readers, strict=True):
        for index in range(spec.asked.n):
            assert reader.tokens[index] == expected_tokens(spec, index)
        assert [event.pause_ns for event in reader.resumed] == [500_000]
        assert reader.done is not None and reader.done.engine_restart_ns == 500_000
        assert reader.done.preemptions == 0
    assert queued.resumed == []


def test_worker_lost_twice_is_one_pause_and_every_settled_step_counts() -> None:
    harness = Harness()
    reader = harness.add(request(10, max_tokens=6))
    harness.step()
    harness.replace_worker(pause_ns=300)
    harness.replace_worker(pause_ns=400)
    harness.run()
    assert [event.pause_ns for event in reader.resumed] == [700]
    assert reader.done is not None
    assert (reader.done.engine_restart_ns, reader.done.step_count) == (700, 6)


def test_what_is_preempted_is_not_idle() -> None:
    harness = Harness()
    harness.add(request(10, max_tokens=6, n=2))
    harness.add(request(12, max_tokens=6))
    harness.step()
    assert harness.engine.load().active_requests == 2
    harness.engine.worker_lost()
    load = harness.engine.load()
    # Nobody runs, nobody waits for a first step, and nobody is through.
    assert (load.running_sequences, load.waiting_requests, load.active_requests) == (0, 0, 2)
    harness.replace_worker()
    harness.run()
    assert harness.engine.load().active_requests == 0


def test_nothing_is_planned_without_a_worker() -> None:
    harness = Harness()
    harness.engine.worker_lost()
    harness.add(request(10))
    assert harness.engine.plan() is None
    assert harness.engine.has_work
    load = harness.engine.load()
    assert (load.kv_blocks, load.waiting_requests) == (0, 1)


def test_result_of_another_step_is_refused_and_changes_nothing() -> None:
    harness = Harness()
    reader = harness.add(request(10))
    harness.plan()
    with pytest.raises(ValueError, match="oldest"):
        harness.engine.settle(StepResult(2, 0, 1, np.zeros(1, np.int32), np.ones(1, np.uint8)))
    with pytest.raises(ValueError, match="has 2 tokens, not 1"):
        harness.engine.settle(StepResult(1, 0, 1, np.zeros(2, np.int32), np.ones(2, np.uint8)))
    harness.run()
    assert reader.tokens[0] == expected_tokens(request(10), 0)


def test_smaller_cache_after_a_restart_ends_what_can_not_fit() -> None:
    harness = Harness(num_blocks=8)
    large, small = harness.add(request(60, max_tokens=60)), harness.add(request(10))
    harness.step()
    harness.num_blocks = 2
    harness.replace_worker()
    harness.run()
    end = large.ends[0]
    assert end.reason is EndReason.ERROR and not end.error
    assert end.unfit == "spec.stop.max_tokens: prompt and max_tokens need 119 tokens of KV cache; there are 32"
    assert small.ends[0].reason is EndReason.LENGTH


def test_expired_work_ends_before_it_costs_a_step() -> None:
    harness = Harness()
    reader = harness.add(request(10, deadline_ns=harness.now_ns + 100))
    assert harness.engine.next_deadline_ns() == harness.now_ns + 100
    harness.now_ns += 100
    assert not harness.plan()
    assert reader.ends[0].reason is EndReason.DEADLINE
    assert reader.started is None


@pytest.mark.parametrize("late_ns", [0, 1_000])
def test_a_deadline_that_passed_on_arrival_ends_the_request_as_any_other_does(late_ns: int) -> None:
    harness = Harness()
    reader = harness.add(request(10, deadline_ns=harness.now_ns - late_ns))
    assert not harness.plan()
    assert reader.ends[0].reason is EndReason.DEADLINE
    assert reader.started is None


def test_deadline_ends_a_running_request_and_keeps_what_it_has() -> None:
    harness = Harness()
    spec = request(10, max_tokens=100, deadline_ns=harness.now_ns + 5_500)
    reader = harness.add(spec)
    harness.run()
    assert reader.ends[0].reason is EndReason.DEADLINE
    assert reader.tokens[0] == expected_tokens(spec, 0)[: len(reader.tokens[0])]
    assert len(reader.tokens[0]) == 6


def test_request_without_a_deadline_ends_at_the_engines_limit() -> None:
    harness = Harness(max_time_limit_s=1.0)
    reader = harness.add(request(10))
    harness.now_ns += 1_000_000_000
    harness.engine.expire()
    harness.read()
    assert reader.ends[0].reason is EndReason.DEADLINE


def test_queue_is_bounded_by_requests_and_by_tokens() -> None:
    harness = Harness(max_waiting_requests=2, max_num_seqs=1)
    for _ in range(2):
        harness.add(request(10))
    refusal = refused(harness, RefusalCode.RESOURCE_EXHAUSTED)
    assert "2 requests" in refusal.message
    assert refusal.retry_after_ns is not None and refusal.retry_after_ns > 0
    harness.step()
    harness.add(request(10))
    harness = Harness(max_waiting_tokens=25)
    for _ in range(2):
        harness.add(request(10))
    assert "25 tokens" in refused(harness, RefusalCode.RESOURCE_EXHAUSTED).message


def test_wait_longer_than_the_deadline_is_refused_at_once() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(request(100, max_tokens=50))
    harness.run()
    for _ in range(10):
        harness.add(request(100, max_tokens=50))
    expected = harness.engine.load().expected_wait_ns
    assert expected > 100_000
    refusal = refused(harness, RefusalCode.RESOURCE_EXHAUSTED, deadline_ns=harness.now_ns + expected // 2)
    assert "expected wait" in refusal.message and refusal.retry_after_ns is not None
    harness.add(request(10, deadline_ns=harness.now_ns + 10 * expected))


def test_a_deadline_counts_the_wait_behind_those_alone_that_are_not_passed() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(request(100, max_tokens=50))
    harness.run()
    for priority in (-100, 50):
        for _ in range(5):
            harness.add(request(100, max_tokens=50, priority=priority))
    soon = harness.now_ns + harness.engine.load().expected_wait_ns // 3
    refused(harness, RefusalCode.RESOURCE_EXHAUSTED, deadline_ns=soon)
    refused(harness, RefusalCode.RESOURCE_EXHAUSTED, deadline_ns=soon, priority=-100)
    refused(harness, RefusalCode.RESOURCE_EXHAUSTED, deadline_ns=soon, priority=49)
    reader = harness.add(request(10, max_tokens=5, deadline_ns=soon, priority=100))
    harness.run()
    assert reader.ends[0].reason is EndReason.LENGTH


def test_what_could_never_fit_is_refused() -> None:
    harness = Harness(num_blocks=4)
    assert harness.engine.max_context_tokens == 65
    assert "KV cache" in refused(harness, RefusalCode.RESOURCE_EXHAUSTED, max_tokens=56).message
    reader = harness.add(request(10, max_tokens=55))
    harness.run()
    assert len(reader.tokens[0]) == 55
    harness = Harness(max_log_bytes=1 << 16, model_len=20_000, num_blocks=2_000)
    assert "log" in refused(harness, RefusalCode.RESOURCE_EXHAUSTED, max_tokens=10_000, n=2).message


def test_draining_engine_takes_nothing_new_and_finishes_the_rest() -> None:
    harness = Harness()
    reader = harness.add(request(10))
    harness.engine.drain()
    refused(harness, RefusalCode.UNAVAILABLE)
    harness.run()
    assert reader.ends[0].reason is EndReason.LENGTH


def test_idempotency_key_names_one_request_per_tenant() -> None:
    harness = Harness()
    first = request(10, idempotency_key="k", spec_digest=b"1")
    harness.add(first)
    again = harness.engine.add(request(10, idempotency_key="k", spec_digest=b"1"), harness.subscriber())
    assert again[:3] == (first.request_id, True, 10)
    refused(harness, RefusalCode.ALREADY_EXISTS, idempotency_key="k", spec_digest=b"2")
    other = harness.engine.add(
        request(10, idempotency_key="k", spec_digest=b"2", tenant="other"), harness.subscriber(stream_id=3)
    )
    assert not other.existing


def test_request_id_in_use_is_refused() -> None:
    harness = Harness()
    harness.add(request(10, request_id="same"))
    refused(harness, RefusalCode.ALREADY_EXISTS, request_id="same")
    refused(harness, RefusalCode.ALREADY_EXISTS, request_id="same", tenant="other")


def test_ended_requests_are_forgotten_after_their_time() -> None:
    harness = Harness(log_ttl_s=10.0)
    spec = request(10, idempotency_key="k")
    harness.add(spec)
    harness.run()
    harness.now_ns = harness.engine.next_deadline_ns() or 0
    harness.engine.expire()
    assert harness.engine.next_deadline_ns() is None
    assert harness.engine.list_requests("", RequestState.ALL, 10, 0) == ([], 0)
    assert harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED) == (False, False)
    harness.add(request(10, idempotency_key="k", spec_digest=b"new", request_id=spec.request_id))


def test_least_recently_used_logs_go_first() -> None:
    harness = Harness(max_logs=2)
    specs = [request(10) for _ in range(3)]
    for spec in specs[:2]:
        harness.add(spec)
        harness.run()
    harness.engine.attach(harness.subscriber(), specs[0].request_id, "", None, 0)
    harness.add(specs[2])
    harness.run()
    kept = {row.request_id for row in harness.engine.list_requests("", RequestState.ALL, 10, 0).rows}
    assert kept == {specs[0].request_id, specs[2].request_id}


def test_logs_are_bounded_in_bytes() -> None:
    harness = Harness(max_log_bytes=1 << 16)
    for _ in range(40):
        harness.add(request(10, max_tokens=30, service_state=bytes(2000)))
        harness.run()
    assert harness.engine._table.log_bytes <= 1 << 16
    assert 10 <= len(harness.engine._table) < 20


def test_listing_pages_backwards_and_filters() -> None:
    harness = Harness(max_num_seqs=2)
    specs = [request(10, max_tokens=4) for _ in range(5)]
    for spec in specs[:2]:
        harness.add(spec)
    harness.run()
    for spec in specs[2:]:
        harness.add(spec)
    harness.add(request(10, tenant="other"))
    harness.step()

    def ids(state: RequestState) -> list[str]:
        listed: list[str] = []
        before = 0
        while True:
            page = harness.engine.list_requests("", state, 2, before)
            assert len(page.rows) <= 2
            listed += [row.request_id for row in page.rows]
            before = page.next_before
            if not before:
                return listed

    newest_first = [spec.request_id for spec in reversed(specs)]
    assert ids(RequestState.ALL) == newest_first
    assert ids(RequestState.QUEUED) == newest_first[:1]
    assert ids(RequestState.RUNNING) == newest_first[1:3]
    assert ids(RequestState.FINISHED) == newest_first[3:]


def test_continuation_goes_on_where_the_earlier_attempt_ended() -> None:
    whole = expected_tokens(request(20, max_tokens=12, n=2), 0), expected_tokens(request(20, max_tokens=12, n=2), 1)
    emitted = tuple(np.array(tokens[:length], np.int32) for tokens, length in zip(whole, (3, 7), strict=True))
    harness = Harness()
    spec = request(20, max_tokens=12, n=2, emitted=emitted, presence_penalty=0.0)
    reader = harness.add(spec)
    harness.run()
    assert (reader.tokens[0], reader.tokens[1]) == (whole[0][3:], whole[1][7:])
    assert reader.done is not None and reader.done.output_tokens == 24
    snapshot = harness.engine.attach(harness.subscriber(), spec.request_id, "", None, 0)
    assert [list(output.token_ids) for output in snapshot.outputs] == [whole[0], whole[1]]
