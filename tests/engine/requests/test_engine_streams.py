"""What readers get: events, stops, snapshots, other readers, lost readers."""

from __future__ import annotations

import pytest
from tests.engine.fake_worker import expected_tokens, top_tokens
from tests.engine.harness import TOKEN_BYTES, Harness, Reader, logprob_entries, request

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason, OutputEnd, RequestDone, Started
from headrace_backend.engine.request import AbortCause, RequestState, Subscriber


def text(tokens: list[int]) -> bytes:
    return b"".join(TOKEN_BYTES[token] for token in tokens)


def kept_text(reader: Reader, output_index: int = 0) -> bytes:
    whole = text(reader.tokens[output_index])
    return whole[: len(whole) - reader.ends[output_index].trim_bytes]


def test_events_come_in_order_and_the_ledger_adds_up() -> None:
    harness = Harness()
    reader = harness.add(request(20, max_tokens=5, service_ns=77))
    arrival = harness.now_ns
    harness.now_ns += 5_000
    harness.run()
    assert [type(event) for event in reader.events] == [Started, OutputEnd, RequestDone]
    done = reader.done
    assert done is not None
    assert (done.prompt_tokens, done.output_tokens, done.step_count) == (20, 5, 5)
    assert done.queued_ns == 5_077
    assert done.ttft_ns == 77 + 5_000 + 1_000
    parts = done.queued_ns + done.prefill_ns + done.decode_ns + done.preempted_ns + done.engine_restart_ns
    assert parts == 77 + done.ended_at_ns - arrival


def test_stop_token_ends_the_output_and_the_token_planned_ahead_is_dropped() -> None:
    tokens = expected_tokens(request(10, max_tokens=20), 0)
    stop = tokens[4]
    harness = Harness()
    reader = harness.add(request(10, max_tokens=20, token_ids=frozenset([stop])))
    harness.run()
    assert reader.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert reader.ends[0] == OutputEnd(0, EndReason.STOP, stop_token_id=stop)


def test_min_tokens_passes_over_earlier_stops() -> None:
    tokens = expected_tokens(request(10, max_tokens=40), 0)
    stop = tokens[2]
    harness = Harness()
    reader = harness.add(request(10, max_tokens=40, token_ids=frozenset([stop]), min_tokens=5))
    harness.run()
    later = [index for index, token in enumerate(tokens) if token == stop and index >= 5]
    assert len(reader.tokens[0]) == (later[0] + 1 if later else 40)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", [3, 8, 13])
def test_stop_string_across_tokens_is_cut_exactly(include: bool, start: int) -> None:
    spec = request(12, max_tokens=40, seed=start)
    whole = text(expected_tokens(spec, 0))
    string = whole[start : start + 5]
    harness = Harness()
    reader = harness.add(
        request(12, max_tokens=40, seed=start, strings=(string, b"never"), include_stop_string=include)
    )
    harness.run()
    position = whole.index(string)
    assert kept_text(reader) == whole[: position + (len(string) if include else 0)]
    assert (reader.ends[0].reason, reader.ends[0].stop_string_index) == (EndReason.STOP, 0)


def test_possible_stop_is_held_back_until_it_is_decided() -> None:
    spec = request(12, max_tokens=12)
    tokens = expected_tokens(spec, 0)
    whole = text(tokens)
    # A string that the text begins and never completes.
    string = whole[:4] + b"#"
    harness = Harness()
    reader = harness.add(request(12, max_tokens=12, strings=(string,)))
    harness.step()
    harness.step()
    assert 0 not in reader.tokens
    harness.run()
    assert reader.tokens[0] == tokens
    assert reader.ends[0] == OutputEnd(0, EndReason.LENGTH)


def test_held_back_tokens_are_released_when_the_request_is_cancelled() -> None:
    spec = request(12, max_tokens=12)
    tokens = expected_tokens(spec, 0)
    harness = Harness()
    spec = request(12, max_tokens=12, strings=(text(tokens)[:40] + b"#",))
    reader = harness.add(spec)
    for _ in range(4):
        harness.step()
    assert 0 not in reader.tokens
    assert harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED) == (True, True)
    harness.read()
    assert reader.tokens[0] == tokens[:4]
    assert reader.ends[0].reason is EndReason.CANCELLED
    assert harness.engine.abort(spec.request_id, "", AbortCause.CANCELLED) == (True, False)
    assert harness.engine.abort(spec.request_id, "other", AbortCause.CANCELLED) == (False, False)


def test_non_finite_logits_end_that_output_only() -> None:
    harness = Harness()
    spec = request(20, max_tokens=10, n=2)
    reader = harness.add(spec)
    other_spec = request(24, max_tokens=10)
    other = harness.add(other_spec)
    harness.step()
    harness.worker.non_finite_rows = {0}
    harness.settle()
    harness.worker.non_finite_rows = set()
    harness.run()
    reasons = sorted(end.reason for end in reader.ends.values())
    assert reasons == [EndReason.LENGTH, EndReason.ERROR]
    failed = next(index for index, end in reader.ends.items() if end.reason is EndReason.ERROR)
    assert reader.ends[failed].error
    assert reader.tokens[1 - failed] == expected_tokens(spec, 1 - failed)
    assert other.tokens[0] == expected_tokens(other_spec, 0)


def test_prefix_that_came_out_non_finite_is_not_published() -> None:
    harness = Harness()
    harness.add(request(40))
    harness.plan()
    harness.worker.non_finite_rows = set(range(8))
    harness.settle()
    harness.worker.non_finite_rows = set()
    harness.run()
    reader = harness.add(request(40))
    harness.run()
    assert reader.started is not None and reader.started.cached_tokens == 0


def test_token_outside_the_vocabulary_ends_the_output_with_an_error() -> None:
    harness = Harness()
    reader = harness.add(request(10))
    harness.plan()
    result = harness.worker.run()
    tokens = result.tokens.copy()
    tokens[0] = 1_000_000
    result.tokens = tokens
    harness.engine.settle(result)
    harness.read()
    assert reader.ends[0].reason is EndReason.ERROR


@pytest.mark.parametrize("strings", [(), (b"ca#",)])
def test_logprobs_travel_with_released_tokens(strings: tuple[bytes, ...]) -> None:
    harness = Harness()
    spec = request(10, max_tokens=20, num_logprobs=3, strings=strings)
    expected = [(-float(token), token + 1, top_tokens(token, 3)) for token in expected_tokens(spec, 0)]
    reader = harness.add(spec)
    for _ in range(6):
        harness.step()
    subscriber = harness.subscriber()
    snapshot = harness.engine.attach(subscriber, spec.request_id, "", None, 0)
    columns = snapshot.outputs[0].logprobs
    assert columns is not None
    early = logprob_entries(columns)
    assert early == reader.logprobs == expected[: len(reader.tokens[0])]
    late = harness.readers[subscriber] = Reader()
    harness.run()
    assert reader.logprobs == expected
    assert early + late.logprobs == expected


def test_missing_logprobs_are_a_wrong_result() -> None:
    harness = Harness()
    harness.add(request(10, num_logprobs=0))
    harness.plan()
    result = harness.worker.run()
    result.logprob_indices = result.logprob_indices[:0]
    with pytest.raises(ValueError, match="log probabilities"):
        harness.engine.settle(result)


def test_two_readers_get_the_same_tokens() -> None:
    harness = Harness()
    spec = request(10, max_tokens=12, n=2, service_state=b"state")
    first = harness.add(spec)
    for _ in range(4):
        harness.step()
    subscriber = harness.subscriber(stream_id=2)
    late = harness.readers[subscriber] = Reader()
    snapshot = harness.engine.attach(subscriber, spec.request_id, "", 1, 2)
    assert (snapshot.service_state, snapshot.prompt_tokens, snapshot.started) == (b"state", 10, True)
    assert [output.output_index for output in snapshot.outputs] == [1]
    harness.run()
    assert list(snapshot.outputs[0].token_ids) + late.tokens[1] == first.tokens[1]
    assert set(late.tokens) == set(late.ends) == {1}
    assert late.done == first.done


def test_attach_to_an_ended_request_gives_everything_at_once() -> None:
    harness = Harness()
    spec = request(10, max_tokens=3)
    first = harness.add(spec)
    harness.run()
    snapshot = harness.engine.attach(Subscriber(9, 1), spec.request_id, "", None, 3)
    assert list(snapshot.outputs[0].token_ids) == first.tokens[0]
    assert (snapshot.outputs[0].end, snapshot.done) == (first.ends[0], first.done)
    # No subscription began, so the handle is free.
    harness.engine.attach(Subscriber(9, 1), spec.request_id, "", 0, 0)


@pytest.mark.parametrize(
    ("tenant", "output_index", "from_token", "code"),
    [
        ("other", None, 0, RefusalCode.NOT_FOUND),
        ("", 1, 0, RefusalCode.OUT_OF_RANGE),
        ("", -1, 0, RefusalCode.OUT_OF_RANGE),
        ("", None, 4, RefusalCode.OUT_OF_RANGE),
        ("", 0, -1, RefusalCode.OUT_OF_RANGE),
    ],
)
def test_attach_refuses_what_does_not_exist(
    tenant: str, output_index: int | None, from_token: int, code: RefusalCode
) -> None:
    harness = Harness()
    spec = request(10, max_tokens=3)
    harness.add(spec)
    harness.run()
    with pytest.raises(RequestRefused) as refusal:
        harness.engine.attach(harness.subscriber(), spec.request_id, tenant, output_index, from_token)
    assert refusal.value.code is code


def test_lost_stream_ends_its_requests_but_not_the_detached_ones() -> None:
    harness = Harness()
    attached, detached, elsewhere = request(10), request(10, detached=True), request(10)
    harness.add(attached)
    harness.add(detached)
    other = harness.add(elsewhere, stream_id=2)
    harness.step()
    harness.engine.stream_lost(1)
    harness.readers = {s: reader for s, reader in harness.readers.items() if s[0] == 2}
    harness.run()
    rows = {row.request_id: row for row in harness.engine.list_requests("", RequestState.ALL, 10, 0).rows}
    assert rows[attached.request_id].finish_reasons == [EndReason.CANCELLED]
    assert rows[detached.request_id].finish_reasons == [EndReason.LENGTH]
    assert other.tokens[0] == expected_tokens(elsewhere, 0)


def test_second_reader_leaving_does_not_end_the_request() -> None:
    harness = Harness()
    spec = request(10)
    first = harness.add(spec)
    second = harness.subscriber()
    harness.engine.attach(second, spec.request_id, "", None, 0)
    harness.engine.detach(second)
    harness.engine.detach(second)
    harness.run()
    assert first.ends[0].reason is EndReason.LENGTH


def test_lagging_stream_merges_its_steps() -> None:
    harness = Harness()
    spec = request(10, max_tokens=6)
    harness.engine.add(spec, Subscriber(5, 1))
    while harness.engine.has_work:
        while (plan := harness.engine.plan()) is not None:
            harness.worker.push(plan)
        harness.engine.settle(harness.worker.run())
        assert harness.engine.take_outboxes(leave={5}) == {}
    outbox = harness.engine.take_outboxes()[5]
    assert list(outbox.tokens) == expected_tokens(spec, 0)
    assert [type(event) for _, event in outbox.events] == [Started, OutputEnd, RequestDone]
    assert (outbox.step_id, outbox.batch_sequences, outbox.batch_tokens) == (6, 1, 1)
    assert harness.engine.take_outboxes() == {}


def test_handle_in_use_is_refused() -> None:
    harness = Harness()
    harness.engine.add(request(10), Subscriber(5, 1))
    spec = request(10, detached=True)
    harness.engine.add(spec, None)
    for call in (
        lambda: harness.engine.add(request(10), Subscriber(5, 1)),
        lambda: harness.engine.attach(Subscriber(5, 1), spec.request_id, "", None, 0),
    ):
        with pytest.raises(RequestRefused, match="handle"):
            call()
