"""Streams of both clients: typed events, whole answers, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from tests.clients.canned_service import PROMPT_TOKENS, REQUEST_ID, REVISION, CannedServer, answer, token

import headrace
from headrace import Accepted, AsyncClient, Client, Delta, Done, FinishReason, OutputFinished, Resumed, Started


def test_events_are_typed_and_in_order(client: Client) -> None:
    events = list(client.generate("hello", max_tokens=2))
    assert [type(event) for event in events] == [Accepted, Started, Delta, Delta, OutputFinished, Done]
    assert events[0] == Accepted(REQUEST_ID, REVISION, PROMPT_TOKENS)
    assert events[2] == Delta(0, 0, (token(0),), "w0 ")
    assert events[4] == OutputFinished(0, FinishReason.LENGTH)
    end = events[5]
    assert isinstance(end, Done)
    assert (end.usage.output_tokens, end.ledger.end_to_end_ns, end.ledger.decode_ns) == (2, 10_000_000, 6_000_000)


def test_events_cannot_be_changed(client: Client) -> None:
    event = next(iter(client.generate("hello")))
    with pytest.raises(AttributeError):
        event.request_id = "other"  # type: ignore[union-attr, misc]


def test_text_yields_the_pieces(client: Client) -> None:
    assert list(client.generate("hello", max_tokens=3).text()) == ["w0 ", "w1 ", "w2 "]


def test_result_collects_the_whole_answer_also_after_some_events(client: Client) -> None:
    stream = client.generate("hello", max_tokens=4, logprobs=2)
    for _ in range(4):
        next(stream)
    completion = stream.result()
    assert completion.text == answer(4)
    assert completion.token_ids == tuple(token(i) for i in range(4))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.logprobs is not None
    assert completion.logprobs.sampled == (-0.5, -1.0, -1.5, -2.0)
    assert completion.logprobs.top(2) == {102: -1.5, 103: -2.5}
    assert stream.usage == completion.usage and stream.ledger == completion.ledger
    assert stream.request_id == REQUEST_ID


def test_the_prompts_log_probabilities_come_before_the_first_delta(client: Client) -> None:
    stream = client.generate("hello", max_tokens=2, prompt_logprobs=1)
    events = list(stream)
    parts = [event for event in events if isinstance(event, headrace.PromptLogprobs)]
    assert [part.first_token_index for part in parts] == [1, 3, 5]
    assert [type(event) for event in events][2:6] == [headrace.PromptLogprobs] * 3 + [Delta]
    whole = stream.result().prompt_logprobs
    assert whole is not None and whole.next_token_index == PROMPT_TOKENS
    assert whole.logprobs.sampled == tuple(-0.5 * (i + 1) for i in range(1, PROMPT_TOKENS))
    assert whole.logprobs.top(4) == {105: -3.0}


def test_token_ids_can_come_without_text(client: Client) -> None:
    completion = client.generate("hello", max_tokens=3, token_ids_only=True).result()
    assert (completion.text, completion.token_ids) == ("", tuple(token(i) for i in range(3)))


def test_result_keeps_outputs_apart_and_text_refuses_to_mix_them(client: Client) -> None:
    completion = client.generate("hello", n=3, max_tokens=2).result()
    assert [output.text for output in completion.outputs] == [answer(2, i) for i in range(3)]
    with pytest.raises(ValueError, match="carries several"):
        list(client.generate("hello", n=2).text())


def test_token_ids_go_out_as_they_are(client: Client, server: CannedServer) -> None:
    client.generate(token_ids=[5, 6, 7]).result()
    assert list(server.seen.requests[0].spec.token_ids.ids) == [5, 6, 7]


def test_chat_sends_roles_and_texts(client: Client, server: CannedServer) -> None:
    messages = [headrace.Message("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "and?")]
    client.chat(messages, continue_last_message=False, temperature=0).result()
    sent = server.seen.requests[0]
    assert [(m.role, m.parts[0].text) for m in sent.messages] == [(1, "be brief"), (2, "hi"), (3, "hello"), (2, "and?")]
    assert sent.HasField("continue_last_message") and not sent.continue_last_message
    assert sent.spec.sampling.HasField("temperature") and sent.spec.sampling.temperature == 0
    assert sent.spec.WhichOneof("prompt") is None


def test_a_replaced_worker_is_an_event_of_its_own(client: Client) -> None:
    events = list(client.generate("resumed"))
    assert Resumed(1_500_000_000) in events
    assert "".join(event.text for event in events if isinstance(event, Delta)) == answer(5)


def test_leaving_the_block_cancels_the_call(client: Client, server: CannedServer) -> None:
    with client.generate("endless") as stream:
        for event in stream:
            if isinstance(event, Delta):
                break
    assert server.seen.cancelled.wait(120)


def test_dropping_the_stream_cancels_the_call(client: Client, server: CannedServer) -> None:
    stream = client.generate("endless")
    next(stream)
    del stream
    gc.collect()
    assert server.seen.cancelled.wait(120)


def test_close_from_another_thread_ends_the_iteration_without_an_error(client: Client, server: CannedServer) -> None:
    stream = client.generate("endless")
    pieces: list[str] = []
    for piece in stream.text():
        if not pieces:
            threading.Timer(0.2, stream.close).start()
        pieces.append(piece)
    assert pieces and pieces[0] == "w0 "
    assert server.seen.cancelled.wait(120)
    assert list(stream) == []


def test_timeout_is_the_deadline_on_the_server_and_raises(client: Client, server: CannedServer) -> None:
    begun = time.monotonic()
    with pytest.raises(headrace.DeadlineExceeded):
        client.generate("endless", timeout=3).result()
    assert 2.5 < time.monotonic() - begun < 60
    remaining = server.seen.time_remaining[0]
    # The wire rounds the timeout to a few digits, and the server's clock starts when it reads it:
    # seen once, 3.008.
    assert remaining is not None and 0 < remaining < 4
    assert server.seen.cancelled.wait(120)


def test_a_failed_output_is_never_returned_as_an_answer(client: Client) -> None:
    for read in (lambda: client.generate("failing").result(), lambda: list(client.generate("failing").text())):
        with pytest.raises(headrace.Internal, match="a step produced NaN"):
            read()
    kinds = [type(event) for event in client.generate("failing")]
    assert kinds == [Accepted, Started, Delta, OutputFinished, Done]


def test_a_stream_without_done_is_an_error(client: Client) -> None:
    with pytest.raises(headrace.Internal, match="ended before the generation did"):
        client.generate("no-done").result()


async def test_async_events_text_and_result(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        events = [event async for event in client.generate("hello", max_tokens=2)]
        assert [type(event) for event in events] == [Accepted, Started, Delta, Delta, OutputFinished, Done]
        assert [piece async for piece in client.chat("hello", max_tokens=2).text()] == ["w0 ", "w1 "]
        assert (await client.generate("hello", max_tokens=3).result()).text == answer(3)


async def test_async_leaving_the_block_cancels_the_call(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        async with client.generate("endless") as stream:
            async for _ in stream:
                break
        assert await asyncio.to_thread(server.seen.cancelled.wait, 120)


async def test_async_aclose_ends_another_tasks_iteration_without_an_error(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.generate("endless")
        pieces: list[str] = []
        async for piece in stream.text():
            if not pieces:
                asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(stream.aclose()))
            pieces.append(piece)
        assert pieces and pieces[0] == "w0 "
        assert await asyncio.to_thread(server.seen.cancelled.wait, 120)


async def test_async_cancelling_the_reading_task_cancels_the_call_and_the_task(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        task = asyncio.create_task(client.generate("endless").result())
        async with asyncio.timeout(120):
            while not server.seen.attempts["Generate"]:
                await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.seen.cancelled.wait, 120)


async def test_async_timeout_raises(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(headrace.DeadlineExceeded):
            await client.generate("endless", timeout=0.3).result()


async def test_async_failed_output_and_missing_done(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(headrace.Internal, match="NaN"):
            await client.generate("failing").result()
        with pytest.raises(headrace.Internal, match="ended before"):
            await client.generate("no-done").result()
