"""Submit, Subscribe, Cancel and ListRequests: generations that outlive their readers."""

from __future__ import annotations

import asyncio
import pathlib
import time
from typing import Any

import grpc
import pytest
from tests.service.harness import ANSWER, Running, events_of, ids_of, kinds_of, running_service, text_of

from headrace.v1 import generation_pb2, inference_pb2

Spec = generation_pb2.GenerationSpec


async def submit(running: Running, key: str = "", **spec: Any) -> inference_pb2.SubmitResponse:
    request = inference_pb2.SubmitRequest(spec=Spec(**{"text": "hello", **spec}), idempotency_key=key)
    answer: inference_pb2.SubmitResponse = await running.stub.Submit(request)
    return answer


def subscribe(running: Running, request_id: str, from_token: int = 0, output_index: int | None = None) -> Any:
    return running.stub.Subscribe(
        inference_pb2.SubscribeRequest(request_id=request_id, from_token=from_token, output_index=output_index)
    )


async def test_a_submitted_request_is_read_while_it_runs_and_after_its_end(running: Running) -> None:
    submitted = await submit(running)
    assert submitted.model_revision == running.engine.model.revision
    live = await events_of(subscribe(running, submitted.request_id))
    await running.until(lambda: running.engine.requests[submitted.request_id].done)
    late = await events_of(subscribe(running, submitted.request_id))
    for events in (live, late):
        assert text_of(events) == ANSWER
        assert ids_of(events) == running.ids(ANSWER)
        assert kinds_of(events) == ["accepted", "started", "delta", "output_finished", "done"]
        assert events[0].accepted.request_id == submitted.request_id


async def test_any_first_token_gives_the_rest_of_the_same_stream(running: Running) -> None:
    submitted = await submit(running)
    whole = await events_of(subscribe(running, submitted.request_id))
    ids = ids_of(whole)
    for from_token in range(len(ids) + 1):
        events = await events_of(subscribe(running, submitted.request_id, from_token))
        first = next((event.delta.first_token_index for event in events if event.HasField("delta")), len(ids))
        # A character on both sides of the border is given whole.
        assert from_token - 3 <= first <= from_token
        assert ids_of(events) == ids[first:]
        assert text_of(events) == ANSWER.encode()[len(_bytes(running, ids[:first])) :].decode()


async def test_a_reader_that_joins_in_the_middle_gets_what_the_first_one_gets(running: Running) -> None:
    running.engine.running.clear()
    submitted = await submit(running)
    first = subscribe(running, submitted.request_id)
    await first.read()
    for _ in range(9):
        running.engine.step()
    second = subscribe(running, submitted.request_id, from_token=4)
    await second.read()
    running.engine.running.set()
    all_events, some_events = await asyncio.gather(events_of(first), events_of(second))
    assert text_of(all_events) == ANSWER
    assert ids_of(some_events) == ids_of(all_events)[4:]
    assert text_of(some_events) == ANSWER.encode()[len(_bytes(running, ids_of(all_events)[:4])) :].decode()


async def test_a_dropped_reader_does_not_end_the_generation_and_cancel_does(running: Running) -> None:
    running.engine.running.clear()
    submitted = await submit(running)
    dropped, staying = (subscribe(running, submitted.request_id) for _ in range(2))
    await asyncio.gather(dropped.read(), staying.read())
    dropped.cancel()
    # The guardian reads it too.
    await running.until(lambda: len(running.engine.requests[submitted.request_id].readers) == 2)
    assert not running.engine.aborts
    answer = await running.stub.Cancel(inference_pb2.CancelRequest(request_id=submitted.request_id))
    assert answer.cancelled
    events = await events_of(staying)
    assert events[-2].output_finished.reason == generation_pb2.FINISH_REASON_CANCELLED
    again = await running.stub.Cancel(inference_pb2.CancelRequest(request_id=submitted.request_id))
    assert not again.cancelled


async def test_one_output_of_several_can_be_read_alone(model_path: pathlib.Path, sockets: pathlib.Path) -> None:
    async with running_service(model_path, sockets, lambda add, index: [200 + index] * 4) as running:
        submitted = await submit(running, n=2)
        events = await events_of(subscribe(running, submitted.request_id, output_index=1))
        assert (ids_of(events, 0), ids_of(events, 1)) == ([], [201] * 4)


@pytest.mark.parametrize("request_id", ["01hzzzzzzzzzzzzzzzzzzzzzzz", "../etc/passwd", "x" * 1000])
async def test_unknown_requests_are_not_found(running: Running, request_id: str) -> None:
    for call in (
        events_of(subscribe(running, request_id)),
        running.stub.Cancel(inference_pb2.CancelRequest(request_id=request_id)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        assert len(refused.value.details() or "") < 200


async def test_a_first_token_beyond_the_output_is_out_of_range(running: Running) -> None:
    submitted = await submit(running)
    await running.until(lambda: running.engine.requests[submitted.request_id].done)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(subscribe(running, submitted.request_id, from_token=10_000))
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_an_idempotency_key_names_one_request_whatever_seed_was_drawn(running: Running) -> None:
    first = await submit(running, key="k")
    second = await submit(running, key="k")
    assert (second.request_id, first.existing, second.existing) == (first.request_id, False, True)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await submit(running, key="k", sampling=generation_pb2.SamplingParameters(seed=1))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_a_submitted_requests_life_is_bounded_by_its_time_limit_not_by_its_call(running: Running) -> None:
    request = inference_pb2.SubmitRequest(spec=Spec(text="hello"))
    submitted = await running.stub.Submit(request, timeout=60)
    add = running.engine.requests[submitted.request_id].add
    assert (add.detached, add.handle > 0, add.remaining_ns) == (True, True, 3600 * 10**9)


async def test_pages_of_requests_newest_first(running: Running) -> None:
    submitted = [(await submit(running)).request_id for _ in range(5)]
    found, token = [], ""
    while True:
        page = await running.stub.ListRequests(inference_pb2.ListRequestsRequest(page_size=2, page_token=token))
        found += [row.request_id for row in page.requests]
        token = page.next_page_token
        if not token:
            break
    assert found == submitted[::-1]
    # Ids are in order of time, so that lists and logs sort by them.
    assert submitted == sorted(submitted)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": 1001}, "page_size"),
        ({"page_token": "%%%"}, "page_token"),
        ({"page_token": "AAAA"}, "page_token"),
        ({"state": 9}, "state"),
    ],
)
async def test_bad_pages_are_refused_by_field(running: Running, fields: dict[str, Any], field: str) -> None:
    from tests.service.harness import violations_of

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.ListRequests(inference_pb2.ListRequestsRequest(**fields))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations_of(refused.value)) == {field}


async def test_a_subscriptions_ledger_leaves_out_the_time_before_it(running: Running) -> None:
    submitted = await submit(running)
    await running.until(lambda: running.engine.requests[submitted.request_id].done)
    await asyncio.sleep(0.3)
    began_ns = time.monotonic_ns()
    ledger = (await events_of(subscribe(running, submitted.request_id)))[-1].done.ledger
    took_ns = time.monotonic_ns() - began_ns
    parts = ledger.queued_ns + ledger.decode_ns + ledger.detokenize_and_send_ns + ledger.blocked_on_reader_ns
    assert abs(parts - ledger.end_to_end_ns) < 1_000_000
    assert ledger.detokenize_and_send_ns + ledger.blocked_on_reader_ns <= took_ns


def _bytes(running: Running, token_ids: list[int]) -> bytes:
    pieces = running.service.core.models.default.text.pieces.pieces
    return b"".join(pieces[token] for token in token_ids)
